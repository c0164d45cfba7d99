"""The next steps of a plan in virtual time: near the closed forms, of a part where the plan is large, and never for long."""

from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from libra.config import config_from_dict
from libra.driver.planned_steps import planned_regime, step_parts
from libra.hardware import load_gpu, load_shape
from libra.planner.build_plan import plan
from libra.planner.cost import Layout, TrajectoryTotals
from libra.planner.snapshot import PlanningSnapshot
from libra.planner.teacher import Teacher
from libra.policy.step_ways import COLOCATED, forms
from libra.sim import next_step
from libra.sim.next_step import Part, part_of, planned_workload, simulated_ways, trained_work

WAYS = ("split", "streaming", "turning")


@pytest.fixture(autouse=True)
def unhurried(monkeypatch):
    """A busy machine does not change what is decided."""
    monkeypatch.setattr(next_step, "LIMIT_S", 300.0)


CONFIG = config_from_dict({"trainer": {"prompts": 12, "group_size": 8}})


def snapshot(**given):
    rng = np.random.default_rng(3)
    totals = TrajectoryTotals.of(
        1000.0, rng.lognormal(8.0, 0.6, 96).clip(200, 20_000), observation_tokens=1400.0, num_turns=3.0, tool_wait_s=7.0
    )
    values = {"update_s": 11.0, "eta": 0, "fixed_train_gpus": 4, "tp": (2,), **given}
    return PlanningSnapshot(load_gpu("A800-80G"), load_shape("Qwen3-8B"), 12, totals, training=Layout(), **values)


@pytest.mark.parametrize(("eta", "train_gpus"), [(0, 4), (0, 3), (1, 4)])
def test_the_forms_and_the_simulator_agree(eta, train_gpus):
    given = snapshot(eta=eta, fixed_train_gpus=train_gpus)
    made = plan(given)
    found = simulated_ways(CONFIG, made, given, WAYS)
    expected = forms(step_parts(made, given))
    assert set(found) == set(WAYS)
    for way in WAYS[: 2 if eta else 3]:  # how soon engines turn where steps overlap is for the simulation to say
        assert found[way] == pytest.approx(expected[way], rel=0.15), (found, expected)
    assert found["streaming"] < found["split"]
    assert eta or simulated_ways(CONFIG, made, given, WAYS) == found


def test_the_simulated_ways_wait_for_the_teacher():
    teacher = Teacher(load_shape("Qwen2.5-32B"))
    short = TrajectoryTotals.of(1000.0, np.linspace(500, 2000, 96), observation_tokens=1400.0, num_turns=3.0)
    given = replace(snapshot(teacher=teacher), num_gpus=13, workload=short)
    made = plan(given)
    assert made.bottleneck == "teacher"
    found = simulated_ways(CONFIG, made, given, WAYS[:2])
    assert found["streaming"] < found["split"] and found["streaming"] > made.teacher_s + made.update_s
    assert found["split"] > 0.99 * forms(step_parts(made, given))["split"]
    dropped = replace(given, teacher=replace(teacher, waits=False))
    assert max(simulated_ways(CONFIG, plan(dropped), dropped, WAYS[:2]).values()) < made.teacher_s


def test_a_plan_is_decided_by_the_simulation_where_the_forms_do_not_settle_it():
    given = snapshot(fixed_train_gpus=3)
    made = plan(given)
    config = config_from_dict({
        "trainer": {"prompts": 12, "group_size": 8}, "rollout": {"engine": "vllm"}, "cluster": {"rollout_workers": 5},
        "policy": {"name": "fifo"},
    })  # fmt: skip
    found = planned_regime(config, made, given, simulated_ways)
    assert found.decided_by == "simulation" and found.simulated == WAYS[:2] and COLOCATED in found.obstacles
    seconds = simulated_ways(config, made, given, WAYS[:2])
    assert {way: found.step_s[way] for way in WAYS[:2]} == seconds and found.choice == "streaming"
    asked = []

    def none(config, plan, snapshot, ways):
        asked.append(ways)
        return {}

    assert planned_regime(config, made, given, none).decided_by == "closed forms" and asked == [list(WAYS[:2])]


def test_a_way_that_is_not_finished_in_time_has_no_seconds(monkeypatch):
    monkeypatch.setattr(next_step, "LIMIT_S", 5.0)
    given = snapshot()
    ticks = count()
    assert simulated_ways(CONFIG, plan(given), given, WAYS, clock=lambda: 0.01 * next(ticks)) == {}


def test_of_a_large_plan_a_part_with_the_same_load_is_simulated(monkeypatch):
    given = snapshot()
    made = plan(given)
    assert part_of(made, given.workload, 1, 8) == Part({2: 4}, 4, 12)
    monkeypatch.setattr(next_step, "MAX_TURNS", 3 * 96 // 2)
    part = part_of(made, given.workload, 1, 8)
    assert part == Part({2: 2}, 2, 6)
    workload = planned_workload(given.workload, 2, part, 8, 0)
    assert len(workload.trajectories) == 2 * 6 * 8
    longest = {max(p.new_tokens for p in workload.trajectories if p.iteration == k) for k in range(2)}
    assert longest == {int(given.workload.generated_tokens.max())}
    assert all(len(each.turns) == 3 and each.turns[-1].status == "" for each in workload.trajectories)
    work = trained_work(workload, given, 100.0, 0)
    assert sum(each.gpu_s for each in work.values()) == pytest.approx(200.0)


def test_groups_without_a_gradient_are_generated_and_cost_no_training():
    given, half = snapshot(), snapshot(trained_frac=0.5)
    part = part_of(plan(given), given.workload, 1, 8)
    workload = planned_workload(given.workload, 4, part, 8, 0)
    work = trained_work(workload, half, 100.0, 0)
    idle = [place for place, each in work.items() if not each.gpu_s]
    assert 0.25 * len(work) < len(idle) < 0.75 * len(work)
    assert sum(each.gpu_s for each in work.values()) == pytest.approx(400.0)
    assert plan(half).train_s == pytest.approx(0.5 * plan(given).train_s, rel=0.05)
    assert plan(half).rollout_s == pytest.approx(plan(given).rollout_s)
