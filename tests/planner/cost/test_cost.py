"""Costs of rollouts and training steps, and the choice of a tensor-parallel degree."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.errors import ConfigError
from libra.hardware import engine_seconds, load_gpu, load_shape
from libra.planner.cost import Layout, TrajectoryTotals, rollout_cost, training_cost, training_table

GPU, SHAPE = load_gpu("A800-80G"), load_shape("Qwen3-14B")
ENGINES = {tp: engine_seconds(GPU, SHAPE, tp) for tp in (1, 2, 4, 8)}


def workload(num=64, *, wait_s=60.0):
    rng = np.random.default_rng(0)
    prompts, generated, observed = rng.integers(300, 2000, num), *rng.lognormal(8.0, 0.7, (2, num))
    return TrajectoryTotals.of(prompts, generated, observation_tokens=observed, num_turns=20, tool_wait_s=wait_s)


def test_totals_broadcast_and_refuse_what_cannot_be():
    totals = TrajectoryTotals.of([10, 20], [12, 1], observation_tokens=[3, 0], num_turns=2)
    assert totals.num_turns.tolist() == [2, 2] and totals.tool_wait_s.tolist() == [0, 0]
    assert totals.final_context_tokens.tolist() == [25, 21]
    for wrong in ({"observation_tokens": -7}, {"num_turns": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            TrajectoryTotals.of([10], [12], **wrong)


def test_alone_is_the_sum_of_its_parts():
    """The published planner gives 30,000 tokens 0.91 s on TP8; their own steps take thirty times as long."""
    cost = rollout_cost(TrajectoryTotals.of(1000, 30_000, num_turns=1, tool_wait_s=5.0), ENGINES[8])
    steps = 30_000 * ENGINES[8].decode_step_s(1, 16_000)
    assert cost.alone_s[0] == pytest.approx(steps + ENGINES[8].prefill_s(1000, 0) + 5.0, rel=1e-6)
    assert cost.alone_s[0] > 100.0


@given(st.integers(0, 63), st.floats(0.0, 500.0))
def test_waiting_for_tools_lengthens_the_path_and_not_the_load(index, more_s):
    base = workload()
    wait = base.tool_wait_s.copy()
    wait[index] += more_s
    before, after = (rollout_cost(w, ENGINES[2], concurrency=8.0) for w in (base, replace(base, tool_wait_s=wait)))
    assert after.alone_s[index] == pytest.approx(before.alone_s[index] + more_s)
    assert np.allclose(after.engine_s, before.engine_s)


def test_loads_add_up_to_what_the_engine_does():
    """Equal trajectories at a concurrency: the engine needs as long as its steps take, and nothing twice."""
    cost = rollout_cost(TrajectoryTotals.of(np.full(32, 500.0), 1000.0), ENGINES[2], concurrency=16.0)
    steps_s = 2 * 1000 * ENGINES[2].decode_step_s(16, 16 * 1000)
    assert cost.engine_s.sum() == pytest.approx(steps_s + 32 * ENGINES[2].prefill_s(500, 0), rel=1e-6)
    assert cost.engine_s.sum() < cost.alone_s.sum()


def test_concurrency_ends_where_kv_does():
    long = TrajectoryTotals.of(np.full(256, 30_000.0), 8000.0)
    costs = {tp: rollout_cost(long, engine) for tp, engine in ENGINES.items()}
    for tp, cost in costs.items():
        assert cost.max_concurrency * 34_000 <= 0.9 * ENGINES[tp].kv_capacity_tokens * 1.001
    assert costs[8].max_concurrency > 8 * costs[1].max_concurrency
    assert not rollout_cost(TrajectoryTotals.of(10_000_000, 10), ENGINES[1]).fits.any()


def test_those_that_wait_hold_kv():
    busy, idle = (rollout_cost(workload(512, wait_s=wait), ENGINES[1]) for wait in (0.0, 2000.0))
    assert idle.concurrency < 0.5 * busy.concurrency
    assert idle.engine_s.sum() > 1.5 * busy.engine_s.sum()


def test_training_flops_are_within_the_peak_and_near_it():
    """The published planner implies 5 to 10 times the peak."""
    lengths = np.full(256, 8192.0)
    cost = training_cost(GPU, SHAPE, lengths, 32, Layout(gradient_checkpointing=False, padding_frac=0.0))
    flops = 6.0 * SHAPE.num_params * lengths.sum()
    assert 0.3 < flops / cost.forward_backward_s / (32 * GPU.flops_per_s) < 0.8


def test_states_are_sharded_once_and_copied_without_fsdp():
    """Weights and AdamW's states with their float32 copy of the weights are 2 + 12 bytes, a summed gradient 4."""
    lengths = np.full(64, 4096.0)
    for num in (8, 32):
        parts = training_cost(GPU, SHAPE, lengths, num, Layout()).memory_parts_bytes
        assert parts["weights"] + parts["optimizer"] == pytest.approx(14 * SHAPE.num_params / num)
    copied = training_cost(GPU, SHAPE, lengths, 32, Layout(kind="ddp"))
    parts = copied.memory_parts_bytes
    assert parts["weights"] + parts["optimizer"] == pytest.approx(14 * SHAPE.num_params)
    assert parts["gradients"] >= 0.99 * 4 * SHAPE.num_params
    assert not copied.fits and copied.headroom_bytes < 0


def test_the_longest_sequence_is_never_cut():
    lengths = np.full(64, 1000.0)
    lengths[0] = 60_000.0
    table = training_table(GPU, SHAPE, lengths, [1, 64, 512])
    assert table[512].forward_backward_s == table[64].forward_backward_s  # one GPU has it whole
    assert table[1].forward_backward_s > table[64].forward_backward_s
    with pytest.raises(ConfigError):
        training_cost(GPU, SHAPE, lengths, 12)
