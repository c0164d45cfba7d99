"""A LoRA run: each version is verified and served as any other, and the checkpoint has the adapters."""

from __future__ import annotations

import json
from pathlib import Path

import lora
from distributed import Client
from safetensors.torch import load_file

import libra
from libra.testing import FixedTurns


def test_a_run_trains_publishes_and_resumes_with_adapters(client: Client, random_model: Path, tmp_path: Path) -> None:
    arguments = {
        "environment": FixedTurns(),
        "client": client,
        "run__dir": str(tmp_path),
        "run__name": "lora",
        "run__iterations": 1,
        "trainer__lr": 1e-2,
        "trainer__prompts": 2,
        "trainer__group_size": 2,
        "rollout__max_new_tokens": 4,
        "rollout__max_turns": 2,
        "rollout__ignore_eos": True,
        "observe__progress": False,
        **lora.LORA,
    }
    libra.train(str(random_model), **arguments)
    summary = libra.train(str(random_model), resume=True, **{**arguments, "run__iterations": 2})
    assert [row["iteration"] for row in summary.iterations] == [1]
    lines = [json.loads(line) for line in (summary.directory / "events.jsonl").read_text().splitlines()]
    checked = [line for line in lines if line["name"] == "version_checked"]
    assert {line["version"] for line in checked} >= {0, 1, 2}, "engines have proved each version"
    assert summary.checkpoint is not None
    merged = load_file(Path(summary.checkpoint) / "model.safetensors")
    adapters = load_file(Path(summary.checkpoint) / "adapter" / "adapter_model.safetensors")
    base = load_file(random_model / "model.safetensors")
    for layer in ("model.layers.0.self_attn.v_proj", "model.layers.1.mlp.down_proj"):
        a, b = (adapters[f"base_model.model.{layer}.lora_{ab}.weight"] for ab in "AB")
        assert b.any()
        change = merged[f"{layer}.weight"] - base[f"{layer}.weight"]
        assert change.sub(2.0 * (b @ a)).abs().max() < 1e-6
    assert (merged["model.embed_tokens.weight"] == base["model.embed_tokens.weight"]).all()


def test_the_workflow_is_short(repository: Path) -> None:
    assert len((repository / "workflows" / "lora.py").read_text().splitlines()) <= 40


def test_settings_of_adapters_without_a_rank_are_told() -> None:
    from libra.config import config_from_dict
    from libra.config.effects import ignored_settings, warning_lines

    config = config_from_dict({"trainer": {"lora_alpha": 8.0}})
    assert warning_lines(ignored_settings(config)) == [
        "trainer.lora_alpha=8.0 has no effect here; needed is a value of trainer.lora_rank"
    ]
