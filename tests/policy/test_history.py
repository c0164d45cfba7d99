"""What is kept of a prompt until it comes again: who was long is believed long, as far as that has held, whatever else drifts."""

import numpy as np
import pytest

from libra.facts import (
    PromptsNamed,
    QuantumFinished,
    TrajectoryEnded,
    TrajectoryParked,
    VersionPublished,
    prompts_named,
)
from libra.policy.posterior import Posterior
from libra.policy.posterior.cohorts import FIRST_PERSISTENCE, KEPT_PROMPTS, History
from libra.types import Phase, ToolStatus

PROMPTS, SAMPLES = 40, 4


def begin(posterior, iteration, prompts):
    """All groups of an iteration are named and parked; their keys."""
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
    for number, key in enumerate(sorted(lengths, key=lengths.__getitem__)):
        for _ in range(5):
            posterior.handle(
                QuantumFinished(key, Phase.ROLLOUT, max(1, int(lengths[key] / 5)), "ls", ToolStatus.OK, 1.0)
            )
        posterior.handle(TrajectoryEnded(key))
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
    strangers = said(posterior, 2, [f"new{k}" for k in range(PROMPTS)])
    assert len(set(strangers)) == 1


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
    expected = said(posterior, 2, prompts)
    assert np.corrcoef(np.log(expected), np.log(means))[0, 1] > 0.9


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
