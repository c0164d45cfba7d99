"""Tables as files: JSON of a few kilobytes, thinned from profiles. Those in ``tables/`` come with the package.

``tables/README.md`` says where the numbers come from and under which licence.
"""

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
    """Write tables thinned to at most ``points`` along each axis; ratios keep three decimals of their logarithm."""

    def listed(values: Array, digits: int) -> list[float]:
        return [round(float(value), digits) for value in values]

    document: dict[str, Any] = {
        "schema": SCHEMA,
        "gpu": tables.gpu.name,
        "source": source,
        "efficiencies": {name: float(f"{value:.5g}") for name, value in asdict(tables.efficiencies).items()},
        "linear": [
            {
                "operator": curve.operator,
                "sizes": list(curve.sizes),
                "log_tokens": listed(curve.log_tokens[keep], 3),
                "log_ratio": listed(curve.log_ratio[keep], 3),
            }
            for curve in tables.linear
            for keep in [spread(len(curve.log_tokens), points)]
        ],
        "all_reduce": [
            {
                "workers": table.workers,
                "workers_per_node": table.workers_per_node,
                "log_bytes": listed(table.log_bytes[keep], 3),
                "log_seconds": listed(table.log_seconds[keep], 3),
            }
            for table in tables.all_reduce
            for keep in [spread(len(table.log_bytes), 2 * points)]
        ],
    }
    for name, tables_of_rows in (("decode", tables.decode), ("prefill", tables.prefill)):
        document[name] = [
            {
                "key": list(rows.key),
                "log_x": listed(rows.log_x[spread(len(rows.log_x), points)], 4),
                "rows": [
                    [listed(at[keep], 3), listed(ratio[keep], 3)]
                    for i in spread(len(rows.log_x), points)
                    for at, ratio in [rows.rows[i]]
                    for keep in [spread(len(at), max(8, points // 2))]
                ],
            }
            for rows in tables_of_rows
        ]
    lines = (
        json.dumps(document, separators=(",", ":")).replace('{"operator"', '\n{"operator"').replace("]],[[", "]],\n[[")
    )
    Path(path).write_text(lines + "\n")


def read_tables(path: str | Path) -> Tables:
    """Tables that `save_tables` wrote; ConfigError where the file is none or of another schema."""
    try:
        document = json.loads(Path(path).read_text())
        if document["schema"] != SCHEMA:
            raise ConfigError(f"{path}: schema {document['schema']}; allowed is {SCHEMA}: calibrate again")
        return Tables(
            gpu=load_gpu(document["gpu"]),
            efficiencies=Efficiencies(**document["efficiencies"]),
            linear=tuple(
                RatioCurve(
                    curve["operator"],
                    tuple(curve["sizes"]),
                    np.array(curve["log_tokens"]),
                    np.array(curve["log_ratio"]),
                )
                for curve in document["linear"]
            ),
            decode=_rows(document["decode"]),
            prefill=_rows(document["prefill"]),
            all_reduce=tuple(
                AllReduceTable(
                    table["workers"],
                    table["workers_per_node"],
                    np.array(table["log_bytes"]),
                    np.array(table["log_seconds"]),
                )
                for table in document["all_reduce"]
            ),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{path}: not a table of measured ratios ({error}); make one with: libra calibrate FILES --save"
        ) from error


def _rows(tables: list[dict[str, Any]]) -> tuple[RatioRows, ...]:
    return tuple(
        RatioRows(
            tuple(table["key"]),
            np.array(table["log_x"]),
            tuple((np.array(at), np.array(ratio)) for at, ratio in table["rows"]),
        )
        for table in tables
    )


@cache
def shipped_tables(gpu_name: str) -> Tables | None:
    """The package's tables of a GPU; None where there are none and the forms have to do."""
    path = _FOLDER / f"{gpu_name.lower().replace('-', '_')}.json"
    return read_tables(path) if path.is_file() else None


def gpus_with_tables() -> tuple[GPU, ...]:
    """GPUs whose tables are in the package."""
    return tuple(gpu for gpu in known_gpus().values() if shipped_tables(gpu.name) is not None)
