"""The queue of requests before an engine's slots, the slots in columns, and the sampling of tokens.

A slot *knows* its tokens (context, then generated tokens) and has the first ``cached`` tokens in
the KV cache. A token is drawn by inverse CDF from one uniform number, fixed by the request's seed;
further draws at a place have numbers of their own. Log-probabilities are of the distribution
sampled from; a greedy token (temperature 0) has the model's own.

1. A trajectory has at most one job, waiting or running. Jobs start in order of (priority, arrival),
   at most ``slots`` at once, and leave by ``end`` only.
2. A slot is free, retained (a trajectory between two turns) or running; a trajectory has at most
   one slot.
3. ``cached < known`` for every slot that is not free.
4. Running slots are close together after `SlotTable.settle`, which moves their KV and their
   columns.
5. Of the trajectories with one context, one leads; the others have nothing cached until the leader
   has computed the KV.

Shapes: N rows, M draws, V vocabulary.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from libra.errors import EngineError
from libra.rollout.attention import SlotKV
from libra.types import Drawn, TurnRequest


@dataclass(slots=True)
class QueuedJob:
    """A request, its arrival number ``ticket``, and its times in perf_counter seconds."""

    ticket: int
    request: TurnRequest
    arrived_s: float
    started_s: float | None = None

    @property
    def name(self) -> str:
        return self.request.trajectory_id


J = TypeVar("J", bound=QueuedJob)


@dataclass(slots=True)
class RequestQueue(Generic[J]):
    """Jobs waiting for one of ``slots`` places, and jobs that have a place."""

    slots: int
    running: dict[str, J] = field(default_factory=dict)
    waiting: dict[str, J] = field(default_factory=dict)
    _order: list[tuple[tuple[int, ...], int, J]] = field(default_factory=list)

    def push(self, job: J) -> None:
        """Queue a job; EngineError if its trajectory already has a job."""
        if job.name in self.waiting or job.name in self.running:
            raise EngineError(f"{job.name}: already has a request in the engine; await it or abort it first")
        self.waiting[job.name] = job
        heapq.heappush(self._order, (tuple(job.request.priority), job.ticket, job))

    def first(self) -> J | None:
        """The job that starts next."""
        while self._order:
            job = self._order[0][2]
            if self.waiting.get(job.name) is job:
                return job
            heapq.heappop(self._order)  # the job was removed while it waited
        return None

    def begin(self, job: J) -> None:
        """Give the `first` job its place."""
        heapq.heappop(self._order)
        self.running[job.name] = self.waiting.pop(job.name)

    def start(self) -> Iterator[J]:
        """Jobs that get one of the free places now, in order."""
        while len(self.running) < self.slots and (job := self.first()) is not None:
            self.begin(job)
            yield job

    def end(self, job: J) -> None:
        """Remove a job that has ended, waiting or running."""
        for place in (self.waiting, self.running):
            if place.get(job.name) is job:
                del place[job.name]
        if not self.waiting:
            self._order.clear()

    def find(self, trajectory_id: str) -> J | None:
        return self.running.get(trajectory_id) or self.waiting.get(trajectory_id)

    def jobs(self) -> list[J]:
        """All jobs, running jobs first."""
        return [*self.running.values(), *self.waiting.values()]


FREE, RETAINED, RUNNING = 0, 1, 2
SPAN_SLACK = 1.25
"""Span of the running slots, relative to their number, above which slots are swapped together."""

Slots = NDArray[np.int64]


def draw_uniforms(seed: int, num_tokens: int, first: int = 0) -> NDArray[np.float32]:
    """The uniform numbers in [0, 1) of a turn's tokens from ``first`` on (num_tokens,)."""
    return np.random.default_rng(seed).random(first + num_tokens, dtype=np.float32)[first:]


def sample(
    logits_NV: Tensor, uniforms_N: Tensor, temperature_N: Tensor | None, top_p_N: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Next token ids (N,) int64 and their log-probabilities (N,) float32. ``temperature_N`` None is
    1 everywhere, and ``top_p_N`` None cuts no row."""
    logits_NV = logits_NV.float()
    greedy_N = None
    if temperature_N is not None:
        greedy_N = temperature_N == 0
        logits_NV = logits_NV / torch.where(greedy_N, 1.0, temperature_N)[:, None]
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    if top_p_N is not None:
        cut_N = top_p_N if greedy_N is None else torch.where(greedy_N, 1.0, top_p_N)
        logprobs_NV = _keep_top_p(logprobs_NV, cut_N)
    cdf_NV = logprobs_NV.exp().cumsum_(dim=-1)
    total_N1 = cdf_NV[:, -1:]
    # Rounding may make u * total equal to the total, past the last token that has any probability.
    aim_N1 = torch.minimum(uniforms_N[:, None] * total_N1, torch.nextafter(total_N1, torch.zeros_like(total_N1)))
    tokens_N1 = torch.searchsorted(cdf_NV, aim_N1, right=True)
    # Only a row of NaN is searched to its end; the index is made valid, and its log-probability is NaN.
    tokens_N1.clamp_(max=logits_NV.shape[-1] - 1)
    if greedy_N is not None:
        tokens_N1 = torch.where(greedy_N[:, None], logits_NV.argmax(dim=-1, keepdim=True), tokens_N1)
    return tokens_N1[:, 0], logprobs_NV.gather(1, tokens_N1)[:, 0]


def _keep_top_p(logprobs_NV: Tensor, top_p_N: Tensor) -> Tensor:
    sorted_NV, order_NV = logprobs_NV.sort(dim=-1, descending=True, stable=True)
    probs_NV = sorted_NV.exp()
    before_NV = probs_NV.cumsum(dim=-1) - probs_NV
    # A token stays while the mass before it is short of top_p; rows at 1 keep everything, rounding or not.
    drop_NV = (before_NV >= top_p_N[:, None]) & (top_p_N < 1)[:, None]
    drop_NV = torch.zeros_like(drop_NV).scatter_(1, order_NV, drop_NV)
    kept_NV = logprobs_NV.masked_fill(drop_NV, -torch.inf)
    return torch.where((top_p_N < 1)[:, None], kept_NV - kept_NV.logsumexp(dim=-1, keepdim=True), kept_NV)


def draw_further(logits_NV: Tensor, uniforms_NM: Tensor, temperature_N: Tensor | None) -> tuple[Tensor, Tensor]:
    """M further tokens of each row (N, M) int64, and log-probabilities (N, M) float32. Rows without
    draws (temperature 0 or top_p below 1) are drawn at temperature 1 and uncut."""
    logits_NV = logits_NV.float()
    if temperature_N is not None:
        logits_NV = logits_NV / torch.where(temperature_N == 0, 1.0, temperature_N)[:, None]
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    cdf_NV = logprobs_NV.exp().cumsum_(dim=-1)
    total_N1 = cdf_NV[:, -1:]
    aim_NM = torch.minimum(uniforms_NM * total_N1, torch.nextafter(total_N1, torch.zeros_like(total_N1)))
    tokens_NM = torch.searchsorted(cdf_NV, aim_NM, right=True).clamp_(max=logits_NV.shape[-1] - 1)
    return tokens_NM, logprobs_NV.gather(1, tokens_NM)


def further_uniforms(seed: int, place: int, draws: int) -> NDArray[np.float32]:
    """The uniform numbers in [0, 1) of a turn's further tokens at a place (draws,)."""
    return np.random.default_rng((seed, place, 1)).random(draws, dtype=np.float32)


@dataclass(slots=True)
class Job(QueuedJob):
    """A request in a batch over slots."""

    slot: int = -1
    cached_tokens: int = 0
    versions: list[tuple[int, int]] = field(default_factory=list)
    first_s: float | None = None
    drawn: list[tuple[NDArray[np.int64], NDArray[np.float32]]] = field(default_factory=list)

    def token_versions(self, count: int) -> NDArray[np.int32]:
        """Version of the weights that generated each of the request's ``count`` tokens."""
        found = np.empty(count, np.int32)
        for begin, version in self.versions:
            found[begin:] = version
        return found


class SamplingColumns:
    """The sampling settings of each slot."""

    def __init__(self, slots: int, max_context_tokens: int) -> None:
        self.uniforms = np.zeros((slots, max_context_tokens), np.float32)
        self.temperature = np.ones(slots, np.float32)
        self.top_p = np.ones(slots, np.float32)
        self.limit = np.zeros(slots, np.int64)  # most tokens the running request may generate
        self.stops = np.full((slots, 1), -1, np.int64)  # stop ids of each slot, padded with -1
        self.any_temperature = self.any_top_p = False  # whether running slots need these inputs of `sample`

    def place(self, slot: int, request: TurnRequest) -> None:
        num_stops = len(request.stop_ids)
        if num_stops > self.stops.shape[1]:
            self.stops = np.pad(self.stops, ((0, 0), (0, num_stops - self.stops.shape[1])), constant_values=-1)
        self.stops[slot] = -1
        self.stops[slot, :num_stops] = request.stop_ids
        self.limit[slot] = request.max_new_tokens
        new = request.max_new_tokens
        self.uniforms[slot, :new] = draw_uniforms(request.seed, new, request.generated)
        self.temperature[slot], self.top_p[slot] = request.temperature, request.top_p

    def settle(self, running: Slots) -> None:
        """Update the sampling features that the running slots use."""
        self.any_temperature = bool((self.temperature[running] != 1).any())
        self.any_top_p = bool((self.top_p[running] < 1).any())


class SlotTable:
    """Columns of all slots, for one thread. ``routes``: layers and experts per token, or ()."""

    def __init__(self, slots: int, max_context_tokens: int, routes: tuple[int, ...] = ()) -> None:
        self.state = np.zeros(slots, np.int8)
        self.owner: list[str] = [""] * slots
        self.jobs: list[Job | None] = [None] * slots
        self.slot_of: dict[str, int] = {}
        self.known = np.zeros(slots, np.int64)  # tokens of the slot's trajectory, in ``tokens``
        self.cached = np.zeros(slots, np.int64)  # known tokens in the KV cache
        self.generated = np.zeros(slots, np.int64)  # known tokens sampled for the running request
        self.rescored = np.zeros(slots, np.int64)  # generated tokens scored alone (`exact_logprobs`)
        self.used_at = np.zeros(slots, np.int64)  # step in which the slot last ran
        self.tokens = np.zeros((slots, max_context_tokens), np.int64)
        self.logprobs = np.zeros((slots, max_context_tokens), np.float32)
        self.routed = np.zeros(slots, np.int64)  # tokens whose routes were given out with earlier requests
        self.routes = np.zeros((slots, max_context_tokens, *routes), np.int16) if routes else None
        self.sampling = SamplingColumns(slots, max_context_tokens)
        self.running: Slots = np.zeros(0, np.int64)
        self.changed = True  # whether the set of running slots changed since the last `settle`

    def of_state(self, state: int) -> list[int]:
        return [int(slot) for slot in np.flatnonzero(self.state == state)]

    def running_job(self, slot: int) -> Job:
        job = self.jobs[slot]
        assert job is not None, f"slot {slot} runs without a request"
        return job

    def place(self, job: Job, slot: int) -> int:
        """Run a request in a free slot or its own; returns the number of reusable cached tokens."""
        context, length = job.request.context_ids, len(job.request.context_ids)
        reuse = 0
        if self.state[slot] == RETAINED:
            shared = min(int(self.cached[slot]), length - 1)  # the last token must be fed to give logits
            differs = self.tokens[slot, :shared] != context[:shared]
            reuse = int(differs.argmax()) if differs.any() else shared
        self.tokens[slot, :length] = context
        self.known[slot], self.cached[slot], self.generated[slot], self.rescored[slot] = length, reuse, 0, 0
        self.routed[slot] = min(int(self.routed[slot]), reuse)
        self.sampling.place(slot, job.request)
        self.state[slot], self.jobs[slot], self.owner[slot] = RUNNING, job, job.name
        self.slot_of[job.name] = job.slot = slot
        self.changed = True
        return reuse

    def retain(self, slot: int, step: int) -> None:
        """Keep the tokens of a slot whose request ended in this step."""
        self.jobs[slot], self.state[slot], self.used_at[slot] = None, RETAINED, step
        self.changed = True

    def free(self, slot: int) -> None:
        self.slot_of.pop(self.owner[slot], None)
        self.owner[slot], self.jobs[slot], self.state[slot] = "", None, FREE
        self.known[slot] = self.cached[slot] = self.routed[slot] = 0
        self.changed = True

    def least_worth(self, waiting: Container[str], but: int | None = None) -> int | None:
        """The retained slot to evict first, least recently used; slots of ``waiting`` come last."""
        retained = (slot for slot in self.of_state(RETAINED) if slot != but)
        return min(retained, key=lambda slot: (self.owner[slot] in waiting, self.used_at[slot]), default=None)

    def new_routes(self, slot: int) -> tuple[NDArray[np.int16] | None, int]:
        """Experts of the slot's new tokens, and the first such token; None if not recorded."""
        if self.routes is None or slot < 0:
            return None, 0
        first, computed = int(self.routed[slot]), int(self.cached[slot])
        self.routed[slot] = computed
        return self.routes[slot, first:computed].copy(), first

    @property
    def reserved_tokens(self) -> int:
        """Context tokens of running requests with all tokens that they may generate."""
        running = self.state == RUNNING
        return int((self.known[running] - self.generated[running] + self.sampling.limit[running]).sum())

    def retained_tokens(self, but: int | None) -> int:
        """Context tokens kept between turns, without the tokens of slot ``but``."""
        return int(self.known[self.state == RETAINED].sum()) - (int(self.known[but]) if but is not None else 0)

    def settle(self, kv: SlotKV) -> None:
        """Move the running slots close together and update their sampling features."""
        running = np.flatnonzero(self.state == RUNNING)
        if len(running) and running[-1] - running[0] + 1 > SPAN_SLACK * len(running) + 2:
            holes = np.flatnonzero(self.state[: len(running)] != RUNNING)
            for hole, slot in zip(holes, running[running >= len(running)], strict=True):
                self._swap(int(hole), int(slot), kv)
            running = np.arange(len(running))
        self.running, self.changed = running, False
        self.sampling.settle(running)

    def _swap(self, one: int, other: int, kv: SlotKV) -> None:
        kv.swap(one, other, int(max(self.cached[one], self.cached[other])))
        pair, swapped = [one, other], [other, one]
        for part in (self, self.sampling):
            for column in vars(part).values():
                if isinstance(column, np.ndarray) and column is not self.running:
                    column[pair] = column[swapped]
        self.jobs[one], self.jobs[other] = self.jobs[other], self.jobs[one]
        self.owner[one], self.owner[other] = self.owner[other], self.owner[one]
        for slot in pair:
            job = self.jobs[slot]
            if self.owner[slot]:
                self.slot_of[self.owner[slot]] = slot
            if job is not None:
                job.slot = slot


class FurtherDraws:
    """The further draws of the last pass of a batch over slots, until they are kept."""

    def __init__(self) -> None:
        self._last: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None

    def draw(self, logits_NV: Tensor, table: SlotTable, slots: NDArray[np.int64], index: NDArray[np.int64]) -> None:
        """Draw after each row, a slot's ``index``-th token, if the slot's request has draws."""
        self._last = None
        requests = [table.running_job(slot).request for slot in slots]
        draws = max(request.draws for request in requests)
        if not draws:
            return
        uniforms_NM = np.zeros((len(slots), draws), np.float32)
        for row, (request, at) in enumerate(zip(requests, index, strict=True)):
            if request.draws:
                uniforms_NM[row] = further_uniforms(request.seed, request.generated + int(at), draws)
        temperature_N = torch.from_numpy(table.sampling.temperature[slots]).to(logits_NV.device)
        ids_NM, nats_NM = draw_further(logits_NV, torch.from_numpy(uniforms_NM).to(logits_NV.device), temperature_N)
        self._last = ids_NM.cpu().numpy(), nats_NM.cpu().numpy()

    def keep(self, table: SlotTable, slots: NDArray[np.int64], first: int = 0) -> None:
        """Keep the draws, from row ``first`` on, for the requests in ``slots`` that have draws."""
        if self._last is None:
            return
        ids, nats = self._last
        for row, slot in enumerate(slots, start=first):
            job = table.running_job(slot)
            if job.request.draws:
                job.drawn.append((ids[row], nats[row]))


def drawn_of(job: Job) -> Drawn | None:
    """The further draws of a request (tokens, draws), if it has any."""
    if not (draws := job.request.draws):
        return None
    ids = np.array([ids for ids, _ in job.drawn], np.int32).reshape(-1, draws)
    return Drawn(ids, np.array([nats for _, nats in job.drawn], np.float32).reshape(-1, draws))


class SharedContexts:
    """For each context, the trajectory that computes it (leader) and its followers."""

    def __init__(self) -> None:
        self.following: dict[str, str] = {}  # follower -> leader
        self._leader_of: dict[bytes, str] = {}
        self._context_of: dict[str, bytes] = {}  # the inverse

    def begin(self, name: str, context: bytes, goes_on: bool) -> None:
        """Start a turn. With cached KV (``goes_on``) it leads only its context's start."""
        if not goes_on:
            self.join(name, context)
        elif not context.startswith(self._context_of.get(name, b"")):
            self.leave(name)

    def join(self, name: str, context: bytes) -> None:
        """Lead the trajectories with this context, or follow their leader."""
        self.leave(name)
        leader = self._leader_of.setdefault(context, name)
        if leader == name:
            self._context_of[name] = context
        else:
            self.following[name] = leader

    def leave(self, name: str) -> None:
        self.following.pop(name, None)
        context = self._context_of.pop(name, None)
        if context is not None:
            del self._leader_of[context]
