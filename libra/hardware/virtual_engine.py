"""An inference engine in virtual time: continuous batching, KV memory, prefix cache and queue.

Time advances between changes of the batch, not per token: all running requests gain one token per
step, at the `EngineSeconds` of the batch halfway to the next change. Computing context delays steps
by its seconds. Samples of a group compute their prompt's KV once, but each holds memory for it;
requests with the same context share all of it.

1. KV in use (reserved by running requests, and kept between turns) never exceeds the engine's
   capacity.
2. Every submitted request finishes once, or `hand_over` returns it.
3. A running request reserves KV for its whole turn and is never preempted; with ``preempts`` it
   holds only its present KV, and when memory is full the latest-started request returns to the
   queue's front, to be recomputed.
4. Smaller priority starts first, then earlier submission.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import replace

import numpy as np

from libra.errors import ConfigError
from libra.hardware.engine_tables import Counters, EngineTables, HostKv, KeptKv, Request
from libra.hardware.tables import Residuals

WATERMARK = 0.01
"""Share of KV kept free when a request starts on a preempting engine, to avoid immediate preemption."""
FRONT = 1 << 48
"""Serial offset that places preempted requests before all that have not started."""


class VirtualEngine:
    """One engine; with ``residuals``, its seconds are drawn around the tables.

    ``preempts``: see invariant 3. ``host``: KV pool, used where a fetch is faster than computing;
    during a fetch the request holds its memory, and other requests continue.
    """

    def __init__(
        self,
        name: str,
        tables: EngineTables,
        *,
        residuals: Residuals | None,
        rng: np.random.Generator,
        preempts: bool = False,
        host: HostKv | None = None,
    ) -> None:
        self.name = name
        self.changes = 0  # invalidates events computed before the last change
        self._tables, self._residuals, self._rng = tables, residuals, rng
        self._queue: list[tuple[tuple[int, ...], int, Request]] = []
        self._running: list[tuple[float, int, str]] = []  # heap of (step of its last token, serial, key)
        self._requests: dict[str, Request] = {}
        self._kept = KeptKv()
        self._reserved = 0
        self._context = 0.0  # present context tokens of running requests
        self._steps = self._now = self._ready = self._step_s = 0.0
        self._serial = 0
        self._work = Counters()
        self._loading = (0.0, 0.0)  # start and end of the present or last weight load
        self._preempts, self._host = preempts, host
        self._fetching: list[tuple[float, int, str, int]] = []  # heap of (second, serial, key, tokens then cached)
        self._before: dict[str, int] = {}  # tokens that preempted requests had generated

    # ---------------------------------------------------------------- requests

    def submit(self, now_s: float, request: Request, priority: tuple[int, ...]) -> None:
        """Submit a turn; ConfigError if it can never fit."""
        need = request.room_tokens
        if need > self._tables.kv_capacity_tokens:
            raise ConfigError(
                f"{request.key} needs {need} tokens of KV, {self.name} holds {self._tables.kv_capacity_tokens}; "
                "type cluster.engines with a higher tp, or shorten the trajectories (planner.lengths.turns, planner.trace)"
            )
        self._advance(now_s)
        self._serial += 1
        heapq.heappush(self._queue, (priority, self._serial, request))
        self._admit()

    def finished(self, now_s: float) -> list[Request]:
        """Requests with their last token at ``now_s``, in order; their KV stays until memory is needed."""
        self._advance(now_s)
        while self._fetching and self._fetching[0][0] <= now_s:
            _, _, key, cached = heapq.heappop(self._fetching)
            self._run(self._requests[key], cached)
        done = []
        while self._running and self._running[0][0] <= self._steps + 1e-6:
            _, _, key = heapq.heappop(self._running)
            request = self._requests.pop(key)
            tokens = request.context_tokens + request.new_tokens
            self._reserved -= request.room_tokens
            self._context -= tokens
            self._work.generated_tokens += request.new_tokens
            self._kept.keep(key, tokens, request.group)
            self._before.pop(key, None)
            done.append(request)
        if not self._running:
            self._context = 0.0
        if self._preempts:
            self._preempt()
        self._admit()
        return done

    def forget(self, key: str) -> None:
        """Drop the KV of a trajectory that has ended or moved."""
        self._kept.evict(key)

    @property
    def load_now(self) -> tuple[int, int, int]:
        """Running requests, waiting requests, and trajectories with kept KV."""
        return len(self._running), len(self._queue), len(self._kept.entries)

    def next_finish_s(self) -> float | None:
        """When the next request finishes or its KV arrives, or None; valid until ``changes`` changes."""
        if not self._running:
            return max(self._now, self._fetching[0][0]) if self._fetching else None
        count = len(self._running)
        steps = max(0.0, self._running[0][0] - self._steps)
        if self._preempts and count > 1:
            steps = min(steps, max(0.0, self._tables.kv_capacity_tokens - self._context) / count)
        self._step_s = self._tables.step_s(count, self._context + 0.5 * count * steps)
        if self._residuals is not None:
            self._step_s *= self._residuals.decode_factor(self._rng, max(1, int(steps)))
        at_s = max(self._ready, self._now) + steps * self._step_s
        return at_s if not self._fetching else max(self._now, min(at_s, self._fetching[0][0]))

    def load(self, now_s: float, load_s: float, *, keeps_kv: bool = False) -> None:
        """Load new weights; without ``keeps_kv``, kept KV is dropped, running contexts recomputed."""
        self._advance(now_s)
        begins_s = max(self._ready, now_s)
        self._ready = begins_s + load_s
        self._loading = begins_s, self._ready
        self.changes += 1
        if keeps_kv:
            return
        for key in list(self._kept.entries):
            self._kept.evict(key)
        for _, _, key in self._running:
            request = self._requests[key]
            self._work.recomputed_tokens += request.context_tokens
            self._compute(request.context_tokens, 0, request.context_tokens)
        self._fetching = [(at_s, serial, key, 0) for at_s, serial, key, _ in self._fetching]

    def hand_over(self, now_s: float) -> dict[str, int]:
        """Stop without finishing any request; returns the generated tokens of each, in order."""
        self.stop_clock(now_s)
        left = {request.key: 0 for _, _, request in sorted(self._queue)}
        for _, _, key, _ in sorted(self._fetching):
            del self._requests[key]
            left[key] = 0
        self._fetching = []
        for finish, _, key in sorted(self._running, key=lambda entry: entry[1]):
            request = self._requests.pop(key)
            left[key] = self._done_of(request, finish)
            self._work.generated_tokens += left[key]
        for key, tokens in self._before.items():
            left[key] += tokens
        self._before.clear()
        self._queue, self._running, self._kept = [], [], KeptKv()
        self._reserved = 0
        self.changes += 1
        return left

    def _done_of(self, request: Request, finish: float) -> int:
        """Tokens generated by a running request, at least one short of its total."""
        return min(request.new_tokens - 1, max(0, request.new_tokens - math.ceil(finish - self._steps - 1e-6)))

    def _preempt(self) -> None:
        capacity = self._tables.kv_capacity_tokens
        while len(self._running) > 1 and self._context + len(self._running) > capacity:
            last = max(self._running, key=lambda entry: entry[1])
            self._running.remove(last)
            heapq.heapify(self._running)
            finish, serial, key = last
            request = self._requests.pop(key)
            done = self._done_of(request, finish)
            context = request.context_tokens + done
            self._work.generated_tokens += done
            self._work.preempted += 1
            self._reserved -= request.room_tokens
            self._context -= request.context_tokens + request.new_tokens - max(0.0, finish - self._steps)
            self._before[key] = self._before.get(key, 0) + done
            self._kept.leave_group(request.group)
            again = request._replace(
                context_tokens=context, new_tokens=request.new_tokens - done, computed_tokens=context, context=0
            )
            self._kept.leave(key)
            heapq.heappush(self._queue, ((), serial - FRONT, again))

    @property
    def counters(self) -> Counters:
        """Counters of the work so far."""
        return replace(self._work)

    @property
    def is_running(self) -> bool:
        """Whether requests are running."""
        return bool(self._running)

    @property
    def is_fetching(self) -> bool:
        """Whether a request's KV is being fetched from host memory."""
        return bool(self._fetching)

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV in use."""
        return (math.ceil(self._context) if self._preempts else self._reserved) + self._kept.tokens

    # ---------------------------------------------------------------- time

    def stop_clock(self, now_s: float) -> None:
        """Stop counting at ``now_s``: recomputation started and not finished does not count."""
        self._advance(now_s)
        self._work.again_s = max(0.0, self._work.again_s - max(0.0, self._ready - now_s))

    def _advance(self, now_s: float) -> None:
        if self._running:
            begun = max(self._now, self._ready)
            if now_s > begun and self._step_s > 0.0:
                steps = (now_s - begun) / self._step_s
                self._steps += steps
                self._context += steps * len(self._running)
            self._work.busy_s += now_s - self._now
            if self._now < self._loading[1]:
                self._work.load_s += max(0.0, min(now_s, self._loading[1]) - max(self._now, self._loading[0]))
        self._now = now_s
        if self._preempts:
            while (
                self._kept.entries and self.kv_tokens > self._tables.kv_capacity_tokens
            ):  # running requests have grown into it
                self._kept.evict_oldest()

    def _admit(self) -> None:
        capacity, most = self._tables.kv_capacity_tokens, self._tables.max_contexts
        while self._queue:
            request = self._queue[0][2]
            need = request.room_tokens
            if self._preempts:
                need = request.context_tokens + 1
                if self._running and self._context + need > capacity * (1.0 - WATERMARK):
                    break
            elif self._reserved + need > capacity:
                break
            if most is not None and len(self._running) >= most:
                break
            heapq.heappop(self._queue)
            cached = self._kept.drop(request.key)
            while self.kv_tokens + need > capacity or (
                most is not None and self._kept.entries and len(self._running) + len(self._kept.entries) >= most
            ):
                self._kept.evict_oldest()
            self._start(request, min(cached, request.context_tokens))
        self._work.peak_kv_tokens = max(self._work.peak_kv_tokens, self.kv_tokens)
        self.changes += 1

    def _start(self, request: Request, cached: int) -> None:
        if not cached and request.context in self._kept.first_with:
            cached = request.context_tokens - 1  # the last token must be fed
        elif not cached:
            if self._kept.groups.get(request.group):
                cached = min(request.prompt_tokens, request.context_tokens)
            self._kept.leave(request.key)
            if request.context:
                self._kept.begins_with(request.key, request.context)
        self._requests[request.key] = request
        self._kept.join_group(request.group)
        self._reserved += request.room_tokens
        if self._host is not None and (held := min(self._host.tokens(request.key), request.context_tokens)) > cached:
            seconds = self._host.fetch(held - cached, self._tables.prefill_s(held - cached, cached))
            if seconds:
                heapq.heappush(self._fetching, (self._now + seconds, self._serial, request.key, held))
                return
        self._run(request, cached)

    def _run(self, request: Request, cached: int) -> None:
        self._work.cached_tokens += cached
        again = max(0, min(request.computed_tokens, request.context_tokens) - cached)
        self._work.recomputed_tokens += again
        self._compute(request.context_tokens - cached, cached, again)
        self._context += request.context_tokens
        self._serial += 1
        heapq.heappush(self._running, (self._steps + request.new_tokens, self._serial, request.key))

    def _compute(self, new_tokens: int, past_tokens: int, again: int) -> None:
        """Compute context; ``again`` of its tokens had been computed before by some engine."""
        if new_tokens <= 0:
            return
        self._work.prefilled_tokens += new_tokens
        factor = 1.0 if self._residuals is None else self._residuals.prefill_factor(self._rng)
        seconds = factor * self._tables.prefill_s(new_tokens, past_tokens)
        self._ready = max(self._ready, self._now) + seconds
        self._work.again_s += seconds * again / new_tokens
