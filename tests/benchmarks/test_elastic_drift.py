"""The drift benchmark's own arithmetic: layouts, steps at both staleness bounds, cut trajectories, a yardstick that is best."""

from __future__ import annotations

import pytest

from benchmarks.elastic_drift import (
    MAX_CONTEXT_TOKENS,
    NODE,
    UPDATE_S,
    Course,
    best_static,
    cut,
    followed_s,
    node_layouts,
)
from libra.sim.workload import Trace, TurnPlan, Workload


def course(rollouts: dict[int, float], num: int = 3) -> Course:
    """Iterations whose rollout takes so long on so many nodes, and whose training takes 80 s on one."""
    made = Course([Workload("sim", ())] * num, {}, {})
    for k in range(num):
        made.trainings[k] = {NODE * nodes: 80.0 / nodes for nodes in (1, 2, 3, 4)}
        for nodes, seconds in rollouts.items():
            for layout in node_layouts(nodes):
                uneven = 1.0 if len(layout) == 1 else 1.1  # engines of one degree are best
                made.rollouts[k, tuple(sorted(layout.items()))] = seconds * uneven
    return made


def test_layouts_are_every_choice_of_a_degree_for_each_node() -> None:
    assert len(node_layouts(1)) == 4
    assert len(node_layouts(3)) == 20
    assert {2: 4, 8: 2} in node_layouts(3)
    assert all(sum(tp * number for tp, number in layout.items()) == 3 * NODE for layout in node_layouts(3))


def test_the_yardstick_is_the_best_of_all_at_either_bound() -> None:
    here = course({1: 300.0, 2: 150.0, 3: 100.0, 4: 75.0})
    assert best_static(here, 0).total_s == pytest.approx(3 * (100.0 + 80.0 + UPDATE_S))
    assert best_static(here, 1).total_s == pytest.approx(100.0 + 2 * 100.0 + 80.0 + 3 * UPDATE_S)
    assert best_static(here, 0, full=True) == best_static(here, 0)
    shared = best_static(here, 0, share=True)
    assert shared.total_s == pytest.approx(3 * (100.0 + 20.0 + UPDATE_S + 18.8))


def test_a_split_that_is_always_right_is_quicker_by_what_pools_wait_for_each_other() -> None:
    here = course({1: 300.0, 2: 150.0, 3: 100.0, 4: 75.0})
    static = best_static(here, 1)
    assert followed_s(here, static) == pytest.approx(100.0 + 2 * (24 * 100.0 + 8 * 80.0) / 32 + 80.0 + 3 * UPDATE_S)
    assert followed_s(here, static) < static.total_s


def test_a_trajectory_is_cut_before_it_would_pass_the_limit() -> None:
    turn = TurnPlan(10_000, "bash", "ok", 2_000, 1.0)
    trace = cut(Trace("task", 5_000, (turn,) * 9))
    assert len(trace.turns) == 3  # the fourth would end at 51,000 tokens
    assert trace.turns[-1] == TurnPlan(10_000, "", "", 0, 0.0)
    assert MAX_CONTEXT_TOKENS >= 5_000 + 3 * 10_000 + 2 * 2_000
