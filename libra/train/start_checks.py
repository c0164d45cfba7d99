"""Checks of `run.from_checkpoint`, before any worker starts."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from safetensors import SafetensorError, safe_open

from libra.errors import CheckpointError
from libra.train.checkpoint import complete, has_optimizer, verify

logger = logging.getLogger(__name__)

_FIELD = "run.from_checkpoint"
_HEAD = "lm_head.weight"


def checked_start(given: Path, model_dir: str | Path, dtype: str) -> Path:
    """The directory ``given``, absolute and without links, after checking that a run of ``model_dir`` can start from it.

    It is a checkpoint of the same names, shapes and dtype, or a Hugging Face directory without ``trainer.json``: then the
    optimizer starts from zero, with a warning. CheckpointError for anything else.
    """
    directory = given.expanduser().resolve()
    if not directory.is_dir():
        raise CheckpointError(f"{_FIELD}: there is no directory {str(given)!r}; type --from RUN/checkpoints/best")
    for inner in (directory / "checkpoints", directory):
        if found := complete(inner):
            raise CheckpointError(
                f"{_FIELD}: {str(given)!r} holds {len(found)} checkpoints; choose one, e.g. --from {found[-1]}"
            )
    missing = [name for name, there in _needed(directory).items() if not there]
    if missing:
        raise CheckpointError(
            f"{_FIELD}: {str(given)!r} is not a checkpoint: it lacks {' and '.join(missing)}; type a directory such as "
            "RUN/checkpoints/best, or one that model.save_pretrained(...) wrote"
        )
    _check_shapes(directory, Path(model_dir))
    if not has_optimizer(directory):
        logger.warning(
            "%s: %s holds no trainer.json: only its weights are used, and the optimizer starts from zero",
            _FIELD,
            directory,
        )
        return directory
    facts = verify(directory)
    if facts["dtype"] != dtype:
        raise CheckpointError(
            f"{_FIELD}: {directory} was trained in {facts['dtype']}, this run is to be in {dtype}; type "
            f"model.dtype={facts['dtype']}, or copy the directory without trainer.json to take its weights only"
        )
    logger.info("starts from %s, after %d steps, with its optimizer's state", directory, facts["steps_done"])
    return directory


def _needed(directory: Path) -> dict[str, bool]:
    return {
        "config.json": (directory / "config.json").is_file(),
        "model.safetensors": any(directory.glob("model*.safetensors")),
    }


def _check_shapes(directory: Path, model_dir: Path) -> None:
    """CheckpointError if the two hold tensors of other names or shapes. A head tied to the embedding is left out."""
    if not all(_needed(model_dir).values()):
        return  # a Hugging Face id, or weights in another format: the workers compare
    got, wanted = _shapes(directory), _shapes(model_dir)
    if _tied(directory) and _tied(model_dir):
        got.pop(_HEAD, None)
        wanted.pop(_HEAD, None)
    differing = sorted(name for name in got.keys() | wanted.keys() if got.get(name) != wanted.get(name))
    if differing:
        first = differing[0]
        raise CheckpointError(
            f"{_FIELD}: {directory} is of another model than model.path={str(model_dir)!r}: {len(differing)} tensors differ, "
            f"first {first}: {got.get(first, 'missing')} and {wanted.get(first, 'missing')}; type model.path={directory} to "
            "train that model"
        )


def _shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(directory.glob("model*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as fault:
            raise CheckpointError(f"{_FIELD}: {path} cannot be read: {fault}") from fault
    return shapes


def _tied(directory: Path) -> bool:
    try:
        return bool(json.loads((directory / "config.json").read_text(encoding="utf-8")).get("tie_word_embeddings"))
    except (OSError, ValueError, AttributeError) as fault:
        raise CheckpointError(f"{_FIELD}: {directory / 'config.json'} cannot be read: {fault}") from fault
