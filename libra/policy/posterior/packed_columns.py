"""Running trajectories as packed columns, so that JSON of a hundred thousand takes a second instead of minutes.

Numbers keep every bit: a column is its little-endian bytes in base 64.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.policy.posterior.compact_rows import Live, Rows
from libra.policy.posterior.forecast_columns import Pool

_NUMBERS = ("imputed", "information", "mean", "order")
_COUNTS = ("tokens", "pending", "returns", "node", "missed")


def pack(column: NDArray[Any]) -> str:
    """A column as text."""
    little = column.astype(column.dtype.newbyteorder("<"), copy=False)
    return base64.b64encode(np.ascontiguousarray(little).tobytes()).decode("ascii")


def unpack(text: str, dtype: str) -> NDArray[Any]:
    """The column again; ``dtype`` is little-endian, e.g. ``"<f8"``."""
    return np.frombuffer(base64.b64decode(text, validate=True), dtype=dtype)


def dump_rows(rows: Sequence[Rows]) -> dict[str, str]:
    """Rows of many trajectories, one after another."""
    sizes = np.array([len(one) for one in rows], dtype=np.int64)
    numbers = np.frombuffer(b"".join(one.tobytes() for one in rows), dtype=np.uint16)
    return {"sizes": pack(sizes), "numbers": pack(numbers)}


def load_rows(dumped: Mapping[str, str]) -> list[Rows]:
    """Inverse of `dump_rows`."""
    numbers = unpack(dumped["numbers"], "<u2").astype(np.uint16, copy=False).tobytes()
    rows, at = [], 0
    for size in (2 * unpack(dumped["sizes"], "<i8")).tolist():
        rows.append(Rows.frombytes(numbers[at : at + size]))
        at += size
    return rows


def dump_live(live: Mapping[str, Live], pool: Pool) -> dict[str, Any]:
    """Live trajectories in the order of their arrival."""
    ones = list(live.values())
    groups = {group: number for number, group in enumerate(dict.fromkeys(one.group for one in ones))}
    families = {family: number for number, family in enumerate(dict.fromkeys(one.family for one in ones))}
    dumped: dict[str, Any] = {
        "keys": list(live),
        "groups": list(groups),
        "families": list(families),
        "group": pack(np.array([groups[one.group] for one in ones], dtype=np.int64)),
        "family": pack(np.array([families[one.family] for one in ones], dtype=np.int64)),
        "rows": dump_rows([one.rows for one in ones]),
        "tree": pack(np.array([one.tree for one in ones], dtype=np.float64).reshape(-1, 2)),
        "decayed": pack(pool.counts[[one.slot for one in ones]]),
    }
    for name in _NUMBERS:
        dumped[name] = pack(np.array([getattr(one, name) for one in ones], dtype=np.float64))
    for name in _COUNTS:
        dumped[name] = pack(np.array([getattr(one, name) for one in ones], dtype=np.int64))
    return dumped


def load_live(dumped: Mapping[str, Any], pool: Pool) -> dict[str, Live]:
    """Inverse of `dump_live`; the decayed counts go to ``pool``, which is empty."""
    groups, families = dumped["groups"], dumped["families"]
    columns = [unpack(dumped[name], "<i8").tolist() for name in ("group", "family", *_COUNTS)]
    columns += [unpack(dumped[name], "<f8").tolist() for name in _NUMBERS]
    trees = unpack(dumped["tree"], "<f8").reshape(-1, 2).tolist()
    live: dict[str, Live] = {}
    for key, rows, tree, *values in zip(dumped["keys"], load_rows(dumped["rows"]), trees, *columns, strict=True):
        one = live[key] = Live(groups[values[0]], families[values[1]], pool.take())
        one.rows = rows
        one.tree = (tree[0], tree[1])
        one.tokens, one.pending, one.returns, one.node, one.missed = values[2:7]
        one.imputed, one.information, one.mean, one.order = values[7:]
    width = pool.counts.shape[1]
    pool.counts[[one.slot for one in live.values()]] = unpack(dumped["decayed"], "<f4").reshape(-1, width)
    return live
