from types import SimpleNamespace

import numpy as np
import pytest

from libra.errors import EngineError
from libra.rollout import capacity
from libra.rollout.vllm.engine_process import PassWatch

QWEN = {"num_hidden_layers": 28, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "model_type": "qwen3"}  # fmt: skip
TRUE = (2e-3, 3e-4, 2e-8, 1e-5)


def passes(count, rng, *, noise=0.0, late=0.0):
    """Passes as `TRUE` says, (n, 5), some of them late by three times."""
    sequences = rng.integers(1, 17, count)
    context = sequences * rng.integers(50, 900, count)
    prefill = np.where(rng.random(count) < 0.2, rng.integers(1, 400, count), 0)
    rows = np.stack([np.ones(count), sequences, context, prefill], axis=1)
    noisy = np.exp(rng.normal(0.0, noise, count))
    seconds = rows @ np.array(TRUE) * noisy * np.where(rng.random(count) < late, 3.0, 1.0)
    return np.column_stack([rows, seconds])


def test_the_fit_finds_the_seconds_that_passes_took():
    steps = capacity.fit_steps(passes(512, np.random.default_rng(0)))
    found = (steps.fixed_s, steps.sequence_s, steps.context_token_s, steps.prefill_token_s)
    assert found == pytest.approx(TRUE, rel=1e-6)
    assert steps.error_frac < 1e-6 and steps.num_steps == 512


def test_noise_and_late_passes_move_it_little_and_are_its_error():
    steps = capacity.fit_steps(passes(2048, np.random.default_rng(1), noise=0.1, late=0.03))
    assert steps.step_s(8, 4000) == pytest.approx(np.dot(TRUE, (1, 8, 4000, 0)), rel=0.1)
    assert 0.01 < steps.error_frac < 0.3
    rows = passes(64, np.random.default_rng(2))
    rows[:, 4] = np.maximum(1e-4, 5e-3 - 1e-4 * rows[:, 1])  # faster with more sequences, which no engine is
    steps = capacity.fit_steps(rows)
    assert min(steps.fixed_s, steps.sequence_s, steps.context_token_s, steps.prefill_token_s) >= 0.0


def test_nothing_is_said_before_enough_passes_and_an_engine_that_became_slower_says_so():
    meter = capacity.PassMeter()
    for row in passes(capacity.FEWEST_PASSES - 1, np.random.default_rng(3)):
        meter.add(*(int(x) for x in row[1:4]), row[4])
    assert meter.seconds() is None
    meter.add(1, 100, 0, 3e-3)
    before = meter.seconds()
    assert before is not None and before.num_steps == capacity.FEWEST_PASSES
    for row in passes(capacity.KEPT_PASSES, np.random.default_rng(4)):
        meter.add(*(int(x) for x in row[1:4]), 4.0 * row[4])
    after = meter.seconds()
    assert after is not None and after.step_s(8, 4000) == pytest.approx(4.0 * np.dot(TRUE, (1, 8, 4000, 0)), rel=1e-6)


def test_bytes_of_a_token_are_those_of_all_ranks_with_heads_copied_where_there_are_too_few():
    whole = 2 * 28 * 8 * 128 * 2
    assert capacity.kv_token_bytes(QWEN, "bfloat16") == whole
    assert [capacity.kv_token_bytes(QWEN, "bfloat16", tp=tp) for tp in (4, 16)] == [whole, 2 * whole]
    assert capacity.architecture_of(QWEN) == "qwen3-28x1024-h16kv8-v151936"


def test_a_budget_that_holds_no_context_is_refused_with_the_one_that_does():
    assert capacity.tokens_within(1.0, 2**20, 1024) == 1024
    with pytest.raises(EngineError):
        capacity.tokens_within(0.5, 2**20, 1024)


def output(name, tokens, *, prompt=0, computed=0, end=None):
    stats = SimpleNamespace(num_prompt_tokens=prompt, num_computed_tokens=computed) if prompt else None
    return SimpleNamespace(request_id=name, new_token_ids=[1] * tokens, prefill_stats=stats, finish_reason=end)


def test_passes_of_vllm_are_the_times_between_its_messages_where_it_did_not_stand_still():
    seen = []
    meter = capacity.PassMeter()
    meter.add = lambda *values: seen.append(values)
    watch = PassWatch(meter)

    def saw(at_s, *outputs):
        watch.saw(SimpleNamespace(outputs=list(outputs), finished_requests=None, timestamp=at_s, scheduler_stats=None))

    saw(10.0, output("a", 1, prompt=100, computed=100))  # from idle: how long it took is not known
    saw(10.5, output("a", 1), output("b", 1, prompt=50, computed=20))
    saw(11.5, output("a", 1, end="stop"), output("b", 1))
    watch.stood()
    saw(20.0, output("b", 1))
    saw(20.25, output("b", 1), output("probe-1-x", 1, prompt=9, computed=9, end="stop"))
    saw(20.5, output("b", 1, end="stop"))
    saw(30.0, output("c", 1, prompt=5, computed=5))
    assert seen == [(2, 151, 20, 0.5), (2, 153, 0, 1.0), (1, 54, 0, 0.25)]
