"""Every engine of Libra does what `libra.testing.engines` asks of one."""

import asyncio

import numpy as np
import pytest
from contract_part import only

from libra.config.sections import vllm_is_installed
from libra.rollout.transformers_engine import TransformersEngine
from libra.rollout.vllm.async_engine import VLLMEngine
from libra.rollout.vllm.engine_args import CPU_BATCHED_TOKENS
from libra.testing.engines import EngineContract
from libra.testing.parts import ask

VLLM = [
    pytest.mark.vllm,
    pytest.mark.skipif(not vllm_is_installed(), reason="vllm is not installed here: type make setup-vllm"),
    pytest.mark.timeout(600),
]


class TestTransformersEngine(EngineContract):
    def make_engine(self, model_dir, **options):
        return TransformersEngine(model_dir, threads=1, **options)


class TestVLLMEngine(EngineContract):
    pytestmark = VLLM

    def make_engine(self, model_dir, **options):
        return VLLMEngine(model_dir, threads=1, **options)


@only("greedy_tokens", "recorded_logprobs", "loaded_in_flight", "later_turn", "probes_tell", "a_degree")
class TestTensorParallelVLLMEngine(EngineContract):
    pytestmark = VLLM
    keeps_kv = True

    def make_engine(self, model_dir, **options):
        return VLLMEngine(model_dir, threads=1, tp=2, keep_kv=True, **options)


@pytest.mark.vllm
@VLLM[1]
@VLLM[2]
def test_vllm_survives_more_context_than_one_step_computes(vllm_engine):
    async def body(engine, models):
        requests = [ask(f"long{n}", length=500, new=4, seed=n) for n in range(16)]
        assert CPU_BATCHED_TOKENS < 16 * 500
        restarts = engine.restarts
        together = await asyncio.gather(*(engine.generate(request) for request in requests))
        alone = [await engine.generate(request) for request in requests[:6]]
        assert engine.restarts == restarts
        return together, alone

    for one, other in zip(*vllm_engine(body), strict=False):
        assert list(one.token_ids) == list(other.token_ids)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-3)
