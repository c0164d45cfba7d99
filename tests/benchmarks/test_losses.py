"""Both sides of the benchmark compute the same gradients, and its sizes fit."""

from __future__ import annotations

import argparse
import subprocess
from typing import Any

import pytest
import torch

from benchmarks.losses import LOSSES, Work, peak_in_a_process, tokens_that_fit


@pytest.mark.parametrize("loss", LOSSES)
def test_both_sides_compute_the_same(loss: str) -> None:
    work = Work(sequences=3, tokens=5, vocab=17, hidden=4, device="cpu")
    gradients = []
    for side in ("chunked", "plain"):
        assert work.run(loss, side, chunk_tokens=4) > 0
        gradients.append((work.hidden_NH.grad.clone(), work.weight_VH.grad.clone()))
    for ours, plain in zip(*gradients, strict=True):
        assert float(plain.abs().max()) > 0
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-6)


def test_tokens_are_halved_until_the_plain_side_fits() -> None:
    options = argparse.Namespace(sequences=64, tokens=4096, vocab=32_000, memory_gib=4.0)
    assert tokens_that_fit(options) == 128
    options.memory_gib = 200.0
    assert tokens_that_fit(options) == 4096
    options.memory_gib = 96.0  # what the page names for a GPU
    assert tokens_that_fit(options) == 4096


def test_the_process_that_measures_memory_gets_what_this_one_cached_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        order.append("run")
        return subprocess.CompletedProcess(command, 0, stdout='{"peak_bytes": 7, "seconds": 0.5}\n')

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: order.append("emptied"))
    options = argparse.Namespace(sequences=1, vocab=8, hidden=4, chunk=4, device="cuda", threads=1)
    assert peak_in_a_process(options, "ppo", "plain", 8) == (7, 0.5)
    assert order == ["emptied", "run"]
