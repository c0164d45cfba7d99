"""Continuous batching over slots: which request runs where, and one step for all of them. One thread, no asyncio.

A running slot *knows* its tokens (context, then what was generated) and has the first ``cached`` of them in the KV cache.
A step feeds every running slot the tokens it knows but has not cached: one where it decodes, a chunk where it prefills.
Whoever is then level gets its next token. An in-flight weight update is therefore one line: ``cached = 0``.

Invariants
1. ``cached < known`` for every running slot before a step, and every running slot advances unless the step's prefill
   budget is spent on slots ahead of it, or the same context is just being computed in another slot (samples of a group
   ask the same): then it takes that KV over when it is there.
2. A slot is free, retained (a trajectory between two turns) or running; a trajectory has at most one slot and one request.
3. Requests start in order of (priority, arrival). Where no slot is free the least recently used retained one is evicted,
   those of waiting trajectories last. A running one never is.
4. All cached KV was computed by the weights in use: ``load`` drops it. So a token's KV version equals its weight version.
5. What was cached is reused only as far as its tokens equal the new context, compared one by one.
6. Contexts of running requests with all that they may still generate, and contexts retained, are never more than ``kv_tokens``.
   That counts tokens; the memory they lie in is that of the longest for every slot (`libra.rollout.kv_slots`).
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from libra.errors import EngineError
from libra.rollout import layer_probes
from libra.rollout.decode_forward import Forward
from libra.rollout.engine import EngineStats
from libra.rollout.engine_capacity import PassMeter
from libra.rollout.kv_slots import Chunk, SlotKV, Step
from libra.rollout.request_checks import check_request
from libra.rollout.sampling import draw_uniforms, sample
from libra.rollout.weight_loading import copy_weights
from libra.types import StopReason, TurnOutput, TurnRequest

FREE, RETAINED, RUNNING = 0, 1, 2
PREFILL_TOKENS_PER_STEP = 4096
"""Most context tokens computed in one step, so that a burst of long prompts neither stalls decoding nor fills memory."""
SPAN_SLACK = 1.25
"""Slots are swapped together once the running ones are spread over more than this many times their number."""


@dataclass(slots=True)
class Job:
    """A request on its way through the engine. ``ticket`` is its arrival number; times are perf_counter seconds."""

    ticket: int
    request: TurnRequest
    arrived_s: float
    slot: int = -1
    first_s: float | None = None
    cached_tokens: int = 0
    versions: list[tuple[int, int]] = field(default_factory=list)  # (first token generated under it, version)


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
    ) -> None:
        self.model, self.version, self.exact_logprobs = model, version, exact_logprobs
        self.kv_tokens = slots * max_context_tokens if kv_tokens is None else kv_tokens
        self.min_pass_s, self.meter = min_pass_s, PassMeter()
        self.vocab_size: int = model.config.vocab_size
        # One slot more than requests can have: that of `score`.
        head = model.get_output_embeddings().weight
        self.kv = SlotKV(model.config, slots + 1, max_context_tokens, head.dtype, head.device)
        self.forward = Forward(model, self.kv, fused=fused)
        self.max_context_tokens = max_context_tokens
        self.state = np.zeros(slots, np.int8)
        self.known = np.zeros(slots, np.int64)  # tokens of the slot's trajectory, in ``tokens``
        self.cached = np.zeros(slots, np.int64)  # of those, in the KV cache
        self.generated = np.zeros(slots, np.int64)  # of those, sampled for the running request
        self.rescored = np.zeros(slots, np.int64)  # of those, scored alone (where exact_logprobs asks for it)
        self.limit = np.zeros(slots, np.int64)  # most tokens the running request may generate
        self.used_at = np.zeros(slots, np.int64)  # step in which the slot last ran
        self.tokens = np.zeros((slots, max_context_tokens), np.int64)
        self.logprobs = np.zeros((slots, max_context_tokens), np.float32)
        self.uniforms = np.zeros((slots, max_context_tokens), np.float32)
        self.temperature = np.ones(slots, np.float32)
        self.top_p = np.ones(slots, np.float32)
        self.stops = np.full((slots, 1), -1, np.int64)  # stop ids of each slot, padded with -1
        self.jobs: list[Job | None] = [None] * slots
        self.owner: list[str] = [""] * slots
        self.slot_of: dict[str, int] = {}
        self.waiting: list[tuple[tuple[int, ...], int, Job]] = []
        self.waiting_jobs: dict[str, Job] = {}
        self.forgotten: set[str] = set()  # trajectories to drop when their running request ends
        self.first_with: dict[bytes, str] = {}  # context -> the trajectory in a slot that was placed with it first
        self.context_of: dict[str, bytes] = {}  # the inverse
        self.following: dict[str, str] = {}  # running, nothing cached -> the one that computes the same context
        self.changed = True  # whether the set of running slots changed since the last step
        self.running = np.zeros(0, np.int64)
        self.steps = self.generated_tokens = self.prefilled_tokens = self.cached_tokens = 0
        self.busy_s = 0.0

    # -- requests ----------------------------------------------------------------------------------------------------

    def check(self, request: TurnRequest) -> None:
        """Raise where a request cannot be served at all; touches no state, so any thread may call it."""
        check_request(request, max_context_tokens=self.max_context_tokens, vocab_size=self.vocab_size)

    def submit(self, job: Job) -> None:
        """Queue a checked request; EngineError where its trajectory already has one here."""
        name = job.request.trajectory_id
        slot = self.slot_of.get(name)
        if name in self.waiting_jobs or (slot is not None and self.state[slot] == RUNNING):
            raise EngineError(f"{name}: already has a request in the engine; await it or abort it first")
        heapq.heappush(self.waiting, (tuple(job.request.priority), job.ticket, job))
        self.waiting_jobs[name] = job

    def abort(self, trajectory_id: str, ticket: int | None = None) -> tuple[Job, TurnOutput] | None:
        """End a trajectory's request (only the one of that ticket, where given) and free its KV."""
        job = self.waiting_jobs.get(trajectory_id)
        slot = self.slot_of.get(trajectory_id)
        if job is None and slot is not None:
            job = self.jobs[slot]
        if ticket is not None and (job is None or job.ticket != ticket):
            return None
        ended = None
        if job is not None and job.slot < 0:
            del self.waiting_jobs[trajectory_id]
            self.waiting = [entry for entry in self.waiting if entry[2] is not job]
            heapq.heapify(self.waiting)
            ended = job, self._output(job, StopReason.ABORT)
        elif job is not None:
            self._rescore(job.slot)
            ended = job, self._output(job, StopReason.ABORT)
        if slot is not None:
            self._free(slot)
        return ended

    def forget(self, trajectory_id: str) -> None:
        """Free a trajectory's KV now, or when its running request ends."""
        slot = self.slot_of.get(trajectory_id)
        if slot is None:
            return
        if self.state[slot] == RUNNING:
            self.forgotten.add(trajectory_id)
        else:
            self._free(slot)

    def load(self, version: int, directory: Path) -> None:
        """Copy new weights in, drop all KV they did not compute, and let running requests compute theirs again."""
        for slot in np.flatnonzero(self.state == RUNNING):
            self._rescore(int(slot))  # what was sampled so far can be scored under its weights only now
        copy_weights(self.model, directory)
        self.forward.weights_changed()
        self.version = version
        for slot in np.flatnonzero(self.state == RETAINED):
            self._free(int(slot))
        for slot in np.flatnonzero(self.state == RUNNING):
            self._running_job(int(slot)).versions.append((int(self.generated[slot]), version))
            self.cached[slot] = 0
        self.kv.resize(int(self.known[self.state == RUNNING].max(initial=1)))

    @torch.inference_mode()
    def score(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """Log-probability of every token but the first given those before it (T - 1,), prefilled through the served pass."""
        ids, slot = torch.from_numpy(np.asarray(token_ids, np.int64)), len(self.jobs)
        if not 2 <= len(ids) <= self.max_context_tokens:
            raise EngineError(f"score: got {len(ids)} tokens; allowed: 2 to {self.max_context_tokens}")
        self.kv.reserve(len(ids))
        chunk = Chunk(0, len(ids), slot, 0, len(ids))
        step = Step(self.kv, torch.full_like(ids, slot), torch.arange(len(ids)), 0, [chunk])
        logits = self.forward.logits(self.forward.hidden(ids, step)[:-1]).float()
        logp = torch.log_softmax(logits, -1).gather(1, ids[1:, None].to(logits.device))[:, 0]
        found: NDArray[np.float32] = logp.cpu().numpy()
        return found

    def project(self, seed: int) -> dict[str, tuple[float, ...]]:
        """Random projections of every layer as the served pass uses it; see `libra.projections`."""
        return layer_probes.project(layer_probes.used_layers(self.forward), seed, self.kv.dtype)

    def columns(self, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, NDArray[np.float32]]:
        """Columns of layers as the served pass uses them; see `libra.rollout.layer_probes.columns`."""
        layers = layer_probes.used_layers(self.forward)
        return layer_probes.columns(layers, layer_probes.used_vectors(self.forward), wanted, self.kv.dtype)

    def _rescore(self, slot: int) -> None:
        """Where exact log-probabilities are asked for: replace those of the tokens sampled under the weights in use."""
        known, generated = int(self.known[slot]), int(self.generated[slot])
        if not self.exact_logprobs or self.rescored[slot] == generated:
            return
        first = known - generated + int(self.rescored[slot])
        scored = self.forward.score_alone(self.tokens[slot, :known], first, float(self.temperature[slot]) or 1.0)
        self.logprobs[slot, self.rescored[slot] : generated] = scored
        self.rescored[slot] = generated

    def drop_all(self) -> list[Job]:
        """Forget every request and all KV after a fault; returns the requests, none of which was answered."""
        jobs = [job for job in self.jobs if job is not None] + list(self.waiting_jobs.values())
        for slot in range(len(self.jobs)):
            self._free(slot)
        self.waiting, self.waiting_jobs = [], {}
        self.kv.clear()
        return jobs

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self.waiting_jobs) or self.changed or len(self.running) > 0

    def stats(self) -> EngineStats:
        """Counters as they stand."""
        return EngineStats(
            running=int((self.state == RUNNING).sum()), waiting=len(self.waiting_jobs),
            retained=int((self.state == RETAINED).sum()), slots=len(self.jobs), version=self.version,
            generated_tokens=self.generated_tokens, prefilled_tokens=self.prefilled_tokens,
            cached_tokens=self.cached_tokens, busy_s=self.busy_s, steps=self.steps,
        )  # fmt: skip

    # -- one step ----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[tuple[Job, TurnOutput]]:
        """Admit who fits, run one forward pass, sample; returns the requests that ended."""
        begun_s = time.perf_counter()
        self._admit(begun_s)
        if self.changed:
            self._settle()
        if not len(self.running):
            return []
        if self.following:
            self._take_over()
        ids_T, step, level, level_rows = self._plan()
        hidden = self.forward.hidden(torch.from_numpy(ids_T), step)
        context_tokens, prefilled = int(self.known[level].sum()), len(ids_T) - step.num_rows
        ended: list[tuple[Job, TurnOutput]] = []
        if len(level):
            ended = self._sample(hidden if level_rows is None else hidden[level_rows], level)
        spent_s = time.perf_counter() - begun_s
        if spent_s < self.min_pass_s:
            time.sleep(self.min_pass_s - spent_s)
            spent_s = time.perf_counter() - begun_s
        self.steps += 1
        self.busy_s += spent_s
        self.meter.add(len(level), context_tokens, prefilled, spent_s)
        return ended

    def _settle(self) -> None:
        """Bring the running slots close together and note what they ask of sampling."""
        running = np.flatnonzero(self.state == RUNNING)
        if len(running) and running[-1] - running[0] + 1 > SPAN_SLACK * len(running) + 2:
            holes = np.flatnonzero(self.state[: len(running)] != RUNNING)
            for hole, slot in zip(holes, running[running >= len(running)], strict=True):
                self._swap(int(hole), int(slot))
            running = np.arange(len(running))
        self.running, self.changed = running, False
        self.any_temperature = bool((self.temperature[running] != 1).any())
        self.any_top_p = bool((self.top_p[running] < 1).any())

    def _plan(self) -> tuple[NDArray[np.int64], Step, NDArray[np.int64], torch.Tensor | None]:
        """Tokens to feed, where they go, the slots that then know no more than is cached, and their rows (None: all)."""
        running, cached = self.running, self.cached[self.running]
        known = self.known[running]
        self.kv.reserve(int(known.max()))
        if self.following:
            leads = np.array([self.owner[slot] not in self.following for slot in running])
            running, cached, known = running[leads], cached[leads], known[leads]
        need = known - cached
        if need.max() == 1:
            step = Step(self.kv, torch.from_numpy(running), torch.from_numpy(cached), len(running))
            step.view_span(running, cached)
            self.cached[running] += 1
            return self.tokens[running, cached], step, running, None
        decoding = need == 1
        slots, positions = [running[decoding]], [cached[decoding]]
        rows, level, budget = int(decoding.sum()), [running[decoding]], PREFILL_TOKENS_PER_STEP
        total, last_rows, chunks = rows, list(range(rows)), []
        for slot in sorted(running[~decoding], key=lambda slot: self._running_job(slot).ticket):
            start = int(self.cached[slot])
            take = min(int(self.known[slot]) - start, budget)
            if take == 0:
                break
            budget -= take
            chunks.append(Chunk(total, total + take, int(slot), start, start + take))
            slots.append(np.full(take, slot))
            positions.append(np.arange(start, start + take))
            total += take
            self.cached[slot] += take
            self.prefilled_tokens += take
            if start + take == self.known[slot]:
                level.append(np.array([slot]))
                last_rows.append(total - 1)
        slot_T, position_T = np.concatenate(slots), np.concatenate(positions)
        step = Step(self.kv, torch.from_numpy(slot_T), torch.from_numpy(position_T), rows, chunks)
        if rows:
            step.view_span(slots[0], positions[0])
            self.cached[slots[0]] += 1
        return self.tokens[slot_T, position_T], step, np.concatenate(level), torch.tensor(last_rows)

    def _take_over(self) -> None:
        """Give slots that wait for the KV of another what is there by now; one whose leader is gone leads itself."""
        ready: dict[int, list[int]] = {}
        for name, leader in list(self.following.items()):
            slot, source = self.slot_of[name], self.slot_of.get(leader)
            known = int(self.known[slot])
            if source is None or (self.tokens[source, :known] != self.tokens[slot, :known]).any():
                del self.following[name]
                self._lead(name, self.tokens[slot, :known].tobytes())
            elif self.cached[source] >= known - 1:
                del self.following[name]
                ready.setdefault(source, []).append(slot)
        for source, slots in ready.items():
            shared = int(self.known[slots[0]]) - 1  # the last token must be fed to give logits
            self.kv.copy(source, slots, shared)
            self.cached[slots] = shared
            self.cached_tokens += shared * len(slots)
            for slot in slots:
                self._running_job(slot).cached_tokens = shared

    def _lead(self, name: str, context: bytes) -> None:
        """Let others with this context follow ``name``, or ``name`` follow whoever has it."""
        self._leave(name)
        leader = self.first_with.setdefault(context, name)
        if leader == name:
            self.context_of[name] = context
        else:
            self.following[name] = leader

    def _leave(self, name: str) -> None:
        """``name`` neither leads nor follows any more."""
        self.following.pop(name, None)
        context = self.context_of.pop(name, None)
        if context is not None:
            del self.first_with[context]

    def _sample(self, hidden: torch.Tensor, slots: NDArray[np.int64]) -> list[tuple[Job, TurnOutput]]:
        """Give each of these slots its next token; returns the requests that this ended."""
        index = self.generated[slots]
        device = self.kv.device
        tokens, logprobs = sample(
            self.forward.logits(hidden),
            torch.from_numpy(self.uniforms[slots, index]).to(device),
            torch.from_numpy(self.temperature[slots]).to(device) if self.any_temperature else None,
            torch.from_numpy(self.top_p[slots]).to(device) if self.any_top_p else None,
        )
        ids, nats = tokens.cpu().numpy(), logprobs.cpu().numpy()
        if not np.isfinite(nats).all():
            raise EngineError(f"version {self.version}: logits are not finite; the weights are broken")
        self.tokens[slots, self.known[slots]] = ids
        self.logprobs[slots, index] = nats
        self.known[slots] += 1
        self.generated[slots] += 1
        self.generated_tokens += len(slots)
        stopped = (ids[:, None] == self.stops[slots]).any(axis=1)
        done = stopped | (index + 1 >= self.limit[slots])
        return [self._finish(int(slots[row]), bool(stopped[row])) for row in np.flatnonzero(done)] if done.any() else []

    # -- slots -------------------------------------------------------------------------------------------------------

    def _admit(self, now_s: float) -> None:
        while self.waiting:
            job = self.waiting[0][2]
            name = job.request.trajectory_id
            slot = self.slot_of.get(name)
            if not self._make_room(len(job.request.context_ids) + job.request.max_new_tokens, slot):
                return
            slot = self._room() if slot is None else slot
            if slot is None:
                return
            heapq.heappop(self.waiting)
            del self.waiting_jobs[name]
            self._place(job, slot, now_s)

    def _room(self) -> int | None:
        """A slot for a trajectory that has none: the lowest free one, else the retained one least worth keeping."""
        free = np.flatnonzero(self.state == FREE)
        if len(free):
            return int(free[0])
        slot = self._least_worth()
        if slot is not None:
            self._free(slot)
        return slot

    def _least_worth(self, but: int | None = None) -> int | None:
        """The retained slot least worth keeping: of those that wait last, then least recently used; None where there is none."""
        retained = [int(slot) for slot in np.flatnonzero(self.state == RETAINED) if slot != but]
        return min(retained, key=lambda slot: (self.owner[slot] in self.waiting_jobs, self.used_at[slot]), default=None)

    def _make_room(self, need: int, own: int | None) -> bool:
        """Whether ``need`` tokens of KV fit beside what runs, in place of slot ``own``; retained ones make way."""
        running = self.state == RUNNING
        reserved = int((self.known[running] - self.generated[running] + self.limit[running]).sum())
        if reserved + need > self.kv_tokens:
            return False
        while reserved + need + self._retained_tokens(own) > self.kv_tokens:
            slot = self._least_worth(own)
            assert slot is not None, "what is retained was counted, and is not there"
            self._free(slot)
        return True

    def _retained_tokens(self, but: int | None) -> int:
        retained = self.state == RETAINED
        return int(self.known[retained].sum()) - (int(self.known[but]) if but is not None else 0)

    def _place(self, job: Job, slot: int, now_s: float) -> None:
        request = job.request
        context, length = request.context_ids, len(request.context_ids)
        reuse = 0
        if self.state[slot] == RETAINED:
            shared = min(int(self.cached[slot]), length - 1)  # the last token must be fed to give logits
            differs = self.tokens[slot, :shared] != context[:shared]
            reuse = int(differs.argmax()) if differs.any() else shared
        if len(request.stop_ids) > self.stops.shape[1]:
            wider = ((0, 0), (0, len(request.stop_ids) - self.stops.shape[1]))
            self.stops = np.pad(self.stops, wider, constant_values=-1)
        self.stops[slot] = -1
        self.stops[slot, : len(request.stop_ids)] = request.stop_ids
        self.tokens[slot, :length] = context
        self.known[slot], self.cached[slot], self.generated[slot], self.rescored[slot] = length, reuse, 0, 0
        self.limit[slot] = request.max_new_tokens
        self.uniforms[slot, : request.max_new_tokens] = draw_uniforms(request.seed, request.max_new_tokens)
        self.temperature[slot], self.top_p[slot] = request.temperature, request.top_p
        self.state[slot], self.jobs[slot], self.owner[slot] = RUNNING, job, request.trajectory_id
        self.slot_of[request.trajectory_id] = slot
        if reuse == 0 and length > 1:
            self._lead(request.trajectory_id, self.tokens[slot, :length].tobytes())
        job.slot, job.first_s, job.cached_tokens, job.versions = slot, now_s, reuse, [(0, self.version)]
        self.cached_tokens += reuse
        self.changed = True

    def _running_job(self, slot: int) -> Job:
        job = self.jobs[slot]
        assert job is not None, f"slot {slot} runs without a request"
        return job

    def _finish(self, slot: int, stopped: bool) -> tuple[Job, TurnOutput]:
        """Answer a slot's request and keep its KV for the next turn."""
        job = self._running_job(slot)
        self._rescore(slot)
        output = self._output(job, StopReason.STOP if stopped else StopReason.LENGTH)
        self.jobs[slot], self.state[slot], self.used_at[slot] = None, RETAINED, self.steps
        self.changed = True
        if self.owner[slot] in self.forgotten:
            self._free(slot)
        return job, output

    def _free(self, slot: int) -> None:
        self.slot_of.pop(self.owner[slot], None)
        self.forgotten.discard(self.owner[slot])
        self._leave(self.owner[slot])
        self.owner[slot], self.jobs[slot], self.state[slot] = "", None, FREE
        self.known[slot] = self.cached[slot] = 0
        self.changed = True

    def _swap(self, one: int, other: int) -> None:
        self.kv.swap(one, other, int(max(self.cached[one], self.cached[other])))
        pair, swapped = [one, other], [other, one]
        for column in (
            self.state, self.known, self.cached, self.generated, self.rescored, self.limit, self.used_at, self.tokens,
            self.logprobs, self.uniforms, self.temperature, self.top_p, self.stops,
        ):  # fmt: skip
            column[pair] = column[swapped]
        self.jobs[one], self.jobs[other] = self.jobs[other], self.jobs[one]
        self.owner[one], self.owner[other] = self.owner[other], self.owner[one]
        for slot in pair:
            job = self.jobs[slot]
            if self.owner[slot]:
                self.slot_of[self.owner[slot]] = slot
            if job is not None:
                job.slot = slot

    def _output(self, job: Job, reason: StopReason) -> TurnOutput:
        now_s = time.perf_counter()
        slot, count = job.slot, int(self.generated[job.slot]) if job.slot >= 0 else 0
        first = len(job.request.context_ids)
        versions = np.empty(count, np.int32)
        for begin, version in job.versions:
            versions[begin:] = version
        first_s = now_s if job.first_s is None else job.first_s
        return TurnOutput(
            token_ids=self.tokens[slot, first : first + count].astype(np.int32),
            logprobs=self.logprobs[slot, :count].copy(),
            weight_versions=versions,
            kv_versions=versions.copy(),
            stop_reason=reason,
            cached_tokens=job.cached_tokens,
            queued_s=first_s - job.arrived_s,
            busy_s=now_s - first_s,
        )
