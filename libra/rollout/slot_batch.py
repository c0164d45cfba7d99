"""Continuous batching over slots: the slot of each request, and one step for all, on one thread.

A step feeds every running slot its tokens without cached KV: one token if it decodes, a chunk if it
prefills. A slot whose tokens are then all cached gets its next token. An in-flight weight update
sets ``cached = 0``.

1. Every running slot advances, unless the step's prefill budget is spent on earlier slots, or
   another slot is computing the same context: then the KV is copied (`libra.rollout.slot_table`).
2. A trajectory has at most one slot and one request. Requests start in order of (priority,
   arrival). If no slot is free, the least recently used retained slot is evicted (to ``host_kv`` if
   there is one), slots of waiting trajectories last. A running slot is never evicted.
3. All cached KV was computed by the weights in use, because ``load`` drops older KV. Cached KV is
   reused only as far as its tokens equal the new context, compared one by one.
4. With ``speculate`` a slot keeps only drafted tokens that equal the tokens sampled at their
   places, whose uniform numbers were fixed before. So drafts change no token, and no KV that is
   used.
5. Contexts of running requests with all tokens that they may still generate, plus retained
   contexts, never exceed ``kv_tokens``. Memory is allocated for the longest context in every slot.
6. With ``record_routes`` (a mixture of experts) a turn returns the experts of every token whose KV
   it computed, or of all tokens if the weights changed: the last choice for each token counts.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from libra.errors import EngineError
from libra.experts import Routers
from libra.rollout.attention import Chunk, SlotKV, Step
from libra.rollout.capacity import PassMeter
from libra.rollout.engine import EngineCounters, EngineStats, check_request
from libra.rollout.forward import Forward
from libra.rollout.kv_objects import HostKV, KVObject, ParkedKV
from libra.rollout.slot_table import (
    FREE,
    RETAINED,
    RUNNING,
    FurtherDraws,
    Job,
    RequestQueue,
    SharedContexts,
    SlotTable,
    drawn_of,
    sample,
)
from libra.rollout.speculation import DraftedStep, GroupSpeculation, accepted
from libra.rollout.weight_loading import copy_weights
from libra.types import StopReason, TurnOutput, TurnRequest

PREFILL_TOKENS_PER_STEP = 4096
"""Most context tokens of one step, so that long prompts neither stall decoding nor fill memory."""


class SlotBatch:
    """A model, its slots, and the requests in and before them."""

    def __init__(
        self,
        model: Any,
        *,
        slots: int,
        max_context_tokens: int,
        version: int,
        fused: bool = True,
        exact_logprobs: bool = False,
        kv_tokens: int | None = None,
        min_pass_s: float = 0.0,
        speculate: bool = False,
        host_kv: HostKV | None = None,
        record_routes: bool = False,
    ) -> None:
        self.model, self.version, self.exact_logprobs = model, version, exact_logprobs
        self.kv_tokens = slots * max_context_tokens if kv_tokens is None else kv_tokens
        self.min_pass_s, self.meter, self.counters = min_pass_s, PassMeter(), EngineCounters()
        # One slot more than requests can have, for `score`.
        head = model.get_output_embeddings().weight
        self.kv = SlotKV(model.config, slots + 1, max_context_tokens, head.dtype, head.device)
        self.forward = Forward(model, self.kv, fused=fused)
        self.routers = Routers(model, listen=True) if record_routes else None
        self.table = SlotTable(slots, max_context_tokens, self.routers.shape if self.routers is not None else ())
        self.parked = ParkedKV(self.kv, self.table, host_kv)
        self.queue: RequestQueue[Job] = RequestQueue(slots)
        self.shared = SharedContexts()
        self.speculation = GroupSpeculation() if speculate else None
        self.further = FurtherDraws()
        self.forgotten: set[str] = set()  # trajectories to drop when their running request ends

    @property
    def max_context_tokens(self) -> int:
        """Maximum context plus generated tokens of one request."""
        return self.table.tokens.shape[1]

    def check(self, request: TurnRequest) -> None:
        """Raise if a request cannot be served at all; any thread may call it."""
        vocab_size = self.model.config.vocab_size
        check_request(request, max_context_tokens=self.max_context_tokens, vocab_size=vocab_size)

    def submit(self, job: Job) -> None:
        """Queue a checked request; EngineError if its trajectory already has a request here."""
        self.queue.push(job)

    def abort(self, trajectory_id: str, ticket: int | None = None) -> tuple[Job, TurnOutput] | None:
        """End a trajectory's request (only with this ticket, if given) and free its KV."""
        job, slot = self.queue.find(trajectory_id), self.table.slot_of.get(trajectory_id)
        if ticket is not None and (job is None or job.ticket != ticket):
            return None
        ended = None
        if job is not None:
            if job.slot >= 0:
                self._rescore(job.slot)
            ended = job, self._output(job, StopReason.ABORT)
            self.queue.end(job)
        if slot is not None:
            self._free(slot)
        self.parked.forget(trajectory_id)
        return ended

    def forget(self, trajectory_id: str) -> None:
        """Free a trajectory's KV now, or when its running request ends."""
        self.parked.forget(trajectory_id)
        slot = self.table.slot_of.get(trajectory_id)
        if slot is None:
            return
        if self.table.state[slot] == RUNNING:
            self.forgotten.add(trajectory_id)
        else:
            self._free(slot)

    def export_kv(self, trajectory_id: str) -> KVObject | None:
        return self.parked.export(trajectory_id, self.version, self.queue.waiting)

    def park_kv(self) -> None:
        for slot in self.table.of_state(RETAINED):
            self._evict(slot)

    def load(self, version: int, directory: Path) -> None:
        """Copy new weights in and drop all KV; running requests compute their KV again."""
        table, running = self.table, self.table.of_state(RUNNING)
        for slot in running:
            self._rescore(slot)  # the tokens sampled so far can be scored under their weights only now
        copy_weights(self.model, directory)
        self.forward.weights_changed()
        self.version = version
        for slot in table.of_state(RETAINED):
            self._free(slot)
        self.parked.loaded(version)
        for slot in running:
            table.running_job(slot).versions.append((int(table.generated[slot]), version))
            table.cached[slot] = table.routed[slot] = 0
        self.kv.resize(int(table.known[running].max(initial=1)))

    @torch.inference_mode()
    def score(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """See RolloutEngine; prefilled through the served pass."""
        ids, slot = torch.from_numpy(np.asarray(token_ids, np.int64)), len(self.table.jobs)
        if not 2 <= len(ids) <= self.max_context_tokens:
            raise EngineError(f"score: got {len(ids)} tokens; allowed: 2 to {self.max_context_tokens}")
        self.kv.reserve(len(ids))
        chunk = Chunk(0, len(ids), slot, 0, len(ids))
        step = Step(self.kv, torch.full_like(ids, slot), torch.arange(len(ids)), 0, [chunk])
        logits = self.forward.logits(self.forward.hidden(ids, step)[:-1]).float()
        logp = torch.log_softmax(logits, -1).gather(1, ids[1:, None].to(logits.device))[:, 0]
        found: NDArray[np.float32] = logp.cpu().numpy()
        return found

    def _rescore(self, slot: int) -> None:
        table = self.table
        known, generated, rescored = int(table.known[slot]), int(table.generated[slot]), int(table.rescored[slot])
        if not self.exact_logprobs or rescored == generated:  # else score what the weights in use sampled
            return
        temperature = float(table.sampling.temperature[slot]) or 1.0
        scored = self.forward.score_alone(table.tokens[slot, :known], known - generated + rescored, temperature)
        table.logprobs[slot, rescored:generated] = scored
        table.rescored[slot] = generated

    def drop_all(self) -> list[Job]:
        """Drop every request and all KV after a fault; returns the unanswered requests."""
        jobs = self.queue.jobs()
        for job in jobs:
            self.queue.end(job)
        for slot in range(len(self.table.jobs)):
            self._free(slot)
        self.kv.clear()
        return jobs

    @property
    def has_work(self) -> bool:
        return bool(self.queue.waiting) or self.table.changed or len(self.table.running) > 0

    def stats(self) -> EngineStats:
        return self.counters.stats(
            running=int(np.count_nonzero(self.table.state == RUNNING)), waiting=len(self.queue.waiting),
            retained=int(np.count_nonzero(self.table.state == RETAINED)), slots=len(self.table.jobs), version=self.version,
            drafted_by_rows={} if self.speculation is None else dict(self.speculation.length.by_rows),
        )  # fmt: skip

    @torch.inference_mode()
    def step(self) -> list[tuple[Job, TurnOutput]]:
        """Admit requests, run one forward pass, sample; returns the requests that ended."""
        begun_s = time.perf_counter()
        self._admit(begun_s)
        if self.table.changed:
            self.table.settle(self.kv)
        if not len(self.table.running):
            return []
        if self.shared.following:
            self._take_over()
        asked = 0
        if self.speculation is not None and not self.shared.following:
            asked, drafted = self.speculation.draft(self.table)
            if drafted is not None:
                return self._verify(self.speculation, drafted, begun_s)
        ids_T, step, level, level_rows = self._plan()
        hidden = self.forward.hidden(torch.from_numpy(ids_T), step)
        self._keep_routes(step)
        context_tokens, prefilled = int(self.table.known[level].sum()), len(ids_T) - step.num_rows
        ended: list[tuple[Job, TurnOutput]] = []
        if len(level):
            ended = self._sample(hidden if level_rows is None else hidden[level_rows], level)
        spent_s = self._end_pass(begun_s)
        self.meter.add(len(level), context_tokens, prefilled, spent_s)
        if self.speculation is not None and not prefilled:
            self.speculation.length.measured(len(level), asked, 0, len(level), spent_s)
        return ended

    def _keep_routes(self, step: Step) -> None:
        if self.routers is not None and self.table.routes is not None:
            places = step.slot_T.cpu().numpy(), step.position_T.cpu().numpy()
            self.table.routes[places] = self.routers.take().to(torch.int16).cpu().numpy()

    def _end_pass(self, begun_s: float) -> float:
        spent_s = time.perf_counter() - begun_s
        if spent_s < self.min_pass_s:
            time.sleep(self.min_pass_s - spent_s)
            spent_s = time.perf_counter() - begun_s
        self.counters.steps += 1
        self.counters.busy_s += spent_s
        return spent_s

    def _plan(self) -> tuple[NDArray[np.int64], Step, NDArray[np.int64], torch.Tensor | None]:
        table, following = self.table, self.shared.following
        running, cached = table.running, table.cached[table.running]
        known = table.known[running]
        self.kv.reserve(int(known.max()))
        if following:
            leads = np.array([table.owner[slot] not in following for slot in running])
            running, cached, known = running[leads], cached[leads], known[leads]
        need = known - cached
        if need.max() == 1:
            step = Step(self.kv, torch.from_numpy(running), torch.from_numpy(cached), len(running))
            step.view_span(running, cached)
            table.cached[running] += 1
            return table.tokens[running, cached], step, running, None
        decoding = need == 1
        slots, positions = [running[decoding]], [cached[decoding]]
        rows, level, budget = int(decoding.sum()), [running[decoding]], PREFILL_TOKENS_PER_STEP
        total, last_rows, chunks = rows, list(range(rows)), []
        for slot in sorted(running[~decoding], key=lambda slot: table.running_job(slot).ticket):
            start = int(table.cached[slot])
            take = min(int(table.known[slot]) - start, budget)
            if take == 0:
                break
            budget -= take
            chunks.append(Chunk(total, total + take, int(slot), start, start + take))
            slots.append(np.full(take, slot))
            positions.append(np.arange(start, start + take))
            total += take
            table.cached[slot] += take
            self.counters.prefilled_tokens += take
            if start + take == table.known[slot]:
                level.append(np.array([slot]))
                last_rows.append(total - 1)
        slot_T, position_T = np.concatenate(slots), np.concatenate(positions)
        step = Step(self.kv, torch.from_numpy(slot_T), torch.from_numpy(position_T), rows, chunks)
        if rows:
            step.view_span(slots[0], positions[0])
            table.cached[slots[0]] += 1
        return table.tokens[slot_T, position_T], step, np.concatenate(level), torch.tensor(last_rows)

    def _take_over(self) -> None:
        table, ready = self.table, dict[int, list[int]]()
        for name, leader in list(self.shared.following.items()):
            slot, source = table.slot_of[name], table.slot_of.get(leader)
            known = int(table.known[slot])
            if source is None or (table.tokens[source, :known] != table.tokens[slot, :known]).any():
                self.shared.join(name, table.tokens[slot, :known].tobytes())
            elif table.cached[source] >= known - 1:
                self.shared.leave(name)
                ready.setdefault(source, []).append(slot)
        for source, slots in ready.items():
            shared = int(table.known[slots[0]]) - 1  # the last token must be fed to give logits
            self.kv.copy(source, slots, shared)
            table.cached[slots] = shared
            if table.routes is not None:
                table.routes[slots, :shared] = table.routes[source, :shared]
            self.counters.cached_tokens += shared * len(slots)
            for slot in slots:
                table.running_job(slot).cached_tokens = shared

    def _sample(self, hidden: torch.Tensor, slots: NDArray[np.int64]) -> list[tuple[Job, TurnOutput]]:
        table, sampling = self.table, self.table.sampling
        index = table.generated[slots]
        ids, nats = self._drawn(hidden, slots, index)
        self.further.keep(table, slots)
        table.tokens[slots, table.known[slots]] = ids
        table.logprobs[slots, index] = nats
        table.known[slots] += 1
        table.generated[slots] += 1
        if not index.all():
            now_s = time.perf_counter()
            for slot in slots[index == 0]:
                table.running_job(slot).first_s = now_s
        self.counters.generated_tokens += len(slots)
        stopped = (ids[:, None] == sampling.stops[slots]).any(axis=1)
        done = stopped | (index + 1 >= sampling.limit[slots])
        return [self._finish(int(slots[row]), bool(stopped[row])) for row in np.flatnonzero(done)] if done.any() else []

    def _drawn(
        self, hidden: torch.Tensor, slots: NDArray[np.int64], index: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        sampling, device = self.table.sampling, self.kv.device
        logits = self.forward.logits(hidden)
        self.further.draw(logits, self.table, slots, index)
        tokens, logprobs = sample(
            logits,
            torch.from_numpy(sampling.uniforms[slots, index]).to(device),
            torch.from_numpy(sampling.temperature[slots]).to(device) if sampling.any_temperature else None,
            torch.from_numpy(sampling.top_p[slots]).to(device) if sampling.any_top_p else None,
        )
        ids, nats = tokens.cpu().numpy(), logprobs.cpu().numpy()
        if not np.isfinite(nats).all():
            raise EngineError(f"version {self.version}: logits are not finite; the weights are broken")
        return ids, nats

    def _verify(
        self, speculation: GroupSpeculation, drafted: DraftedStep, begun_s: float
    ) -> list[tuple[Job, TurnOutput]]:
        table, sampling, slots = self.table, self.table.sampling, drafted.slots
        self.kv.reserve(int(table.known[slots].max()) + drafted.longest)
        ids_T, step = drafted.step(self.kv, table.tokens, table.cached)
        rows, offsets = np.repeat(slots, drafted.rows), drafted.offsets
        hidden = self.forward.hidden(torch.from_numpy(ids_T), step)
        self._keep_routes(step)
        ids, nats = self._drawn(hidden, rows, table.generated[rows] + offsets)
        ended, generated = list[tuple[Job, TurnOutput]](), 0
        for slot, tokens, begin in zip(slots, drafted.drafts, drafted.begins, strict=True):
            kept = accepted(tokens, ids[begin : begin + len(tokens) + 1].tolist(), set(sampling.stops[slot].tolist()))
            known, index = int(table.known[slot]), int(table.generated[slot])
            table.tokens[slot, known : known + kept] = ids[begin : begin + kept]
            table.logprobs[slot, index : index + kept] = nats[begin : begin + kept]
            self.further.keep(table, np.full(kept, slot), begin)
            table.known[slot], table.generated[slot], table.cached[slot] = known + kept, index + kept, known + kept - 1
            generated += kept
            stopped = bool((ids[begin + kept - 1] == sampling.stops[slot]).any())
            if stopped or index + kept >= sampling.limit[slot]:
                ended.append(self._finish(int(slot), stopped))
        num_drafted, spent_s = len(ids) - len(slots), self._end_pass(begun_s)
        self.counters.generated_tokens += generated
        self.counters.drafted_tokens += num_drafted
        self.counters.accepted_tokens += generated - len(slots)
        speculation.length.measured(len(slots), drafted.length, num_drafted, generated, spent_s)
        return ended

    def _admit(self, now_s: float) -> None:
        while (job := self.queue.first()) is not None:
            slot = self.table.slot_of.get(job.name)
            if not self._make_room(len(job.request.context_ids) + job.request.max_new_tokens, slot):
                return
            slot = self._room() if slot is None else slot
            if slot is None:
                return
            self.queue.begin(job)
            self.table.place(job, slot)
            reuse = self.parked.restore(job, self.version)
            context = self.table.tokens[slot, : len(job.request.context_ids)]
            self.shared.begin(job.name, context.tobytes(), reuse > 0 or len(context) == 1)
            job.started_s, job.cached_tokens, job.versions = now_s, reuse, [(0, self.version)]
            self.counters.cached_tokens += reuse

    def _room(self) -> int | None:
        free = self.table.of_state(FREE)
        if free:
            return free[0]
        slot = self.table.least_worth(self.queue.waiting)
        if slot is not None:
            self._evict(slot)
        return slot

    def _make_room(self, need: int, own: int | None) -> bool:
        reserved = self.table.reserved_tokens
        if reserved + need > self.kv_tokens:
            return False
        while reserved + need + self.table.retained_tokens(own) > self.kv_tokens:
            slot = self.table.least_worth(self.queue.waiting, own)
            assert slot is not None, "retained tokens were counted, but no slot is retained"
            self._evict(slot)
        return True

    def _evict(self, slot: int) -> None:
        self.parked.evicted(slot, self.version, self.queue.waiting)
        self._free(slot)

    def _finish(self, slot: int, stopped: bool) -> tuple[Job, TurnOutput]:
        job = self.table.running_job(slot)
        if self.speculation is not None:
            self.speculation.finished(job, self.table)
        self._rescore(slot)
        output = self._output(job, StopReason.STOP if stopped else StopReason.LENGTH)
        self.queue.end(job)
        self.table.retain(slot, self.counters.steps)
        if job.name in self.forgotten:
            self._free(slot)
        return job, output

    def _free(self, slot: int) -> None:
        owner = self.table.owner[slot]
        self.forgotten.discard(owner)
        self.shared.leave(owner)
        self.table.free(slot)

    def _output(self, job: Job, reason: StopReason) -> TurnOutput:
        table, slot, now_s = self.table, job.slot, time.perf_counter()
        first, count = len(job.request.context_ids), int(table.generated[slot]) if slot >= 0 else 0
        versions = job.token_versions(count)
        started_s = now_s if job.started_s is None else job.started_s
        routes, routed = table.new_routes(slot)
        return TurnOutput(
            token_ids=table.tokens[slot, first : first + count].astype(np.int32),
            logprobs=table.logprobs[slot, :count].copy(),
            weight_versions=versions,
            kv_versions=versions.copy(),
            stop_reason=reason,
            cached_tokens=job.cached_tokens,
            queued_s=started_s - job.arrived_s,
            busy_s=now_s - started_s,
            prefill_s=0.0 if job.first_s is None else job.first_s - started_s,
            routes=routes,
            routes_from=routed,
            drawn=drawn_of(job),
        )
