"""An inference engine in virtual time: continuous batching, KV memory, a prefix cache, and a queue. It moves from one change of
its batch to the next, never token by token.

Invariants
----------
1. KV held (reserved by running requests, and kept between turns) never exceeds the engine's capacity.
2. Every request that was submitted is finished once, or handed back by `lost`.
3. A running request is never preempted: it reserves its whole turn when it starts. (A real engine does not know how long a turn
   will be, and now and then recomputes one.)
4. Smaller priority starts first, then earlier submission.

The model: all running requests gain one token per step, whose seconds come from `EngineSeconds` for the batch as it is, halfway to
the next change; computing context holds the steps up for its seconds (chunked or not, the work is the same). Samples of a group
share the KV of their prompt in time, not in memory; and of a whole context, where one is there that began with the same.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from libra.errors import ConfigError
from libra.hardware.measured_engine import MeasuredEngine
from libra.hardware.seconds import EngineSeconds
from libra.hardware.timing_residuals import Residuals
from libra.types import EngineCapacity, StepSeconds

CONTEXT_GRAIN = 256
"""Tables of step seconds are made once per so many tokens of context: a lookup instead of a sum over operators."""


class Request(NamedTuple):
    """One turn to generate."""

    key: str
    group: str
    context_tokens: int
    prompt_tokens: int  # of the context, what all samples of the group share
    new_tokens: int
    computed_tokens: int = 0  # of the context, what some engine has computed before
    reserved_tokens: int = 0  # of generated ones, whose room is held; 0: those that it will generate
    context: int = 0  # requests of one number have the same tokens of context; 0: nobody else has

    @property
    def room_tokens(self) -> int:
        """KV that is held for it while it runs."""
        return self.context_tokens + max(self.new_tokens, self.reserved_tokens)


class EngineTables:
    """Seconds of one kind of engine, looked up; shared by all engines of that kind.

    Parameters
    ----------
    seconds : EngineSeconds
    grain_tokens : int
        Contexts are rounded to the middle of so many tokens.
    max_contexts : int or None
        Trajectories that it holds the KV of at most, whatever room they take: an engine of slots keeps a context in each. None:
        as many as fit.
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
        """Seconds to compute ``new_tokens`` after ``past_tokens``; the latter to a grain."""
        at = (new_tokens, past_tokens // self._grain)
        found = self._prefill_s.get(at)
        if found is None:
            found = self._prefill_s[at] = self.seconds.prefill_s(new_tokens, at[1] * self._grain)
        return found

    def capacity(self, slots: int, context_tokens: int) -> EngineCapacity:
        """What such an engine declares. Its seconds are those of the tables alone at ``context_tokens`` and with slots and memory
        full; between the two they go with the context held. Bytes are 0 where the seconds know none.
        """
        alone_s, tokens = self.step_s(1, context_tokens), self.kv_capacity_tokens
        if isinstance(self.seconds, MeasuredEngine):  # it said so itself
            return EngineCapacity(tokens, 0, 0, slots, self.seconds.tp, self.seconds.steps)
        context_token_s = (self.step_s(slots, tokens) - alone_s) / tokens
        prefill_token_s = self.seconds.prefill_s(max(1, context_tokens), 0) / max(1, context_tokens)
        token_bytes = int(getattr(self.seconds, "kv_token_bytes", 0))
        steps = StepSeconds(alone_s, 0.0, max(0.0, context_token_s), prefill_token_s, 0, 0.0)
        return EngineCapacity(tokens, tokens * token_bytes, token_bytes, slots, self.seconds.tp, steps)


class Counters(NamedTuple):
    """What an engine has done."""

    generated_tokens: int
    prefilled_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    busy_s: float
    peak_kv_tokens: int


class VirtualEngine:
    """One engine; with ``residuals`` its seconds are drawn around the tables, as measured ones lie around predictions."""

    def __init__(
        self, name: str, tables: EngineTables, *, residuals: Residuals | None, rng: np.random.Generator
    ) -> None:
        self.name = name
        self.changes = 0  # an event that was computed before the last one is void
        self._tables, self._residuals, self._rng = tables, residuals, rng
        self._queue: list[tuple[tuple[int, ...], int, Request]] = []
        self._running: list[tuple[float, int, str]] = []  # heap of (step of its last token, serial, key)
        self._requests: dict[str, Request] = {}
        self._kept: OrderedDict[str, tuple[int, str]] = (
            OrderedDict()
        )  # context kept between turns, oldest first; its group
        self._prompts: dict[str, int] = {}  # how many contexts of a group are here
        self._first_with: dict[int, str] = {}  # context -> who computed it here, and is still here
        self._context_of: dict[str, int] = {}  # the inverse
        self._reserved = self._kept_tokens = 0
        self._context = 0.0  # tokens that running requests attend to, now
        self._steps = self._now = self._ready = self._step_s = 0.0
        self._serial = 0
        self._generated = self._prefilled = self._cached = self._recomputed = self._peak = 0
        self._busy_s = 0.0

    # ---------------------------------------------------------------- requests

    def submit(self, now_s: float, request: Request, priority: tuple[int, ...]) -> None:
        """A trajectory asks for a turn; ConfigError where it could never fit."""
        need = request.room_tokens
        if need > self._tables.kv_capacity_tokens:
            raise ConfigError(
                f"{request.key} needs {need} tokens of KV, {self.name} holds {self._tables.kv_capacity_tokens}; "
                "take engines of more GPUs, or shorter trajectories"
            )
        self._advance(now_s)
        self._serial += 1
        heapq.heappush(self._queue, (priority, self._serial, request))
        self._admit()

    def finished(self, now_s: float) -> list[Request]:
        """Requests whose last token is there at ``now_s``, in order; their KV is kept while nobody needs the room."""
        self._advance(now_s)
        done = []
        while self._running and self._running[0][0] <= self._steps + 1e-6:
            _, _, key = heapq.heappop(self._running)
            request = self._requests.pop(key)
            tokens = request.context_tokens + request.new_tokens
            self._reserved -= request.room_tokens
            self._context -= tokens
            self._generated += request.new_tokens
            self._kept[key] = (tokens, request.group)
            self._kept_tokens += tokens
            done.append(request)
        if not self._running:
            self._context = 0.0
        self._admit()
        return done

    def forget(self, key: str) -> None:
        """Drop the KV of a trajectory that will not come back, if it is kept."""
        self._evict(key)

    def cancel(self, now_s: float, key: str) -> bool:
        """Take back a trajectory's request, and its KV; whether it had one."""
        self._advance(now_s)
        self._evict(key)
        waiting = [entry for entry in self._queue if entry[2].key != key]
        had = len(waiting) < len(self._queue)
        if had:
            self._queue = waiting
            heapq.heapify(self._queue)
        request = self._requests.pop(key, None)
        if request is not None:
            finish = next(entry[0] for entry in self._running if entry[2] == key)
            self._running = [entry for entry in self._running if entry[2] != key]
            heapq.heapify(self._running)
            self._reserved -= request.room_tokens
            self._context -= request.context_tokens + request.new_tokens - max(0.0, finish - self._steps)
            self._prompts[request.group] -= 1
            if not self._prompts[request.group]:
                del self._prompts[request.group]
            had = True
        self._admit()
        return had

    @property
    def load_now(self) -> tuple[int, int, int]:
        """Requests that generate, requests that wait, and trajectories whose context is kept."""
        return len(self._running), len(self._queue), len(self._kept)

    def next_finish_s(self) -> float | None:
        """When the next request will be done if nothing changes; None where nothing runs. Void once ``changes`` moves on."""
        if not self._running:
            return None
        count = len(self._running)
        steps = max(0.0, self._running[0][0] - self._steps)
        self._step_s = self._tables.step_s(count, self._context + 0.5 * count * steps)
        if self._residuals is not None:
            self._step_s *= self._residuals.decode_factor(self._rng, max(1, int(steps)))
        return max(self._ready, self._now) + steps * self._step_s

    def load(self, now_s: float, load_s: float) -> None:
        """New weights: kept KV is void, and running requests compute their context again."""
        self._advance(now_s)
        self._ready = max(self._ready, now_s) + load_s
        for key in list(self._kept):
            self._evict(key)
        for _, _, key in self._running:
            request = self._requests[key]
            self._recomputed += request.context_tokens
            self._compute(request.context_tokens, 0)
        self.changes += 1

    def lost(self) -> list[str]:
        """The engine is gone; keys of all it had, which never finish here."""
        keys = [request.key for _, _, request in sorted(self._queue)] + sorted(self._requests)
        self._queue, self._running, self._requests = [], [], {}
        self.changes += 1
        return keys

    @property
    def counters(self) -> Counters:
        """What it has done so far."""
        return Counters(self._generated, self._prefilled, self._cached, self._recomputed, self._busy_s, self._peak)

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV that are reserved or kept now."""
        return self._reserved + self._kept_tokens

    # ---------------------------------------------------------------- time

    def _advance(self, now_s: float) -> None:
        if self._running:
            begun = max(self._now, self._ready)
            if now_s > begun and self._step_s > 0.0:
                steps = (now_s - begun) / self._step_s
                self._steps += steps
                self._context += steps * len(self._running)
            self._busy_s += now_s - self._now
        self._now = now_s

    def _admit(self) -> None:
        capacity, most = self._tables.kv_capacity_tokens, self._tables.max_contexts
        while self._queue:
            request = self._queue[0][2]
            need = request.room_tokens
            if self._reserved + need > capacity or (most is not None and len(self._running) >= most):
                break
            heapq.heappop(self._queue)
            cached, _ = self._drop(request.key)
            while self.kv_tokens + need > capacity or (
                most is not None and self._kept and len(self._running) + len(self._kept) >= most
            ):
                self._evict(next(iter(self._kept)))
            self._start(request, min(cached, request.context_tokens))
        self._peak = max(self._peak, self.kv_tokens)
        self.changes += 1

    def _start(self, request: Request, cached: int) -> None:
        if not cached and request.context in self._first_with:
            cached = request.context_tokens - 1  # its last token must be fed
        elif not cached:
            if self._prompts.get(request.group):
                cached = min(request.prompt_tokens, request.context_tokens)
            self._leave(request.key)
            if request.context:
                self._first_with[request.context], self._context_of[request.key] = request.key, request.context
        self._cached += cached
        self._recomputed += max(0, min(request.computed_tokens, request.context_tokens) - cached)
        self._compute(request.context_tokens - cached, cached)
        self._requests[request.key] = request
        self._prompts[request.group] = self._prompts.get(request.group, 0) + 1
        self._reserved += request.room_tokens
        self._context += request.context_tokens
        self._serial += 1
        heapq.heappush(self._running, (self._steps + request.new_tokens, self._serial, request.key))

    def _compute(self, new_tokens: int, past_tokens: int) -> None:
        if new_tokens > 0:
            self._prefilled += new_tokens
            factor = 1.0 if self._residuals is None else self._residuals.prefill_factor(self._rng)
            self._ready = max(self._ready, self._now) + factor * self._tables.prefill_s(new_tokens, past_tokens)

    def _evict(self, key: str) -> None:
        """Forget kept KV for good: nobody can take it over any more."""
        self._drop(key)
        self._leave(key)

    def _leave(self, key: str) -> None:
        """Nobody takes over what ``key`` began with."""
        context = self._context_of.pop(key, None)
        if context is not None:
            del self._first_with[context]

    def _drop(self, key: str) -> tuple[int, str]:
        """Forget kept KV; how many tokens it had, and its group."""
        tokens, group = self._kept.pop(key, (0, ""))
        if tokens:
            self._kept_tokens -= tokens
            self._prompts[group] -= 1
            if not self._prompts[group]:
                del self._prompts[group]
        return tokens, group
