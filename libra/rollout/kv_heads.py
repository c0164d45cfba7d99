"""Which KV heads a tensor-parallel rank has; so a KV object with all of them goes from any degree to any other.

As vLLM divides them: heads are dealt in runs of equal length; with fewer heads than ranks, neighbouring ranks have copies of one.
"""

from __future__ import annotations

from libra.errors import KVRefused


def heads_of(rank: int, tp: int, num_kv_heads: int) -> slice:
    """The KV heads of one of ``tp`` ranks; KVRefused if they can be neither divided nor copied evenly."""
    if num_kv_heads % tp == 0:
        share = num_kv_heads // tp
        return slice(rank * share, (rank + 1) * share)
    if tp % num_kv_heads == 0:
        head = rank // (tp // num_kv_heads)
        return slice(head, head + 1)
    raise KVRefused(
        f"{num_kv_heads} KV heads on {tp} ranks: neither number divides the other, so no rank has whole heads"
    )


def is_first_copy(rank: int, tp: int, num_kv_heads: int) -> bool:
    """Whether no rank before this one has the same heads."""
    return rank == 0 or heads_of(rank, tp, num_kv_heads) != heads_of(rank - 1, tp, num_kv_heads)
