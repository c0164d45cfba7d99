"""Siblings that have not begun get one forecast between them, and it is the one each would get alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from libra.policy.messages import QuantumFinished, TrajectoryEnded, TrajectoryParked
from libra.policy.ordering import LEARNS_EVERY, LEARNS_RARELY, learns_after
from libra.policy.posterior import Posterior
from libra.types import Phase, ToolStatus


def told(lengths: list[int], groups: int) -> Posterior:
    """A posterior that has seen trajectories of these lengths end, and has three siblings waiting in each group."""
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
def test_together_is_what_each_gets_alone(lengths: list[int], groups: int) -> None:
    together = told(lengths, groups)
    keys = [f"{group}-{sample}" for group in range(groups) for sample in range(3)]
    forecasts = {key: together.reconsidered(key) for key in keys}
    for key in keys:
        assert told(lengths, groups).reconsidered(key) == forecasts[key]


def test_a_forecast_follows_what_is_learned_between_two_siblings() -> None:
    posterior = told([100, 4000, 200, 3000] * 8, 2)
    for number in range(4):
        key = f"more-{number}"
        posterior.handle(TrajectoryParked(key, 0, Phase.ROLLOUT, 0, "g0", "f"))
        posterior.handle(QuantumFinished(key, Phase.ROLLOUT, 60_000, "", "", 1.0))
        posterior.handle(TrajectoryEnded(key))
    before = posterior.reconsidered("0-0")
    posterior.learn()
    assert posterior.reconsidered("0-1") != before


def test_learning_is_seldomer_the_more_is_known() -> None:
    assert learns_after(0) == LEARNS_EVERY
    assert learns_after(1024) == 32
    assert learns_after(1_000_000) == LEARNS_RARELY
