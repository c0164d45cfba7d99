"""The checkpoints that a run keeps (the last m and the best), and the checkpoint it may start from.

The best checkpoint has the highest score; of equal scores the later one wins. The score is the mean
reward of held-out questions at that version, or, without ``evaluation.every``, of its step's batch.

1. These are never removed: the best, the newest, the last ``keep``, and a checkpoint being written.
2. ``best`` is a relative link, replaced in one rename before anything is removed: it never dangles.
3. A removed checkpoint loses its name first, so no reader sees a part of it. The next `tidy`
   removes files of a killed process.
4. One process, the driver, calls `KeptCheckpoints`.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import uuid
from pathlib import Path

from safetensors import SafetensorError, safe_open

from libra.errors import CheckpointError
from libra.seals import sealed_text, unseal
from libra.train.checkpoint import checkpoint_name, complete, has_optimizer, step_of, verify

logger = logging.getLogger(__name__)
BEST = "best"
SCORES_FILE = "scores.json"
_REMOVED, _REPLACING = ".gone", ".new"
"""Suffixes of hidden names: checkpoints being removed, and files about to replace others."""


class KeptCheckpoints:
    """The ``checkpoints`` directory of a run, existing or not, with all earlier scores."""

    def __init__(self, directory: Path, *, keep: int) -> None:
        self.directory, self.keep = directory, keep
        self._scores = self._read_scores()

    def score(self, step: int, reward: float) -> None:
        """Record the mean reward of a step's weights; NaN (nothing was graded) is ignored."""
        if math.isfinite(reward):
            self._scores[checkpoint_name(step)] = reward
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                self._write_scores()
            except OSError as fault:
                raise CheckpointError(f"checkpoint: {self.directory} cannot be written to: {fault}") from fault

    def best(self) -> Path | None:
        """The checkpoint with the highest score; None without a score."""
        scored = [path for path in complete(self.directory) if path.name in self._scores]
        return max(scored, key=lambda path: (self._scores[path.name], step_of(path)), default=None)

    def tidy(self) -> list[Path]:
        """Link the best checkpoint; remove and return those not kept. CheckpointError if the disk
        fails."""
        there = complete(self.directory)
        if not there:
            return []
        best = self.best()
        kept = {*there[-self.keep :], *([best] if best is not None else [])}
        removed = [path for path in there if path not in kept]
        try:
            for path in removed:
                self._scores.pop(path.name, None)
            self._write_scores()
            if best is not None:
                self._link(best)
            for path in removed:
                path.rename(self._hidden(path.name, _REMOVED))
                logger.info("not among the last %d: %s is removed", self.keep, path)
            for leftover in [*self.directory.glob(f".*{_REMOVED}"), *self.directory.glob(f".*{_REPLACING}")]:
                if leftover.is_dir() and not leftover.is_symlink():
                    shutil.rmtree(leftover, ignore_errors=True)
                else:
                    leftover.unlink(missing_ok=True)
        except OSError as fault:
            raise CheckpointError(f"checkpoint: {self.directory} could not be tidied: {fault}") from fault
        return removed

    def _link(self, best: Path) -> None:
        link = self.directory / BEST
        if link.is_symlink() and link.readlink() == Path(best.name):
            return
        new = self._hidden(BEST, _REPLACING)
        new.symlink_to(best.name, target_is_directory=True)
        new.replace(link)
        logger.info("mean reward %.4f is the best so far: %s", self._scores[best.name], best)

    def _write_scores(self) -> None:
        new = self._hidden(SCORES_FILE, _REPLACING)
        new.write_text(sealed_text(self._scores) + "\n", encoding="utf-8")
        new.replace(self.directory / SCORES_FILE)

    def _hidden(self, name: str, end: str) -> Path:
        return self.directory / f".{name}.{uuid.uuid4().hex}{end}"

    def _read_scores(self) -> dict[str, float]:
        path = self.directory / SCORES_FILE
        try:
            return unseal(path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as fault:
            raise CheckpointError(
                f"checkpoint: {path} cannot be read ({fault}); delete it: then only checkpoints yet to come can be the best"
            ) from fault


_FIELD = "run.from_checkpoint"
_HEAD = "lm_head.weight"


def checked_start(given: Path, model_dir: str | Path, dtype: str) -> Path:
    """The absolute directory ``given``, if a run of ``model_dir`` can start there; else
    CheckpointError. The directory is a checkpoint of the same names, shapes and dtype, or a Hugging
    Face model, whose optimizer starts from zero with a warning."""
    directory = given.expanduser().resolve()
    if not directory.is_dir():
        raise CheckpointError(f"{_FIELD}: there is no directory {str(given)!r}; type --from RUN/checkpoints/best")
    for inner in (directory / "checkpoints", directory):
        if found := complete(inner):
            raise CheckpointError(
                f"{_FIELD}: {str(given)!r} holds {len(found)} checkpoints; choose one, e.g. --from {found[-1]}"
            )
    if missing := _missing(directory):
        raise CheckpointError(
            f"{_FIELD}: {str(given)!r} is not a checkpoint without {' and '.join(missing)}; type a directory such as "
            "RUN/checkpoints/best, or one that model.save_pretrained(...) wrote"
        )
    _check_shapes(directory, Path(model_dir))
    if not has_optimizer(directory):
        text = "%s: %s holds no trainer.json: only its weights are used, and the optimizer starts from zero"
        logger.warning(text, _FIELD, directory)
        return directory
    facts = verify(directory)
    if facts["dtype"] != dtype:
        raise CheckpointError(
            f"{_FIELD}: {directory} was trained in {facts['dtype']}, this run is to be in {dtype}; type "
            f"model.dtype={facts['dtype']}, or copy the directory without trainer.json to take its weights only"
        )
    logger.info("starts from %s, after %d steps, with its optimizer's state", directory, facts["steps_done"])
    return directory


def _missing(directory: Path) -> list[str]:
    needed = {"config.json": "config.json", "model.safetensors": "model*.safetensors"}
    return [name for name, pattern in needed.items() if not any(directory.glob(pattern))]


def _check_shapes(directory: Path, model_dir: Path) -> None:
    if _missing(model_dir):
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
