"""Tables as JSON files of a few kilobytes. Those in ``tables/`` come with the package; its README.md names sources and licences."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.errors import ConfigError
from libra.hardware.fit_rooflines import spread
from libra.hardware.gpus import GPU, known_gpus, load_gpu
from libra.hardware.rooflines import Efficiencies
from libra.hardware.tables import AllReduceTable, RatioCurve, RatioRows, Tables

Array = NDArray[np.float64]

_FOLDER = Path(__file__).parent / "tables"
SCHEMA = 1


def save_tables(tables: Tables, path: str | Path, *, source: str, points: int = 40) -> None:
    """Write tables, thinned to at most ``points`` along each axis; logarithms of ratios keep three decimals."""
    document = {
        "schema": SCHEMA,
        "gpu": tables.gpu.name,
        "source": source,
        "efficiencies": {name: float(f"{value:.5g}") for name, value in asdict(tables.efficiencies).items()},
        "linear": [
            {
                "operator": curve.operator,
                "sizes": list(curve.sizes),
                **_thinned(curve, "log_tokens", "log_ratio", points),
            }
            for curve in tables.linear
        ],
        "all_reduce": [
            {
                "workers": table.workers,
                "workers_per_node": table.workers_per_node,
                **_thinned(table, "log_bytes", "log_seconds", 2 * points),
            }
            for table in tables.all_reduce
        ],
        "decode": [_thinned_rows(rows, points) for rows in tables.decode],
        "prefill": [_thinned_rows(rows, points) for rows in tables.prefill],
    }
    text = json.dumps(document, separators=(",", ":"))
    Path(path).write_text(text.replace('{"operator"', '\n{"operator"').replace("]],[[", "]],\n[[") + "\n")


def _rounded(values: Array, digits: int = 3) -> list[float]:
    return [round(float(value), digits) for value in values]


def _thinned(table: object, x: str, y: str, points: int) -> dict[str, list[float]]:
    keep = spread(len(getattr(table, x)), points)
    return {name: _rounded(getattr(table, name)[keep]) for name in (x, y)}


def _thinned_rows(table: RatioRows, points: int) -> dict[str, Any]:
    kept, rows = spread(len(table.log_x), points), []
    for at, ratio in (table.rows[i] for i in kept):
        keep = spread(len(at), max(8, points // 2))
        rows.append([_rounded(at[keep]), _rounded(ratio[keep])])
    return {"key": list(table.key), "log_x": _rounded(table.log_x[kept], 4), "rows": rows}


def read_tables(path: str | Path) -> Tables:
    """Tables that `save_tables` wrote; ConfigError for any other file or schema."""
    try:
        document = json.loads(Path(path).read_text())
        if document["schema"] != SCHEMA:
            raise ConfigError(f"{path}: schema {document['schema']}; allowed is {SCHEMA}: calibrate again")
        return Tables(
            gpu=load_gpu(document["gpu"]),
            efficiencies=Efficiencies(**document["efficiencies"]),
            linear=tuple(RatioCurve(**_fields(curve)) for curve in document["linear"]),
            decode=tuple(RatioRows(**_fields(rows)) for rows in document["decode"]),
            prefill=tuple(RatioRows(**_fields(rows)) for rows in document["prefill"]),
            all_reduce=tuple(AllReduceTable(**_fields(table)) for table in document["all_reduce"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{path}: not a table of measured ratios ({error}); make one with: libra calibrate FILES --save"
        ) from error


def _fields(values: dict[str, Any]) -> dict[str, Any]:
    """The values of one table: logarithms as arrays, other lists as tuples."""
    found = {name: np.array(value) if name.startswith("log_") else value for name, value in values.items()}
    if "rows" in found:
        found["rows"] = tuple((np.array(at), np.array(ratio)) for at, ratio in found["rows"])
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


@cache
def shipped_tables(gpu_name: str) -> Tables | None:
    """The package's tables of a GPU, or None."""
    path = _FOLDER / f"{gpu_name.lower().replace('-', '_')}.json"
    return read_tables(path) if path.is_file() else None


def gpus_with_tables() -> tuple[GPU, ...]:
    """GPUs with tables in the package."""
    return tuple(gpu for gpu in known_gpus().values() if shipped_tables(gpu.name) is not None)
