"""The next steps of a plan in virtual time are near the closed forms by which `libra plan` chooses a way."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.systems.next_step import planned_workload, simulated_ways, trained_work
from libra.config import config_from_dict
from libra.driver.launch_layout import step_parts
from libra.hardware import load_gpu, load_shape
from libra.planner.build_plan import plan
from libra.planner.cost import Layout, TrajectoryTotals
from libra.planner.snapshot import PlanningSnapshot
from libra.planner.teacher import Teacher
from libra.policy.step_ways import forms

WAYS = ("split", "streaming", "turning")


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


def test_groups_without_a_gradient_are_generated_and_cost_no_training():
    given, half = snapshot(), snapshot(trained_frac=0.5)
    workload = planned_workload(given.workload, 4, 8, 0)
    work = trained_work(workload, half, 100.0, 0)
    idle = [place for place, each in work.items() if not each.gpu_s]
    assert 0.25 * len(work) < len(idle) < 0.75 * len(work)
    assert sum(each.gpu_s for each in work.values()) == pytest.approx(400.0)
    assert plan(half).train_s == pytest.approx(0.5 * plan(given).train_s, rel=0.05)
    assert plan(half).rollout_s == pytest.approx(plan(given).rollout_s)
