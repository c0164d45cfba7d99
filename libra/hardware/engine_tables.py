"""Parts of a simulated engine: requests, step tables, counters, host KV (Seer, arXiv:2511.14617)."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from libra.errors import ConfigError
from libra.hardware.engine_seconds import EngineSeconds, MeasuredEngine
from libra.types import EngineCapacity, StepSeconds

CONTEXT_GRAIN = 256
"""Context tokens per entry of the table of step seconds."""


class Request(NamedTuple):
    """One turn to generate."""

    key: str
    group: str
    context_tokens: int
    prompt_tokens: int  # shared by all samples of the group
    new_tokens: int
    computed_tokens: int = 0  # context that an engine computed before
    reserved_tokens: int = 0  # KV reserved for generated tokens; 0: new_tokens
    context: int = 0  # equal numbers have equal context tokens; 0: unique

    @property
    def room_tokens(self) -> int:
        """KV tokens reserved while the request runs."""
        return self.context_tokens + max(self.new_tokens, self.reserved_tokens)


class EngineTables:
    """Tabulated seconds shared by all engines of one kind.

    Contexts are rounded to the middle of ``grain_tokens`` intervals. ``max_contexts`` limits the
    trajectories with kept KV: one per slot, or by default as many as fit.
    """

    def __init__(
        self, seconds: EngineSeconds, *, grain_tokens: int = CONTEXT_GRAIN, max_contexts: int | None = None
    ) -> None:
        self.seconds, self.max_contexts, self._grain = seconds, max_contexts, grain_tokens
        self.kv_capacity_tokens = int(seconds.kv_capacity_tokens)
        if self.kv_capacity_tokens < 1:
            raise ConfigError(f"an engine of {seconds.tp} GPUs has no room for KV beside the weights; take a larger tp")
        self._step_s: dict[tuple[int, int], float] = {}
        self._prefill_s: dict[tuple[int, int], float] = {}

    def step_s(self, num_sequences: int, context_tokens: float) -> float:
        """Seconds of one decode step."""
        grain = self._grain
        at = (num_sequences, int(context_tokens) // (grain * num_sequences))
        found = self._step_s.get(at)
        if found is None:
            middle = (at[1] * grain + grain // 2) * num_sequences
            found = self._step_s[at] = self.seconds.decode_step_s(num_sequences, middle)
        return found

    def prefill_s(self, new_tokens: int, past_tokens: int) -> float:
        """Seconds to compute ``new_tokens`` after ``past_tokens``, which is rounded to a grain."""
        at = (new_tokens, past_tokens // self._grain)
        found = self._prefill_s.get(at)
        if found is None:
            found = self._prefill_s[at] = self.seconds.prefill_s(new_tokens, at[1] * self._grain)
        return found

    def capacity(self, slots: int, context_tokens: int) -> EngineCapacity:
        """The capacity that such an engine declares.

        Its linear seconds match the tables for one sequence of ``context_tokens``, and for full
        slots and memory. Bytes are 0 if unknown.
        """
        alone_s, tokens = self.step_s(1, context_tokens), self.kv_capacity_tokens
        if isinstance(self.seconds, MeasuredEngine):
            return EngineCapacity(tokens, 0, 0, slots, self.seconds.tp, self.seconds.steps)
        context_token_s = (self.step_s(slots, tokens) - alone_s) / tokens
        prefill_token_s = self.seconds.prefill_s(max(1, context_tokens), 0) / max(1, context_tokens)
        token_bytes = int(getattr(self.seconds, "kv_token_bytes", 0))
        steps = StepSeconds(alone_s, 0.0, max(0.0, context_token_s), prefill_token_s, 0, 0.0)
        return EngineCapacity(tokens, tokens * token_bytes, token_bytes, slots, self.seconds.tp, steps)


@dataclass(slots=True)
class Counters:
    """Counters of an engine's work so far.

    ``busy_s``: seconds with running requests. ``again_s``: the part spent on recomputed contexts.
    ``load_s``: weight loads, without work that a stopped engine left unfinished.
    """

    generated_tokens: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    busy_s: float = 0.0
    peak_kv_tokens: int = 0
    preempted: int = 0
    again_s: float = 0.0
    load_s: float = 0.0


class KeptKv:
    """KV that an engine keeps between turns, oldest first, and contexts that other requests may share."""

    def __init__(self) -> None:
        self.entries: OrderedDict[str, tuple[int, str]] = OrderedDict()  # tokens, group
        self.tokens = 0
        self.groups: dict[str, int] = {}  # contexts per group, running ones included: its prompt is computed once
        self.first_with: dict[int, str] = {}  # the trajectory that computed a context and still has its KV
        self._context_of: dict[str, int] = {}  # the inverse of first_with

    def keep(self, key: str, tokens: int, group: str) -> None:
        """Keep KV after a turn; its group was joined at the start of the turn."""
        self.entries[key] = (tokens, group)
        self.tokens += tokens

    def drop(self, key: str) -> int:
        """Release kept KV; returns its tokens."""
        tokens, group = self.entries.pop(key, (0, ""))
        if tokens:
            self.tokens -= tokens
            self.leave_group(group)
        return tokens

    def evict(self, key: str) -> None:
        """Drop kept KV, which is then no longer shared."""
        self.drop(key)
        self.leave(key)

    def evict_oldest(self) -> None:
        """Evict the oldest kept KV."""
        self.evict(next(iter(self.entries)))

    def begins_with(self, key: str, context: int) -> None:
        """Register that ``key`` computes a context that others may share."""
        self.first_with[context], self._context_of[key] = key, context

    def leave(self, key: str) -> None:
        """Stop sharing the context with which ``key`` started."""
        context = self._context_of.pop(key, None)
        if context is not None:
            del self.first_with[context]

    def join_group(self, group: str) -> None:
        """Count one more context of a group."""
        self.groups[group] = self.groups.get(group, 0) + 1

    def leave_group(self, group: str) -> None:
        """Count one context of a group less."""
        self.groups[group] -= 1
        if not self.groups[group]:
            del self.groups[group]


class HostPool(NamedTuple):
    """A pool's capacity over all hosts, and the price of a fetch in seconds and seconds per token."""

    capacity_tokens: int
    latency_s: float
    token_s: float


class HostKv:
    """Host KV in tokens by trajectory; the least recently stored entries are dropped first.

    KV is stored at the end of a turn or part, which overlaps with steps and takes no time here.
    During a fetch the engine continues with other requests.
    """

    def __init__(self, pool: HostPool) -> None:
        self.pool = pool
        self._tokens: OrderedDict[str, int] = OrderedDict()
        self.held_tokens = self.fetched_tokens = 0
        self._unreported: list[tuple[int, float]] = []

    def tokens(self, key: str) -> int:
        """Tokens of KV held for a trajectory."""
        return self._tokens.get(key, 0)

    def fetch(self, tokens: int, prefill_s: float) -> float:
        """Seconds of a fetch that starts now; 0 (and no fetch) if computing the tokens is faster."""
        seconds = self.pool.latency_s + tokens * self.pool.token_s
        if seconds >= prefill_s:
            return 0.0
        self.fetched_tokens += tokens
        self._unreported.append((tokens, seconds))
        return seconds

    def fetches(self) -> list[tuple[int, float]]:
        """Tokens and seconds of the fetches since the last call."""
        unreported, self._unreported = self._unreported, []
        return unreported

    def put(self, key: str, tokens: int) -> None:
        """Store a trajectory's KV, replacing older KV."""
        self.drop(key)
        self._tokens[key] = tokens
        self.held_tokens += tokens
        while self.held_tokens > self.pool.capacity_tokens:
            self.drop(next(iter(self._tokens)))

    def drop(self, key: str) -> None:
        """Drop the KV of an ended trajectory."""
        self.held_tokens -= self._tokens.pop(key, 0)

    def clear(self) -> None:
        """Drop all KV, which is invalid for new weights."""
        self._tokens.clear()
        self.held_tokens = 0
