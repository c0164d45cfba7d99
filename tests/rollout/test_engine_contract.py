"""Every engine of Libra does what `libra.testing.engines` asks of one."""

from __future__ import annotations

import pytest

from libra.rollout.transformers_engine import TransformersEngine
from libra.rollout.vllm_engine import VLLMEngine
from libra.rollout.vllm_settings import is_installed
from libra.testing.engines import EngineContract

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
