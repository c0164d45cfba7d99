"""What a run may start from is looked at before anything starts, and every refusal says what to type."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from libra.errors import CheckpointError
from libra.train.start_checks import checked_start


@pytest.fixture
def checkpoint(replica, tmp_path):
    replica().save(tmp_path / "run" / "checkpoints" / "step-000001")
    return tmp_path / "run" / "checkpoints" / "step-000001"


def test_a_checkpoint_is_taken_by_what_it_is_now(checkpoint, model_dir):
    link = checkpoint.parent / "best"
    link.symlink_to(checkpoint.name)
    assert checked_start(link, model_dir, "float32") == checkpoint.resolve()


def test_a_plain_model_gives_its_weights_only_and_says_so(model_dir, caplog):
    assert checked_start(model_dir, model_dir, "float32") == model_dir.resolve()
    assert "only its weights are used, and the optimizer starts from zero" in caplog.text


def test_a_missing_directory_a_run_and_anything_else_are_told_apart(checkpoint, model_dir, tmp_path):
    cases = {
        tmp_path / "nowhere": r"there is no directory .*--from RUN/checkpoints/best",
        tmp_path / "run": r"holds 1 checkpoints; choose one, e.g. --from .*step-000001",
        checkpoint.parent: r"holds 1 checkpoints; choose one",
        tmp_path: r"lacks config\.json and model\.safetensors",
    }
    for path, words in cases.items():
        with pytest.raises(CheckpointError, match=words):
            checked_start(path, model_dir, "float32")


def test_an_altered_checkpoint_is_refused(checkpoint, model_dir):
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(CheckpointError, match="altered or torn"):
        checked_start(checkpoint, model_dir, "float32")


def test_another_dtype_is_named_with_the_setting(checkpoint, model_dir):
    with pytest.raises(CheckpointError, match=r"type model\.dtype=float32"):
        checked_start(checkpoint, model_dir, "bfloat16")


@pytest.mark.parametrize(("size", "tied"), [(16, True), (32, False)])
def test_another_models_checkpoint_is_refused_with_both_shapes(checkpoint, tmp_path, size, tied):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=48,
        hidden_size=size,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=tied,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"another model than .* tensors differ, first .* type model\.path="):
        checked_start(checkpoint, tmp_path / "other", "float32")
