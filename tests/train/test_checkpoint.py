"""Checkpoints: whole or absent whatever happens to their writer, and a replica that goes on bit for bit."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import factories
from libra.errors import CheckpointError, TrainError
from libra.seals import sealed_text, unseal
from libra.tensors import digest
from libra.train import Replica, TrainSettings
from libra.train.checkpoint import complete, newest, read_facts, save_checkpoint
from libra.train.checkpoint_directory import KeptCheckpoints, checked_start

_SAVE_AND_DIE = """
import os, signal, sys
from pathlib import Path
from libra.train import checkpoint
from libra.train import Replica, TrainSettings

model = Replica(sys.argv[1], TrainSettings(lr=1e-3))
model.load(Path(sys.argv[2]) / "step-000001")
model.steps_done = 2
dies_at, calls = sys.argv[3], []

def die_after(name, real):
    def call(*args, **kwargs):
        result = real(*args, **kwargs)
        calls.append(name)
        if f"{name} {calls.count(name)}" == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return call

checkpoint.sync = die_after("sync", checkpoint.sync)
type(model.model).save_pretrained = die_after("weights", type(model.model).save_pretrained)
model.save(Path(sys.argv[2]) / "step-000002")
"""


def test_a_checkpoint_continues_as_if_nothing_happened_and_plain_transformers_reads_it(replica, batch, tmp_path):
    model, directory = replica(kl_coef=0.1), tmp_path / "k" / "step-000001"
    model.step(batch, 0)
    model.save(directory)
    loaded = AutoModelForCausalLM.from_pretrained(directory).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.weights().items())
    expected = [model.step(batch, step).digest for step in (1, 2, 3)]
    resumed = replica(kl_coef=0.1)
    resumed.load(directory)
    assert resumed.steps_done == 1
    assert resumed.step([], 0).step == 0  # the relaunched step before the checkpoint
    assert [resumed.step(batch, step).digest for step in (1, 2, 3)] == expected
    assert (directory / "tokenizer.json").is_file()
    assert [path.name for path in directory.parent.iterdir()] == ["step-000001"]
    names = load_file(directory / "optimizer.safetensors").keys()
    assert {f"{name}.{key}" for name in model.parameters() for key in ("step", "exp_avg", "exp_avg_sq")} == names


def test_a_new_run_from_a_checkpoint_goes_on_where_an_uninterrupted_one_would(replica, batch, tmp_path, model_dir):
    settings = TrainSettings(lr=1e-3, kl_coef=0.1)
    uninterrupted = Replica(model_dir, settings)
    for step in range(2):
        uninterrupted.step(batch, step)
    uninterrupted.save(tmp_path / "step-000002")
    expected = [uninterrupted.step(batch, step) for step in (2, 3, 4)]
    started = Replica(tmp_path / "step-000002", settings, base_dir=model_dir)
    started.continue_optimizer(tmp_path / "step-000002")
    assert (started.steps_done, started.last_report) == (0, None)
    reports = [started.step(batch, step) for step in range(3)]
    assert [r.digest for r in reports] == [r.digest for r in expected]
    assert [r.kl_reference for r in reports] == [r.kl_reference for r in expected] != [0, 0, 0]


def test_a_snapshot_is_the_state_at_its_step_whatever_the_replica_does_next(replica, batch, tmp_path):
    model = replica()
    model.step(batch, 0)
    model.save(tmp_path / "at-once")
    snapshot = model.snapshot()
    model.step(batch, 1)
    save_checkpoint(tmp_path / "later", snapshot)
    for name in ("model.safetensors", "optimizer.safetensors", "trainer.json"):
        assert (tmp_path / "later" / name).read_bytes() == (tmp_path / "at-once" / name).read_bytes()


def test_a_whole_checkpoint_is_never_overwritten_and_the_same_one_is_written_once(replica, batch, tmp_path):
    model = replica()
    model.save(tmp_path / "a")
    before = (tmp_path / "a" / "model.safetensors").stat().st_ino
    model.save(tmp_path / "a")
    assert (tmp_path / "a" / "model.safetensors").stat().st_ino == before
    model.step(batch, 0)
    with pytest.raises(TrainError, match="overwritten"):
        model.save(tmp_path / "a")
    (tmp_path / "b").mkdir()
    with pytest.raises(CheckpointError):
        model.save(tmp_path / "b")


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_an_altered_or_cut_file_is_never_loaded_and_written_anew(replica, batch, tmp_path, name):
    model = replica()
    model.step(batch, 0)
    model.save(tmp_path / "step-000001")
    path = tmp_path / "step-000001" / name
    altered = bytearray(path.read_bytes())
    altered[-1] ^= 1
    path.write_bytes(altered)
    other = replica()
    before = digest(other.weights())
    with pytest.raises(CheckpointError, match="digest"):
        other.load(tmp_path / "step-000001")
    path.write_bytes(altered[:-100])
    with pytest.raises(CheckpointError):
        other.load(tmp_path / "step-000001")
    assert digest(other.weights()) == before and not other.optimizer.state
    model.save(tmp_path / "step-000001")
    other.load(tmp_path / "step-000001")
    assert digest(other.weights()) == digest(model.weights())


def test_the_newest_is_the_last_whole_one(replica, batch, tmp_path, caplog):
    assert newest(tmp_path / "nothing") is None
    model = replica()
    for step in range(3):
        model.step(batch, step)
        model.save(tmp_path / f"step-{step + 1:06d}")
    (tmp_path / ".step-000009.abc.tmp").mkdir()
    (tmp_path / "best").symlink_to("step-000001")
    assert [path.name for path in complete(tmp_path)] == ["step-000001", "step-000002", "step-000003"]
    assert newest(tmp_path) == tmp_path / "step-000003"
    (tmp_path / "step-000003" / "model.safetensors").write_bytes(b"torn")
    assert newest(tmp_path) == tmp_path / "step-000002"
    assert "step-000003" in caplog.text
    facts = unseal((tmp_path / "step-000002" / "trainer.json").read_bytes())
    (tmp_path / "step-000002" / "trainer.json").write_text(sealed_text(facts | {"schema": 1}))
    with pytest.raises(CheckpointError, match="schema"):
        read_facts(tmp_path / "step-000002")


@pytest.mark.live
@pytest.mark.parametrize("dies_at", ["weights 1", "sync 2"])
def test_a_writer_killed_in_mid_save_leaves_the_former_checkpoint_whole(replica, batch, model_dir, tmp_path, dies_at):
    model = replica()
    model.step(batch, 0)
    model.save(tmp_path / "step-000001")
    child = subprocess.run([sys.executable, "-c", _SAVE_AND_DIE, model_dir, tmp_path, dies_at], check=False)
    assert child.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob(".*.tmp"))) == 1, "it died before or after the save, not in it"
    assert newest(tmp_path) == tmp_path / "step-000001"
    heir = replica()
    heir.load(tmp_path / "step-000001")
    KeptCheckpoints(tmp_path, keep=1).tidy()
    assert heir.step(batch, 1).digest == model.step(batch, 1).digest
    heir.save(tmp_path / "step-000002")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["scores.json", "step-000001", "step-000002"]


@pytest.mark.parametrize("where", ["weights", "optimizer", "facts"])
def test_a_full_disk_at_any_file_is_named(replica, tmp_path, monkeypatch, where):
    from libra.train import checkpoint

    model = replica()
    rust = checkpoint.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    def full(*_, **__):
        raise OSError(28, "No space left on device") if where == "facts" else rust

    saving = (type(model.model), "save_pretrained")
    targets = {"weights": saving, "optimizer": (checkpoint, "save_file"), "facts": (Path, "write_text")}
    monkeypatch.setattr(*targets[where], full)
    with pytest.raises(CheckpointError, match="disk full"):
        model.save(tmp_path / "k" / "step-000001")
    assert not list((tmp_path / "k").iterdir())


def test_a_run_starts_from_a_checkpoint_or_a_plain_model_and_from_nothing_else(replica, model_dir, tmp_path, caplog):
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000001"
    replica().save(checkpoint)
    (link := checkpoint.parent / "best").symlink_to(checkpoint.name)
    assert checked_start(link, model_dir, "float32") == checkpoint.resolve()
    assert checked_start(model_dir, model_dir, "float32") == model_dir.resolve()
    assert "optimizer" in caplog.text
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
