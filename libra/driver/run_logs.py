"""What the driver's libraries log of a run: to ``logs/driver.log`` of its directory, not to the terminal.

Dask, Bokeh and tornado log tracebacks where a browser leaves a page, a worker ends or a connection breaks. What of that a user has
to know Libra says itself, in a line (docs/failures.md). Libra's own records are in the file too, with their tracebacks.

Invariants
----------
1. Until the directory exists records wait; a start that leaves no run leaves no log.
2. Afterwards every logger has the handlers that it had.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from logging.handlers import MemoryHandler
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from libra.untrusted import shown

LOGS: Final = "logs"
DRIVER_LOG: Final = "driver.log"
FOREIGN: Final = frozenset({"distributed", "dask", "bokeh", "tornado", "asyncio"})
"""Loggers of libraries whose records never reach the terminal, with all below them."""
WAITING_RECORDS: Final = 1000


class ShownFormatter(logging.Formatter):
    """The record, with its traceback unless ``brief``, as `libra.untrusted.shown`: an error may quote what a model wrote."""

    def __init__(self, text: str, *, brief: bool = False) -> None:
        super().__init__(text)
        self._brief = brief

    def format(self, record: logging.LogRecord) -> str:
        if self._brief and (record.exc_info or record.stack_info):
            record = logging.makeLogRecord({**record.__dict__, "exc_info": None, "exc_text": None, "stack_info": None})
        return shown(super().format(record))


class RunLogs:
    """The log of one driver; a context manager.

    Parameters
    ----------
    directory : Path
        Of the run; it may not exist yet.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / LOGS / DRIVER_LOG
        self._waiting = MemoryHandler(WAITING_RECORDS, flushLevel=logging.CRITICAL + 1)
        self._file: logging.Handler | None = None
        self._terminal: logging.Handler | None = None
        self._changed: list[tuple[logging.Logger, list[logging.Handler], bool]] = []

    def __enter__(self) -> Self:
        names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] in FOREIGN]
        for logger in {logging.getLogger(name) for name in [*names, *FOREIGN]}:
            self._changed.append((logger, list(logger.handlers), logger.propagate))
            own = [handler for handler in logger.handlers if not _writes_to_terminal(handler)]
            top = logger.name in FOREIGN
            logger.handlers[:] = [*own, self._waiting] if top else own
            logger.propagate = not top
        libra = logging.getLogger("libra")
        self._changed.append((libra, list(libra.handlers), libra.propagate))
        if not libra.hasHandlers():  # a program that set up no logging: as Python would print it
            self._terminal = logging.StreamHandler()
            self._terminal.setFormatter(ShownFormatter("libra: %(message)s", brief=True))
            self._terminal.setLevel(logging.WARNING)
            libra.addHandler(self._terminal)
        libra.addHandler(self._waiting)
        return self

    def open(self) -> None:
        """Write to the file from now on, first what has waited; nothing where it cannot be written."""
        try:
            self.path.parent.mkdir(exist_ok=True)
            self._file = LogFile(self.path, delay=False)
        except OSError as error:
            logging.getLogger(__name__).warning("%s: no log of this run is kept: %s", self.path, error)
            return
        self._file.setFormatter(ShownFormatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
        self._waiting.setTarget(self._file)
        self._waiting.flush()
        self._waiting.capacity = 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for logger, handlers, propagate in self._changed:
            logger.handlers[:] = handlers
            logger.propagate = propagate
        self._changed.clear()
        self._waiting.close()
        if self._file is not None:
            self._file.close()


class LogFile(logging.FileHandler):
    """A log that loses lines on a full disk, instead of hiding the error that ended the run."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


def _writes_to_terminal(handler: logging.Handler) -> bool:
    streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return isinstance(handler, logging.StreamHandler) and handler.stream in streams
