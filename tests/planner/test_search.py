"""The search finds what trying everything finds, proves it, and says why where there is nothing to find."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.errors import PlanError
from libra.planner.engine_packing import cheapest_kinds, placed
from libra.planner.planning_problem import Problem, gpu_seconds
from libra.planner.search import Planner, search


def random_problem(seed):
    """At most 12 GPUs and 6 trajectories; kinds that do and do not pay, long tails, holes, both step models."""
    rng = np.random.default_rng(seed)
    num_gpus, num, node = int(rng.integers(3, 13)), int(rng.integers(1, 7)), int(rng.choice([4, 8]))
    degrees = [tp for tp in (1, 2, 4, 8)[: int(rng.integers(1, 5))] if tp <= node]
    kinds = [(tp, c) for tp in degrees for c in ((4, 16) if rng.random() < 0.3 else (8,))]
    size = rng.lognormal(0.0, 1.0, num)
    load_s = np.stack([size * rng.uniform(0.7, 1.3, num) * tp ** -rng.uniform(0.3, 1.3) for tp, _ in kinds])
    alone_s = np.stack([size * rng.uniform(0.5, 2.0, num) * tp ** -rng.uniform(0.0, 0.8) for tp, _ in kinds])
    if len(kinds) > 1 and num_gpus > 4 and rng.random() < 0.3:
        load_s[0, size.argmax()] = np.inf
    train_gpus = np.arange(1, num_gpus)
    train_s = rng.uniform(0.03, 0.8) * size.sum() / train_gpus ** rng.uniform(0.6, 1.0)
    if len(train_gpus) > 2 and rng.random() < 0.3:
        train_s[0] = np.inf
    eta = int(rng.integers(0, 2))
    update_s = float(rng.uniform(0.05, 0.5)) * size.sum()
    beside_s = update_s * float(rng.choice([0.0, 0.6, 1.0]))
    return Problem(
        num_gpus, node, kinds, load_s, alone_s, train_gpus, train_s, eta=eta, update_s=update_s, beside_s=beside_s
    )


def step_s(problem, train_gpus, train_s, rollout_s):
    """Seconds from one step to the next where nothing else is known than who waits for whom."""
    update_s, beside_s = problem.update_s, problem.beside_s
    if not problem.eta:
        return train_s + rollout_s + update_s
    if train_gpus > 1 or not beside_s:
        return max(train_s, rollout_s) + update_s
    trains_s = max(train_s, beside_s) + update_s - beside_s  # passes beside a publication, and what comes after both
    return max(trains_s, rollout_s + update_s - beside_s, (train_s + rollout_s + update_s) / (problem.eta + 1))


def best_by_trying(problem):
    """The shortest step over all splits, engines and assignments of whole trajectories: every subset on every kind, in turn."""
    num, kinds = problem.num_trajectories, range(len(problem.kinds))
    everything = (1 << num) - 1
    takes = {}
    for subset in range(1, everything + 1):
        items = [i for i in range(num) if subset >> i & 1]
        for k in kinds:
            takes[k, subset] = max(problem.load_s[k, items].sum(), problem.alone_s[k, items].max())
    best = [[float("inf")] * (everything + 1) for _ in range(problem.num_gpus + 1)]
    for gpus in range(problem.num_gpus + 1):
        best[gpus][0] = 0.0
        for subset in range(1, everything + 1) if gpus else ():
            first = subset & -subset
            rest = others = subset ^ first
            while True:  # the engine that has the first trajectory, with every choice of company
                for k in kinds:
                    if problem.kinds[k].tp <= gpus:
                        after = best[gpus - problem.kinds[k].tp][subset ^ others ^ first]
                        best[gpus][subset] = min(best[gpus][subset], max(takes[k, others | first], after))
                if not others:
                    break
                others = (others - 1) & rest
    steps = []
    for gpus, train_s in zip(problem.train_gpus.tolist(), problem.train_s.tolist(), strict=True):
        steps.append(step_s(problem, gpus, train_s, best[problem.num_gpus - gpus][everything]))
    return min(steps)


def check_found(problem, found):
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


@pytest.mark.parametrize("block", range(5))
def test_the_plan_is_the_best_of_all_whole_assignments(block):
    for seed in range(8 * block, 8 * block + 8):
        problem = random_problem(seed)
        best_s = best_by_trying(problem)
        if not np.isfinite(best_s):
            with pytest.raises(PlanError):
                search(problem, gap_frac=0.0)
            continue
        found = search(problem, gap_frac=0.0)
        check_found(problem, found)
        assert found.step_s == pytest.approx(best_s, rel=1e-6), seed
        assert found.lower_s <= best_s * (1 + 1e-6), seed


@given(st.integers(1000, 10**6), st.sampled_from([64, 300]), st.sampled_from([12, 40, 96]))
def test_the_bound_holds_and_is_met_for_many_trajectories(seed, num, num_gpus):
    rng = np.random.default_rng(seed)
    size = rng.lognormal(0, 0.8, num)
    load_s = np.stack([size, size**0.9 * 0.6, size**0.8 * 0.4])
    alone_s = np.stack([9 * size, 6 * size, 4 * size])
    gpus = np.arange(1, num_gpus)
    problem = Problem(num_gpus, 4, [(1, 9), (2, 9), (4, 9)], load_s, alone_s, gpus, size.sum() / 3 / gpus, eta=1)
    found = search(problem)
    check_found(problem, found)
    assert found.lower_s >= float(gpu_seconds(problem).at_s[0]) * (1 - 1e-12)
    assert found.gap_frac <= 0.1  # the best whole split of 12 GPUs may be 8 % above the bound


def test_the_closed_form_is_the_linear_relaxation():
    for seed in range(40):
        problem = random_problem(seed)
        if not np.isfinite(problem.least_s).any(axis=0).all():
            continue
        bound = gpu_seconds(problem)
        for gpus in (1, 3, 8):
            lower_s = float(bound.lower_s(np.array([gpus]))[0])
            assert bound.at(lower_s * (1 + 1e-12)) <= gpus * lower_s * (1 + 1e-9)
            assert bound.at(lower_s * (1 - 1e-9)) > gpus * lower_s * (1 - 1e-8) or lower_s <= bound.at_s[0]


def test_fixed_parts_are_kept():
    size = np.linspace(1, 4, 12)
    problem = Problem(
        12, 4, [(1, 8), (2, 8), (4, 8)], np.stack([size, size / 1.5, size / 2]), np.stack([size, size, size]),
        np.arange(1, 12), 10 / np.arange(1, 12), fixed_train_gpus=4, fixed_engines={1: 2, 2: 1},
    )  # fmt: skip
    found = search(problem)
    counts = found.layout.counts(3)
    assert found.train_gpus == 4
    assert counts[0] == 2 and counts[1] == 1 and counts @ [1, 2, 4] <= 8
    assert search(problem.having(fixed_engines={}, fixed_train_gpus=None)).step_s <= found.step_s + 1e-9


def test_layouts_of_the_same_workload_are_remembered():
    problem = random_problem(7).having(beside_s=0.0)
    planner = Planner(gap_frac=0.0)
    first = planner.search(problem)
    again = planner.search(problem.having(update_s=5.0))
    assert again.num_programs == 0
    assert again.step_s == pytest.approx(first.step_s - problem.update_s + 5.0)


def test_a_single_trainer_publishes_beside_its_next_step():
    problem = random_problem(7).having(eta=2, update_s=3, beside_s=2, train_gpus=[1, 2], train_s=[4, 2.5], num_gpus=4)
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
    assert problem.having(eta=0).step_s(1, 4.0, 1.0) == pytest.approx(8.0)


@pytest.mark.parametrize(("changes", "names"), [
    ({"fixed_train_gpus": 7}, "planner.fixed_train_gpus=6"), ({"fixed_engines": {4: 3}}, "planner.num_gpus=14"),
    ({"fixed_engines": {2: 1}}, "TP 2"), ({"train_s": [np.inf] * 4}, "memory"),
    ({"load_s": np.full((2, 3), np.inf)}, "fit no kind"), ({"gpus_per_node": 6}, "nest"),
])  # fmt: skip
def test_what_cannot_be_names_the_constraint_and_the_change(changes, names):
    one = np.ones((2, 3))
    problem = Problem(12, 4, [(1, 8), (4, 8)], one, one, [2, 4, 6, 8], [4.0, 3.0, 2.0, 1.0])
    with pytest.raises(PlanError, match=names):
        search(problem.having(**changes))


@given(
    st.integers(1, 60), st.sampled_from([4, 8, 16]), st.integers(0, 60),
    st.lists(st.sampled_from([1, 2, 4, 8]), max_size=30),
)  # fmt: skip
def test_engines_that_fit_in_number_find_their_nodes(num_gpus, node, train, degrees):
    train = min(train, num_gpus)
    left, engines = num_gpus - train, dict[int, int]()
    for tp in degrees:
        if tp <= min(left, node):
            engines[tp] = engines.get(tp, 0) + 1
            left -= tp
    with pytest.raises(PlanError):
        placed(16, 8, 2, {8: 2})
    groups = placed(num_gpus, node, train, engines)
    assert sum(group.num_nodes * group.train_gpus for group in groups) == train
    for tp, number in engines.items():
        assert sum(group.num_nodes * group.engines.get(tp, 0) for group in groups) == number
    for group in groups:
        used = group.train_gpus + sum(tp * number for tp, number in group.engines.items()) + group.free_gpus
        assert used in (node, num_gpus % node)


def test_the_cheapest_kind_costs_the_fewest_gpu_seconds_and_not_the_fewest_seconds():
    times = np.array([[10.0, 10.0, np.inf], [6.0, 4.0, 3.0]])  # of TP 1 and 2: 12, 8 and 6 GPU-seconds on the larger
    problem = SimpleNamespace(tp=np.array([1, 2]), load_s=times, least_s=times)
    assert cheapest_kinds(problem, 10.0).tolist() == [0, 1, 1]
    assert cheapest_kinds(problem, 5.0).tolist() == [-1, 1, 1]
