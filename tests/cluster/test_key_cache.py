"""The cache of keys is Dask's own, and stays small."""

from __future__ import annotations

import distributed.scheduler
import distributed.worker_state_machine

from libra.cluster import key_cache


def test_the_cache_that_scheduler_and_workers_fill_is_emptied_when_it_is_large() -> None:
    assert distributed.scheduler.key_split is distributed.worker_state_machine.key_split is key_cache.key_split
    key_cache.key_split.cache_clear()
    for number in range(key_cache.KEPT_KEYS):
        distributed.scheduler.key_split(f"trajectory-train-{number}-0-0-e0-demo")
    key_cache.bound_key_cache()
    assert key_cache.key_split.cache_info().currsize == key_cache.KEPT_KEYS
    distributed.scheduler.key_split("one more")
    key_cache.bound_key_cache()
    assert key_cache.key_split.cache_info().currsize == 0
