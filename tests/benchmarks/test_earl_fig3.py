"""The rates that EARL's figure is compared with."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.earl_fig3 import generation
from libra.hardware import engine_seconds


def test_a_gpu_delivers_less_while_responses_queue() -> None:
    engine = engine_seconds("A800-80G", "Qwen3-14B", 1)
    found = generation(engine, np.array([8.0, 64.0]), np.full(2, 16_384.0), 100_000.0)
    (few, many), demand = found.tokens_per_gpu_s, found.kv_demand
    assert demand[0] < 1 < demand[1]
    assert found.running[1] == pytest.approx(engine.kv_capacity_tokens / 16_384)
    assert many < 2.2 * few  # eight times the responses
