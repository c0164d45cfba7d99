"""What earlier starts of a run have committed, so that its graphs leave that out; `libra.driver.resume` reads it."""

from __future__ import annotations

from dataclasses import dataclass, field

from libra.policy.admission import GroupId


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """What earlier starts of a run committed.

    Attributes
    ----------
    members : list of tuples of GroupId
        Groups of each committed batch, in order; the run goes on with batch ``len(members)``.
    committed : set of (split, iteration, group)
        Groups whose record exists, consumed or not; an evaluation's iteration is its version.
    started : dict of GroupId to int
        Groups that are not committed and have records in the journal, with the oldest version in them.
    """

    members: list[tuple[GroupId, ...]] = field(default_factory=list)
    committed: frozenset[tuple[str, int, int]] = frozenset()
    started: dict[GroupId, int] = field(default_factory=dict)

    @property
    def batches(self) -> int:
        """Batches committed, and so the version of the weights the run goes on with."""
        return len(self.members)

    @property
    def consumed(self) -> frozenset[GroupId]:
        """Groups that a committed batch holds."""
        return frozenset(group for batch in self.members for group in batch)

    def left(self, iteration: int, groups: int) -> list[int]:
        """Groups of an iteration that no committed batch holds."""
        return [g for g in range(groups) if (iteration, g) not in self.consumed]
