"""Lengths of a prompt's earlier trajectories: a prior for a group before any member runs.

Prompts of a data set return with every pass over it, and one that was long is long again far more
often than by chance (RhymeRL, arXiv:2508.18588, reports it of consecutive epochs). Lengths drift
while a policy learns, so the history keeps by how much a prompt's trajectories were longer than
those of the other prompts of their time.

How much of that persists is measured: every prompt that returns is compared with its history
(`persistence`).
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

KEPT = 16_384
"""Maximum number of prompts kept; the least recently seen are dropped first."""
FIRST_PERSISTENCE = 0.8
"""Assumed share of a prompt's departure that persists, before any prompt has returned."""
FIRST_GROUPS = 4.0
"""Weight of that assumption, in groups."""
FORGET = 0.998
"""Weight of a comparison after each later one."""
LARGEST_PERSISTENCE = 0.95
CENTRE_GROUPS = 8.0
"""Weight, in groups, of the previous version's centre in that of the next."""


class Past(NamedTuple):
    """Of one prompt: log tokens by which its trajectories departed from the others', and how many
    those were."""

    departure: float
    members: float


class History(msgspec.Struct):
    """The history of all prompts.

    A group that has ended waits for the next version; then it is compared with those that ended in
    the same version.

    Attributes
    ----------
    past : dict
        By prompt.
    pending : dict
        By prompt, of groups ended since the last version: mean log total, members, the departure
        recalled when it began.
    centre : float or None
        Log total of an average group.
    squares, products : float
        Of what was recalled of prompts that returned, and with what was observed.
    """

    past: dict[str, Past] = {}
    pending: dict[str, tuple[float, float, float]] = {}
    centre: float | None = None
    squares: float = 0.0
    products: float = 0.0

    @property
    def persistence(self) -> float:
        """Measured share of a departure that persists until the prompt returns, 0 to 0.95."""
        first = FIRST_GROUPS * 0.5
        share = (self.products + first * FIRST_PERSISTENCE) / (self.squares + first)
        return min(max(share, 0.0), LARGEST_PERSISTENCE)

    @property
    def measured(self) -> float:
        """`persistence`, or 0 before any prompt has returned."""
        return self.persistence if self.squares else 0.0

    def recall(self, prompt: str, prior: float) -> float | None:
        """Log tokens by which members of ``prompt`` are expected to depart, if all of it persisted;
        None: it is new.

        ``prior`` is the weight, in members, of the prior that a prompt is like all others.
        """
        past = self.past.get(prompt)
        return None if past is None else past.departure * past.members / (past.members + prior)

    def ended(self, prompt: str, mean_log: float, members: float, recalled: float | None) -> None:
        """A group of ``prompt`` has ended; ``recalled`` was its history before. The last call
        counts."""
        self.pending[prompt] = (mean_log, members, 0.0 if recalled is None else recalled)

    def published(self) -> None:
        """A new version: compare and keep what has ended since the last one."""
        ended, self.pending = self.pending, {}
        if not ended:
            return
        mean = sum(mean_log for mean_log, _, _ in ended.values()) / len(ended)
        before = mean if self.centre is None else self.centre
        self.centre = centre = (len(ended) * mean + CENTRE_GROUPS * before) / (len(ended) + CENTRE_GROUPS)
        for prompt, (mean_log, members, recalled) in ended.items():
            departure = mean_log - centre
            if recalled:
                self.squares = FORGET * self.squares + recalled * recalled
                self.products = FORGET * self.products + recalled * departure
            self._keep(prompt, departure, members)

    def _keep(self, prompt: str, departure: float, members: float) -> None:
        before = self.past.pop(prompt, None)
        if before is not None:
            worth = self.persistence * min(before.members, members)
            departure = (departure * members + before.departure * worth) / (members + worth)
            members += worth
        self.past[prompt] = Past(departure, members)
        if len(self.past) > KEPT:
            del self.past[next(iter(self.past))]
