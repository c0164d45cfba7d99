"""What a run may start from is looked at before anything starts, and every refusal says what to type."""

from __future__ import annotations

import pytest

import factories
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
    assert "optimizer" in caplog.text


def test_what_is_no_checkpoint_is_refused(checkpoint, model_dir, tmp_path):
    for path in (tmp_path / "nowhere", tmp_path / "run", checkpoint.parent, tmp_path):
        with pytest.raises(CheckpointError):
            checked_start(path, model_dir, "float32")
    with pytest.raises(CheckpointError, match="dtype"):
        checked_start(checkpoint, model_dir, "bfloat16")
    for shape in ({"hidden_size": 16}, {"tie_word_embeddings": False}):
        other = factories.save_model(tmp_path / "other", vocab_size=48, **shape)
        with pytest.raises(CheckpointError, match="path"):
            checked_start(checkpoint, other, "float32")
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(CheckpointError):
        checked_start(checkpoint, model_dir, "float32")
