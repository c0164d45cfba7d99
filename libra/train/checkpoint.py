"""One checkpoint: a Hugging Face model directory with the optimizer's state.

::

    checkpoints/step-000012/
        config.json, model.safetensors, tokenizer*   as transformers and vLLM read them
        optimizer.safetensors   <parameter>.exp_avg, .exp_avg_sq, .step, .master, .ewma
        trainer.json            schema, steps_done, settings, seed, dtype, digests, last_report
    checkpoints/best -> step-000012                  see `libra.train.checkpoint_directory`

1. A checkpoint directory is whole or absent: it is filled under a temporary name, synced and
   renamed. A killed writer leaves a name that begins with ".", which no reader opens and the next
   writer removes.
2. A whole checkpoint is never overwritten; a torn checkpoint is replaced. Writing the same state
   again has no effect.
3. The replica may take further steps while a `ReplicaSnapshot` is written.
4. Loading changes nothing in the replica before all files are read and every digest agrees.
5. One process writes into a directory of checkpoints.
"""

from __future__ import annotations

import logging
import re
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from libra.errors import CheckpointError, disk_refusal
from libra.seals import sealed_text, unseal
from libra.tensor_files import FACTS_FILE, OPTIMIZER_FILE, WEIGHTS_PATTERN, altered_files, small_files, sync
from libra.tensors import digest
from libra.train.replica_group import laid_out, whole
from libra.train.replica_state import ReplicaState
from libra.train.step_report import StepReport
from libra.train.weight_copies import ADAPTER_DIR, EWMA, LowRankWeights, adapter_config, write_adapter

logger = logging.getLogger(__name__)

SCHEMA = 2
"""Version of the layout of a checkpoint; a change that old code cannot read raises it."""
MASTER = "master"
TEMPORARY = ".tmp"
"""Suffix of the hidden name of a checkpoint being written."""
_NAME = re.compile(r"step-(\d{6,})")
_TOKENIZER_FILES = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*", "*.model",
)  # fmt: skip


def checkpoint_name(step: int) -> str:
    """Name of the checkpoint of weights ``step``, e.g. ``step-000012``."""
    return f"step-{step:06d}"


def step_of(directory: Path) -> int:
    """The step in a checkpoint's name."""
    match = _NAME.fullmatch(directory.name)
    assert match is not None, f"{directory} is not named as a checkpoint"
    return int(match[1])


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    """A replica's state at one step, to be written. ``weights`` and ``optimizer`` are copies in
    host memory (views with ``copy=False``), ``facts`` is ``trainer.json`` without digests, and
    ``adapter`` is the JSON configuration of adapters, or empty."""

    model: Any
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    facts: dict[str, Any]
    tokenizer_dir: Path
    adapter: str = ""

    @classmethod
    def of(cls, replica: ReplicaState, *, copy: bool = True) -> ReplicaSnapshot:
        """The present state; no step may run meanwhile. A collective if the replica is sharded."""

        def kept(tensor: Tensor) -> Tensor:
            tensor = whole(tensor)
            return tensor.detach().to("cpu", copy=True).contiguous() if copy else tensor.detach().contiguous()

        optimizer = {
            f"{name}.{key}": kept(value)
            for name, parameter in replica.optimized().items()
            for key, value in replica.optimizer.state.get(parameter, {}).items()
        }
        if replica.master is not None:
            optimizer |= {f"{name}.{MASTER}": kept(tensor) for name, tensor in replica.master.tensors.items()}
        if replica.average is not None:
            optimizer |= {f"{name}.{EWMA}": kept(tensor) for name, tensor in replica.average.tensors.items()}
        facts = {
            "schema": SCHEMA,
            "steps_done": replica.steps_done,
            "settings": replica.settings.of_a_step(),
            "seed": replica.seed,
            "kl_coef": replica.gradient.kl.value,
            "dtype": str(replica.dtype).removeprefix("torch."),
            "last_report": replica.last_report.as_dict() if replica.last_report else None,
        }
        weights = {name: kept(tensor) for name, tensor in replica.weights().items()}
        master = replica.master
        adapter = adapter_config(master, str(replica.base_dir)) if isinstance(master, LowRankWeights) else ""
        return cls(replica.model, weights, optimizer, facts, replica.base_dir, adapter)

    @property
    def steps_done(self) -> int:
        return int(self.facts["steps_done"])


def save_checkpoint(directory: Path, snapshot: ReplicaSnapshot) -> None:
    """Write ``snapshot`` as ``directory``, whole or not at all; does nothing if it exists.
    CheckpointError if ``directory`` has other content, or cannot be written."""
    content = {"digest": digest(snapshot.weights), "optimizer_digest": digest(snapshot.optimizer)}
    if _is_there(directory, content):
        return
    temporary = _hidden(directory)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        for leftover in directory.parent.glob(f".*{TEMPORARY}"):
            logger.warning("%s is removed: a writer that died left it half-written", leftover)
            shutil.rmtree(leftover, ignore_errors=True)
        temporary.mkdir()
        snapshot.model.save_pretrained(temporary, state_dict=dict(snapshot.weights))
        for pattern in _TOKENIZER_FILES:
            for source in snapshot.tokenizer_dir.glob(pattern):
                if source.is_file():
                    shutil.copy2(source, temporary / source.name)
        save_file(snapshot.optimizer, temporary / OPTIMIZER_FILE)
        if snapshot.adapter:
            names = [name for name in snapshot.optimizer if name.endswith(f".{MASTER}")]
            own = {name.removesuffix(f".{MASTER}"): snapshot.optimizer[name] for name in names}
            write_adapter(temporary / ADAPTER_DIR, snapshot.adapter, own)
        facts = snapshot.facts | content | {"files": small_files(temporary)}
        (temporary / FACTS_FILE).write_text(sealed_text(facts, indent=2) + "\n", encoding="utf-8")
        for path in temporary.iterdir():
            sync(path)
        sync(temporary)
        temporary.rename(directory)
        sync(directory.parent)
    except (OSError, SafetensorError) as fault:
        text = disk_refusal(directory, fault)
        if "Make space" in text:
            text += ". Or keep fewer checkpoints (checkpoint.keep=1), or set run.dir to another disk"
        raise CheckpointError(f"checkpoint: {text}") from fault
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load_checkpoint(directory: Path, replica: ReplicaState) -> None:
    """Load the saved state into ``replica``; CheckpointError if torn or of another model."""
    facts, weights, optimizer = _read(directory)
    own = replica.tensors()
    differing = sorted(name for name in own.keys() | weights.keys() if _form(own.get(name)) != _form(weights.get(name)))
    if differing:
        raise CheckpointError(
            f"checkpoint: {directory} is of another model or dtype; different tensors: {differing[:4]}"
        )
    replica.take_weights(weights)
    _take_optimizer(replica, optimizer)
    replica.steps_done = int(facts["steps_done"])
    if replica.settings.kl_args["target"] is not None:
        replica.gradient.kl.value = float(facts.get("kl_coef", replica.gradient.kl.value))
    replica.last_report = StepReport(**facts["last_report"]) if facts["last_report"] else None


def load_optimizer(directory: Path, replica: ReplicaState) -> None:
    """Load only the optimizer's state into ``replica``, which has the weights of ``directory``.
    CheckpointError if the directory is torn, or the replica has other weights."""
    facts, _, optimizer = _read(directory)
    own = digest(replica.weights())
    if own != facts["digest"]:
        raise CheckpointError(
            f"checkpoint: the weights loaded have digest {own}, {directory} holds {facts['digest']} ({facts['dtype']}); "
            "an optimizer's state belongs to one set of weights"
        )
    _take_optimizer(replica, optimizer)


def read_facts(directory: Path) -> dict[str, Any]:
    """The content of ``trainer.json``; CheckpointError if it is missing or of another schema."""
    path = directory / FACTS_FILE
    try:
        facts = unseal(path.read_bytes())
        schema = facts["schema"]
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise CheckpointError(f"checkpoint: {path} cannot be read: {fault!r}") from fault
    if schema != SCHEMA:
        raise CheckpointError(
            f"checkpoint: {directory} has schema {schema}, this Libra reads {SCHEMA}; use the Libra that wrote it. Its "
            f"weights can be used as a model: type model.path={directory}"
        )
    return facts


def has_optimizer(directory: Path) -> bool:
    """Whether ``directory`` is a checkpoint of Libra, not only a Hugging Face model."""
    return (directory / FACTS_FILE).is_file()


def verify(directory: Path) -> dict[str, Any]:
    """The facts of a checkpoint; CheckpointError if its content differs from its digests."""
    return _read(directory)[0]


def complete(directory: str | Path) -> list[Path]:
    """Checkpoints under ``directory`` by step, without leftovers; digests are not checked."""
    directory = Path(directory)
    if not directory.is_dir():
        return []
    found = [p for p in directory.iterdir() if _NAME.fullmatch(p.name) and has_optimizer(p)]
    return sorted(found, key=step_of)


def newest(directory: str | Path, up_to: int | None = None) -> Path | None:
    """The last checkpoint (up to step ``up_to``) with correct digests; others cause warnings."""
    for path in reversed([path for path in complete(directory) if up_to is None or step_of(path) <= up_to]):
        try:
            verify(path)
        except CheckpointError as fault:
            logger.warning("%s is skipped: %s", path, fault)
        else:
            return path
    return None


def _read(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    facts = read_facts(directory)
    if altered := altered_files(directory, facts):
        raise CheckpointError(f"checkpoint: {directory / altered[0]} was altered or is gone; take another checkpoint")
    try:
        weights: dict[str, Tensor] = {}
        for path in sorted(directory.glob(WEIGHTS_PATTERN)):
            weights.update(load_file(path))
        optimizer = load_file(directory / OPTIMIZER_FILE)
    except (OSError, ValueError, SafetensorError) as fault:
        raise CheckpointError(f"checkpoint: {directory} cannot be read: {fault}") from fault
    for name, tensors, key in (("weights", weights, "digest"), ("optimizer state", optimizer, "optimizer_digest")):
        got = digest(tensors)
        if got != facts[key]:
            raise CheckpointError(
                f"checkpoint: the {name} in {directory} have digest {got}, {FACTS_FILE} has {facts[key]}; the files were "
                "altered or torn: take another checkpoint"
            )
    return facts, weights, optimizer


def _hidden(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.{uuid.uuid4().hex}{TEMPORARY}")


def _is_there(directory: Path, content: dict[str, str]) -> bool:
    if not directory.exists():
        return False
    try:
        facts = verify(directory)
    except CheckpointError as fault:
        if not has_optimizer(directory):
            raise CheckpointError(f"checkpoint: {directory} exists and is not a checkpoint; move it away") from fault
        logger.warning("%s is written again: %s", directory, fault)
        directory.rename(_hidden(directory))
        return False
    if {key: facts[key] for key in content} != content:
        raise CheckpointError(
            f"checkpoint: {directory} exists with digest {facts['digest']} and is never overwritten; to be written was "
            f"{content['digest']}. Choose another directory, or move that one away"
        )
    return True


def _take_optimizer(replica: ReplicaState, state: dict[str, Tensor]) -> None:
    replica.optimizer.state.clear()
    for name, parameter in replica.optimized().items():
        if f"{name}.step" in state:
            step, *moments = (state[f"{name}.{key}"] for key in ("step", "exp_avg", "exp_avg_sq"))
            own = parameter.detach()
            first, second = (laid_out(each.to(own.device, own.dtype, copy=True), own) for each in moments)
            # A fused optimizer counts where it computes.
            found = {"step": step.to(own.device, copy=True), "exp_avg": first, "exp_avg_sq": second}
            replica.optimizer.state[parameter] = found
    if replica.master is not None:
        keys = {name: f"{name}.{MASTER}" for name in replica.master.tensors}
        replica.master.load({name: state[key] for name, key in keys.items() if key in state})
    if replica.average is not None:
        replica.average.load(state, replica.tensors())


def _form(tensor: Tensor | None) -> tuple[object, ...] | None:
    return None if tensor is None else (tuple(tensor.shape), tensor.dtype)
