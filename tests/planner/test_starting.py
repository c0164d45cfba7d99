"""A plan that is put into a configuration starts what the plan says, and is refused where it does not belong."""

from dataclasses import replace

import msgspec
import pytest
from deployments import configured_deployment, planned_deployment
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.config import config_from_dict, dump_config
from libra.config.planner import PlannedLayout
from libra.errors import ConfigError, PlanError
from libra.hardware import load_gpu, load_shape
from libra.hardware.shapes import shape_digest
from libra.planner.cost import Layout, TrajectoryTotals, training_cost
from libra.planner.from_config import snapshot_of
from libra.planner.plan_settings import CPU, check_planned, layout_of, planned, with_plan
from libra.planner.snapshot import PlanningSnapshot

QWEN, LLAMA = load_shape("Qwen/Qwen3-4B"), load_shape("Meta-Llama-3-8B")


def _config(**sections):
    return config_from_dict({"model": {"path": "Qwen/Qwen3-4B"}, "rollout": {"engine": "vllm"}, **sections})


def _layout(**changes):
    values = {
        "model": QWEN.name, "model_digest": shape_digest(QWEN), "gpu": "A800-80G", "num_gpus": 8, "train_gpus": 2,
        "engines": [{"tp": 1, "count": 2, "concurrency": 48}, {"tp": 4, "count": 1, "concurrency": 9}],
        "boundaries_tokens": [812.0], "micro_batch_tokens": 8192, "step_s": 12.0, "rests_on": "a datasheet",
        "why": "training", "lost": ["13 s: another"],
    }  # fmt: skip
    return msgspec.convert(values | changes, PlannedLayout)


@settings(max_examples=6)
@given(st.integers(4, 16), st.integers(0, 99), st.integers(0, 1), st.sampled_from([0.2, 1.0, 8.0]))
def test_executing_a_plan_gives_back_what_it_deploys(num_gpus, seed, eta, scale):
    lengths = {"generated_p50_tokens": 900 * scale, "generated_p99_tokens": 7000 * scale}
    planner = {"gpu": "A800-80G", "num_gpus": num_gpus}
    config = _config(
        model={"path": "Qwen3-0.6B", "dtype": "bfloat16"}, run={"seed": seed, "eta": eta},
        planner=planner | {"lengths": {**lengths, "tool_s": 0.1 * (seed + 1), "turns": 3}},
        trainer={"prompts": 6, "group_size": 4, "micro_batch_tokens": 16384, "layout": "fsdp2", "gradient_checkpointing": True},
        rollout={"engine": "vllm", "max_context_tokens": 16384, "max_new_tokens": 8192},
    )  # fmt: skip
    snapshot, _ = snapshot_of(config, None, what_if=True)
    plan, micro_batch_tokens = planned(snapshot, 16384)
    layout = layout_of(plan, snapshot.shape, micro_batch_tokens, "A800-80G", "a datasheet")
    started = with_plan(config, layout)
    assert configured_deployment(started) == planned_deployment(plan)
    pairs = [(f"tp{b.tp}", b.to_tokens) for b in plan.buckets[:-1]]
    assert list(started.policy.boundaries_tokens.items()) == [pair for pair in pairs if pair[1] > 0]
    assert started.trainer.micro_batch_tokens == micro_batch_tokens >= 16384
    assert layout.boundaries_tokens == tuple(bucket.to_tokens for bucket in plan.buckets[:-1])
    assert layout.boundaries == tuple((bucket.tp, bucket.to_tokens) for bucket in plan.buckets[:-1])
    again = config_from_dict(started.model_dump(mode="json"))  # what config.resolved.yaml holds
    assert again == started
    assert "planned" in dump_config(again)
    check_planned(layout, load_shape("Qwen3-0.6B"), "A800-80G", num_gpus)


def test_a_micro_batch_that_does_not_fit_is_halved_and_one_that_pays_is_doubled():
    tokens = TrajectoryTotals.of([512.0] * 512, [1500.0] * 512)
    gpu = load_gpu("L40S-48G")
    large = Layout(micro_batch_tokens=2**20)
    snapshot = PlanningSnapshot(gpu, QWEN, 4, tokens, tp=(1, 2), training=large, fixed_train_gpus=2)
    _, smaller = planned(snapshot, 2048)
    assert smaller < 2**20
    final = tokens.final_context_tokens
    assert training_cost(gpu, QWEN, final, 2, replace(snapshot.training, micro_batch_tokens=smaller)).fits
    assert not training_cost(gpu, QWEN, final, 2, replace(snapshot.training, micro_batch_tokens=2 * smaller)).fits
    little = replace(snapshot, training=Layout(micro_batch_tokens=2048))
    _, larger = planned(little, 2048)
    assert larger > 2048  # fewer micro-batches gather the shards less often
    assert planned(little, 2048, may_grow=False)[1] == 2048
    with pytest.raises(PlanError, match=r"micro_batch_tokens|planner\.num_gpus"):
        planned(snapshot, 2**20)


def test_a_plan_of_another_model_or_other_hardware_is_refused_naming_both():
    layout = _layout()
    check_planned(layout, replace(QWEN, name="a trained copy"), "A800-80G", 8)
    check_planned(_layout(gpu=CPU), QWEN, CPU, 0)
    for shape, gpu, num_gpus, named in (
        (LLAMA, "A800-80G", 8, rf"{QWEN.name}.*{LLAMA.name}"), (QWEN, "H100-80G", 8, "A800-80G.*H100-80G"),
        (QWEN, CPU, 0, "A800-80G.*no GPU"), (QWEN, "A800-80G", 4, r"planner\.num_gpus=4"),
    ):  # fmt: skip
        with pytest.raises(PlanError, match=named):
            check_planned(layout, shape, gpu, num_gpus)


@pytest.mark.parametrize(
    ("section", "change"),
    [("cluster", {"train_workers": 3}), ("policy", {"boundaries_tokens": {"tp1": 5.0}}), ("trainer", {"micro_batch_tokens": 2048})],
)  # fmt: skip
def test_what_was_planned_is_not_changed_by_hand(section, change):
    values = with_plan(_config(), _layout()).model_dump()
    values[section] |= change
    with pytest.raises(ConfigError, match=rf"{section}\.{next(iter(change))}.*planner\.planned"):
        config_from_dict(values)
    values["planner"]["planned"] = None
    config_from_dict(values)


@pytest.mark.parametrize("cluster", [{"engines": [{"tp": 1}]}, {"train_workers": 2}, {"scheduler": "tcp://there:8786"}])
def test_what_is_to_be_planned_is_not_also_given(cluster):
    _config(cluster=cluster)
    with pytest.raises(ConfigError, match="layout"):
        _config(cluster=cluster, planner={"layout": "auto"})
