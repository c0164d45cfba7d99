"""Dask's cache of keys, which grows with every task of a run.

Each process remembers the prefixes of the last 100,000 keys that it has seen (``dask.utils.key_split``): 300 bytes each, of tasks
that are long forgotten.
"""

from __future__ import annotations

from dask.utils import key_split

KEPT_KEYS = 8_192
"""Keys after which the cache is emptied. The next call for a key takes a few microseconds."""


def bound_key_cache() -> None:
    """Empty the cache of this process if it has more than `KEPT_KEYS` keys."""
    if key_split.cache_info().currsize > KEPT_KEYS:
        key_split.cache_clear()
