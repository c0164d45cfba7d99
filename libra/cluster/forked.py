"""What the fork server imports first (`libra.cluster.fork_server`): its environment becomes that of
workers, and each worker that is forked gets random numbers of its own.

Acts where it is imported by that process only.
"""

from __future__ import annotations

import gc
import json
import os
import sys

OWN_PATH_VARIABLE = "LIBRA_FORK_PATH"
"""Variables of Python's search path as workers are to have them, as JSON; the fork server itself
starts with others."""


def _freeze() -> None:
    """Before a fork: what was imported is collected by nobody, so that its memory stays shared."""
    if os.getpid() == _SERVER:
        gc.freeze()


def _renew() -> None:
    """In a worker: collect garbage, and draw other random numbers than its siblings. Python's own
    generator renews itself."""
    if os.getppid() == _SERVER:
        gc.enable()
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed()


_SERVER = 0
if OWN_PATH_VARIABLE in os.environ:
    _SERVER = os.getpid()
    for _name, _value in json.loads(os.environ.pop(OWN_PATH_VARIABLE)).items():
        if _value is None:
            os.environ.pop(_name, None)
        else:
            os.environ[_name] = _value
    gc.disable()  # a tenth of the time of these imports
    os.register_at_fork(before=_freeze, after_in_child=_renew)
