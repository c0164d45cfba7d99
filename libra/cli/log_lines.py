"""Log records of a command on standard error: a line each, and nothing in them acts on the terminal."""

from __future__ import annotations

import logging
import os

from libra.driver.run_logs import ShownFormatter


def log_to_stderr(level: int) -> None:
    """Send records of ``level`` and above to standard error, unless the process has handlers already.

    Tracebacks only with ``LIBRA_TRACEBACK=1``; a run's are in its ``logs/driver.log``.
    """
    handler = logging.StreamHandler()
    brief = os.environ.get("LIBRA_TRACEBACK") != "1"
    handler.setFormatter(ShownFormatter("%(asctime)s %(name)s %(levelname)s: %(message)s", brief=brief))
    logging.basicConfig(level=level, handlers=[handler])
