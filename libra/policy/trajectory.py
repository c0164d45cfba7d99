"""A trajectory that has not ended: one record for the queues, the engines and the dispatcher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from libra.facts import WorkerCapacity
from libra.types import Phase

if TYPE_CHECKING:
    from libra.policy.engine_table import EngineState


class Share(NamedTuple):
    """What a trajectory adds to the sums of its home: reserved KV tokens, tokens left, and their product with the mean context."""

    room: float = 0.0
    left: float = 0.0
    work: float = 0.0


NO_SHARE = Share()


@dataclass(slots=True, eq=False)
class Trajectory:
    """A trajectory between its first event and its end.

    Attributes
    ----------
    phase : Phase or None
        Of its newest parking.
    ranked : bool
        Whether it has had a priority since then.
    serial : int
        Of its entry in the heaps of its phase; 0: it does not wait.
    waits_at : str
        Worker in whose queue it waits; empty: in no worker's.
    home, generates_at : EngineState or None
        The engine with its KV, and the one in whose slot it is.
    last_home : WorkerCapacity or None
        While it has no home: an engine that may still have its KV.
    tool_home : str
        Worker of its newest action.
    context_tokens : int
        Context so far; 0 before the first generation.
    left_tokens, final_tokens : float
        Forecast: tokens that it still generates, and its context at the end (None: there is no forecast).
    begins_tp : int
        Tensor-parallel degree planned for its beginning; 0: any.
    buckets : tuple of str
        Buckets whose slots it takes besides those of its home.
    has_prompt : bool
        Whether the length of its prompt is known.
    share : Share
        Its part in the sums of its home.
    """

    key: str
    group: str = ""
    phase: Phase | None = None
    ranked: bool = False
    serial: int = 0
    waits_at: str = ""
    home: EngineState | None = None
    generates_at: EngineState | None = None
    last_home: WorkerCapacity | None = None
    tool_home: str = ""
    context_tokens: int = 0
    left_tokens: float = 0.0
    final_tokens: float | None = None
    begins_tp: int = 0
    buckets: tuple[str, ...] = ()
    has_prompt: bool = False
    share: Share = NO_SHARE

    @property
    def has_forecast(self) -> bool:
        """Whether it is expected to generate more."""
        return self.left_tokens > 0.0

    def work(self, context_tokens: int | None = None) -> float:
        """Tokens left times the mean context while they are generated."""
        now = self.context_tokens if context_tokens is None else context_tokens
        return self.left_tokens * 0.5 * (now + (self.final_tokens or 0.0))
