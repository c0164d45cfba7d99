"""Log records of a command on standard error: nothing in them acts on the terminal."""

from __future__ import annotations

import logging

from libra.untrusted import shown


class ShownFormatter(logging.Formatter):
    """The record with its traceback, as `libra.untrusted.shown`: an error may quote what a model or a tool wrote."""

    def format(self, record: logging.LogRecord) -> str:
        return shown(super().format(record))


def log_to_stderr(level: int) -> None:
    """Send records of ``level`` and above to standard error, unless the process has handlers already."""
    handler = logging.StreamHandler()
    handler.setFormatter(ShownFormatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
