"""The benchmark of one GPU, on the CPU: every part's path, the parts' independence, and what it calls useful operations."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import gpu, gpu_parts

HERE = argparse.Namespace(device="cpu", scale="tiny")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_and_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--json"]) == 2
    printed = capsys.readouterr()
    assert "sees no GPU here" in printed.err
    assert "--device cpu --scale tiny" in printed.err
    assert not printed.out


@pytest.mark.parametrize("name", [name for name in gpu_parts.PARTS if name != "quickstart"])
def test_each_part_measures_on_a_cpu_too(name: str, tmp_path: Path) -> None:
    found = gpu_parts.PARTS[name](gpu_parts.Bench("cpu", "tiny", tmp_path))
    figures = gpu.figures_of({name: json.loads(json.dumps(found))}, "smoke_")
    assert figures
    assert all(each.value > 0 for each in figures.values())
    assert found["text"]


def test_the_command_runs_parts_as_processes_and_the_quick_start_among_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--device", "cpu", "--scale", "tiny", "--part", "quickstart", "--limit-s", "400", "--json"]) in (
        0,
        1,
    )
    lines = capsys.readouterr().out.splitlines()
    report = json.loads(lines[-1])
    assert report["device"] == "CPU"
    if "quickstart" in report["failed"]:  # the part's own limit, on a machine that is busy with other things
        assert report["failed"]["quickstart"].startswith("not done after")
    else:
        assert report["figures"]["smoke_quickstart_iteration_s"]["value"] > 0


def test_a_part_that_fails_or_takes_too_long_is_told_and_the_next_one_goes_on() -> None:
    assert gpu.run_part("nothing", HERE, 100) == {"error": "KeyError: 'nothing'"}
    assert gpu.run_part("gap", HERE, 0.01) == {"error": "not done after 0 s"}
    assert set(gpu.PARTS) == set(gpu_parts.PARTS)
    assert sum(gpu.PARTS.values()) <= 540


def test_useful_operations_are_those_that_torch_counts() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape, tokens = gpu_parts.SHAPES["tiny"], 32
    model = Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=True, pad_token_id=0))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    counted = counter.get_flop_counts()["Global"]
    attention = sum(number for kind, number in counted.items() if "attention" in str(kind))
    useful = gpu_parts.step_flops(shape, tokens, tokens, 1) / gpu_parts.PASSES
    # torch counts all pairs of tokens, of which causal attention needs half.
    assert attention > 0
    assert useful == pytest.approx(counter.get_total_flops() - attention / 2, rel=1e-6)
