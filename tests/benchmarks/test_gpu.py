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


def test_the_command_prints_what_a_part_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--device", "cpu", "--scale", "tiny", "--part", "gap", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (report["device"], report["failed"]) == ("CPU", {})
    assert 0 < report["figures"]["smoke_logprob_gap_mean_nats"]["value"] < 0.1


def test_the_quick_start_runs_as_a_part() -> None:
    found = gpu.run_part("quickstart", HERE, 380)
    assert "error" not in found, found
    assert found["figures"]["quickstart_iteration_s"]["value"] > 0
    assert found["facts"]["iterations"] == 1


def test_a_part_that_fails_or_takes_too_long_is_told_and_the_next_one_goes_on() -> None:
    assert gpu.run_part("nothing", HERE, 100) == {"error": "KeyError: 'nothing'"}
    assert gpu.run_part("gap", HERE, 0.01) == {"error": "not done after 0 s"}
    assert set(gpu.PARTS) == set(gpu_parts.PARTS)
    assert sum(gpu.PARTS.values()) <= 540


def test_useful_operations_are_those_that_torch_counts() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape, tokens = gpu_parts.SHAPES["tiny"], 32
    config = Qwen3Config(**shape, tie_word_embeddings=True, pad_token_id=0, attn_implementation="eager")
    model = Qwen3ForCausalLM(config)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    # torch counts all pairs of tokens, of which causal attention needs half.
    pairs = 2 * shape["num_hidden_layers"] * shape["num_attention_heads"] * shape["head_dim"] * tokens**2
    useful = gpu_parts.step_flops(shape, tokens, tokens, 1) / gpu_parts.PASSES
    assert useful == pytest.approx(counter.get_total_flops() - pairs, rel=1e-6)
