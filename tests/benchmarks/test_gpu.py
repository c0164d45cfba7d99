"""The benchmark of one GPU, on the CPU: every part's path, the parts' independence, and prime-rl's
count of operations."""

import argparse
import json

import pytest
import torch

from benchmarks import gpu, gpu_parts

pytestmark = pytest.mark.live
HERE = argparse.Namespace(device="cpu", scale="tiny")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_and_what_to_type(capsys):
    assert gpu.main(["--json"]) == 2
    printed = capsys.readouterr()
    assert "--device cpu --scale tiny" in printed.err
    assert not printed.out


@pytest.mark.parametrize("name", [name for name in gpu_parts.PARTS if name not in ("quickstart", "gap")])
def test_each_part_measures_on_a_cpu_too(name, tmp_path):
    found = gpu_parts.PARTS[name](gpu_parts.Bench("cpu", "tiny", tmp_path))
    figures = gpu.figures_of({name: json.loads(json.dumps(found))}, "smoke_")
    assert figures
    assert all(each.value > 0 for each in figures.values())
    assert not any("mfu" in figure for figure in figures)  # a CPU has no datasheet
    assert found["text"]


def test_what_was_measured_is_in_the_file_when_a_later_part_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "PARTS", {"gap": 100.0, "nothing": 1.0})
    out = tmp_path / "gpu.json"
    assert gpu.main(["--device", "cpu", "--scale", "tiny", "--minutes", "5", "--out", str(out)]) == 1
    report = json.loads(out.read_text())
    assert (report["device"], report["failed"]) == ("CPU", {"nothing": "KeyError: 'nothing'"})
    assert 0 < report["figures"]["smoke_logprob_gap_mean_nats"]["value"] < 0.1


def test_a_part_that_takes_too_long_is_stopped(tmp_path):
    assert gpu.run_part("gap", HERE, 0.01, tmp_path) == {"error": "not done after 0 s"}
    assert set(gpu.PARTS) == set(gpu_parts.PARTS)


def test_the_quick_start_runs_as_a_part(tmp_path):
    found = gpu.run_part("quickstart", HERE, 380, tmp_path)
    assert "error" not in found, found
    assert found["figures"]["quickstart_iteration_s"]["value"] > 0
    assert found["text"].startswith("1 iterations")


@pytest.mark.parametrize(
    ("name", "tokens_per_s", "mfu"),
    [("0b6_16k", 11895.99, 0.11082), ("0b6_64k", 10147.47, 0.26805), ("4b_16k", 6229.23, 0.21671), ("4b_64k", 4164.08, 0.37373)],
)  # fmt: skip
def test_utilisation_is_counted_as_prime_rl_counts_its_published_runs(name, tokens_per_s, mfu):
    baseline = gpu_parts.BASELINES[name]
    flops = gpu_parts.token_flops(gpu_parts.SHAPES[baseline.model], baseline.tokens, baseline.lora_rank)
    assert flops * tokens_per_s / 989e12 == pytest.approx(mfu, rel=2e-3)
