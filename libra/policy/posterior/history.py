"""How long a prompt's trajectories were when it came before: what is known of a group before anything of it runs.

Prompts of a data set come again with every pass over it, and a prompt that was long is long again, far more often than chance
has it (RhymeRL, arXiv:2508.18588, reports it of consecutive epochs). Lengths themselves drift while a policy learns, so what is
kept is by how much a prompt's trajectories were longer than those of the other prompts of their time.

How much of that survives until the prompt comes again is not assumed: every prompt that has come again is compared with what was
kept of it (`belief`), and where nothing survives nothing is believed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

KEPT = 16_384
"""Prompts that are remembered; the longest unseen goes first."""
FIRST_BELIEF = 0.8
"""Share of a prompt's departure that is believed to survive, before any prompt has come again."""
FIRST_GROUPS = 4.0
"""Groups' worth of that belief."""
FORGET = 0.998
"""Weight of a comparison after each later one."""
LARGEST_BELIEF = 0.95
CENTRE_GROUPS = 8.0
"""Groups' worth of belief that the centre of a version is that of the one before."""


class Past(NamedTuple):
    """Of one prompt: log tokens by which its trajectories departed from the others', and how many those were."""

    departure: float
    members: float


class History:
    """What is kept of all prompts.

    A group that is over waits until the next version is published; then it is set against those that ended with it.
    """

    def __init__(self) -> None:
        self._past: dict[str, Past] = {}
        self._ended: dict[str, tuple[float, float, float]] = {}  # mean log total, members, what was said of it before
        self._centre: float | None = None
        self._squares = 0.0  # of what was said of prompts that came again
        self._products = 0.0  # with what came

    @property
    def belief(self) -> float:
        """Share of a departure that survives until the prompt comes again, 0 to 0.95, as far as it was seen."""
        first = FIRST_GROUPS * 0.5
        share = (self._products + first * FIRST_BELIEF) / (self._squares + first)
        return min(max(share, 0.0), LARGEST_BELIEF)

    @property
    def measured(self) -> float:
        """`belief`, as far as any prompt has come again and been compared; 0 before."""
        return self.belief if self._squares else 0.0

    def recall(self, prompt: str, prior: float) -> float | None:
        """Log tokens by which members of ``prompt`` are expected to depart, if all of it survived; None: it never came.

        ``prior`` is the members' worth of belief that a prompt is like all others.
        """
        past = self._past.get(prompt)
        return None if past is None else past.departure * past.members / (past.members + prior)

    def ended(self, prompt: str, mean_log: float, members: float, said: float | None) -> None:
        """A group of ``prompt`` is over, of which ``said`` had been recalled; told again, the later one counts."""
        self._ended[prompt] = (mean_log, members, 0.0 if said is None else said)

    def published(self) -> None:
        """A new version: what has ended since the last one is compared and kept."""
        ended = self._ended
        if not ended:
            return
        mean = sum(mean_log for mean_log, _, _ in ended.values()) / len(ended)
        before = mean if self._centre is None else self._centre
        self._centre = centre = (len(ended) * mean + CENTRE_GROUPS * before) / (len(ended) + CENTRE_GROUPS)
        for prompt, (mean_log, members, said) in ended.items():
            departure = mean_log - centre
            if said:
                self._squares = FORGET * self._squares + said * said
                self._products = FORGET * self._products + said * departure
            self._keep(prompt, departure, members)
        ended.clear()

    def _keep(self, prompt: str, departure: float, members: float) -> None:
        before = self._past.pop(prompt, None)
        if before is not None:
            worth = self.belief * min(before.members, members)
            departure = (departure * members + before.departure * worth) / (members + worth)
            members += worth
        self._past[prompt] = Past(departure, members)
        if len(self._past) > KEPT:
            del self._past[next(iter(self._past))]

    def snapshot(self) -> dict[str, Any]:
        """Everything it knows, as values that JSON can hold."""
        return {
            "past": [[prompt, *past] for prompt, past in self._past.items()],
            "ended": [[prompt, *values] for prompt, values in self._ended.items()],
            "centre": self._centre,
            "sums": [self._squares, self._products],
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Know what ``snapshot`` says and nothing else."""
        self._past = {str(prompt): Past(float(shift), float(members)) for prompt, shift, members in snapshot["past"]}
        self._ended = {str(prompt): (float(a), float(b), float(c)) for prompt, a, b, c in snapshot["ended"]}
        self._centre = None if snapshot["centre"] is None else float(snapshot["centre"])
        self._squares, self._products = (float(value) for value in snapshot["sums"])
