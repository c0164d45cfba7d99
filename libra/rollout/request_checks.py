"""Checks of a request before an engine takes it. Pure; any thread may call them."""

from __future__ import annotations

from libra.errors import ContextOverflow, EngineError
from libra.types import TurnRequest

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
