"""The search finds what trying everything finds, proves it, and says why where there is nothing to find."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.errors import PlanError
from libra.planner.lower_bound import gpu_seconds
from libra.planner.planning_problem import Problem
from libra.planner.search import Found, Planner, search

Make = Callable[[int], Problem]
Try = Callable[[Problem], float]
Step = Callable[[Problem, int, float, float], float]


def check_found(problem: Problem, found: Found, step_s: Step) -> None:
    """The invariants of `libra.planner.search` and of the layout it gives."""
    layout, items = found.layout, range(problem.num_trajectories)
    for engine, kind in enumerate(layout.kind_of):
        mine = [i for i in items if layout.engine_of[i] == engine]
        took_s = max(problem.load_s[kind, mine].sum(), problem.alone_s[kind, mine].max()) if mine else 0.0
        assert took_s <= layout.time_s * (1 + 1e-9)
    assert layout.gpus(problem) <= found.rollout_gpus == problem.num_gpus - found.train_gpus
    assert found.lower_s <= found.step_s
    assert found.step_s == pytest.approx(step_s(problem, found.train_gpus, found.train_s, found.rollout_s))
    counts = {tp: int((problem.tp[layout.kind_of] == tp).sum()) for tp in problem.fixed_engines}
    assert all(counts[tp] == number for tp, number in problem.fixed_engines.items())


@pytest.mark.parametrize("block", range(10))
def test_the_plan_is_the_best_of_all_whole_assignments(
    block: int, random_problem: Make, best_by_trying: Try, step_s: Step
) -> None:
    for seed in range(20 * block, 20 * block + 20):
        problem = random_problem(seed)
        best_s = best_by_trying(problem)
        if not np.isfinite(best_s):
            with pytest.raises(PlanError):
                search(problem, gap_frac=0.0)
            continue
        found = search(problem, gap_frac=0.0)
        check_found(problem, found, step_s)
        assert found.step_s == pytest.approx(best_s, rel=1e-6), seed
        assert found.lower_s <= best_s * (1 + 1e-6), seed


def test_trying_everything_tries_everything(random_problem: Make, best_by_trying: Try, step_s: Step) -> None:
    """The oracle against the most literal enumeration: engines with their trajectories, one by one."""
    for seed in range(300, 306):
        problem = random_problem(seed).having(num_gpus=4, train_gpus=[1, 2], train_s=[0.2, 0.1])
        problem = problem.having(load_s=problem.load_s[:, :3], alone_s=problem.alone_s[:, :3])
        best = np.inf
        for size in range(1, 4):
            for kinds in itertools.combinations_with_replacement(range(len(problem.kinds)), size):
                for placed in itertools.product(range(size), repeat=problem.num_trajectories):
                    done = [
                        max(problem.load_s[k, on].sum(), problem.alone_s[k, on].max())
                        for e, k in enumerate(kinds)
                        if (on := [i for i, at in enumerate(placed) if at == e])
                    ]
                    for gpus, train_s in ((1, 0.2), (2, 0.1)):
                        if sum(problem.kinds[k].tp for k in kinds) <= 4 - gpus:
                            best = min(best, step_s(problem, gpus, train_s, max(done)))
        assert best_by_trying(problem) == pytest.approx(best)


@given(st.integers(1000, 10**6), st.sampled_from([64, 300]), st.sampled_from([12, 40, 96]))
def test_the_bound_holds_and_is_met_for_many_trajectories(step_s: Step, seed: int, num: int, num_gpus: int) -> None:
    rng = np.random.default_rng(seed)
    size = rng.lognormal(0, 0.8, num)
    load_s = np.stack([size, size**0.9 * 0.6, size**0.8 * 0.4])
    alone_s = np.stack([9 * size, 6 * size, 4 * size])
    train_gpus = np.arange(1, num_gpus)
    problem = Problem(
        num_gpus, 4, [(1, 9), (2, 9), (4, 9)], load_s, alone_s, train_gpus, size.sum() / 3 / train_gpus, eta=1
    )
    found = search(problem)
    check_found(problem, found, step_s)
    assert found.lower_s >= float(gpu_seconds(problem).at_s[0]) * (1 - 1e-12)
    assert (
        found.gap_frac <= 0.02
    )  # few trajectories per engine need not fit evenly; large cases are benchmarks.planner's


def test_the_closed_form_is_the_linear_relaxation(random_problem: Make, best_by_trying: Try) -> None:
    for seed in range(40):
        problem = random_problem(seed)
        if not np.isfinite(problem.least_s).any(axis=0).all():
            continue
        bound = gpu_seconds(problem)
        for gpus in (1, 3, 8):
            lower_s = float(bound.lower_s(np.array([gpus]))[0])
            assert bound.at(lower_s * (1 + 1e-12)) <= gpus * lower_s * (1 + 1e-9)
            assert bound.at(lower_s * (1 - 1e-9)) > gpus * lower_s * (1 - 1e-8) or lower_s <= bound.at_s[0]


def test_one_degree_for_all_is_an_answer() -> None:
    size = np.linspace(1, 2, 40)
    problem = Problem(9, 8, [(1, 8), (2, 8)], np.stack([size, size]), np.stack([size, size]), [1], [1e-3], eta=1)
    found = search(problem)
    assert found.layout.counts(2).tolist() == [8, 0]


def test_a_longer_trajectory_than_all_others_gets_the_engine_it_needs() -> None:
    size = np.array([1.0] * 30 + [10.0])
    load_s = np.stack([size, size * 0.8])
    problem = Problem(9, 8, [(1, 8), (4, 8)], load_s, np.stack([2 * size, 0.7 * size]), [1], [1e-3], eta=1)
    found = search(problem)
    assert found.layout.kind_of[found.layout.engine_of[30]] == 1
    assert found.step_s == pytest.approx(best := 8.0) or found.step_s < best * 1.3


def test_fixed_parts_are_kept(random_problem: Make) -> None:
    size = np.linspace(1, 4, 12)
    problem = Problem(
        12,
        4,
        [(1, 8), (2, 8), (4, 8)],
        np.stack([size, size / 1.5, size / 2]),
        np.stack([size, size, size]),
        np.arange(1, 12),
        10 / np.arange(1, 12),
        fixed_train_gpus=4,
        fixed_engines={1: 2, 2: 1},
    )
    found = search(problem)
    counts = found.layout.counts(3)
    assert found.train_gpus == 4
    assert counts[0] == 2 and counts[1] == 1 and counts @ [1, 2, 4] <= 8
    assert search(problem.having(fixed_engines={}, fixed_train_gpus=None)).step_s <= found.step_s + 1e-9


def test_layouts_of_the_same_workload_are_remembered(random_problem: Make) -> None:
    problem = random_problem(7).having(beside_s=0.0)
    planner = Planner(gap_frac=0.0)
    first = planner.search(problem)
    again = planner.search(problem.having(update_s=5.0))
    assert again.num_programs == 0
    assert again.step_s == pytest.approx(first.step_s - problem.update_s + 5.0)


def test_a_single_trainer_publishes_beside_its_next_step(random_problem: Make) -> None:
    problem = random_problem(7).having(
        eta=2, update_s=3.0, beside_s=2.0, train_gpus=[1, 2], train_s=[4.0, 2.5], num_gpus=4
    )
    one, two = problem.step_s(np.array([1, 2]), np.array([4.0, 2.5]), 1.0)
    assert (one, two) == (pytest.approx(4.0 + 1.0), pytest.approx(2.5 + 3.0))  # of the update, one second is left
    assert problem.step_s(1, 0.5, 1.0) == pytest.approx(3.0)  # it exceeds the next step's training
    assert problem.step_s(1, 4.0, 20.0) == pytest.approx(21.0)
    chain = problem.having(eta=1, update_s=4.0, beside_s=4.0)
    assert chain.step_s(1, 4.0, 4.0) == pytest.approx(6.0)  # two batches are under way at most
    for train_s in (0.5, 4.0):
        enough_s, step_s = chain.enough_s(1, train_s), float(chain.step_s(1, train_s, chain.enough_s(1, train_s)))
        assert step_s == pytest.approx(float(chain.step_s(1, train_s, 0.0)))
        assert chain.step_s(1, train_s, enough_s + 0.1) > step_s
        assert chain.step_s(1, train_s, chain.most_s(1, train_s, 9.0)) == pytest.approx(9.0)
    synchronous = problem.having(eta=0)
    assert synchronous.step_s(1, 4.0, 1.0) == pytest.approx(8.0)
    with pytest.raises(PlanError, match="a part of update_s"):
        problem.having(beside_s=3.5)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"min_train_gpus": 9, "min_rollout_gpus": 9}, "planner.min_train_gpus: got 9"),
        ({"fixed_train_gpus": 7}, "type planner.fixed_train_gpus=6"),
        ({"fixed_train_gpus": 8, "min_rollout_gpus": 6}, "leave 4 for rollout"),
        ({"fixed_engines": {4: 3}}, "type planner.num_gpus=14"),
        ({"fixed_engines": {2: 1}}, "TP 2 is not a degree"),
        ({"train_s": [np.inf] * 4}, "its memory does not fit"),
        ({"load_s": np.full((2, 3), np.inf)}, "fit no kind of engine"),
        ({"gpus_per_node": 6}, "do not nest"),
    ],
)
def test_what_cannot_be_names_the_constraint_and_the_change(changes: dict[str, object], says: str) -> None:
    one = np.ones((2, 3))
    problem = Problem(12, 4, [(1, 8), (4, 8)], one, one, [2, 4, 6, 8], [4.0, 3.0, 2.0, 1.0])
    with pytest.raises(PlanError) as caught:
        search(problem.having(**changes))
    assert says in str(caught.value)
