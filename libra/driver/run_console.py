"""Ctrl-C, log and summary of a run.

The first Ctrl-C stops the run in order. The second ends the command at once, as a kill would, and
loses nothing committed; in a user's program (`libra.train`) it stops waiting for the end. Records
of Dask, Bokeh and tornado go to the run's ``logs/driver.log``, not to the terminal.

1. Between the first and last line after Ctrl-C nothing else reaches standard error. There are at
   most three lines, the last with what to type.
2. The last line is printed only for a run that can be resumed; a start that left none prints one
   line.
3. Nothing is installed outside the main thread, nor where a program handles SIGINT itself.
4. A KeyboardInterrupt that a program does not catch ends it without a traceback.
5. A start that leaves no run leaves no log. Afterwards every logger has its original handlers.
"""

from __future__ import annotations

import contextlib
import html
import logging
import math
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from libra.errors import shell_path
from libra.processes.fork_server import STDERR, redirected
from libra.store.run_records import read_evaluations
from libra.store.start_records import STARTS_FILE
from libra.untrusted import shown

if TYPE_CHECKING:
    from libra.config import RunConfig

EXIT_INTERRUPTED = 130


class Interruption:
    """Context manager that handles Ctrl-C for one run.

    ``command``: this process ends with the run. ``overrides``: settings typed for a resume.
    """

    def __init__(self, *, command: bool = False, overrides: Sequence[str] = ()) -> None:
        self.command, self.overrides, self.count = command, overrides, 0
        self._directory: Path | None = None
        self._again = ""
        self._done: int | None = None
        self._total = 0
        self._starting = self._announced = False
        self._before: Callable[[int, FrameType | None], object] | int | None = None
        self._quiet = ExitStack()

    def __enter__(self) -> Self:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before = signal.signal(signal.SIGINT, self._typed)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._before is not None:
            if isinstance(error, KeyboardInterrupt) and self.count:
                self._say_end("stopped")
                _end_quietly(error)
            signal.signal(signal.SIGINT, self._before)

    def of(self, directory: Path, again: str) -> None:
        """Set the run's directory, which may not exist yet, and the command that continues it."""
        self._directory, self._again = directory, with_overrides(again, self.overrides)

    def starts(self) -> None:
        """From now on the first Ctrl-C raises, because a start may have files to remove."""
        self._starting = True

    def finished(self, iterations: int, total: int) -> None:
        self._done, self._total = iterations, total

    def announce(self) -> None:
        """After Ctrl-C, print once that the run stops, and redirect other output meanwhile."""
        if not self.count or self._announced or self._before is None:
            return
        self._announced = True
        if self._directory is None or not self._resumable:
            return
        _say("libra: interrupted, stopping the run; Ctrl-C again: at once")
        log = self._directory / "logs" / "driver.log"
        if self.command and log.parent.is_dir():
            with contextlib.suppress(OSError):
                self._quiet.enter_context(redirected(STDERR, log))

    def _typed(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count == 1 and (self._starting or not self.command):
            raise KeyboardInterrupt
        self._say_end("stopped at once" if self.count > 1 else "stopped")
        if not self.command:
            raise KeyboardInterrupt

    @property
    def _resumable(self) -> bool:
        return self._directory is not None and (self._directory / STARTS_FILE).exists()

    def _say_end(self, how: str) -> None:
        self._quiet.close()
        if self._resumable:
            when = "during the start" if self._done is None else f"after {self._done} of {self._total} iterations"
            _say(f"libra: {how} {when}; what is committed is kept. To continue, type\n{self._again}")
        elif self._again:
            _say("libra: interrupted during the start, which left no run")
        self._directory, self._again = None, ""
        if self.command:
            sys.stdout.flush()
            os._exit(EXIT_INTERRUPTED)


def _say(text: str) -> None:
    over = "\r\x1b[K" if sys.stderr.isatty() else ""  # where the terminal has written ^C
    sys.stderr.write(f"{over}{text}\n")
    sys.stderr.flush()


def _end_quietly(announced: KeyboardInterrupt) -> None:
    """Suppress this interrupt's traceback if uncaught; Python then exits by SIGINT (130)."""
    announced.libra_announced = True  # type: ignore[attr-defined]
    show = sys.excepthook
    if getattr(show, "is_libras", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not getattr(error, "libra_announced", False):
            show(kind, error, trace)

    hook.is_libras = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def with_overrides(again: str, overrides: Sequence[str]) -> str:
    return " ".join([again, *map(shlex.quote, overrides)])


def resume_words(directory: Path, given: bool, iterations: int | None = None) -> str:
    """The command that continues a run; ``given``: its environment or score is a Python object."""
    if given:
        more = "" if iterations is None else f"run__iterations={iterations}, "
        return f"libra.train(..., {more}run__dir={str(directory.parent)!r}, run__name={directory.name!r}, resume=True)"
    here = Path.cwd()
    shown = directory.relative_to(here) if directory.is_relative_to(here) else directory
    return f"libra resume {shell_path(shown)}" + ("" if iterations is None else f" run.iterations={iterations}")


FOREIGN: Final = frozenset({"distributed", "dask", "bokeh", "tornado", "asyncio"})
"""Loggers of libraries whose records never reach the terminal, with all below them."""


class ShownFormatter(logging.Formatter):
    """Formats records by `libra.untrusted.shown`, without traceback if ``brief``."""

    def __init__(self, text: str, *, brief: bool = False) -> None:
        super().__init__(text)
        self._brief = brief

    def format(self, record: logging.LogRecord) -> str:
        if self._brief and (record.exc_info or record.stack_info):
            record = logging.makeLogRecord({**record.__dict__, "exc_info": None, "exc_text": None, "stack_info": None})
        return shown(super().format(record))


class RunLogs:
    """Context manager of a driver's log."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "logs" / "driver.log"
        self._exits = ExitStack()

    def __enter__(self) -> Self:
        file: logging.Handler = logging.NullHandler()
        libra = logging.getLogger("libra")
        try:
            self.path.parent.mkdir(exist_ok=True)
            file = LogFile(self.path)
        except OSError as error:
            libra.warning("%s: no log of this run is kept: %s", self.path, error)
        file.setFormatter(ShownFormatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
        self._exits.callback(file.close)
        names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] in FOREIGN]
        for logger in {logging.getLogger(name) for name in [*names, *FOREIGN]}:
            top = logger.name in FOREIGN
            own = [handler for handler in logger.handlers if not _writes_to_terminal(handler)]
            self._set(logger, [*own, file] if top else own, propagate=not top)
        added = [file]
        if not libra.hasHandlers():  # a program that set up no logging: as Python would print it
            terminal = logging.StreamHandler()
            terminal.setFormatter(ShownFormatter("libra: %(message)s", brief=True))
            terminal.setLevel(logging.WARNING)
            added.append(terminal)
        self._set(libra, [*libra.handlers, *added], propagate=libra.propagate)
        return self

    def _set(self, logger: logging.Logger, handlers: list[logging.Handler], *, propagate: bool) -> None:
        before, propagated = list(logger.handlers), logger.propagate

        def restore() -> None:
            logger.handlers[:], logger.propagate = before, propagated

        self._exits.callback(restore)
        logger.handlers[:], logger.propagate = handlers, propagate

    def __exit__(self, *_: object) -> None:
        self._exits.close()


class LogFile(logging.FileHandler):
    """A log that drops lines on a full disk, so as not to hide the error that ended the run."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


def _writes_to_terminal(handler: logging.Handler) -> bool:
    streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return isinstance(handler, logging.StreamHandler) and handler.stream in streams


@dataclass(slots=True)
class RunSummary:
    """The result of a run: rewards, files and duration; prints as a short table."""

    run: str
    directory: Path
    iterations: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    checkpoint: Path | None = None
    best: Path | None = None
    wall_s: float = 0.0

    @property
    def reward_before(self) -> float:
        """Mean held-out reward before the first step; NaN without evaluation."""
        return float(self.evaluations[0]["reward"]) if self.evaluations else math.nan

    @property
    def reward_after(self) -> float:
        return float(self.evaluations[-1]["reward"]) if self.evaluations else math.nan

    def rows(self) -> list[tuple[str, str]]:
        rows = [("run", self.run), ("iterations", f"{len(self.iterations)} in {self.wall_s:.0f} s")]
        if len(self.evaluations) >= 2:
            change = f"{self.reward_before:.3f} before, {self.reward_after:.3f} after"
            rows.append(("held-out reward", f"{change}, {self.evaluations[-1]['num']:,} questions"))
        if self.iterations:
            first, last = (float(self.iterations[at].get("reward", math.nan)) for at in (0, -1))
            rows.append(("training reward", f"{first:.3f} in the first iteration, {last:.3f} in the last"))
            tokens, failures = (
                sum(int(v.get(name, 0)) for v in self.iterations) for name in ("generated_tokens", "left_out")
            )
            rows.append(("tokens generated", f"{tokens:,}"))
            if failures:
                rows.append(("left out", f"{failures:,} trajectories that failed; libra inspect RUN --failed"))
        rows.append(("directory", str(self.directory)))
        rows += [(name, str(path)) for name, path in (("model", self.checkpoint), ("best model", self.best)) if path]
        return rows

    def __str__(self) -> str:
        return "\n".join(f"{name:<17} {text}" for name, text in self.rows())

    @classmethod
    def of_finished(cls, directory: Path, config: RunConfig) -> RunSummary:
        """The summary, from its files, of a run with nothing left to do."""
        total, checkpoints = config.run.iterations, directory / "checkpoints"
        best = (checkpoints / "best").resolve() if (checkpoints / "best").exists() else None
        evaluations = read_evaluations(directory / "evaluations", total)
        return cls(directory.name, directory, [], evaluations, checkpoints / f"step-{total:06d}", best)

    def _repr_html_(self) -> str:
        cells = "".join(
            f'<tr><th style="text-align:left">{html.escape(name)}</th><td style="text-align:left">{html.escape(text)}</td></tr>'
            for name, text in self.rows()
        )
        return f"<table>{cells}</table>"
