"""The forecasters that the posterior is compared with."""

from __future__ import annotations

import pytest

from benchmarks.forecasters import GlobalMean, PaperTree, Tracker, TurnIndex
from libra.policy.messages import QuantumFinished, TrajectoryEnded, TrajectoryParked
from libra.types import NO_TOOL, Phase, ToolStatus


def run(forecaster: Tracker, key: str, turns: list[tuple[int, str]], group: str = "") -> None:
    """A whole trajectory; the last turn calls no tool."""
    forecaster.handle(TrajectoryParked(key, 0, Phase.ROLLOUT, 0, group))
    for tokens, tool in turns:
        forecaster.handle(QuantumFinished(key, Phase.ROLLOUT, tokens, tool, ToolStatus.OK if tool else NO_TOOL, 1.0))
    forecaster.handle(TrajectoryEnded(key))


def test_the_papers_tree_backs_off_to_the_ancestor_and_its_length_there() -> None:
    tree = PaperTree()
    run(tree, "a", [(10, "ls"), (20, "cat"), (30, "")], "p")
    run(tree, "b", [(10, "ls"), (40, "cat"), (50, "")], "q")
    tree.handle(TrajectoryParked("c", 0, Phase.ROLLOUT, 0, "unseen"))
    tree.handle(QuantumFinished("c", Phase.ROLLOUT, 500, "ls", ToolStatus.OK, 1.0))
    assert tree.remaining("c").mean_tokens == pytest.approx((50 + 90) / 2)
    tree.handle(QuantumFinished("c", Phase.ROLLOUT, 500, "never seen", ToolStatus.OK, 1.0))
    assert tree.remaining("c").mean_tokens == pytest.approx(70)
    tree.handle(TrajectoryParked("d", 0, Phase.ROLLOUT, 0, "p"))
    assert tree.remaining("d").mean_tokens == pytest.approx(60)


def test_the_turn_index_knows_the_turn_and_the_global_mean_does_not() -> None:
    turn_index, global_mean = TurnIndex(), GlobalMean()
    for forecaster in (turn_index, global_mean):
        for number in range(100):
            run(forecaster, f"t-{number}", [(10, "ls"), (90, "")])
        forecaster.handle(TrajectoryParked("new", 0, Phase.ROLLOUT, 0))
    assert global_mean.remaining("new").mean_tokens == pytest.approx(95)  # of 100 at the start and 90 after the call
    assert turn_index.remaining("new").mean_tokens == pytest.approx((100 * 100 + 20 * 95) / 120)
