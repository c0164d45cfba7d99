"""Seconds of an engine's steps, and of a trainer's from a run's own."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.errors import ConfigError
from libra.hardware import Efficiencies, ModelOnGPU, Overhead, engine_seconds
from libra.hardware.engine_seconds import Grid
from libra.hardware.run_calibration import fit_positive, fit_trainer

ENGINES = {(g, tp): engine_seconds(g, "Qwen3-14B", tp) for g in ("A100-80G", "A800-80G", "H100-80G") for tp in (1, 4)}
counts = st.integers(1, 300)
contexts = st.integers(0, 40_000)


@given(st.sampled_from(sorted(ENGINES)), counts, counts, contexts, contexts)
def test_steps_never_get_shorter_with_more_to_do(key, n, more, context, longer):
    engine = ENGINES[key]
    step = engine.decode_step_s(n, n * context)
    assert engine.decode_step_s(n + more, (n + more) * context) >= step
    assert engine.decode_step_s(n, n * (context + longer)) >= step
    prefill = engine.prefill_s(n, context)
    assert engine.prefill_s(n + more, context) >= prefill
    assert engine.prefill_s(n, context + longer) >= prefill


@given(st.sampled_from(sorted(ENGINES)), st.integers(1, 30_000), contexts, counts)
def test_one_at_a_time_and_many_agree(key, new, past, n):
    engine = ENGINES[key]
    assert engine.prefills_s([new, 1], [past, 0])[0] == pytest.approx(engine.prefill_s(new, past))
    assert engine.decode_steps_s([n], [n * past])[0] == pytest.approx(engine.decode_step_s(n, n * past))


def test_weights_are_read_once_and_sharded_once():
    """The published planner divided by TP twice: its TP8 steps were a tenth of the measured ones."""
    bare = Overhead(0.0, 0.0)
    step = {tp: engine_seconds("A800-80G", "Qwen3-14B", tp, overhead=bare).decode_step_s(1, 1024) for tp in (1, 2, 8)}
    read_s = 14.77e9 * 2 / 2.039e12
    assert read_s < step[1] < 1.6 * read_s
    assert step[2] > read_s / 2
    assert step[8] > read_s / 8
    assert step[1] > step[2] > step[8]


def test_a_step_of_a_known_model_is_what_was_measured():
    """Llama-2-7b, A100: 291 us a layer of linear operators at one token, 74 us of them products of 8-way shards."""
    engine = engine_seconds("A100-80G", "Llama-2-7b", 1)
    assert float(engine.layer_s(1)) == pytest.approx(291e-6, rel=0.02)
    assert float(engine.layer_s(4096)) == pytest.approx(8.18e-3, rel=0.03)


def test_room_for_kv_is_counted_per_gpu():
    engine = ENGINES["A800-80G", 4]
    free = 0.9 * 80e9 - engine.shape.num_params * 2 / 4 - 2e9
    assert engine.kv_capacity_tokens == int(free // (2 * 40 * 2 * 128 * 2))
    assert engine.kv_capacity_tokens > 4 * ENGINES["A800-80G", 1].kv_capacity_tokens


def test_weights_that_do_not_fit_say_what_would():
    with pytest.raises(ConfigError, match="tp"):
        engine_seconds("A100-80G", "Qwen2.5-72B-Instruct", 2)
    assert engine_seconds("A100-80G", "Qwen2.5-72B-Instruct", 4).kv_capacity_tokens > 0


def test_chunks_add_up_and_all_reduces_and_hosts_count():
    engine = ENGINES["A100-80G", 1]
    parts = engine.prefill_s(8192, 100) + engine.prefill_s(8192, 8292) + engine.prefill_s(20_000 - 16_384, 16_484)
    assert engine.prefill_s(20_000, 100) == pytest.approx(parts)
    fast = engine_seconds("H100-80G", "Qwen3-14B", 8, tables=None, overhead=Overhead(0.0, 0.0))
    slow = ModelOnGPU(fast.gpu, fast.shape, 8, efficiencies=Efficiencies(hop_s=20e-6), overhead=Overhead(5e-3, 0.0))
    gap = slow.decode_step_s(4, 400) - fast.decode_step_s(4, 400)
    assert gap == pytest.approx(5e-3 + 80 * 2 * 3 * 18e-6, rel=0.01)  # two per layer, two passes of three hops each


def test_a_grid_is_linear_between_and_beyond():
    grid = Grid([1.0, 2.0, 4.0], [0.0, 10.0], [[0.0, 10.0], [2.0, 12.0], [6.0, 16.0]])  # 2 (x - 1) + y
    for x, y in ((1.5, 5.0), (8.0, 20.0), (4.0, 0.0)):
        assert grid.at(x, y) == pytest.approx(2 * (x - 1) + y)
        assert float(grid.at_many(x, y)) == pytest.approx(grid.at(x, y))
    assert grid.at(0.0, 0.0) == 0.0  # constant before the first


def test_a_trainer_from_its_steps():
    tokens = np.linspace(1000, 4000, 12)
    trainer = fit_trainer(0.2 + 1e-3 * tokens, tokens)
    assert trainer is not None
    assert trainer.step_s(10_000) == pytest.approx(10.2, rel=0.03)
    assert fit_trainer([1.0], [1.0]) is None


def test_a_fit_finds_constants_despite_outliers():
    x = np.linspace(1.0, 10.0, 50)
    measured = 3.0 + 0.5 * x
    measured[::10] *= 4.0
    found = fit_positive(lambda c: np.log((c[0] + c[1] * x) / measured), np.array([1.0, 1.0]))
    assert found == pytest.approx([3.0, 0.5], rel=0.03)
