"""Failure classes: from the exception that ended a quantum or a grading to its failure class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from libra.errors import (
    ContextOverflow,
    EngineError,
    EnvironmentFault,
    RewardFault,
    RewardTimeout,
    SessionLost,
    ToolFault,
    ToolTimeout,
)
from libra.types import FailureClass, Trajectory

_CLASSES: tuple[tuple[type[Exception], FailureClass], ...] = (
    (RewardTimeout, FailureClass.TIMEOUT),
    (RewardFault, FailureClass.REWARD),
    (ToolTimeout, FailureClass.TIMEOUT),
    (ToolFault, FailureClass.TOOL),
    (SessionLost, FailureClass.WORKER),
    (EnvironmentFault, FailureClass.ENVIRONMENT),
    (ContextOverflow, FailureClass.ENVIRONMENT),  # a trajectory ends before it overflows, so this prompt never fitted
    (EngineError, FailureClass.ENGINE),
)
"""The first match counts, so a subclass is listed before its base."""

FAULTS = (EngineError, EnvironmentFault)
"""Errors that end a trajectory as a failure. Any other error (a full disk, a bug) ends the run, which can be resumed."""


def failure_of(error: EngineError | EnvironmentFault) -> FailureClass:
    """The class of an error of `FAULTS`."""
    return next(failure for kind, failure in _CLASSES if isinstance(error, kind))


def failure_counts(trajectories: Sequence[Trajectory]) -> dict[str, int]:
    """The failures of a batch; every count is present in every iteration.

    ``failures/<class>``: members that ended so. ``resampled/<class>``: failed attempts that were followed by another one;
    ``resampled`` is their sum.
    """
    ended = Counter(member.failure for member in trajectories)
    again = Counter(name for member in trajectories if member.retried for name in member.retried.split(","))
    failed = [failure for failure in FailureClass if failure is not FailureClass.NONE]
    return {
        **{f"failures/{failure}": ended[failure] for failure in failed},
        **{f"resampled/{failure}": again[str(failure)] for failure in failed if not failure.trains},
        "resampled": again.total(),
    }
