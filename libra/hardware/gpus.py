"""Datasheets of GPUs, one small YAML file each in ``gpus/``; prices of GPU-hours and core-hours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import yaml

from libra.errors import ConfigError, nearest_name

_FOLDER = Path(__file__).parent / "gpus"


@dataclass(frozen=True, slots=True)
class GPU:
    """The datasheet of one kind of GPU. Peak figures, without sparsity; efficiencies are in `libra.hardware.rooflines`.

    Attributes
    ----------
    name, full_name : str
        Short name, e.g. ``"A800-80G"``, and the vendor's.
    flops_per_s : float
        Dense bfloat16 (float16 before Ampere) matrix products with float32 accumulation.
    clock_hz : float
        Boost clock of the multiprocessors, to which the peak operations refer.
    num_sms : int
        Streaming multiprocessors, which compute the tiles of a matrix product.
    link_bytes_per_s, network_bytes_per_s : float
        One direction: the sum of a GPU's links to the others of its machine (bytes, half of a "bidirectional" figure), and
        its share of its machine's network.
    """

    name: str
    full_name: str
    memory_bytes: float
    memory_bytes_per_s: float
    flops_per_s: float
    clock_hz: float
    num_sms: int
    l2_bytes: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    gpus_per_node: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("name", "full_name") and not value > 0:
                raise ConfigError(f"GPU {self.name}: {field.name}: got {value!r}; give a number above 0")


def _key(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "").replace(" ", "")


@lru_cache(maxsize=1)
def known_gpus() -> dict[str, GPU]:
    """The GPUs with a datasheet in the package, by name."""
    gpus = [read_gpu(path) for path in sorted(_FOLDER.glob("*.yaml"))]
    return {gpu.name: gpu for gpu in gpus}


def read_gpu(path: str | Path) -> GPU:
    """The datasheet in a YAML file; ConfigError for a missing, unknown or non-numeric field."""
    values = yaml.safe_load(Path(path).read_text())
    names = {field.name for field in fields(GPU)}
    if not isinstance(values, dict) or set(values) != names:
        got = sorted(values) if isinstance(values, dict) else values
        raise ConfigError(f"{path}: got fields {got}; a GPU file has exactly {', '.join(sorted(names))}")
    kinds: dict[str, type] = {"name": str, "full_name": str, "num_sms": int, "gpus_per_node": int}
    try:
        numbers: dict[str, Any] = {key: kinds.get(key, float)(value) for key, value in values.items()}
        return GPU(**numbers)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error


def load_gpu(name: str) -> GPU:
    """The GPU ``name`` ("A800-80G", "a100_80g"; "h100" if only one known GPU begins so), or the one in the file ``name``.

    ConfigError names the nearest known GPU.
    """
    if name.endswith((".yaml", ".yml")):
        if not Path(name).is_file():
            raise ConfigError(f"GPU {name!r}: no such file; a known name would be one of {', '.join(known_gpus())}")
        return read_gpu(name)
    by_key = {_key(known): gpu for known, gpu in known_gpus().items()}
    wanted = _key(name)
    if wanted in by_key:
        return by_key[wanted]
    begin = [gpu for key, gpu in by_key.items() if wanted and key.startswith(wanted)]
    if len(begin) == 1:
        return begin[0]
    if len(begin) > 1:
        raise ConfigError(f"GPU {name!r} is not one GPU; type one of {', '.join(gpu.name for gpu in begin)}")
    near = nearest_name(wanted, by_key)
    hint = f"; did you mean {by_key[near].name}?" if near else "."
    raise ConfigError(f"GPU {name!r} is unknown{hint} Known are {', '.join(known_gpus())}, or the path of a YAML file")


SHIPPED: Final = Path(__file__).with_name("prices.yaml")
"""The prices that come with Libra."""
_ENTRY: Final = {"price", "source", "date"}
_FILE: Final = {"currency", "core_hour", "gpu_hour"}


@dataclass(frozen=True, slots=True)
class Price:
    """Price of one hour of one unit, where it is from, and when it was read there."""

    price: float
    source: str
    date: date


@dataclass(frozen=True, slots=True)
class Prices:
    """A file of prices; ``core_hour`` is None where it has none. GPUs have the names of the datasheets, or any other."""

    path: Path
    currency: str
    core_hour: Price | None
    gpu_hour: Mapping[str, Price]

    def of(self, gpu: str) -> Price | None:
        """Price per GPU-hour of the GPU with this name, letters' case and ``-`` or ``_`` aside; None if the file has none."""
        wanted = _key(gpu)
        return next((price for name, price in self.gpu_hour.items() if _key(name) == wanted), None)


def load_prices(path: Path | None = None) -> Prices:
    """The prices in a file, by default Libra's own; ConfigError names file, entry and what to write."""
    path = SHIPPED if path is None else path
    example = f"copy {SHIPPED} and change the numbers"
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"--prices {path}: cannot be read as YAML ({error}); {example}") from error
    if not isinstance(values, dict) or not set(values) <= _FILE or not isinstance(values.get("currency"), str):
        got = ", ".join(map(str, values)) if isinstance(values, dict) else type(values).__name__
        raise ConfigError(f"--prices {path}: has {got}; allowed are currency, core_hour and gpu_hour; {example}")
    gpus = values.get("gpu_hour") or {}
    if not isinstance(gpus, dict):
        raise ConfigError(f"--prices {path}: gpu_hour: got {gpus!r}; give an entry for each GPU; {example}")
    core = values.get("core_hour")
    return Prices(
        path,
        values["currency"],
        None if core is None else _price(path, "core_hour", core),
        {str(name): _price(path, f"gpu_hour.{name}", entry) for name, entry in gpus.items()},
    )


def _price(path: Path, where: str, entry: Any) -> Price:
    if not isinstance(entry, dict) or set(entry) != _ENTRY:
        got = ", ".join(map(str, entry)) if isinstance(entry, dict) else repr(entry)
        raise ConfigError(f"--prices {path}: {where}: got {got}; it has price, source and date")
    number, day = entry["price"], entry["date"]
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < float("inf"):
        raise ConfigError(f"--prices {path}: {where}.price: got {number!r}; give a number from 0 on")
    if not isinstance(day, date):
        raise ConfigError(f"--prices {path}: {where}.date: got {day!r}; give a date as 2026-11-09")
    return Price(float(number), str(entry["source"]), day)
