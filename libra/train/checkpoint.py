"""Checkpoints: a Hugging Face model directory with the optimizer's state beside it.

::

    config.json, model.safetensors, tokenizer*   as transformers reads them
    optimizer.safetensors                        <parameter>.exp_avg, <parameter>.exp_avg_sq, <parameter>.step
    trainer.json                                 schema, steps_done, settings, seed, dtype, digest, last_report

Invariants
----------
1. A checkpoint directory is whole or absent: it is filled under a temporary name, synced and renamed.
2. An existing directory is never overwritten.
3. `load_checkpoint` changes nothing in the replica before everything was read and the weights' digest agrees.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from libra.errors import TrainError
from libra.tensors import digest, untied
from libra.train.report import StepReport

if TYPE_CHECKING:
    from libra.train.replica import Replica

SCHEMA = 1
_TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.model",
)


def save_checkpoint(directory: Path, replica: Replica) -> None:
    """Write ``replica`` as ``directory``; TrainError where that exists."""
    if directory.exists():
        raise TrainError(f"checkpoint: {directory} exists and is never overwritten; choose another directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}.tmp")
    temporary.mkdir()
    try:
        replica.model.save_pretrained(temporary)
        for pattern in _TOKENIZER_FILES:
            for source in replica.model_dir.glob(pattern):
                if source.is_file():
                    shutil.copy2(source, temporary / source.name)
        state = {
            f"{name}.{key}": value.detach().contiguous()
            for name, parameter in replica.parameters().items()
            for key, value in replica.optimizer.state.get(parameter, {}).items()
        }
        save_file(state, temporary / "optimizer.safetensors")
        facts = {
            "schema": SCHEMA,
            "steps_done": replica.steps_done,
            "settings": asdict(replica.settings),
            "seed": replica.seed,
            "dtype": str(replica.dtype),
            "digest": digest(replica.weights()),
            "last_report": replica.last_report.as_dict() if replica.last_report else None,
        }
        (temporary / "trainer.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        for path in temporary.iterdir():
            _sync(path)
        _sync(temporary)
        temporary.rename(directory)
        _sync(directory.parent)
    except OSError as fault:
        raise TrainError(f"checkpoint: {directory} could not be written: {fault}") from fault
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load_checkpoint(directory: Path, replica: Replica) -> None:
    """Bring ``replica`` to the state saved in ``directory``; TrainError where it is torn or of another model."""
    try:
        facts: dict[str, Any] = json.loads((directory / "trainer.json").read_text(encoding="utf-8"))
        state = load_file(directory / "optimizer.safetensors")
        weights = _read_weights(directory)
    except (OSError, ValueError, SafetensorError) as fault:
        raise TrainError(f"checkpoint: {directory} cannot be read: {fault}") from fault
    if facts.get("schema") != SCHEMA:
        raise TrainError(f"checkpoint: {directory} has schema {facts.get('schema')}; this Libra reads {SCHEMA}")
    own = untied(replica.model.state_dict())[0]
    differing = sorted(name for name in own.keys() | weights.keys() if _form(own.get(name)) != _form(weights.get(name)))
    if differing:
        raise TrainError(f"checkpoint: {directory} is of another model or dtype; tensors that differ: {differing[:4]}")
    got = digest(weights)
    if got != facts["digest"]:
        raise TrainError(f"checkpoint: weights in {directory} have digest {got}, trainer.json says {facts['digest']}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(weights[name])
    replica.optimizer.state.clear()
    for name, parameter in replica.parameters().items():
        entry = {key: state[f"{name}.{key}"] for key in ("step", "exp_avg", "exp_avg_sq") if f"{name}.{key}" in state}
        if entry:
            replica.optimizer.state[parameter] = {key: value.clone() for key, value in entry.items()}
    replica.steps_done = int(facts["steps_done"])
    replica.last_report = StepReport(**facts["last_report"]) if facts["last_report"] else None


def _read_weights(directory: Path) -> dict[str, Tensor]:
    """Every tensor of the safetensors files that transformers wrote, one or several."""
    weights: dict[str, Tensor] = {}
    for path in sorted(directory.glob("model*.safetensors")):
        weights.update(load_file(path))
    return weights


def _form(tensor: Tensor | None) -> tuple[object, ...] | None:
    return None if tensor is None else (tuple(tensor.shape), tensor.dtype)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
