"""What every inference engine promises; the rest of Libra knows engines only through this.

Invariants
1. Every ``generate`` ends exactly once: with a TurnOutput, or with an EngineError.
2. Tokens in, tokens out: an engine never sees text, and returns the very ids it sampled.
3. A token's weight version is that of the weights whose logits it was drawn from; its KV version is that of the weights
   that computed every key and value it attended to.
4. ``load_version`` takes effect between two tokens. It changes nothing where it raises.
5. A trajectory has at most one request in the engine. Between its turns the engine may keep its KV; it never has to.
6. Smaller ``priority`` is served first, then earlier arrival; a running request is never preempted.
7. It never holds more than its ``capacity`` says, and what that says of seconds was measured on its own passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from libra.types import EngineCapacity, TurnOutput, TurnRequest


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine holds now (first five) and has done since it started (the rest).

    Attributes
    ----------
    running, waiting, retained : int
        Requests generating, requests queued, and trajectories whose KV is kept between turns.
    slots : int
        Requests that can run at once; ``running + retained <= slots``.
    version : int
        Weight version in use.
    generated_tokens, prefilled_tokens, cached_tokens : int
        Tokens sampled, context tokens computed, and context tokens whose KV was already there.
    busy_s : float
        Wall seconds spent inside steps.
    steps : int
        Forward passes.
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


@runtime_checkable
class RolloutEngine(Protocol):
    """One inference engine on one worker. All coroutines may be awaited from any event loop."""

    version: int

    async def start(self) -> None:
        """Load the model; ModelError where it cannot be served."""

    async def generate(self, request: TurnRequest) -> TurnOutput:
        """Generate one turn; ContextOverflow where it cannot fit, EngineError where the engine failed."""

    async def abort(self, trajectory_id: str) -> None:
        """End the trajectory's request with StopReason.ABORT, if it has one, and free its KV."""

    def forget(self, trajectory_id: str) -> None:
        """Free the KV kept for a trajectory that will not come back; at once, or when its request ends."""

    async def pause(self) -> None:
        """Stop between two steps; running requests keep their place."""

    async def resume(self) -> None:
        """Go on after ``pause``."""

    async def load_version(self, version: int, directory: Path) -> None:
        """Serve ``directory/model.safetensors`` (Hugging Face names) as ``version`` from the next token on.

        Running requests are computed again under the new weights and retained KV is dropped. WeightsError where tensors
        are missing, unknown, of another shape or unreadable; the old version then stays.
        """

    async def score(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """Log-probability in nats of each token but the first, given those before it (T - 1,), at temperature 1.

        Under the weights as really served, by the pass that serves requests; may be asked while requests run.
        """

    async def project(self, seed: int) -> dict[str, tuple[float, ...]]:
        """Eight numbers for each linear layer and embedding, by the Hugging Face name of its weight.

        Computed by the matrices as really used (packed, tied, joined), by the convention of `libra.projections`.
        """

    def stats(self) -> EngineStats:
        """Counters as of the last step."""

    def capacity(self) -> EngineCapacity:
        """What a started engine can hold, and how fast its last passes were; any thread may ask, at any time."""

    async def close(self) -> None:
        """Fail what is pending with EngineError and release everything; may be called twice."""


@runtime_checkable
class ReadsColumns(Protocol):
    """An engine that can also give back single columns of its layers exactly: the check then sees a change of one bit.

    Only for engines that multiply with the weights as published: no quantisation, no TF32.
    """

    async def columns(self, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, NDArray[np.float32]]:
        """Of each named matrix the wanted columns (K, outputs), as its layer answers one-hot inputs.

        Of an embedding the wanted rows (K, width). Of a norm or bias the whole vector (1, n), whatever is wanted.
        """
