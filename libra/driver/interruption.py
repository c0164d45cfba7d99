"""Ctrl-C while a run starts, works or stops: at most three lines on the terminal, the last of them with what to type.

The first stops the run in order. The second ends the command at once, as a kill would, which loses nothing that was committed; in
a program of the user's own (`libra.train`) it gives up waiting for the end.

Invariants
----------
1. Between the first of these lines and the last, nothing else reaches standard error: it goes to the run's log.
2. The last line is printed only for a run that can be resumed; a start that left none has one line.
3. Nothing is installed outside the main thread, nor where a program handles SIGINT itself.
4. A KeyboardInterrupt that a program does not catch ends it without a traceback, as these lines have told of it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from libra.cluster.redirected_output import STDERR, redirected
from libra.driver.start_records import STARTS_FILE
from libra.errors import shell_path

EXIT_INTERRUPTED = 130


class Interruption:
    """The handler of Ctrl-C for one run; a context manager.

    Parameters
    ----------
    command : bool
        Whether this process is the command's, and ends with the run.
    overrides : sequence of str
        Settings that were typed for a run that is resumed, which only this start knows.

    Attributes
    ----------
    count : int
        How often Ctrl-C was typed.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            if isinstance(error, KeyboardInterrupt) and self.count:
                self._say_end("stopped")
                _end_quietly(error)
            signal.signal(signal.SIGINT, self._before)

    # ---------------------------------------------------------------- what the run says of itself

    def of(self, directory: Path, again: str) -> None:
        """The run's directory, which may not exist yet, and what to type to continue it."""
        self._directory, self._again = directory, with_overrides(again, self.overrides)

    def starts(self) -> None:
        """From here on the first Ctrl-C is an exception: something may have been made that is to be removed."""
        self._starting = True

    def finished(self, iterations: int, total: int) -> None:
        """So many iterations of the run are committed."""
        self._done, self._total = iterations, total

    def announce(self) -> None:
        """Say that the run stops, and let nothing else be said until it has; once, and only after Ctrl-C."""
        if not self.count or self._announced or self._before is None:
            return
        self._announced = True
        if self._directory is None or not self._resumable:
            return
        self._say("libra: interrupted, stopping the run; Ctrl-C again: at once")
        log = self._directory / "logs" / "driver.log"
        if self.command and log.parent.is_dir():
            with contextlib.suppress(OSError):
                self._quiet.enter_context(redirected(STDERR, log))

    # ---------------------------------------------------------------- the key

    def _typed(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count == 1 and (self._starting or not self.command):
            raise KeyboardInterrupt
        self._say_end("stopped at once" if self.count > 1 else "stopped")
        if not self.command:
            raise KeyboardInterrupt

    @property
    def _resumable(self) -> bool:
        """Whether a start of the run is on record."""
        return self._directory is not None and (self._directory / STARTS_FILE).exists()

    def _say_end(self, how: str) -> None:
        """The last lines, once; a command ends here."""
        self._quiet.close()
        if self._resumable:
            when = "during the start" if self._done is None else f"after {self._done} of {self._total} iterations"
            self._say(f"libra: {how} {when}; what is committed is kept. To continue, type\n{self._again}")
        elif self._again:
            self._say("libra: interrupted during the start, which left no run")
        self._directory, self._again = None, ""
        if self.command:
            sys.stdout.flush()
            os._exit(EXIT_INTERRUPTED)

    @staticmethod
    def _say(text: str) -> None:
        over = "\r\x1b[K" if sys.stderr.isatty() else ""  # where the terminal has written ^C
        sys.stderr.write(f"{over}{text}\n")
        sys.stderr.flush()


def _end_quietly(told: KeyboardInterrupt) -> None:
    """Print no traceback of this one if nobody catches it; Python then ends by SIGINT, which is 130 in a shell."""
    told.libra_told = True  # type: ignore[attr-defined]
    show = sys.excepthook
    if getattr(show, "knows_told", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not getattr(error, "libra_told", False):
            show(kind, error, trace)

    hook.knows_told = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def with_overrides(again: str, overrides: Sequence[str]) -> str:
    """What to type, with settings of this start."""
    return " ".join([again, *map(shlex.quote, overrides)])


def resume_words(directory: Path, given: bool, iterations: int | None = None) -> str:
    """What to type to continue the run of a directory, with so many iterations (None: those that it has); ``given``: an
    environment or a score node was given as an object."""
    if given:
        more = "" if iterations is None else f"run__iterations={iterations}, "
        return f"libra.train(..., {more}run__dir={str(directory.parent)!r}, run__name={directory.name!r}, resume=True)"
    here = Path.cwd()
    shown = directory.relative_to(here) if directory.is_relative_to(here) else directory
    return f"libra resume {shell_path(shown)}" + ("" if iterations is None else f" run.iterations={iterations}")
