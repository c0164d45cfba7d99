"""Where a step is streamed and where engines turn: what `auto` and `on` do."""

import pytest

from libra.config import config_from_dict
from libra.config.algorithms import ALGORITHMS
from libra.config.streaming import MAX_WAVES, enough_groups, most_waves, streaming_words, turns, wave_groups, ways_of

WHOLE = {
    "epochs": {"epochs": 2}, "minibatches": {"minibatches": 4}, "whitened": {"algorithm": "reinforce_pp"},
    "scaled": {"advantage": "reinforce_pp_baseline"}, "m2po": {"reject_args": {"m2po": 0.04}},
    "own": {"advantage": "workflows.own:advantage"}, "late": {"late": "wait"},
}  # fmt: skip
"""What needs the whole batch; that `on` refuses these is in test_refused."""
NO_TURNS = {
    "streaming": {"trainer": {"streaming": "off"}}, "nobody": {"cluster": {"hybrid_workers": 0}},
    "alone": {"cluster": {"rollout_workers": 1, "hybrid_workers": 1}}, "wide": {"rollout": {"engine": "vllm", "tp": 2}},
    "planner": {"planner": {"replan": "apply"}},
}  # fmt: skip


def config(streaming, **trainer):
    return config_from_dict({"trainer": {"streaming": streaming, **trainer}})


@pytest.mark.parametrize("case", WHOLE)
def test_auto_does_not_stream_what_needs_the_whole_batch(case):
    auto = config("auto", **WHOLE[case])
    assert most_waves(auto) == 0 and streaming_words(auto)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_auto_streams_every_algorithm_whose_advantages_are_of_a_group_alone(name):
    teacher = {"distil": {"teacher": "t"}} if name == "opd" else {}
    given = {"trainer": {"streaming": "auto", "algorithm": name, "prompts": 40}, **teacher}
    streamed = most_waves(config_from_dict(given)) > 0
    assert streamed is ("reinforce_pp" not in name)


def test_waves_are_bounded_and_off_is_the_default():
    assert most_waves(config_from_dict({})) == 0 and streaming_words(config_from_dict({})) == ""
    assert most_waves(config("on", prompts=5)) == 5
    assert most_waves(config("on", prompts=500)) == MAX_WAVES
    ranks = config_from_dict({"trainer": {"streaming": "on", "group_size": 2}, "cluster": {"train_workers": 5}})
    assert wave_groups(ranks) == 3  # a sequence for each of five replicas


def turning(choice, **changes):
    sections = {
        "trainer": {"streaming": "on", "turning": choice, "group_size": 4},
        "cluster": {"rollout_workers": 3, "hybrid_workers": 2},
    }
    for section, values in changes.items():
        sections.setdefault(section, {}).update(values)
    return config_from_dict(sections)


@pytest.mark.parametrize("case", NO_TURNS)
def test_auto_turns_no_engine_where_none_can(case):
    auto = turning("auto", **NO_TURNS[case])
    assert not turns(auto) and enough_groups(auto) == 0


def test_auto_leaves_the_run_a_choice_and_on_does_not():
    both = {"trainer": {"streaming": "auto"}}
    assert ways_of(config("auto")) == ("split", "streaming") and ways_of(config("on")) == ("streaming",)
    assert ways_of(config("off")) == ways_of(config("auto", epochs=2)) == ("split",)
    assert ways_of(turning("auto", **both)) == ("split", "streaming", "turning")
    assert ways_of(turning("auto")) == ("streaming", "turning") and ways_of(turning("off")) == ("streaming",)
    assert ways_of(turning("on", **both)) == ("turning",)


def test_waves_are_smaller_where_engines_turn():
    for choice in ("on", "auto"):
        assert turns(turning(choice)) and enough_groups(turning(choice)) == 3  # four sequences for each trainer
    assert not turns(turning("off")) and not turns(config_from_dict({}))
