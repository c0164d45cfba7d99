"""Costs of rollouts and training steps, and the choice of a tensor-parallel degree."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.errors import ConfigError
from libra.hardware import engine_seconds, load_gpu, load_shape
from libra.planner.cost import (
    Layout,
    Workload,
    generation,
    rollout_cost,
    rollout_costs,
    training_cost,
    training_table,
)
from libra.planner.selector import select_tp

GPU, SHAPE = load_gpu("A800-80G"), load_shape("Qwen3-14B")
ENGINES = {tp: engine_seconds(GPU, SHAPE, tp) for tp in (1, 2, 4, 8)}


def workload(num: int = 64, *, wait_s: float = 60.0) -> Workload:
    rng = np.random.default_rng(0)
    return Workload.of(
        rng.integers(300, 2000, num),
        rng.lognormal(8.0, 0.7, num),
        observation_tokens=rng.lognormal(8.0, 0.7, num),
        num_turns=20,
        tool_wait_s=wait_s,
    )


def test_totals_from_turns_and_from_ends() -> None:
    turns = Workload.from_turns([10, 20], [[5, 7], [1]], [[3], []], [[0.5], []])
    ends = Workload.of([10, 20], [12, 1], final_context_tokens=[25, 21], num_turns=[2, 1], tool_wait_s=[0.5, 0])
    for name in ("prompt_tokens", "generated_tokens", "observation_tokens", "num_turns", "tool_wait_s"):
        assert getattr(turns, name).tolist() == getattr(ends, name).tolist()
    with pytest.raises(ConfigError, match="observation_tokens"):
        Workload.of([10], [12], final_context_tokens=[15])
    with pytest.raises(ConfigError, match="num_turns"):
        Workload.of([10], [12], num_turns=0)


def test_alone_is_the_sum_of_its_parts() -> None:
    """The published planner gives 30,000 tokens 0.91 s on TP8; their own steps take thirty times as long."""
    one = Workload.of(1000, 30_000, num_turns=1, tool_wait_s=5.0)
    cost = rollout_cost(one, ENGINES[8])
    steps = 30_000 * ENGINES[8].decode_step_s(1, 16_000)
    assert cost.alone_s[0] == pytest.approx(steps + ENGINES[8].prefill_s(1000, 0) + 5.0, rel=1e-6)
    assert cost.alone_s[0] > 100.0


@given(st.integers(0, 63), st.floats(0.0, 500.0))
def test_waiting_for_tools_lengthens_the_path_and_not_the_load(index: int, more_s: float) -> None:
    base = workload()
    wait = base.tool_wait_s.copy()
    wait[index] += more_s
    before, after = (
        rollout_cost(each, ENGINES[2], concurrency=8.0) for each in (base, replace(base, tool_wait_s=wait))
    )
    assert after.alone_s[index] == pytest.approx(before.alone_s[index] + more_s)
    assert np.allclose(after.engine_s, before.engine_s)


def test_loads_add_up_to_what_the_engine_does() -> None:
    """Equal trajectories at a concurrency: the engine needs as long as its steps take, and nothing twice."""
    same = Workload.of(np.full(32, 500.0), 1000.0)
    cost = rollout_cost(same, ENGINES[2], concurrency=16.0)
    steps_s = 2 * 1000 * ENGINES[2].decode_step_s(16, 16 * 1000)
    assert cost.engine_s.sum() == pytest.approx(steps_s + 32 * ENGINES[2].prefill_s(500, 0), rel=1e-6)
    assert cost.engine_s.sum() < cost.alone_s.sum()


def test_concurrency_ends_where_kv_does() -> None:
    long = Workload.of(np.full(256, 30_000.0), 8000.0)
    costs = rollout_costs(long, ENGINES)
    for tp, cost in costs.items():
        assert cost.max_concurrency * 34_000 <= 0.9 * ENGINES[tp].kv_capacity_tokens * 1.001
    assert costs[8].max_concurrency > 8 * costs[1].max_concurrency
    with pytest.raises(ConfigError, match=r"concurrency: got 200.*tp=1"):
        rollout_cost(long, ENGINES[1], concurrency=200.0)
    assert not rollout_cost(Workload.of(10_000_000, 10), ENGINES[1]).fits.any()


def test_those_that_wait_hold_kv() -> None:
    busy, idle = (rollout_cost(workload(512, wait_s=wait), ENGINES[1]) for wait in (0.0, 2000.0))
    assert idle.concurrency < 0.5 * busy.concurrency
    assert idle.engine_s.sum() > 1.5 * busy.engine_s.sum()


def test_training_flops_are_within_the_peak_and_near_it() -> None:
    """The published planner implies 5 to 10 times the peak."""
    lengths = np.full(256, 8192.0)
    cost = training_cost(GPU, SHAPE, lengths, 32, Layout(gradient_checkpointing=False, padding_frac=0.0))
    flops = 6.0 * SHAPE.num_params * lengths.sum()
    assert 0.3 < flops / cost.forward_backward_s / (32 * GPU.flops_per_s) < 0.8


def test_what_a_layout_adds() -> None:
    lengths = np.full(64, 4096.0)
    base = training_cost(GPU, SHAPE, lengths, 16, Layout())
    plain = training_cost(GPU, SHAPE, lengths, 16, Layout(gradient_checkpointing=False))
    assert plain.forward_backward_s == pytest.approx(0.75 * base.forward_backward_s)
    assert plain.memory_parts_bytes["activations"] > 3 * base.memory_parts_bytes["activations"]
    assert plain.memory_bytes > base.memory_bytes + 5e9
    scored = training_cost(GPU, SHAPE, lengths, 16, Layout(recompute_logprobs=True))
    assert scored.logprobs_s == pytest.approx(base.forward_backward_s / 4)
    offloaded = training_cost(GPU, SHAPE, lengths, 16, Layout(offload=True))
    assert offloaded.optimizer_s > base.optimizer_s
    shards = (2 + 12) * SHAPE.num_params / 16
    assert base.memory_bytes - offloaded.memory_bytes >= 0.99 * shards
    with pytest.raises(ConfigError, match="tensor, pipeline or expert"):
        Layout(kind="tp")  # type: ignore[arg-type]


def test_states_are_sharded_once_and_copied_without_fsdp() -> None:
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


def test_the_longest_sequence_is_never_cut() -> None:
    lengths = np.full(64, 1000.0)
    lengths[0] = 60_000.0
    table = training_table(GPU, SHAPE, lengths, [1, 64, 512])
    assert table[512].forward_backward_s == table[64].forward_backward_s  # one GPU has it whole
    assert table[1].forward_backward_s > table[64].forward_backward_s
    with pytest.raises(ConfigError, match=r"e\.g\. 16"):
        training_cost(GPU, SHAPE, lengths, 12)


def test_a_gpu_delivers_less_while_responses_queue() -> None:
    few, many = (generation(ENGINES[1], n, 16_384, 100_000.0) for n in (8.0, 64.0))
    assert few.kv_demand < 1 < many.kv_demand
    assert many.running == pytest.approx(ENGINES[1].kv_capacity_tokens / 16_384)
    assert many.tokens_per_gpu_s < 2.2 * few.tokens_per_gpu_s  # eight times the responses
    with pytest.raises(ConfigError, match="tokens_per_pass"):
        generation(ENGINES[1], 1, 1, 0.0)


def test_a_switch_comes_before_memory_runs_out() -> None:
    engines = {tp: ENGINES[tp] for tp in (1, 8)}
    tp, seen = 1, []
    for context in range(1024, 32_768, 1024):
        choice = select_tp(
            engines, 32, context, tokens_per_pass=1e5, expected_context_tokens=context + 1024, current=tp
        )
        tp = choice.tp
        seen.append(tp)
        assert 32 * (context + 1024) <= engines[tp].kv_capacity_tokens, choice.reason
    assert seen[0] == 1 and seen[-1] == 8
    assert sum(a != b for a, b in itertools.pairwise(seen)) == 1


def test_small_gains_are_not_worth_a_switch_and_nothing_safe_says_so() -> None:
    engines = {tp: ENGINES[tp] for tp in (1, 8)}
    free = select_tp(engines, 4, 512, tokens_per_pass=1e5)
    assert free.tp == 1 and "delivers most" in free.reason
    stays = select_tp(engines, 4, 512, tokens_per_pass=1e5, current=8, min_gain_frac=10.0)
    assert stays.tp == 8 and "stays" in stays.reason
    full = select_tp(engines, 4096, 60_000, tokens_per_pass=1e5, current=1)
    assert full.tp == 8 and "no degree holds" in full.reason
    with pytest.raises(ConfigError, match="tp=3"):
        select_tp(engines, 1, 1, tokens_per_pass=1.0, current=3)
