"""Retention of a run's checkpoints: the last m, and the best.

The best is the one with the highest score. A run has one measure, so that scores can be compared:

- ``evaluation``, with ``evaluation.every`` > 0: the mean reward of the held-out questions at that version. A checkpoint whose
  version was not evaluated is never the best.
- ``training``, otherwise: the mean reward of the batch whose step made that version (``run.eta`` = 0: answers of the
  weights one step older). Noisy: of two checkpoints whose scores are close, either may be the better model.

Of equal scores the later one wins.

Invariants
----------
1. Never removed: the best, the newest, the last ``keep``, and one that is being written (its name is hidden).
2. ``best`` is a relative link replaced in one rename, before anything is removed: it never dangles, and goes along with
   the directory when that is moved.
3. A removed checkpoint loses its name first, so no reader sees a part of it; files left by a killed process are removed the
   next time.
4. One process, the driver, calls `KeptCheckpoints`.
"""

from __future__ import annotations

import logging
import math
import shutil
import uuid
from pathlib import Path

from libra.errors import CheckpointError
from libra.seals import sealed_text, unseal
from libra.train.checkpoint import checkpoint_name, complete, step_of

logger = logging.getLogger(__name__)

BEST = "best"
SCORES_FILE = "scores.json"
_REMOVED, _REPLACING = ".gone", ".new"
"""Suffixes of the hidden names of checkpoints being removed, and of files about to replace others."""


class KeptCheckpoints:
    """The ``checkpoints`` directory of one run, which need not exist yet.

    The last ``keep`` stay, and with ``keep_best`` the one with the best score, which is linked as ``best``. Scores written by an
    earlier start of the run count.
    """

    def __init__(self, directory: Path, *, keep: int, keep_best: bool) -> None:
        assert keep >= 1, "the configuration allows 1 or more"
        self.directory, self.keep, self.keep_best = directory, keep, keep_best
        self._scores = self._read_scores()

    def score(self, step: int, reward: float) -> None:
        """Record the mean reward of the weights of a step; NaN (nothing was graded) is ignored."""
        if math.isfinite(reward):
            self._scores[checkpoint_name(step)] = reward
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                self._write_scores()
            except OSError as fault:
                raise CheckpointError(f"checkpoint: {self.directory} cannot be written to: {fault}") from fault

    def best(self) -> Path | None:
        """The checkpoint with the highest score; None if none has a score."""
        scored = [path for path in complete(self.directory) if path.name in self._scores]
        return max(scored, key=lambda path: (self._scores[path.name], step_of(path)), default=None)

    def tidy(self) -> list[Path]:
        """Link the best one and remove those that are not kept; returns them. CheckpointError if the disk refuses."""
        there = complete(self.directory)
        if not there:
            return []
        best = self.best() if self.keep_best else None
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
