"""The interface of inference engines; the rest of Libra uses engines only through it.

1. Every ``generate`` ends exactly once: with a TurnOutput, or with an EngineError.
2. Tokens in, tokens out: an engine never sees text, and returns the ids it sampled, unchanged.
3. A token's weight version is the weights whose logits it was drawn from; its KV version is the
   weights that computed every key and value it attended to.
4. ``load_version`` takes effect between two tokens. It changes nothing if it raises.
5. A trajectory has at most one request in the engine, which may keep its KV between turns. An
   engine never holds more than its ``capacity``, whose seconds were measured on its own passes.
6. Smaller ``priority`` is served first, then earlier arrival; a running request is never preempted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
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
    """The settings that engines of every kind have."""

    model_dir: Path  # in Hugging Face layout
    slots: int  # maximum requests that generate at once
    max_context_tokens: int  # maximum context plus generated tokens of each
    dtype: str = "float32"  # or "bfloat16"
    threads: int | None = None  # of torch; by default the engine's own choice
    kv_cache_gib: float | None = None  # maximum KV cache

    def __post_init__(self) -> None:
        if self.slots < 1 or self.max_context_tokens < 2:
            raise EngineError(
                f"engine: got slots={self.slots}, max_context_tokens={self.max_context_tokens}; allowed: at least 1 and 2"
            )


@dataclass(slots=True)
class EngineCounters:
    """An engine's work since it started."""

    generated_tokens: int = 0  # sampled
    prefilled_tokens: int = 0  # of contexts, computed
    cached_tokens: int = 0  # of contexts, whose KV was cached
    busy_s: float = 0.0  # wall seconds inside steps
    steps: int = 0  # forward passes
    drafted_tokens: int = 0  # `rollout.speculate`
    accepted_tokens: int = 0  # drafted tokens that equal the sampled tokens

    def stats(self, **state: Any) -> EngineStats:
        """These counters with the engine's present state."""
        done = {each.name: getattr(self, each.name) for each in fields(EngineCounters)}  # `asdict` copies deeply
        return EngineStats(**done, **state)


@dataclass(slots=True, kw_only=True)
class EngineStats(EngineCounters):
    """An engine's counters and present state."""

    running: int  # requests generating
    waiting: int  # requests queued
    retained: int  # trajectories whose KV is kept between turns
    slots: int  # requests that can run at once; ``running + retained <= slots``
    version: int  # of the weights in use
    drafted_by_rows: DraftedByRows = field(default_factory=dict)  # by batch size


@runtime_checkable
class RolloutEngine(Protocol):
    """One inference engine on one worker. All coroutines may be awaited from any event loop."""

    version: int

    async def start(self) -> None:
        """Load the model; ModelError if it cannot be served."""

    async def generate(self, request: TurnRequest) -> TurnOutput:
        """Generate one turn; ContextOverflow if it cannot fit, EngineError if the engine failed."""

    async def abort(self, trajectory_id: str) -> None:
        """End the trajectory's request, if any, with StopReason.ABORT, and free its KV."""

    def forget(self, trajectory_id: str) -> None:
        """Free the KV of a trajectory that has ended; at once, or when its request ends."""

    async def pause(self) -> None:
        """Stop between two steps; running requests keep their place."""

    async def resume(self) -> None:
        """Continue after ``pause``."""

    async def load_version(self, version: int, directory: Path) -> None:
        """Serve ``directory/model.safetensors`` as ``version`` from the next token on. Running
        requests are computed again and retained KV is dropped. WeightsError if tensors are missing,
        unknown, of another shape or unreadable; the old version then remains in use."""

    async def score(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """Log-probability in nats of each token but the first (T - 1,), at temperature 1. Computed
        by the weights and the pass that serve requests; may be called while requests run."""

    async def project(self, seed: int) -> dict[str, tuple[float, ...]]:
        """Eight numbers for each linear layer and embedding, by its weight's Hugging Face name,
        from the matrices as used (packed, tied, joined), as `libra.projections` defines them."""

    def stats(self) -> EngineStats:
        """Counters as of the last step."""

    def capacity(self) -> EngineCapacity:
        """The capacity of a started engine, and the seconds of its last passes; for any thread."""

    async def close(self) -> None:
        """Fail pending requests with EngineError and release everything; may be called twice."""


class EngineFactory(Protocol):
    """A user's ``rollout.engine``: a class or function that makes an engine, not started.

    Attribute ``tp_degrees``, e.g. ``(1, 2, 4)``, lists the tensor-parallel degrees of its engines,
    by default 1 alone. If attribute ``continues_turns`` is true, its engines use
    `TurnRequest.generated`, as ``rollout.chunk_tokens`` needs. The factory gets only options that
    its signature names: ``tp`` (if it declares degrees), ``dtype`` ("float32" or "bfloat16"),
    ``threads``, ``kv_cache_gib``, ``min_pass_s``, ``device``, ``loader``, and for a rebucketed
    engine ``cores`` and ``devices``. `libra.testing.engines.EngineContract` tests the engine.
    """

    def __call__(
        self, *, model_dir: Path, slots: int, max_context_tokens: int, version: int, **options: Any
    ) -> RolloutEngine:
        """An engine that will serve the weights in ``model_dir`` as ``version``."""


@runtime_checkable
class ReadsColumns(Protocol):
    """An engine that returns single columns of its layers, so that one changed bit is detected.
    Only for engines that multiply with the weights as published: no quantisation, no TF32."""

    async def columns(self, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, NDArray[np.float32]]:
        """The requested columns (K, outputs) of each matrix: outputs for one-hot inputs. For an
        embedding the requested rows (K, width), for a norm or bias the whole vector (1, n)."""


@runtime_checkable
class MovesKV(Protocol):
    """An engine that exchanges the KV of trajectories with other engines."""

    async def export_kv(self, trajectory_id: str) -> KVObject | None:
        """The KV of a trajectory between two turns, if any; kept until `forget`."""

    async def park_kv(self) -> None:
        """Move all KV between two turns to host memory, for `export_kv` after `close`."""

    async def import_kv(self, kv: KVObject) -> bool:
        """Keep an object for the trajectory's next request; False without room. The request uses
        the object only if `KVObject.check` allows it."""


PRIORITY_BITS = (20, 10, 30)
"""Bits of a priority's entries: up to 2^20 iterations, 2^10 levels, 2^30 places."""


def check_request(request: TurnRequest, *, max_context_tokens: int, vocab_size: int) -> None:
    """Raise ContextOverflow if a request is too long, EngineError if it is invalid."""
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
    """One number, below 2**60, in the order of the tuples, whose entries are at least -1 (overdue).
    EngineError beyond `PRIORITY_BITS`."""
    if len(priority) > len(PRIORITY_BITS) or any(
        not -1 <= part <= 2**bits - 3 for part, bits in zip(priority, PRIORITY_BITS, strict=False)
    ):
        allowed = ", ".join(f"-1 to {2**bits - 3}" for bits in PRIORITY_BITS)
        raise EngineError(f"priority: got {priority}; allowed are at most {len(PRIORITY_BITS)} entries of {allowed}")
    packed = 0
    for position, bits in enumerate(PRIORITY_BITS):  # a missing entry sorts before any other, as in tuples
        packed = packed << bits | (priority[position] + 2 if position < len(priority) else 0)
    return packed
