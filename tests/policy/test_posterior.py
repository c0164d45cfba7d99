"""The posterior of the remaining length: what it promises, and that each signal says what it should; and lengths that are given."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.orderings import KnownLengths
from libra.facts import (
    PromptsNamed,
    QuantumFinished,
    TrajectoryEnded,
    TrajectoryParked,
    VersionPublished,
    prompts_named,
)
from libra.policy.posterior.cohorts import FIRST_PERSISTENCE, KEPT_PROMPTS, History
from libra.policy.posterior.forecaster import Posterior
from libra.types import NO_TOOL, Phase, ToolStatus

KEYS = st.sampled_from([f"t-{group}-{sample}" for group in range(3) for sample in range(4)])
TOOLS = st.sampled_from(["ls", "cat", "pytest"])
STEP = st.one_of(
    st.tuples(st.just("turn"), KEYS, st.integers(1, 70_000), TOOLS, st.booleans()),
    st.tuples(st.just("turn"), KEYS, st.integers(1, 400), st.sampled_from(["ls", "edit", ""]), st.booleans()),
    st.tuples(st.just("end"), KEYS, st.booleans()), st.tuples(st.just("named"), st.sampled_from(["p", "q"])),
    st.tuples(st.sampled_from(["learn", "version"])),
)  # fmt: skip
STEPS = st.lists(STEP, max_size=80)
PROMPTS, SAMPLES = 40, 4


def parked(key, group="", family=""):
    return TrajectoryParked(key, 0, Phase.ROLLOUT, 0, group, family)


def take(forecaster, step):
    match step:
        case ("turn", key, tokens, tool, success):
            forecaster.handle(parked(key, key[:3], "family"))
            forecaster.handle(QuantumFinished(key, Phase.ROLLOUT, tokens, "", "", 1.0))
            if tool:
                status = ToolStatus.OK if success else ToolStatus.ERROR
                forecaster.handle(QuantumFinished(key, Phase.TOOL, 0, tool, status, 1.0, payload_tokens=tokens % 2000))
            return forecaster.remaining(key)
        case ("end", key, completed):
            forecaster.handle(TrajectoryEnded(key, completed))
        case ("learn",):
            forecaster.learn()
        case ("named", prompt):
            forecaster.handle(PromptsNamed((("t-0", prompt), ("t-1", "p"))))
        case ("version",):
            forecaster.handle(VersionPublished(1))
    return None


def through_json(forecaster):
    return json.loads(json.dumps(forecaster.snapshot(), allow_nan=False))


def run(forecaster, key, turns, *, group="", family=""):
    forecaster.handle(parked(key, group, family))
    for tokens, tool in turns:
        forecaster.handle(QuantumFinished(key, Phase.ROLLOUT, tokens, tool, ToolStatus.OK if tool else NO_TOOL, 1.0))
    forecaster.handle(TrajectoryEnded(key))
    forecaster.learn()


@given(before=STEPS, after=STEPS)
def test_a_snapshot_changes_no_later_answer_and_every_forecast_is_a_length(before, after):
    one, other = (Posterior() for _ in range(2))
    said = [take(one, step) for step in before]
    other.restore(through_json(one))
    assert through_json(other) == through_json(one)
    later = [take(one, step) for step in after]
    assert later == [take(other, step) for step in after]
    assert through_json(other) == through_json(one)
    for forecast in (each for each in said + later if each is not None):
        assert all(math.isfinite(value) for value in forecast)
        assert forecast.mean_tokens >= 0 and forecast.order_tokens >= 0 and forecast.skill <= 1


def test_without_anything_measured_the_least_served_goes_first_and_skill_is_zero():
    posterior = Posterior()
    for key, tokens in (("short", 10), ("long", 1000)):
        posterior.handle(parked(key))
        posterior.handle(QuantumFinished(key, Phase.ROLLOUT, tokens, "ls", ToolStatus.OK, 1.0))
    short, long = posterior.remaining("short"), posterior.remaining("long")
    assert short.order_tokens < long.order_tokens
    assert short.skill == long.skill == 0.0


def worlds(rng, count):
    made = []
    for number in range(count):
        long = bool(rng.random() < 0.5)
        turns = int(rng.integers(5, 12)) * (4 if long else 1)
        made.append((f"w-{number}", [(int(rng.integers(50, 150)), "debug" if long else "ls") for _ in range(turns)]))
    return made


def test_a_tool_that_tells_the_length_earns_weight_and_skill():
    posterior = Posterior()
    for key, turns in worlds(np.random.default_rng(0), 120):
        run(posterior, key, turns)
    assert posterior.skill > 0.2
    assert sum(posterior.weights.values()) > 0.5
    for key, tool in (("a", "ls"), ("b", "debug")):
        posterior.handle(parked(key))
        for _ in range(3):
            posterior.handle(QuantumFinished(key, Phase.ROLLOUT, 100, tool, ToolStatus.OK, 1.0))
    assert posterior.remaining("b").order_tokens > 2 * posterior.remaining("a").order_tokens
    assert posterior.remaining("b").mean_tokens > 2 * posterior.remaining("a").mean_tokens


def test_tools_that_tell_nothing_earn_next_to_nothing():
    rng = np.random.default_rng(1)
    posterior = Posterior()
    for number in range(120):
        made = [(int(rng.integers(50, 150)), str(rng.choice(["ls", "cat", "sed"]))) for _ in range(rng.integers(5, 40))]
        run(posterior, f"n-{number}", made)
    assert posterior.skill < 0.05


def test_finished_siblings_tell():
    rng = np.random.default_rng(2)
    posterior = Posterior()
    for group in range(40):
        turns = int(rng.choice([4, 40]))
        for sample in range(4):
            run(posterior, f"g-{group}-{sample}", [(100, "ls")] * turns, group=f"g-{group}")
    for group, turns in (("short", 4), ("long", 40)):
        for sample in range(3):
            run(posterior, f"{group}-{sample}", [(100, "ls")] * turns, group=group)
        posterior.handle(parked(group, group))
        posterior.handle(QuantumFinished(group, Phase.ROLLOUT, 100, "ls", ToolStatus.OK, 1.0))
    assert posterior.remaining("long").order_tokens > 3 * posterior.remaining("short").order_tokens


def test_a_sibling_that_runs_on_makes_a_group_a_long_one():
    """One sibling ended early; where two others are far beyond that, the fourth is believed longer than where there are none."""
    posterior = Posterior()
    rng = np.random.default_rng(3)
    for group in range(40):
        turns = int(rng.choice([4, 40]))
        for sample in range(4):
            run(posterior, f"g-{group}-{sample}", [(100, "ls")] * turns, group=f"g-{group}")
    said = []
    for runs_on in (30, 1):
        forecaster = Posterior()
        forecaster.restore(through_json(posterior))
        forecaster.handle(parked("new-0", "new"))
        for sample in (1, 2):
            forecaster.handle(parked(f"new-{sample}", "new"))
            for _ in range(runs_on):
                forecaster.handle(QuantumFinished(f"new-{sample}", Phase.ROLLOUT, 100, "ls", ToolStatus.OK, 1.0))
        run(forecaster, "new-3", [(100, "ls")] * 4, group="new")
        forecaster.handle(QuantumFinished("new-0", Phase.ROLLOUT, 100, "ls", ToolStatus.OK, 1.0))
        said.append(forecaster.remaining("new-0").order_tokens)
    assert said[0] > 1.2 * said[1]


def test_learning_from_running_ones_undoes_that_the_first_to_finish_are_short():
    lengths = np.exp(np.random.default_rng(4).normal(3.0, 0.8, 64)).astype(int) + 2
    posterior, ended = Posterior(), []
    for number in range(64):
        posterior.handle(parked(f"t-{number}"))
    for turn in range(int(np.median(lengths))):
        for number, length in enumerate(lengths):
            if turn < length:
                posterior.handle(QuantumFinished(f"t-{number}", Phase.ROLLOUT, 100, "ls", ToolStatus.OK, 1.0))
            if turn == length - 1:
                posterior.handle(TrajectoryEnded(f"t-{number}"))
                posterior.learn()
                ended.append(100.0 * length)
    posterior.handle(parked("new"))
    truth, of_ended = 100.0 * lengths.mean(), float(np.mean(ended))
    assert of_ended < 0.7 * truth
    assert abs(posterior.remaining("new").mean_tokens - truth) < abs(of_ended - truth)


def test_one_member_of_a_group_is_the_probe_until_something_is_known():
    posterior = Posterior()
    for sample in range(3):
        posterior.handle(parked(f"s-{sample}", "g"))
    posterior.handle(parked("alone"))
    assert [posterior.is_probe(f"s-{sample}") for sample in range(3)] == [True, False, False]
    assert not posterior.is_probe("alone")
    posterior.handle(TrajectoryEnded("s-0"))
    assert not posterior.is_probe("s-1")


def test_a_new_version_makes_what_was_learned_count_less():
    kept, forgot = Posterior(), Posterior()
    for posterior, versions in ((kept, 0), (forgot, 20)):
        for number in range(60):
            run(posterior, f"old-{number}", [(100, "ls")] * 40)
        for version in range(versions):
            posterior.handle(VersionPublished(version))
        for number in range(20):
            run(posterior, f"new-{number}", [(100, "ls")] * 4)
        posterior.handle(parked("t"))
    assert forgot.remaining("t").order_tokens < 0.7 * kept.remaining("t").order_tokens


@pytest.mark.parametrize("part", ["live", "regression", "groups"])
def test_what_is_no_snapshot_is_refused(part):
    posterior = with_siblings([100], 1)
    with pytest.raises((KeyError, TypeError, ValueError)):
        Posterior().restore(through_json(posterior) | {part: {"x": 1}})


def test_rows_to_learn_from_are_kept_of_a_bounded_number():
    posterior = Posterior()
    for number in range(3_000):
        posterior.handle(parked(f"t-{number}"))
    live = posterior.snapshot()["live"]
    followed = [key for key, one in live.items() if one[2]]
    assert followed == list(live)[: len(followed)]
    assert 1_000 < len(followed) < 3_000
    posterior.handle(TrajectoryEnded(followed[7], completed=False))
    for key in ("next", "one more"):
        posterior.handle(parked(key))
    assert [bool(posterior.snapshot()["live"][key][2]) for key in ("next", "one more")] == [True, False]


def with_siblings(lengths, groups):
    posterior = Posterior()
    for number, tokens in enumerate(lengths):
        key, group = f"done-{number}", f"g{number % groups}"
        posterior.handle(TrajectoryParked(key, 0, Phase.ROLLOUT, 0, group, "f"))
        posterior.handle(QuantumFinished(key, Phase.ROLLOUT, tokens, "", "", 1.0))
        posterior.handle(QuantumFinished(key, Phase.TOOL, 0, "shell", ToolStatus.OK, 1.0, 5))
        posterior.handle(QuantumFinished(key, Phase.ROLLOUT, 1 + tokens // 2, "", "", 1.0))
        posterior.handle(TrajectoryEnded(key, completed=number % 3 != 2))
    for group in range(groups):
        for sample in range(3):
            posterior.handle(TrajectoryParked(f"{group}-{sample}", 0, Phase.ROLLOUT, 0, f"g{group}", "f"))
    posterior.learn()
    return posterior


@given(st.lists(st.integers(1, 5000), min_size=0, max_size=20), st.integers(1, 3))
def test_siblings_that_have_not_begun_share_the_forecast_that_each_gets_alone(lengths, groups):
    together = with_siblings(lengths, groups)
    keys = [f"{group}-{sample}" for group in range(groups) for sample in range(3)]
    forecasts = {key: together.reconsidered(key) for key in keys}
    for key in keys:
        assert with_siblings(lengths, groups).reconsidered(key) == forecasts[key]


def test_a_forecast_follows_what_is_learned_between_two_siblings():
    posterior = with_siblings([100, 4000, 200, 3000] * 8, 2)
    for number in range(4):
        key = f"more-{number}"
        posterior.handle(TrajectoryParked(key, 0, Phase.ROLLOUT, 0, "g0", "f"))
        posterior.handle(QuantumFinished(key, Phase.ROLLOUT, 60_000, "", "", 1.0))
        posterior.handle(TrajectoryEnded(key))
    before = posterior.reconsidered("0-0")
    posterior.learn()
    assert posterior.reconsidered("0-1") != before


def test_the_oracle_gives_the_truth_and_a_predictor_guesses_of_its_accuracy():
    rng = np.random.default_rng(0)
    truth = {f"t-{i}": int(tokens) for i, tokens in enumerate(np.exp(rng.normal(8, 1, 4000)))}
    oracle, predictor = KnownLengths(truth), KnownLengths(truth, accuracy=0.7)
    guesses = []
    for key in truth:
        for forecaster in (oracle, predictor):
            forecaster.handle(TrajectoryParked(key, 0, Phase.ROLLOUT, 0))
        assert oracle.remaining(key).mean_tokens == truth[key]
        guesses.append(predictor.remaining(key).order_tokens)
    assert np.corrcoef(np.log(guesses), np.log(list(truth.values())))[0, 1] == pytest.approx(0.7, abs=0.03)
    oracle.handle(QuantumFinished("t-0", Phase.ROLLOUT, 5, "ls", ToolStatus.OK, 1.0))
    assert oracle.remaining("t-0").order_tokens == truth["t-0"] - 5
    with pytest.raises(ValueError, match="accuracy"):
        KnownLengths(truth, accuracy=0.0)


def begin(posterior, iteration, prompts):
    posterior.handle(prompts_named("train", iteration, prompts))
    groups = [[f"t-{iteration}-{g}-{s}" for s in range(SAMPLES)] for g in range(len(prompts))]
    for g, keys in enumerate(groups):
        for key in keys:
            posterior.handle(TrajectoryParked(key, iteration, Phase.ROLLOUT, 0, f"train-{iteration}-{g}"))
    return groups


def live(posterior, iteration, prompts, means, seed):
    """A whole iteration: lengths vary around the mean of each prompt, the short ones end first."""
    rng = np.random.default_rng([seed, iteration])
    groups = begin(posterior, iteration, prompts)
    lengths = {
        key: float(m * np.exp(0.3 * rng.standard_normal())) for m, keys in zip(means, groups, strict=True) for key in keys
    }  # fmt: skip
    for number, k in enumerate(sorted(lengths, key=lengths.__getitem__)):
        for _ in range(5):
            posterior.handle(QuantumFinished(k, Phase.ROLLOUT, max(1, int(lengths[k] / 5)), "ls", ToolStatus.OK, 1.0))
        posterior.handle(TrajectoryEnded(k))
        if number % 16 == 15:
            posterior.learn()
    posterior.learn()
    posterior.handle(VersionPublished(iteration + 1))


def said(posterior, iteration, prompts):
    return [posterior.remaining(keys[-1]).order_tokens for keys in begin(posterior, iteration, prompts)]


def prompts_and_means(seed):
    rng = np.random.default_rng(seed)
    return [f"p{k}" for k in range(PROMPTS)], [float(x) for x in np.exp(6.0 + 0.9 * rng.standard_normal(PROMPTS))]


def test_who_was_long_is_believed_long_before_anything_of_it_has_run():
    prompts, means = prompts_and_means(0)
    posterior = Posterior()
    live(posterior, 0, prompts, means, seed=0)
    order = np.random.default_rng(1).permutation(PROMPTS)  # the next pass is in another order
    expected = said(posterior, 1, [prompts[k] for k in order])
    assert np.corrcoef(np.log(expected), np.log([means[k] for k in order]))[0, 1] > 0.9
    assert len(set(said(posterior, 2, [f"new{k}" for k in range(PROMPTS)]))) == 1


def test_nobody_probes_for_a_prompt_that_is_known():
    prompts, means = prompts_and_means(0)
    posterior = Posterior()
    live(posterior, 0, prompts, means, seed=0)
    known, unknown = begin(posterior, 1, [prompts[0], "never seen"])
    assert not any(posterior.is_probe(key) for key in known)
    assert [posterior.is_probe(key) for key in unknown] == [True, False, False, False]


def test_lengths_may_drift_together():
    """All trajectories of the second pass are a quarter as long; who is longer than the others is still known."""
    prompts, means = prompts_and_means(3)
    posterior = Posterior()
    live(posterior, 0, prompts, means, seed=3)
    live(posterior, 1, [f"other{k}" for k in range(PROMPTS)], [m / 4 for m in means], seed=3)
    assert np.corrcoef(np.log(said(posterior, 2, prompts)), np.log(means))[0, 1] > 0.9


@pytest.mark.parametrize(("survives", "low", "high"), [(1.0, 0.8, 1.0), (0.0, 0.0, 0.25)])
def test_as_much_is_believed_as_has_survived(survives, low, high):
    prompts, means = prompts_and_means(5)
    posterior = Posterior()
    assert History().persistence == FIRST_PERSISTENCE
    assert posterior.weights["history"] == 0.0  # nothing was measured yet
    rng = np.random.default_rng(6)
    for iteration in range(4):
        live(posterior, iteration, prompts, means, seed=5)
        means = means if survives else [means[k] for k in rng.permutation(PROMPTS)]
    assert low <= posterior.weights["history"] <= high


def test_what_is_kept_is_bounded():
    history = History()
    for k in range(KEPT_PROMPTS + 5):
        history.ended(f"p{k}", 5.0 + k % 3, 4.0, None)
    history.published()
    assert len(history.past) == KEPT_PROMPTS
    assert history.recall("p0", 1.0) is None
    assert history.recall(f"p{KEPT_PROMPTS}", 1.0) is not None
    posterior = Posterior()
    for k in range(3):
        posterior.handle(PromptsNamed(tuple((f"train-{k}-{g}", f"p{g}") for g in range(40_000))))
    assert len(posterior.snapshot()["named"]) == 65_536
