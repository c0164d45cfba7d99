"""Moves judged afterwards, by the lengths that trajectories turned out to have."""

import pytest

from benchmarks.move_review import moves
from libra import facts
from libra.types import NO_TOOL, Phase

FAST_S, SLOW_S = 0.012, 0.036


def _log(short, *, long):
    """One trajectory generates 10 tokens on each of two engines; with ``long`` another one 100 on the fast engine."""

    def capacity(worker, seconds):
        return facts.Line("run", 0.0, facts.WorkerCapacity(worker, "tp1", 8, 0, 10_000, seconds, seconds, 1e-6))

    def quantum(key, number, worker, tokens, end):
        return [
            facts.Line("run", 0.1, facts.QuantumDispatched(key, Phase.ROLLOUT, worker, number, (0,), "move: because", True)),
            facts.Line("run", 0.2, facts.QuantumFinished(
                key, Phase.ROLLOUT, tokens, "", NO_TOOL, 0.1, quantum=number, worker=worker, end=end)),
        ]  # fmt: skip

    def parked(key):
        return facts.Line("run", 0.0, facts.TrajectoryParked(key, 0, Phase.ROLLOUT, 0))

    one, other = "trajectory-train-0-0-0-e0-run", "trajectory-train-0-0-1-e0-run"
    begin, finish = quantum(other, 0, "fast", 100, "eos") if long else ([], [])
    return [
        capacity("fast", FAST_S), capacity("slow", SLOW_S), parked(one), *([parked(other), begin] if long else []),
        *quantum(one, 0, short[0], 10, ""), *quantum(one, 1, short[1], 10, "eos"),
        facts.Line("run", 1.0, facts.TrajectoryEnded(one, True)),
        *([finish, facts.Line("run", 1.2, facts.TrajectoryEnded(other, True))] if long else []),
    ]  # fmt: skip


def test_a_move_beside_a_longer_trajectory_makes_no_difference():
    (moved,), dispatched = moves(_log(("slow", "fast"), long=True))
    assert dispatched == 3
    assert moved.stayed_s == pytest.approx(100 * FAST_S)  # not the 10 tokens that are left at home
    assert not moved.useless and not moved.worth


def test_a_move_to_a_slower_engine_is_useless_and_one_to_a_faster_engine_is_worth_it():
    (away,), _ = moves(_log(("fast", "slow"), long=False))
    (back,), _ = moves(_log(("slow", "fast"), long=False))
    assert (away.useless, away.worth) == (True, False)
    assert (back.useless, back.worth) == (False, True)
