"""Every engine of Libra does what `libra.testing.engines` asks of one."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from libra.rollout.transformers_engine import TransformersEngine
from libra.rollout.vllm_engine import VLLMEngine
from libra.rollout.vllm_settings import CPU_BATCHED_TOKENS, is_installed
from libra.testing.engines import EngineContract
from libra.testing.models import Models, ask
from libra.types import TurnOutput

needs_vllm = pytest.mark.skipif(not is_installed(), reason="vllm is not installed here: make setup-vllm")


class TestTransformersEngine(EngineContract):
    """In this process, on a thread."""

    def make_engine(self, model_dir, **options):
        return TransformersEngine(model_dir, threads=1, **options)


@needs_vllm
@pytest.mark.timeout(600)
class TestVLLMEngine(EngineContract):
    """A process of its own."""

    def make_engine(self, model_dir, **options):
        return VLLMEngine(model_dir, threads=1, **options)


@needs_vllm
@pytest.mark.timeout(600)
class TestTensorParallelVLLMEngine(EngineContract):
    """Two ranks, which keep KV over an update."""

    keeps_kv = True
    # One start less: what follows a death is the same for any number of ranks.
    test_a_killed_engine_process_fails_what_it_had_and_is_replaced = None

    def make_engine(self, model_dir, **options):
        return VLLMEngine(model_dir, threads=1, tp=2, keep_kv=True, **options)


@needs_vllm
@pytest.mark.timeout(600)
def test_vllm_survives_more_context_than_one_step_computes(tmp_path) -> None:
    """Parts of a context would be drawn from and thrown away, of which the engine process dies where requests have seeds."""
    slots, length = 6, 1000
    engine = VLLMEngine(Models(tmp_path).first, threads=1, slots=slots, max_context_tokens=length + 8)
    assert slots * length > CPU_BATCHED_TOKENS

    async def body() -> tuple[list[TurnOutput], list[TurnOutput]]:
        await engine.start()
        try:
            requests = [ask(f"long{n}", length=length, new=4, seed=n) for n in range(slots)]
            together = await asyncio.gather(*(engine.generate(request) for request in requests))
            return list(together), [await engine.generate(request) for request in requests]
        finally:
            await engine.close()

    together, alone = asyncio.run(body())
    assert engine.restarts == 0
    for one, other in zip(together, alone, strict=True):
        assert list(one.token_ids) == list(other.token_ids)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-3)
