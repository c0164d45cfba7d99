"""Every error Libra raises on purpose, in one tree.

::

    LibraError
    +-- ConfigError(ValueError), RunDirectoryError(FileExistsError), ModelError(FileNotFoundError)
    +-- ClusterError(RuntimeError), CallbackError(RuntimeError), PlanError(ValueError)
    +-- RequestRefused(ValueError), LateRefused(ValueError)
    +-- EngineError(RuntimeError)
    |   +-- ContextOverflow(ValueError), EngineAsleep, KVRefused(ValueError)
    +-- EnvironmentFault(RuntimeError)
    |   +-- SessionLost, ActionRevoked, RateLimited
    |   +-- RewardFault(ValueError)
    |   |   +-- RewardTimeout
    |   +-- ToolFault
    |   |   +-- ToolTimeout
    |   |   +-- ServiceFault
    |   |   |   +-- ServiceTimeout
    +-- StoreError(OSError)
    |   +-- Unstorable, RecordExists(FileExistsError), FencedOff(PermissionError), DamagedRun
    +-- WeightsError(RuntimeError)
    +-- TrainError(RuntimeError)
    |   +-- BatchFailed, NothingToLearn, MismatchAlarm, CheckpointError, GroupLost
    |   +-- TransferError(ConnectionError)
    +-- TransportError(ConnectionError)

Each class also subclasses the built-in that a caller would catch. A message names the setting or
place, the value, the allowed values and what to type.
"""

from __future__ import annotations

import difflib
import errno
import importlib.metadata
import math
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # safetensors writes in Rust, and has the number in its message only


class LibraError(Exception):
    """Root of the tree; catch it to catch everything Libra raises on purpose."""


class ConfigError(LibraError, ValueError):
    """A configuration field is unknown, has the wrong type, or contradicts another one."""


class RunDirectoryError(LibraError, FileExistsError):
    """The run directory already holds a run, or holds none although a run was expected."""


class ModelError(LibraError, FileNotFoundError):
    """A model directory is missing, incomplete, or of a kind that cannot be used."""


class ClusterError(LibraError, RuntimeError):
    """The Dask cluster cannot run this: workers, resources, ports or settings."""


class CallbackError(LibraError, RuntimeError):
    """A user's callback raised; committed work stays, and the run can be resumed."""


class RequestRefused(LibraError, ValueError):
    """A request of an agent is refused.

    ``param`` is the field at fault, ``status`` the HTTP status, ``code`` the error's
    name for clients.
    """

    def __init__(self, message: str, param: str = "", status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


class LateRefused(LibraError, ValueError):
    """A late reward is refused: delivered before, awaited by nothing, or not one finite number."""


class EngineError(LibraError, RuntimeError):
    """An inference engine failed; its trajectory's failure class is ``engine``."""


class ContextOverflow(EngineError, ValueError):
    """A request needs more tokens than the engine's context holds."""


class EngineAsleep(EngineError):
    """The engine sleeps while its worker has another role. Not a failure: use another engine."""


class KVRefused(EngineError, ValueError):
    """A KV object has other weights, tokens, layout or bytes; the context is computed again."""


class EnvironmentFault(LibraError, RuntimeError):
    """An environment could not produce a prompt or run an action."""


class SessionLost(EnvironmentFault):
    """A trajectory's leased session is gone: the session or its worker has died."""


class RewardFault(EnvironmentFault, ValueError):
    """A reward function raised, hung, or returned something that is not one finite number."""


class RewardTimeout(RewardFault):
    """A reward timed out. Not a TimeoutError: Dask cannot send an OSError that is a ValueError."""


class ActionRevoked(EnvironmentFault):
    """A turn's calls were stopped, as their lease was revoked. Not a failure: they run again."""


class ToolFault(EnvironmentFault):
    """A tool failed so that the model must not read it; the trajectory ends as class ``tool``."""


class ToolTimeout(ToolFault):
    """A tool with a fatal time limit timed out; the trajectory ends as class ``timeout``."""


class ServiceFault(ToolFault):
    """A service failed, its weights could not be restored, or the run has none of that name."""


class ServiceTimeout(ServiceFault):
    """A service's batch missed its ``timeout_s``: no free device, no weights, or no answer."""


class RateLimited(EnvironmentFault):
    """An API refuses a call because there were too many (HTTP 429).

    Raise it in a tool, a reward or a service: the call is repeated later, at most
    ``environment.retries`` times. ``retry_after_s``: seconds to wait, if the API gives them.
    """

    def __init__(self, message: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class StoreError(LibraError, OSError):
    """A record, group or batch could not be written or read."""


class Unstorable(StoreError):
    """A value has no form in a record, so a retry would fail too; only its trajectory fails."""


class RecordExists(StoreError, FileExistsError):
    """Another writer created this record first; the loser of the race must stop."""


class FencedOff(StoreError, PermissionError):
    """A newer start of the run exists; this process must stop and write nothing more."""


class DamagedRun(StoreError):
    """Files of a run are gone, torn or altered. The message names them and what to type."""


class WeightsError(LibraError, RuntimeError):
    """A weight version is missing, torn, or differs from the one announced."""


class TrainError(LibraError, RuntimeError):
    """A training step cannot be taken."""


class BatchFailed(TrainError):
    """A batch's trajectories all failed, none because of the model; `libra run` exits with 1."""


class NothingToLearn(TrainError):
    """Three batches in a row had no advantage, and ``trainer.no_signal`` is stop."""


class MismatchAlarm(TrainError):
    """Engine and trainer log-probabilities, at equal weights, exceed ``trainer.mismatch_args``."""


class CheckpointError(TrainError):
    """A checkpoint cannot be written or read, is torn, is of another model, or is not a checkpoint."""


class GroupLost(TrainError):
    """A process group lost a member or never formed; a new group takes the step again."""


class TransferError(TrainError, ConnectionError):
    """A connection between replicas broke, was refused, or carried an invalid message."""


class TransportError(LibraError, ConnectionError):
    """An authenticated connection could not be made, broke, or carried a foreign message."""


class PlanError(LibraError, ValueError):
    """No plan fits the request; the message names the constraint and what to change."""


def shell_path(path: str | Path) -> str:
    """``path`` as one word of a shell that is not an option."""
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


def enough_gib(num_bytes: float) -> str:
    """A positive number of bytes in GiB, rounded up to two digits."""
    gib = num_bytes / 2**30
    digits = max(0, 1 - math.floor(math.log10(gib)))
    return f"{math.ceil(gib * 10**digits) / 10**digits:g}"


def nearest_name(given: object, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The most similar known name, ignoring case, ``-`` and ``_``; None below ``cutoff``."""
    plain = {_plain(name): name for name in known}
    near = difflib.get_close_matches(_plain(str(given)), plain, 1, cutoff)
    return plain[near[0]] if near else None


def nearest(given: object, known: Iterable[str]) -> str:
    """`` (did you mean 'NAME'?)`` with the most similar known name; empty if none is similar."""
    match = nearest_name(given, known)
    return f" (did you mean {match!r}?)" if match else ""


def one_of(name: str, value: object, allowed: Sequence[object]) -> None:
    """ConfigError if ``value`` is not allowed; ``name`` is the setting."""
    if value not in allowed:
        raise ConfigError(f"{name}: got {value!r}; allowed are {', '.join(map(repr, allowed))}")


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def disk_refusal(path: str | Path, fault: Exception) -> str:
    """Why ``path`` could not be written, with advice if the disk is full."""
    match = _OS_ERROR.search(str(fault))
    number = fault.errno if isinstance(fault, OSError) and fault.errno else int(match[1]) if match else None
    if number not in (errno.ENOSPC, errno.EDQUOT):
        return f"{path}: cannot write: {getattr(fault, 'strerror', None) or fault}"
    what = "quota exceeded" if number == errno.EDQUOT else "disk full"
    return (
        f"{path}: {what}; nothing that was committed is lost. Make space on that file system "
        f"(df -h {shell_path(Path(path).parent)}), then type libra resume RUN"
    )


def pip_install(extra: str) -> str:
    """The command that installs an extra's packages, such as "pip install 'mcp<3,>=2.3'"."""
    try:
        required = importlib.metadata.requires("libra-rl") or []
    except importlib.metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        required = []
    mine = re.compile(rf"extra == ['\"]{re.escape(extra)}['\"]")
    packages = [f"'{line.partition(';')[0].strip()}'" for line in required if mine.search(line)]
    return f"pip install {' '.join(packages)}" if packages else f"pip install -e '.[{extra}]'"
