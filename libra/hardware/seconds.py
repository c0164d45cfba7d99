"""What planner, simulator and emulated engines ask of a model on a GPU: seconds of an engine's steps, and room for KV."""

from __future__ import annotations

from typing import Protocol


class EngineSeconds(Protocol):
    """One model on one engine of ``tp`` GPUs of one kind. Its attributes are read, never set: frozen values serve."""

    @property
    def tp(self) -> int:
        """GPUs of the engine (tensor-parallel degree)."""

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens whose keys and values fit beside the weights."""

    def decode_step_s(self, num_sequences: int, context_tokens: int) -> float:
        """Seconds of one step that gives each of ``num_sequences`` one token; ``context_tokens`` is the sum over all of them."""

    def prefill_s(self, new_tokens: int, past_tokens: int) -> float:
        """Seconds to compute ``new_tokens`` of one sequence after ``past_tokens`` whose KV is there already."""
