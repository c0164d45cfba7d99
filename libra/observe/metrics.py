"""Metrics of a run by step: ``metrics.jsonl`` in the run directory, and trackers.

1. A step's line is on disk when `MetricsLog.write` returns; trackers show the same numbers.
2. A line holds ``step``, ``wall_time_s`` (Unix seconds) and values; NaN and infinity are null.
3. A tracker never ends a run: its first error causes one warning and disables the tracker.
4. Built-in trackers write into the run directory; Weights & Biases uploads only with
   ``WANDB_MODE=online``.
5. Each start is a new run in Weights & Biases; in TensorBoard the run continues.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final, Protocol, Self

from libra.errors import ConfigError, StoreError
from libra.named_parts import is_named, named_part
from libra.observe.trajectory_view import Decode, headline
from libra.store.line_log import LineLog, read_lines
from libra.types import Trajectory
from libra.untrusted import shown

logger = logging.getLogger(__name__)

PROJECT: Final = "libra"
SECTIONS: Final = ("run", "model", "environment", "rollout", "trainer", "policy", "evaluation")
"""Configuration sections that trackers record."""

EVERY: Final = 10
"""Iterations between samples; the last iteration has one too."""
MAX_CHARS: Final = 6000
Setting = bool | int | float | str


class Tracker(Protocol):
    """A tracker for one start of a run."""

    def __init__(self, directory: Path, run: str, settings: Mapping[str, Setting]) -> None: ...

    def numbers(self, step: int, wall_time_s: float, values: Mapping[str, float]) -> None:
        """Record numbers of a step; values may be NaN or infinite."""

    def texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Record texts by name."""

    def close(self) -> None:
        """Write remaining data."""


class TensorBoard:
    """TensorBoard event files in ``RUN/tensorboard``."""

    def __init__(self, directory: Path, run: str, settings: Mapping[str, Setting]) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        self._writer: Any = SummaryWriter(str(directory / "tensorboard"))  # type: ignore[no-untyped-call]
        for part in hparams(dict(settings), {})[:2]:  # type: ignore[no-untyped-call]  # the third marks the end
            self._writer.file_writer.add_summary(part)  # type: ignore[attr-defined]

    def numbers(self, step: int, wall_time_s: float, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, wall_time_s)
        self._writer.flush()

    def texts(self, step: int, texts: Mapping[str, str]) -> None:
        for name, text in texts.items():
            self._writer.add_text(name, "\n".join(f"    {line}" for line in text.split("\n")), step)  # code in Markdown
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Weights & Biases, offline in ``RUN/wandb`` unless ``WANDB_MODE`` is online."""

    def __init__(self, directory: Path, run: str, settings: Mapping[str, Setting]) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), name=run, group=run, dir=directory, config=dict(settings),
            mode=os.environ.get("WANDB_MODE", "offline"), reinit="create_new",  # type: ignore[arg-type]
            settings=wandb.Settings(silent=True, console="off"),
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")  # an evaluation has the step of the next iteration

    def numbers(self, step: int, wall_time_s: float, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def texts(self, step: int, texts: Mapping[str, str]) -> None:
        pages = {name: self._wandb.Html(f"<pre>{escape(text)}</pre>") for name, text in texts.items()}
        self._run.log({"step": step, **pages})

    def close(self) -> None:
        self._run.finish()


TRACKERS: Final[Mapping[str, type[Tracker]]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
"""Built-in trackers; ``observe.trackers`` also takes ``module:Class``."""


def check_trackers(names: Sequence[str]) -> None:
    """ConfigError, with a command to type, if a tracker cannot be imported."""
    for name in names:
        if is_named(name):
            named_part("observe.trackers", name)
        elif importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"observe.trackers: {name} is not installed in this environment; type: pip install {name}, or leave it out of "
                "observe.trackers"
            )


def settings_of(config: Mapping[str, Any]) -> dict[str, Setting]:
    """Plain values of a configuration by dotted name, without unset settings."""
    found: dict[str, Setting] = {}
    for section in SECTIONS:
        values = config.get(section)
        for name, value in (values if isinstance(values, Mapping) else {}).items():
            if value is not None:
                found[f"{section}.{name}"] = value if isinstance(value, Setting) else str(value)
    return found


class Trackers:
    """Open trackers of one start of a run.

    ``names`` are keys of `TRACKERS` or ``module:Class``; ``config`` has plain values.
    """

    def __init__(self, names: Sequence[str], directory: Path, run: str, config: Mapping[str, Any]) -> None:
        self._open: dict[str, Tracker] = {}
        settings = settings_of(config)
        for name in dict.fromkeys(names):
            with self._tried(name):
                make = named_part("observe.trackers", name) if is_named(name) else TRACKERS[name]
                self._open[name] = make(directory, run, settings)

    def __bool__(self) -> bool:
        return bool(self._open)

    def numbers(self, step: int, wall_time_s: float, values: Mapping[str, float]) -> None:
        """Record numbers of a step by their names in ``metrics.jsonl``."""
        named = {grouped(name): value for name, value in values.items()}
        for name, tracker in list(self._open.items()):
            with self._tried(name):
                tracker.numbers(step, wall_time_s, named)

    def texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Record texts by name, e.g. ``samples/best``; the texts must be safe to display."""
        for name, tracker in list(self._open.items()):
            with self._tried(name):
                tracker.texts(step, texts)

    def close(self) -> None:
        """Close all trackers; a second call does nothing."""
        for name, tracker in list(self._open.items()):
            with self._tried(name):
                tracker.close()
        self._open.clear()

    @contextlib.contextmanager
    def _tried(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  the boundary to other libraries: none of them may end a run
            first = (str(error).strip() or "no message").splitlines()[0]
            logger.warning("%s gets nothing more of this run: %s: %s", name, type(error).__name__, first[:300])
            self._open.pop(name, None)


# ---------------------------------------------------------------- names and texts

_RENAMED: Final = {
    "reward": "reward/mean", "frac_reward_zero_std": "reward/frac_zero_std",
    "groups_without_signal": "reward/groups_without_signal",
    "evaluation/reward": "reward/held_out", "evaluation/wall_s": "time/evaluation_s", "lag": "lag/mean", "version": "lag/version",
    "failures": "failures/all", "left_out": "failures/left_out", "resampled": "failures/tried_again",
}  # fmt: skip
_PREFIXES: Final = (
    ("evaluation/reward/", "reward/held_out_by/"), ("evaluation/", "reward/held_out_"), ("reward_", "reward/"), ("lag_", "lag/"),
    ("mismatch_", "lag/mismatch_"), ("failures/", "failures/"), ("resampled/", "failures/tried_again_"), ("forecast_", "forecast/"),
    ("plan/", "plan/"), ("late_", "late/"), ("sessions_", "sessions/"),
)  # fmt: skip


def grouped(name: str) -> str:
    """A metric's name with its group: ``time/`` for seconds, ``train/`` for others."""
    if name in _RENAMED:
        return _RENAMED[name]
    for prefix, group in _PREFIXES:
        if name.startswith(prefix):
            return group + name.removeprefix(prefix)
    return f"time/{name}" if name.endswith("_s") else f"train/{name}"


def sample_texts(trajectories: Sequence[Trajectory], decode: Decode) -> dict[str, str]:
    """Texts of the best and worst trajectories, as ``samples/best`` and ``samples/worst``."""
    graded = sorted((each for each in trajectories if not math.isnan(each.reward)), key=lambda each: each.reward)
    if not graded:
        return {}
    texts = {}
    for name, each in (("best", graded[-1]), ("worst", graded[0])):
        words = shown(decode(each.token_ids.tolist()))
        words = words if len(words) <= MAX_CHARS else f"{words[:MAX_CHARS]} ... (cut here)"
        texts[f"samples/{name}"] = f"{shown(headline(each))}\n\n{words}"
    return texts


_RESERVED = ("step", "wall_time_s")


class MetricsLog:
    """Writer of a run's metrics, one per run; it also closes its ``trackers``."""

    def __init__(
        self, run_dir: str | Path, trackers: Trackers | None = None, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._lines = LineLog(Path(run_dir) / "metrics.jsonl", buffer_lines=1)
        self.trackers = trackers

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record values of one step; StoreError for a non-number, or a reserved name."""
        wall_time_s = self._clock()
        line: dict[str, Any] = {"step": step, "wall_time_s": wall_time_s}
        numbers = {}
        for name, value in values.items():
            if name in _RESERVED:
                raise StoreError(f"metric {name!r}: the names {', '.join(_RESERVED)} are reserved")
            try:
                numbers[name] = float(value)
            except (TypeError, ValueError) as error:
                raise StoreError(f"metric {name!r} of step {step}: got {value!r}; expected one number") from error
            whole = isinstance(value, int) and not isinstance(value, bool)
            line[name] = value if whole else numbers[name] if math.isfinite(numbers[name]) else None
        self._lines.write_line(json.dumps(line, allow_nan=False))
        if self.trackers is not None:
            self.trackers.numbers(step, wall_time_s, numbers)

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        self._lines.close()
        if self.trackers is not None:
            self.trackers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """Lines of a run's metrics, without a torn last line; StoreError if missing or damaged."""
    return read_lines(Path(run_dir) / "metrics.jsonl")
