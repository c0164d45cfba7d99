"""The process of a vLLM engine, and the worker that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from libra.rollout.vllm_draws import skip_draws
from libra.rollout.vllm_settings import PARENT, is_installed

END = "from libra.rollout.vllm_scheduler import _die_with_parent; _die_with_parent(); print('lives')"


@pytest.mark.skipif(not is_installed(), reason="vllm is not installed here: make setup-vllm")
@pytest.mark.parametrize(("parent", "output", "code"), [(os.getpid(), "lives\n", 0), (1, "", -signal.SIGKILL)])
def test_an_engine_whose_worker_died_while_the_model_loaded_ends(parent: int, output: str, code: int) -> None:
    """Its parent is then another process than the one that started it."""
    environment = {**os.environ, PARENT: str(parent)}
    engine = subprocess.run(
        [sys.executable, "-c", END], env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    assert (engine.stdout, engine.returncode) == (output, code)


@pytest.mark.parametrize(("kernel", "fp64"), [("forward_cpu", False), ("forward_cpu", True), ("forward_native", False)])
def test_a_continued_request_skips_what_its_tokens_drew(kernel: str, fp64: bool) -> None:
    """As vLLM's two ways of drawing a token on a CPU do it."""
    vocab, dtype = 300, torch.float64 if fp64 else torch.float32

    def draw(generator: torch.Generator) -> torch.Tensor:
        if kernel == "forward_cpu" and not fp64:
            return torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)
        return torch.empty(vocab, dtype=dtype).exponential_(generator=generator)

    def forward() -> None: ...

    forward.__name__ = kernel
    sampler = SimpleNamespace(topk_topp_sampler=SimpleNamespace(forward=forward, use_fp64_gumbel=fp64))
    whole, parts = torch.Generator().manual_seed(7), torch.Generator().manual_seed(7)
    drawn = [draw(whole) for _ in range(20)]
    skip_draws(parts, 13, SimpleNamespace(sampler=sampler, input_batch=SimpleNamespace(vocab_size=vocab)))
    assert all(torch.equal(draw(parts), each) for each in drawn[13:])
