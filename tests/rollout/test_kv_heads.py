"""KV heads of tensor-parallel ranks: a KV object goes from any degree to any other."""

from __future__ import annotations

import numpy as np
import pytest

from libra.errors import KVRefused
from libra.rollout.kv_heads import heads_of, is_first_copy

DEGREES = (1, 2, 4, 8, 16)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
@pytest.mark.parametrize("tp", DEGREES)
@pytest.mark.parametrize("other", DEGREES)
def test_what_ranks_of_one_degree_write_those_of_another_read(num_kv_heads, tp, other):
    kv = np.random.default_rng(0).integers(0, 256, (3, num_kv_heads, 5), np.uint8)  # layers, KV heads, the rest
    shards = [kv[:, heads_of(rank, tp, num_kv_heads)] for rank in range(tp)]
    assert {shard.shape[1] for shard in shards} == {max(1, num_kv_heads // tp)}
    whole, writers = np.zeros_like(kv), 0
    for rank, shard in enumerate(shards):
        if is_first_copy(rank, tp, num_kv_heads):
            whole[:, heads_of(rank, tp, num_kv_heads)] = shard
            writers += 1
    assert writers == min(tp, num_kv_heads)
    assert np.array_equal(whole, kv)
    for rank in range(other):
        # As vLLM replicates: rank r has the heads of r // (ranks per head).
        first = rank * num_kv_heads // other
        read = whole[:, heads_of(rank, other, num_kv_heads)]
        assert np.array_equal(read, kv[:, first : first + max(1, num_kv_heads // other)])


@pytest.mark.parametrize(("tp", "num_kv_heads"), [(2, 3), (4, 6), (3, 2)])
def test_heads_that_cannot_be_dealt_evenly_are_refused(tp, num_kv_heads):
    with pytest.raises(KVRefused, match=f"{num_kv_heads} KV heads on {tp} ranks"):
        heads_of(0, tp, num_kv_heads)
