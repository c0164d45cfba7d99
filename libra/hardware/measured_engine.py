"""`EngineSeconds` from the seconds that an engine measured of its own forward passes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from libra.types import StepSeconds

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class MeasuredEngine:
    """`EngineSeconds` of an engine that declared them.

    Attributes
    ----------
    steps : StepSeconds
        Of its forward passes. Prefill costs ``prefill_token_s`` per context token, alone or in a batch.
    tp : int
    kv_capacity_tokens : int
    wall_over_passes : float
        Wall seconds of its turns over the sum of its passes; the difference is its work between two passes.
    """

    steps: StepSeconds
    tp: int
    kv_capacity_tokens: int
    wall_over_passes: float = 1.0

    def decode_step_s(self, num_sequences: int, context_tokens: float) -> float:
        """Seconds of one step; ``context_tokens`` is the sum over all sequences."""
        if num_sequences < 1:
            return 0.0
        return self.wall_over_passes * self.steps.step_s(num_sequences, context_tokens)

    def decode_steps_s(self, num_sequences: ArrayLike, context_tokens: ArrayLike) -> Array:
        """`decode_step_s` of many steps; the arguments broadcast."""
        num, context = np.broadcast_arrays(np.asarray(num_sequences, float), np.asarray(context_tokens, float))
        steps = self.steps
        seconds = steps.fixed_s + steps.sequence_s * num + steps.context_token_s * context
        return np.where(num >= 1, self.wall_over_passes * seconds, 0.0)

    def prefill_s(self, new_tokens: int, past_tokens: int) -> float:
        """Seconds that computing ``new_tokens`` adds to a pass."""
        return self.wall_over_passes * self.steps.prefill_token_s * max(0, new_tokens)

    def prefills_s(self, new_tokens: ArrayLike, past_tokens: ArrayLike) -> Array:
        """`prefill_s` of many sequences."""
        new, _ = np.broadcast_arrays(np.asarray(new_tokens, float), np.asarray(past_tokens, float))
        return np.asarray(self.wall_over_passes * self.steps.prefill_token_s * np.maximum(new, 0.0))
