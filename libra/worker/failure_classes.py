"""Whose fault an error is: from the exception that ended a quantum or a grading to its failure class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from libra.errors import (
    ContextOverflow,
    EngineError,
    EnvironmentFault,
    RewardFault,
    RewardTimeout,
    ToolFault,
    ToolTimeout,
)
from libra.types import FailureClass, Trajectory

_CLASSES: tuple[tuple[type[Exception], FailureClass], ...] = (
    (RewardTimeout, FailureClass.TIMEOUT),
    (RewardFault, FailureClass.REWARD),
    (ToolTimeout, FailureClass.TIMEOUT),
    (ToolFault, FailureClass.TOOL),
    (EnvironmentFault, FailureClass.ENVIRONMENT),
    (ContextOverflow, FailureClass.ENVIRONMENT),  # a trajectory ends before it overflows, so this prompt never fitted
    (EngineError, FailureClass.ENGINE),
)
"""The first that fits; a subclass stands before its base."""

FAULTS = (EngineError, EnvironmentFault)
"""What ends a trajectory as a failure. Anything else (a full disk, a bug) ends the run, which can be resumed."""


def failure_of(error: EngineError | EnvironmentFault) -> FailureClass:
    """The class of an error of `FAULTS`."""
    return next(failure for kind, failure in _CLASSES if isinstance(error, kind))


def failure_counts(trajectories: Sequence[Trajectory]) -> dict[str, int]:
    """The failures of a batch, every count there in every iteration.

    ``failures/<class>``: members that ended so. ``resampled/<class>``: failed attempts that another one made good, or tried
    to; ``resampled`` is their sum. ``groups_without_signal``: groups of several members of which fewer than two are valid, so
    that nobody is left to compare with.
    """
    ended = Counter(member.failure for member in trajectories)
    again = Counter(name for member in trajectories if member.retried for name in member.retried.split(","))
    size: Counter[tuple[int, int]] = Counter()
    valid: Counter[tuple[int, int]] = Counter()
    for member in trajectories:
        group = (member.trajectory_id.iteration, member.trajectory_id.group)
        size[group] += 1
        valid[group] += member.failure.trains
    failed = [failure for failure in FailureClass if failure is not FailureClass.NONE]
    return {
        **{f"failures/{failure}": ended[failure] for failure in failed},
        **{f"resampled/{failure}": again[str(failure)] for failure in failed if not failure.trains},
        "resampled": again.total(),
        "groups_without_signal": sum(size[group] > 1 and valid[group] < 2 for group in size),
    }
