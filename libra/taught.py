"""What is kept of the distributions of teacher and student beside the generated tokens (section ``distil``)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Drawn(NamedTuple):
    """Tokens drawn at each of T places beside the generated one: int32 (T, M), and log-probabilities in nats, float32 (T, M)."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


class Taught(NamedTuple):
    """What a teacher says of the A generated tokens of a trajectory, in nats, at the temperature of the run.

    ``token_ids`` int32 (A, K) are the tokens scored at each place, ``logp`` (A, K) their log-probabilities by the teacher,
    ``own_logp`` (A,) that of the generated token; with a top-k ``rest_logp`` (A,) is that of all others together, and with draws of
    the student ``old_logp`` (A, K) are those it had. All float32.
    """

    token_ids: NDArray[np.int32]
    logp: NDArray[np.float32]
    own_logp: NDArray[np.float32]
    rest_logp: NDArray[np.float32] | None = None
    old_logp: NDArray[np.float32] | None = None

    def only(self, kept_A: NDArray[np.bool_]) -> Taught:
        """What it says of the tokens that are True in ``kept_A``."""
        return Taught(*(None if each is None else each[kept_A] for each in self))  # type: ignore[arg-type]
