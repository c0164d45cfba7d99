"""Every error Libra raises on purpose, in one tree.

::

    LibraError
    +-- ConfigError(ValueError)            a field of the configuration is wrong
    +-- RunDirectoryError(FileExistsError) the run directory is taken, or is not a run
    +-- ModelError(FileNotFoundError)      a model directory is missing or unusable
    +-- ClusterError(RuntimeError)         Dask, its workers, ports or settings do not fit
    +-- EngineError(RuntimeError)          an inference engine failed
    |   +-- ContextOverflow(ValueError)    a request does not fit the engine's context
    |   +-- EngineAsleep                   the engine released its memory; use another one
    |   +-- KVRefused(ValueError)          a KV object is of other weights, tokens or engines, or did not arrive whole
    +-- EnvironmentFault(RuntimeError)     an environment failed to give, run or grade a prompt
    |   +-- RewardFault(ValueError)        a reward is not one finite number
    |   |   +-- RewardTimeout              the reward did not return in time
    |   +-- SessionLost                    the session of a trajectory is gone, with its worker or alone
    |   +-- ToolFault                      a tool failed in a way that the model must not read
    |   |   +-- ToolTimeout                it did not return in time, which it declares fatal
    |   |   +-- ServiceFault               a service failed, or is none of the run's
    |   |   |   +-- ServiceTimeout         it took longer than its timeout_s
    |   +-- ActionRevoked                  a call was stopped so that others can begin; it is called again
    |   +-- RateLimited                    an API refuses a call for now; it is tried again
    +-- RequestRefused(ValueError)         a request of an agent is refused, with the field and the reason
    +-- LateRefused(ValueError)            a late reward is not taken: there is one, or nothing waits for it
    +-- CallbackError(RuntimeError)        a callback of the user raised
    +-- StoreError(OSError)                a record, a group or a batch could not be written or read
    |   +-- Unstorable                     a value has no form in a record; nothing is wrong with the disk
    |   +-- RecordExists(FileExistsError)  another writer wrote this record first
    |   +-- FencedOff(PermissionError)     the run was started again; this process belongs to an older start
    |   +-- DamagedRun                     files of a run are gone, torn or altered
    +-- WeightsError(RuntimeError)         a weight version is missing, torn, or not the one announced
    +-- TrainError(RuntimeError)           a step cannot be taken (wrong order, nothing to train on, NaN)
    |   +-- BatchFailed                    every trajectory of a batch failed, and none because of the model
    |   +-- NothingToLearn                 no reward of several batches in a row said anything
    |   +-- MismatchAlarm                  engine and trainer disagree about the same weights by more than was allowed
    |   +-- CheckpointError                a checkpoint cannot be written or read, or is none
    |   +-- GroupLost                      a process group lost a member; its epoch has ended
    |   +-- TransferError(ConnectionError) tensors between replicas did not arrive, or came without the secret
    +-- TransportError(ConnectionError)    a connection broke, or its peer does not know the run's secret
    +-- PlanError(ValueError)              no plan fits the request, or the request contradicts itself

Each class also subclasses the built-in that a caller would catch. A message names the setting or place, the value,
the allowed values and what to type.
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
    """The run directory already holds a run, or holds none if one was expected."""


class ModelError(LibraError, FileNotFoundError):
    """A model directory is missing, incomplete, or of a kind that cannot be used."""


class ClusterError(LibraError, RuntimeError):
    """The Dask cluster cannot run this: workers, resources, ports or settings."""


class CallbackError(LibraError, RuntimeError):
    """A callback of the user raised; what is committed stays, and the run can be resumed."""


class RequestRefused(LibraError, ValueError):
    """A request of an agent is not answered.

    ``param`` is the field at fault, ``status`` the HTTP status, ``code`` the word by which clients tell errors apart.
    """

    def __init__(self, message: str, param: str = "", status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


class LateRefused(LibraError, ValueError):
    """A late reward is not taken: one was delivered before, nothing waits for it, or it is not one finite number."""


class EngineError(LibraError, RuntimeError):
    """An inference engine failed; the trajectory at hand is classified ``engine``."""


class ContextOverflow(EngineError, ValueError):
    """A request needs more tokens than the engine's context holds."""


class EngineAsleep(EngineError):
    """The engine sleeps, or is about to, while its worker has another role. Not a failure: another engine generates the
    turn."""


class KVRefused(EngineError, ValueError):
    """A KV object cannot be used: other weights, tokens or layout, or not the bytes that were exported. The context is
    computed again."""


class EnvironmentFault(LibraError, RuntimeError):
    """An environment could not produce a prompt or run an action."""


class SessionLost(EnvironmentFault):
    """The session that a trajectory has leased is gone: its worker, or the session itself, has died."""


class RewardFault(EnvironmentFault, ValueError):
    """A reward function raised, hung, or returned something that is not one finite number."""


class RewardTimeout(RewardFault):
    """A reward function did not return in time. Not a TimeoutError: Dask cannot send an OSError that is also a
    ValueError."""


class ActionRevoked(EnvironmentFault):
    """The calls of a turn were stopped, as their lease was revoked. Not a failure: they are called again when there is room."""


class ToolFault(EnvironmentFault):
    """A tool failed in a way that the model must not read. A tool that raises it ends its trajectory as class ``tool``."""


class ToolTimeout(ToolFault):
    """A tool with a fatal time limit did not return in time; the trajectory ends as class ``timeout``."""


class ServiceFault(ToolFault):
    """A service did not answer: its function failed, its weights could not be restored, or the run has none of that name."""


class ServiceTimeout(ServiceFault):
    """A batch of a service did not end within its ``timeout_s``: the device was not free, its weights not there, or no answer
    came."""


class RateLimited(EnvironmentFault):
    """An API refuses a call because there were too many (HTTP 429). Raise it in a tool, a reward or a service: the call
    is made again later, at most ``environment.retries`` times.

    ``retry_after_s``: seconds to wait as given by the API, if it gives any.
    """

    def __init__(self, message: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class StoreError(LibraError, OSError):
    """A record, group or batch could not be written or read."""


class Unstorable(StoreError):
    """A value has no form in a record, so trying again would fail again. In a trajectory it is that trajectory's failure."""


class RecordExists(StoreError, FileExistsError):
    """Another writer created this record first; the loser of the race must stop."""


class FencedOff(StoreError, PermissionError):
    """A newer start of the run exists; this process must stop and write nothing more."""


class DamagedRun(StoreError):
    """Files of a run are gone, torn or altered. The message names them in three lines, the last with what to type."""


class WeightsError(LibraError, RuntimeError):
    """A weight version is missing, torn, or differs from the one announced."""


class TrainError(LibraError, RuntimeError):
    """A training step cannot be taken."""


class BatchFailed(TrainError):
    """Every trajectory of a batch failed, and none because of the model; names the first failure. `libra run` exits with 1."""


class NothingToLearn(TrainError):
    """Three batches in a row had no advantage, and ``trainer.no_signal`` is stop."""


class MismatchAlarm(TrainError):
    """Log-probabilities of rollout and trainer, under the same weights, are further apart than ``trainer.mismatch_args``."""


class CheckpointError(TrainError):
    """A checkpoint cannot be written or read, is torn, is of another model, or is not a checkpoint."""


class GroupLost(TrainError):
    """A process group of training replicas lost a member or never formed; the step is taken again by a new one."""


class TransferError(TrainError, ConnectionError):
    """A connection between replicas broke, was refused, or carried an invalid message."""


class TransportError(LibraError, ConnectionError):
    """An authenticated connection could not be made, broke, or carried a message that is not one of ours."""


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
    """The known name most similar to a given one, ignoring case, ``-`` and ``_``; None below similarity ``cutoff``."""
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
    """The reason why ``path`` could not be written, with advice if the disk is full."""
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
    """The command that installs the packages of an extra, such as "pip install 'mcp<3,>=2.3'"."""
    try:
        required = importlib.metadata.requires("libra-rl") or []
    except importlib.metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        required = []
    mine = re.compile(rf"extra == ['\"]{re.escape(extra)}['\"]")
    packages = [f"'{line.partition(';')[0].strip()}'" for line in required if mine.search(line)]
    return f"pip install {' '.join(packages)}" if packages else f"pip install -e '.[{extra}]'"
