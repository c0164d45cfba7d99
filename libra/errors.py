"""Every error Libra raises on purpose, in one tree.

::

    LibraError
    +-- ConfigError(ValueError)            a field of the configuration is wrong
    +-- RunDirectoryError(FileExistsError) the run directory is taken, or is not a run
    +-- ModelError(FileNotFoundError)      a model directory is missing or unusable
    +-- ClusterError(RuntimeError)         Dask, its workers, ports or settings do not fit
    +-- EngineError(RuntimeError)          an inference engine failed
    |   +-- ContextOverflow(ValueError)    a request does not fit the engine's context
    |   +-- EngineAsleep                   the engine gave its memory to something else; ask another one
    +-- EnvironmentFault(RuntimeError)     an environment failed to give, run or grade a prompt
    |   +-- RewardFault(ValueError)        a reward is not one finite number
    |   |   +-- RewardTimeout              it did not come in time
    |   +-- ToolFault                      a tool failed in a way that is not to be shown to the model
    |   |   +-- ToolTimeout                it did not return in time, and says that this is fatal
    +-- StoreError(OSError)                a record, a group or a batch could not be written or read
    |   +-- RecordExists(FileExistsError)  somebody else already wrote this record
    |   +-- FencedOff(PermissionError)     the run was started again; this process belongs to an older start
    +-- WeightsError(RuntimeError)         a weight version is missing, torn, or not the one announced
    +-- TrainError(RuntimeError)           a step cannot be taken (wrong order, nothing to train on, NaN)
    |   +-- MismatchAlarm                  engine and trainer disagree about the same weights by more than was allowed
    |   +-- CheckpointError                a checkpoint cannot be written or read, or is none
    |   +-- GroupLost                      a member of a process group is gone; its epoch is over
    |   +-- TransferError(ConnectionError) tensors between replicas did not arrive, or came from a stranger
    +-- DispatchError(ConnectionError)     rows of a batch did not arrive whole from any holder, or a stranger asked for them
    +-- LayoutError(ValueError)            rows of a batch that nobody holds, or that lie in two ways at once
    +-- PlanError(ValueError)              no plan fits what was asked, or what was asked contradicts itself

Each class also subclasses the built-in that a caller would catch. A message says what, where, what was got, what is
allowed and what to type.
"""

from __future__ import annotations


class LibraError(Exception):
    """Root of the tree; catch it to catch everything Libra raises on purpose."""


class ConfigError(LibraError, ValueError):
    """A configuration field is unknown, has the wrong type, or contradicts another one."""


class RunDirectoryError(LibraError, FileExistsError):
    """The run directory already holds a run, or holds none where one was expected."""


class ModelError(LibraError, FileNotFoundError):
    """A model directory is missing, incomplete, or of a kind that cannot be used."""


class ClusterError(LibraError, RuntimeError):
    """The Dask cluster cannot run this: workers, resources, ports or settings."""


class EngineError(LibraError, RuntimeError):
    """An inference engine failed; the trajectory at hand is classified ``engine``."""


class ContextOverflow(EngineError, ValueError):
    """A request asks for more tokens than the engine's context holds."""


class EngineAsleep(EngineError):
    """The engine sleeps, or is about to, while its worker does something else. No fault: the turn is to be generated elsewhere."""


class EnvironmentFault(LibraError, RuntimeError):
    """An environment could not produce a prompt or run an action."""


class RewardFault(EnvironmentFault, ValueError):
    """A reward function raised, hung, or returned something that is not one finite number."""


class RewardTimeout(RewardFault):
    """A reward function did not return in time. No TimeoutError: Dask cannot send an OSError that is a ValueError too."""


class ToolFault(EnvironmentFault):
    """A tool failed in a way that is not the model's to read. A tool that raises it ends its trajectory as class ``tool``."""


class ToolTimeout(ToolFault):
    """A tool that calls its time-out fatal did not return in time; the trajectory ends as class ``timeout``."""


class StoreError(LibraError, OSError):
    """A record, group or batch could not be written or read."""


class RecordExists(StoreError, FileExistsError):
    """Another writer created this record first; whoever sees this has lost the race and must stop."""


class FencedOff(StoreError, PermissionError):
    """A newer start of the run exists; whoever sees this must stop and write nothing more."""


class WeightsError(LibraError, RuntimeError):
    """A weight version is missing, torn, or differs from the one announced."""


class TrainError(LibraError, RuntimeError):
    """A training step cannot be taken."""


class MismatchAlarm(TrainError):
    """Log-probabilities of rollout and trainer, under the same weights, are further apart than ``trainer.mismatch_alarm``."""


class CheckpointError(TrainError):
    """A checkpoint cannot be written or read, is torn, is of another model, or is no checkpoint at all."""


class GroupLost(TrainError):
    """A process group of training replicas lost a member or never formed; the step is taken again by a new one."""


class TransferError(TrainError, ConnectionError):
    """A connection between replicas broke, was refused, or carried what is no message of ours."""


class DispatchError(LibraError, ConnectionError):
    """Rows of a batch did not arrive whole from any of their holders, or came from or for somebody without the secret."""


class LayoutError(LibraError, ValueError):
    """A layout contradicts itself: a row that nobody holds, a row wanted twice, or copies of different sizes."""


class PlanError(LibraError, ValueError):
    """No plan fits what was asked; the message names the constraint and what to change."""
