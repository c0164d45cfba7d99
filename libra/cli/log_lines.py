"""Log records and facts as lines of the terminal; nothing in them acts on it."""

from __future__ import annotations

import logging
import os

from libra.facts import Fact, sentence
from libra.untrusted import shown_line

MAX_EVENT_CHARS = 3000
"""Longest sentence of one fact; the detail of a failure has at most 2,000."""


def log_to_stderr(level: int) -> None:
    """Send records of ``level`` and above to standard error, unless the process has handlers already.

    Tracebacks only with ``LIBRA_TRACEBACK=1``; a run's are in its ``logs/driver.log``.
    """
    from libra.driver.run_console import ShownFormatter

    handler = logging.StreamHandler()
    brief = os.environ.get("LIBRA_TRACEBACK") != "1"
    handler.setFormatter(ShownFormatter("%(asctime)s %(name)s %(levelname)s: %(message)s", brief=brief))
    logging.basicConfig(level=level, handlers=[handler])


def event_text(fact: Fact) -> str:
    """One fact as a sentence, on one line."""
    return shown_line(sentence(fact), MAX_EVENT_CHARS)
