"""The interface of inference engines; the rest of Libra uses engines only through it.

Invariants
1. Every ``generate`` ends exactly once: with a TurnOutput, or with an EngineError.
2. Tokens in, tokens out: an engine never sees text, and returns the ids it sampled, unchanged.
3. A token's weight version is that of the weights whose logits it was drawn from; its KV version is that of the weights
   that computed every key and value it attended to.
4. ``load_version`` takes effect between two tokens. It changes nothing if it raises.
5. A trajectory has at most one request in the engine. Between its turns the engine may keep its KV, but need not.
6. Smaller ``priority`` is served first, then earlier arrival; a running request is never preempted.
7. It never holds more than its ``capacity``, whose seconds were measured on its own passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from libra.errors import ContextOverflow, EngineError
from libra.rollout.kv_objects import KVObject
from libra.rollout.speculation import DraftedByRows
from libra.types import EngineCapacity, TurnOutput, TurnRequest


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The settings that engines of every kind have.

    Attributes
    ----------
    model_dir : Path
        Directory in Hugging Face layout.
    slots, max_context_tokens : int
        Maximum requests that generate at once, and maximum context plus generated tokens of each.
    dtype : {"float32", "bfloat16"}
    threads : int or None
        torch threads; None leaves the engine's own choice.
    kv_cache_gib : float or None
        Maximum KV cache, in GiB.
    """

    model_dir: Path
    slots: int
    max_context_tokens: int
    dtype: str = "float32"
    threads: int | None = None
    kv_cache_gib: float | None = None

    def __post_init__(self) -> None:
        if self.slots < 1 or self.max_context_tokens < 2:
            raise EngineError(
                f"engine: got slots={self.slots}, max_context_tokens={self.max_context_tokens}; allowed: at least 1 and 2"
            )


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters of an engine: its present state (first five) and its work since it started (the rest).

    Attributes
    ----------
    running, waiting, retained : int
        Requests generating, requests queued, and trajectories whose KV is kept between turns.
    slots : int
        Requests that can run at once; ``running + retained <= slots``.
    version : int
        Weight version in use.
    generated_tokens, prefilled_tokens, cached_tokens : int
        Tokens sampled, context tokens computed, and context tokens whose KV was cached.
    busy_s : float
        Wall seconds spent inside steps.
    steps : int
        Forward passes.
    drafted_tokens, accepted_tokens : int
        Tokens that were drafted (`rollout.speculate`), and those of them that were the ones sampled.
    drafted_by_rows : dict
        The same by batch size, with the seconds of steps with and without drafts (`libra.rollout.speculation.Drafted`).
    """

    running: int
    waiting: int
    retained: int
    slots: int
    version: int
    generated_tokens: int
    prefilled_tokens: int
    cached_tokens: int
    busy_s: float
    steps: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafted_by_rows: DraftedByRows = field(default_factory=dict)


@dataclass(slots=True)
class EngineCounters:
    """An engine's work since it started; fields of `EngineStats`."""

    generated_tokens: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    busy_s: float = 0.0
    steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def stats(
        self,
        *,
        running: int,
        waiting: int,
        retained: int,
        slots: int,
        version: int,
        by_rows: DraftedByRows | None = None,
    ) -> EngineStats:
        """Add the engine's present state, and the counters of its drafts."""
        done = (getattr(self, each.name) for each in fields(self))  # in the order of `EngineStats`; `asdict` copies
        found = EngineStats(running, waiting, retained, slots, version, *done)
        return found if not by_rows else replace(found, drafted_by_rows=dict(by_rows))


@runtime_checkable
class RolloutEngine(Protocol):
    """One inference engine on one worker. All coroutines may be awaited from any event loop."""

    version: int

    async def start(self) -> None:
        """Load the model; ModelError if it cannot be served."""

    async def generate(self, request: TurnRequest) -> TurnOutput:
        """Generate one turn; ContextOverflow if it cannot fit, EngineError if the engine failed."""

    async def abort(self, trajectory_id: str) -> None:
        """End the trajectory's request with StopReason.ABORT, if it has one, and free its KV."""

    def forget(self, trajectory_id: str) -> None:
        """Free the KV kept for a trajectory that has ended; at once, or when its request ends."""

    async def pause(self) -> None:
        """Stop between two steps; running requests keep their place."""

    async def resume(self) -> None:
        """Continue after ``pause``."""

    async def load_version(self, version: int, directory: Path) -> None:
        """Serve ``directory/model.safetensors`` (Hugging Face names) as ``version`` from the next token on.

        Running requests are computed again under the new weights and retained KV is dropped. WeightsError if tensors are
        missing, unknown, of another shape or unreadable; the old version then stays in use.
        """

    async def score(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """Log-probability in nats of each token but the first, given those before it (T - 1,), at temperature 1.

        Under the weights as served, by the pass that serves requests; may be called while requests run.
        """

    async def project(self, seed: int) -> dict[str, tuple[float, ...]]:
        """Eight numbers for each linear layer and embedding, by the Hugging Face name of its weight.

        Computed by the matrices as used (packed, tied, joined), by the convention of `libra.projections`.
        """

    def stats(self) -> EngineStats:
        """Counters as of the last step."""

    def capacity(self) -> EngineCapacity:
        """What a started engine can hold, and the seconds of its last passes; any thread may call it at any time."""

    async def close(self) -> None:
        """Fail what is pending with EngineError and release everything; may be called twice."""


class EngineFactory(Protocol):
    """``rollout.engine`` of one's own: a class or function that makes an engine, not started.

    Its attribute ``tp_degrees``, e.g. ``(1, 2, 4)``, has the tensor-parallel degrees that its engines can have; without it: 1.
    Its attribute ``continues_turns``, if true, says that its engines heed `TurnRequest.generated`, as ``rollout.chunk_tokens``
    needs.

    Of further options it gets those that it takes by name: ``tp``, one of its degrees, if it declares others than 1
    (``rollout.tp``, ``cluster.engines``, a role change), ``dtype`` ("float32" or "bfloat16"), ``threads`` (of torch, None: its own
    choice), ``kv_cache_gib`` (None: enough for all slots), ``min_pass_s`` (minimum seconds of a pass), ``device``
    (``cluster.device``), ``loader`` (``model.loader``), and of a rebucketed engine ``cores`` and ``devices``, as
    `libra.worker.engine.engine_factory.Share` has them.
    `libra.testing.engines.EngineContract` tests what it makes; a run verifies each version that it serves by
    `RolloutEngine.score` and `RolloutEngine.project`.
    """

    def __call__(
        self, *, model_dir: Path, slots: int, max_context_tokens: int, version: int, **options: Any
    ) -> RolloutEngine:
        """An engine that will serve the weights in ``model_dir`` as ``version``."""


@runtime_checkable
class ReadsColumns(Protocol):
    """An engine that can also return single columns of its layers exactly: the version check then detects a change of one
    bit.

    Only for engines that multiply with the weights as published: no quantisation, no TF32.
    """

    async def columns(self, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, NDArray[np.float32]]:
        """The requested columns (K, outputs) of each named matrix: outputs of its layer for one-hot inputs.

        For an embedding the requested rows (K, width), for a norm or bias the whole vector (1, n).
        """


@runtime_checkable
class MovesKV(Protocol):
    """An engine that gives the KV of a trajectory to other engines, and takes it from them."""

    async def export_kv(self, trajectory_id: str) -> KVObject | None:
        """The KV of a trajectory that is between two turns, kept until `forget`; None if the engine has none."""

    async def park_kv(self) -> None:
        """Bring the KV of all trajectories between two turns into host memory; `export_kv` gives it also from a closed engine."""

    async def import_kv(self, kv: KVObject) -> bool:
        """Keep an object for the trajectory's next request, which uses it if `KVObject.check` allows that; False if there is
        no room."""


PRIORITY_BITS = (20, 10, 30)
"""Bits of each entry of a priority in one number: up to 2^20 iterations, 2^10 levels, 2^30 places."""


def check_request(request: TurnRequest, *, max_context_tokens: int, vocab_size: int) -> None:
    """Raise if a request cannot be served at all: ContextOverflow if it is too long, else EngineError."""
    name, context, new = request.trajectory_id, len(request.context_ids), request.max_new_tokens
    if context < 1 or new < 1:
        raise EngineError(f"{name}: got {context} context tokens and max_new_tokens={new}; both must be at least 1")
    if context + new > max_context_tokens:
        raise ContextOverflow(
            f"{name}: {context} context tokens + {new} new ones = {context + new}, more than the engine's "
            f"{max_context_tokens}; ask for at most {max_context_tokens - context} new tokens, "
            f"or type rollout.max_context_tokens={context + new}"
        )
    if not (request.temperature >= 0 and 0 < request.top_p <= 1 and request.seed >= 0):
        raise EngineError(
            f"{name}: got temperature={request.temperature}, top_p={request.top_p}, seed={request.seed}; "
            "allowed: temperature >= 0, 0 < top_p <= 1, seed >= 0"
        )
    if not 0 <= request.generated < context:
        raise EngineError(
            f"{name}: got generated={request.generated} of {context} context tokens; allowed: 0 to {context - 1}"
        )
    low, high = int(request.context_ids.min()), int(request.context_ids.max())
    if low < 0 or high >= vocab_size:
        raise EngineError(f"{name}: context ids from {low} to {high}; the model knows 0 to {vocab_size - 1}")


def packed_priority(priority: tuple[int, ...]) -> int:
    """One non-negative number below 2**60 in the order of the tuples: ``a < b`` if and only if it holds for their tuples.

    Raises
    ------
    EngineError
        More entries than `PRIORITY_BITS` has, or one below -1 (a level of those that are overdue) or too large for its bits.
    """
    if len(priority) > len(PRIORITY_BITS) or any(
        not -1 <= part <= 2**bits - 3 for part, bits in zip(priority, PRIORITY_BITS, strict=False)
    ):
        allowed = ", ".join(f"-1 to {2**bits - 3}" for bits in PRIORITY_BITS)
        raise EngineError(f"priority: got {priority}; allowed are at most {len(PRIORITY_BITS)} entries of {allowed}")
    packed = 0
    for position, bits in enumerate(PRIORITY_BITS):  # a missing entry sorts before any other, as in tuples
        packed = packed << bits | (priority[position] + 2 if position < len(priority) else 0)
    return packed
