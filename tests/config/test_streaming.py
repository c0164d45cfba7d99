"""Where a step may be streamed: what is refused, what `auto` does, and what `libra plan` says of it."""

from __future__ import annotations

from typing import Any

import pytest

from libra.config import config_from_dict
from libra.config.algorithms import ALGORITHMS
from libra.config.streaming import MAX_WAVES, enough_groups, most_waves, streaming_words, turns, wave_groups, ways_of
from libra.errors import ConfigError

REFUSED = {
    "epochs": ({"epochs": 2}, "one batch takes 2 optimizer steps"),
    "minibatches": ({"minibatches": 4}, "one batch takes 4 optimizer steps"),
    "whitened": ({"algorithm": "reinforce_pp"}, "advantage=reinforce_pp needs the rewards of the whole batch"),
    "scaled": ({"advantage": "reinforce_pp_baseline"}, "needs the rewards of the whole batch"),
    "m2po": ({"m2po_threshold": 0.04}, "m2po_threshold=0.04 chooses among all tokens of the batch"),
    "own": ({"advantage": "workflows.own:advantage"}, "own:advantage may look at the rewards of the whole batch"),
}


def config(streaming: str, **trainer: Any) -> Any:
    return config_from_dict({"trainer": {"streaming": streaming, **trainer}})


@pytest.mark.parametrize("case", REFUSED)
def test_what_needs_the_whole_batch_is_refused_with_on_and_not_streamed_with_auto(case: str) -> None:
    given, why = REFUSED[case]
    with pytest.raises(ConfigError, match=rf"trainer\.streaming: on, but .*{why}.*type trainer\."):
        config("on", **given)
    auto = config("auto", **given)
    assert most_waves(auto) == 0
    assert "steps are not streamed; " in streaming_words(auto) and why in streaming_words(auto)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_auto_streams_every_algorithm_whose_advantages_are_of_a_group_alone(name: str) -> None:
    teacher = {"distil": {"teacher": "t"}} if name == "opd" else {}
    given = {"trainer": {"streaming": "auto", "algorithm": name, "prompts": 40}, **teacher}
    streamed = most_waves(config_from_dict(given)) > 0
    assert streamed is ("reinforce_pp" not in name)


def test_waves_are_bounded_and_off_is_the_default() -> None:
    assert most_waves(config_from_dict({})) == 0 and streaming_words(config_from_dict({})) == ""
    assert most_waves(config("on", prompts=5)) == 5
    assert most_waves(config("on", prompts=500)) == MAX_WAVES
    assert f"up to {MAX_WAVES} waves" in streaming_words(config("on", prompts=500))
    ranks = config_from_dict({"trainer": {"streaming": "on", "group_size": 2}, "cluster": {"train_workers": 5}})
    assert wave_groups(ranks) == 3  # a sequence for each of five replicas


@pytest.mark.parametrize(
    ("eta", "trainer", "why"),
    [
        (0, {"streaming": "on"}, "with run.eta=0 nothing of another iteration.*type run.eta=1, or trainer.batches=own"),
        (1, {}, "trainer.streaming=off; type trainer.streaming=on, or trainer.batches=own"),
        (1, {"streaming": "auto", "epochs": 2}, "one batch takes 2 optimizer steps.*or trainer.batches=own"),
    ],
)
def test_batches_of_what_is_complete_first_are_refused_where_they_are_own_ones_or_whole(
    eta: int, trainer: dict[str, Any], why: str
) -> None:
    given = {"run": {"eta": eta}, "trainer": {"batches": "first_come", **trainer}}
    with pytest.raises(ConfigError, match=rf"trainer\.batches: first_come.*{why}"):
        config_from_dict(given)
    assert config_from_dict(
        {"run": {"eta": 1}, "trainer": {"streaming": "on", "batches": "first_come"}}
    ).trainer.batches


TURNING = {
    "streaming": ({"trainer": {"streaming": "off"}}, "its steps are not streamed.*type trainer.streaming=on"),
    "nobody": ({"cluster": {"hybrid_workers": 0}}, "no worker can change its role; type cluster.hybrid_workers=1"),
    "alone": (
        {"cluster": {"rollout_workers": 1, "hybrid_workers": 1}},
        "the only engine has to generate; type cluster.rollout_workers=2",
    ),
    "wide": (
        {"rollout": {"engine": "vllm", "tp": 2}},
        "an engine of 2 GPUs would train with one of them; type rollout.tp=1",
    ),
    "planner": (
        {"planner": {"replan": True, "apply": True}},
        "the planner would move the same workers; type planner.apply=false",
    ),
}


def turning(choice: str, **changes: Any) -> Any:
    sections: dict[str, dict[str, Any]] = {
        "trainer": {"streaming": "on", "turning": choice, "group_size": 4},
        "cluster": {"rollout_workers": 3, "hybrid_workers": 2},
    }
    for section, values in changes.items():
        sections.setdefault(section, {}).update(values)
    return config_from_dict(sections)


@pytest.mark.parametrize("case", TURNING)
def test_where_no_engine_can_turn_on_is_refused_and_auto_leaves_them(case: str) -> None:
    changes, why = TURNING[case]
    with pytest.raises(ConfigError, match=rf"trainer\.turning: on, but {why}"):
        turning("on", **changes)
    assert not turns(turning("auto", **changes)) and enough_groups(turning("auto", **changes)) == 0


def test_auto_leaves_the_run_a_choice_and_on_does_not() -> None:
    both = {"trainer": {"streaming": "auto"}}
    assert ways_of(config("auto")) == ("split", "streaming") and ways_of(config("on")) == ("streaming",)
    assert ways_of(config("off")) == ways_of(config("auto", epochs=2)) == ("split",)
    assert ways_of(turning("auto", **both)) == ("split", "streaming", "turning")
    assert ways_of(turning("auto")) == ("streaming", "turning") and ways_of(turning("off")) == ("streaming",)
    assert ways_of(turning("on", **both)) == ("turning",)
    assert "where the measured steps of the run say that it pays" in streaming_words(config("auto"))
    assert "where the measured" not in streaming_words(config("on"))


def test_waves_are_smaller_where_engines_turn() -> None:
    for choice in ("on", "auto"):
        assert (
            turns(turning(choice)) and enough_groups(turning(choice)) == 3
        )  # four sequences for each of three trainers
        assert "by engines too that its tail does not need" in streaming_words(turning(choice))
    assert not turns(turning("off")) and not turns(config_from_dict({}))
