"""A plan explains itself: its numbers agree with each other, and each alternative says why it lost."""

import dataclasses
import io
import json

import numpy as np
import pytest

from libra.config import config_from_dict
from libra.config.service_devices import Place
from libra.errors import ConfigError, ModelError, PlanError
from libra.hardware import engine_seconds, load_gpu, load_shape
from libra.planner.agent_turns import agent_turns
from libra.planner.build_plan import compare, plan
from libra.planner.cost import Layout, TrajectoryTotals, rollout_cost
from libra.planner.cost.rollout_cost import TRACE_COLUMNS, totals_of_trace
from libra.planner.drain import Pace, best_concurrency
from libra.planner.from_config import services_of
from libra.planner.plan import text
from libra.planner.services import ServiceModel, ServiceModels
from libra.planner.snapshot import PlanningSnapshot, formulate

SERVICE = ServiceModel("oracle", load_shape("Qwen3-0.6B"))
JUDGE = ServiceModel("judge", load_shape("Qwen3-0.6B"), passes=2)
TRACE = """task,sample,turn,prompt_tokens,completion_tokens,tool_s
a,0,1,160,30,0.25
a,0,0,100,20,1.5
b,0,0,50,5,
"""


def taught(teacher, **more):
    return {"services": ServiceModels(teacher=teacher, of_others=2 if teacher.name else 3, **more)}


def snapshot(num_gpus=32, **changes):
    tokens = np.random.default_rng(0).lognormal(8.5, 0.7, 96).clip(200, 30_000)
    workload = TrajectoryTotals.of(1000.0, tokens, observation_tokens=3000.0, num_turns=8.0, tool_wait_s=4.0)
    settings = {"training": Layout(), "update_s": 5.0, **changes}
    return PlanningSnapshot(load_gpu("A800-80G"), load_shape("Qwen3-8B"), num_gpus, workload, **settings)


@pytest.fixture(scope="module")
def made():
    return plan(snapshot())


def test_the_parts_agree(made):
    assert made.training.gpus + made.rollout_gpus + made.spare_gpus == made.num_gpus
    assert sum(made.idle_frac.values()) == pytest.approx(1.0)
    assert made.low_s <= made.step_s <= made.high_s
    assert made.step_s == pytest.approx(max(made.rollout_s, made.train_s) + made.update_s)
    assert made.bounds.step_s <= made.low_s * (1 + 1e-9)
    assert made.bounds.gap_frac <= 1e-3
    assert made.bounds.longest_s + made.update_s <= made.bounds.step_s * (1 + 1e-9)
    assert made.gpu_hours_per_step == pytest.approx(made.num_gpus * made.step_s / 3600)
    assert sum(bucket.num_trajectories for bucket in made.buckets) == made.num_trajectories
    edges = [edge for bucket in made.buckets for edge in (bucket.from_tokens, bucket.to_tokens)]
    assert (edges[0], edges[-1]) == (0, None) and edges[1:-1:2] == edges[2::2]
    assert all(0 < bucket.kv_used_frac <= 1.01 for bucket in made.buckets)
    assert made.needed_gpus <= made.num_gpus
    held = sum(group.num_nodes * group.engines.get(tp, 0) for group in made.nodes for tp in made.engines)
    assert held == sum(made.engines.values())


def test_synchronous_steps_add_up():
    made = plan(snapshot(eta=0))
    assert made.step_s == pytest.approx(made.rollout_s + made.train_s + made.update_s)
    assert made.idle_frac["engines wait for the trainer"] > 0


@pytest.mark.parametrize("eta", [0, 1])
def test_a_teacher_has_a_gpu_of_its_own_and_no_step_is_over_before_it_has_scored(eta):
    without, small = plan(snapshot(31, eta=eta)), ServiceModel("", load_shape("Qwen3-0.6B"))
    made = plan(snapshot(eta=eta, **taught(small)))  # which is done before the engines are
    assert (made.teacher_gpus, made.num_gpus) == (1, 32)
    assert made.training.gpus + made.rollout_gpus + made.spare_gpus == 31
    assert 0 < made.teacher_s < made.rollout_s and made.bottleneck == without.bottleneck
    assert (made.step_s, made.engines, made.bounds) == (without.step_s, without.engines, without.bounds)
    assert sum(made.idle_frac.values()) == pytest.approx(1.0) and made.idle_frac["the teacher waits for groups"] > 0

    large = ServiceModel("", load_shape("Qwen2.5-32B"))
    slow = plan(snapshot(eta=eta, **taught(large)))
    assert slow.bottleneck == "teacher" and slow.rollout_s == slow.teacher_s > made.rollout_s
    both_s = max(slow.teacher_s, slow.train_s) if eta else slow.teacher_s + slow.train_s
    assert slow.step_s == pytest.approx(both_s + slow.update_s)
    assert slow.step_s * (1 + 1e-9) >= slow.bounds.step_s >= slow.teacher_s + slow.update_s  # the bound knows it, too
    assert slow.bounds.gap_frac <= 1e-3
    assert slow.train_s <= made.train_s  # GPUs that engines do not need
    assert slow.bounds.longest_s == pytest.approx(without.bounds.longest_s)
    assert sum(slow.idle_frac.values()) == pytest.approx(1.0)
    dropped = plan(snapshot(eta=eta, **taught(dataclasses.replace(large, waits=False))))
    assert dropped.step_s == made.step_s and dropped.teacher_s == slow.teacher_s


def test_a_teacher_that_fits_nowhere_is_refused():
    for num_gpus, teacher, field in (
        (2, ServiceModel("", load_shape("Qwen3-0.6B")), "planner.num_gpus"),
        (32, ServiceModel("", load_shape("Qwen2.5-72B-Instruct")), "distil.teacher"),
        (32, SERVICE, "services.device_gib"),
    ):
        with pytest.raises(PlanError, match=field):
            plan(snapshot(num_gpus, **taught(teacher, room_bytes=2.0**30)))


def test_services_that_rewards_ask_have_a_gpu_and_no_step_is_over_before_they_have_answered():
    def judged(*models, **more):
        return plan(snapshot(8, services=ServiceModels(models), fixed_train_gpus=4, **more))

    without, made = plan(snapshot(7, fixed_train_gpus=4)), judged(JUDGE)
    assert (made.services_gpus, made.teacher_gpus, made.num_gpus) == (1, 0, 8)
    assert (made.step_s, made.engines, made.training) == (without.step_s, without.engines, without.training)
    assert sum(made.idle_frac.values()) == pytest.approx(1.0) and made.idle_frac["services wait to be asked"] > 0
    declared = judged(dataclasses.replace(JUDGE, passes=500))
    assert declared.bottleneck == "services" and declared.rollout_s == declared.services_s > declared.train_s
    assert declared.step_s * (1 + 1e-9) >= declared.bounds.step_s >= declared.services_s
    assert judged(dataclasses.replace(JUDGE, passes=500, waits=False)).step_s == made.step_s


def test_services_are_planned_as_a_configuration_has_them():
    reward = [{"service": "late", "late": True}, {"service": "judge"}]
    named = {
        "judge": {"model": "Qwen3-4B", "max_batch": 4}, "counts": {"function": "math:sqrt"},
        "late": {"model": "Qwen3-0.6B", "function": "logprob"}, "mine": {"model": "Qwen3-0.6B", "function": "math:sqrt"},
    }  # fmt: skip
    given = {
        "environment": {"args": {"reward": reward}}, "trainer": {"late": "correct"}, "cluster": {"tool_workers": 3},
        "services": {"named": named, "device_gib": 20},
    }  # fmt: skip
    services = services_of(config_from_dict(given))
    found = [(each.name, each.passes, each.waits) for each in services.models]
    assert found == [("judge", 2, True), ("late", 1, False), ("mine", 0, True)]
    assert (services.room_bytes, services.workers, services.of_others, services.on_cores) == (20 * 2**30, 3, 2, False)
    with pytest.raises(ModelError, match="no/where"):
        services_of(config_from_dict({"services": {"named": {"judge": {"model": "no/where"}}}}))


@pytest.mark.parametrize("eta", [0, 1])
def test_a_teacher_that_no_gpu_is_left_for_takes_seconds_and_memory_of_a_training_worker(eta):
    small = dataclasses.replace(snapshot(2, eta=eta, training=Layout(offload=True)), shape=load_shape("Qwen3-1.7B"))
    alone, shared = plan(small), plan(dataclasses.replace(small, **taught(SERVICE)))
    assert [taught(SERVICE)["services"].place(gpus) for gpus in (2, 3)] == [Place.TRAINING, Place.TOOLS]
    assert (shared.teacher_gpus, shared.num_gpus, shared.engines) == (0, 2, alone.engines)
    more_bytes = shared.training.memory_bytes - alone.training.memory_bytes
    assert more_bytes == pytest.approx(2 * SERVICE.shape.num_params)
    assert shared.train_s == pytest.approx(alone.train_s + (shared.teacher_s if eta else 0.0))
    assert sum(shared.idle_frac.values()) == pytest.approx(1.0)
    large = ServiceModel("oracle", load_shape("Qwen2.5-32B"))  # fits on a GPU, and not beside the trainer
    with pytest.raises(PlanError):
        plan(dataclasses.replace(small, **taught(large)))


def test_alternatives_are_other_plans_and_say_why_they_lost(made):
    assert 1 <= len(made.alternatives) <= 3
    for other in made.alternatives:
        assert (other.train_gpus, dict(other.engines)) != (made.training.gpus, made.engines)
        assert other.slower_frac == pytest.approx(other.step_s / made.step_s - 1)
        assert other.slower_frac >= -0.02  # what the plan may be behind in draining alone
        assert " s" in other.reason
    assert [o.step_s for o in made.alternatives] == sorted(o.step_s for o in made.alternatives)


def test_a_fixed_choice_is_compared_and_never_better_in_the_model(made):
    other = compare(snapshot(), dataclasses.replace(snapshot(), fixed_train_gpus=24), "train=24")
    assert other.train_gpus == 24
    assert other.slower_frac > -0.05
    assert sum(tp * number for tp, number in other.engines.items()) <= 8


def test_it_is_json_and_text(made):
    values = json.loads(json.dumps(made.to_dict(), allow_nan=False))
    assert values["training"]["gpus"] == made.training.gpus
    assert values["rollout_gpus"] == made.rollout_gpus
    words = text(made, "work-bound: change nothing")
    assert "bottleneck" in words and f"{made.training.gpus:>6} GPUs" in words


def test_what_holds_no_engine_is_left_out_with_its_reason():
    big = dataclasses.replace(snapshot(64), shape=load_shape("Qwen2.5-72B-Instruct"), tp=(1, 2, 4, 8))
    posed = formulate(big)
    assert 1 in posed.left_out and "weights" in posed.left_out[1]
    with pytest.raises(PlanError):
        formulate(dataclasses.replace(big, tp=(1,)))


def test_an_engine_with_one_trajectory_takes_its_time_alone():
    workload = TrajectoryTotals.of(500.0, np.array([3000.0, 100.0]), tool_wait_s=np.array([7.0, 1.0]))
    engine = engine_seconds("A800-80G", "Qwen3-8B", 1)
    alone_s = rollout_cost(workload, engine, concurrency=1).alone_s
    pace = Pace.of(workload, engine, alone_s)
    assert pace.engine_s(np.array([0]), 8) == pytest.approx(alone_s[0], rel=1e-6)
    assert pace.engine_s(np.array([0, 1]), 1) == pytest.approx(alone_s.sum(), rel=1e-6)
    assert alone_s[0] <= pace.engine_s(np.array([0, 1]), 2) < alone_s.sum()


def test_longest_first_drains_sooner_and_the_best_concurrency_is_the_quickest():
    workload = TrajectoryTotals.of(200.0, np.array([400.0] * 60 + [4000.0] * 4))
    engine = engine_seconds("A800-80G", "Qwen3-8B", 1)
    pace, items = Pace.of(workload, engine, rollout_cost(workload, engine, concurrency=1).alone_s), np.arange(64)
    assert pace.engine_s(items, 16) < pace.engine_s(items, 16, longest_first=False)
    concurrency, quickest_s, _ = best_concurrency(pace, [items], 64)
    assert quickest_s == min(pace.engine_s(items, c) for c in (64, 32, 16, 8, 4, 2, 1))
    assert pace.engine_s(items, concurrency) == quickest_s


def test_a_trace_becomes_a_workload():
    workload = totals_of_trace(agent_turns(io.StringIO(TRACE), TRACE_COLUMNS, "planner.trace"), tool_s=9.0)
    assert workload.prompt_tokens.tolist() == [100, 50]
    assert workload.generated_tokens.tolist() == [50, 5]
    assert workload.observation_tokens.tolist() == [40, 0]
    assert workload.num_turns.tolist() == [2, 1]
    assert workload.tool_wait_s.tolist() == [1.75, 9.0]
    batch = workload.resampled(40, 0, max_context_tokens=110)
    assert batch.final_context_tokens.max() <= 110
    assert len(batch) == 40
    head = ",".join(TRACE_COLUMNS)
    for rows in ("task,turn\na,0\n", f"{head}\nb,0,0,50,x\n"):
        with pytest.raises(ConfigError):
            agent_turns(io.StringIO(rows), TRACE_COLUMNS, "planner.trace")
    for turns in (agent_turns(io.StringIO(f"{head}\nb,0,0,,5\n"), TRACE_COLUMNS, "planner.trace"), []):
        with pytest.raises(PlanError):
            totals_of_trace(turns, 1.0)
