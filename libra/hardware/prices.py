"""Prices of GPU-hours and core-hours, from a YAML file that names the source and the date of each (``prices.yaml``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Final

import yaml

from libra.errors import ConfigError

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
        wanted = _plain(gpu)
        return next((price for name, price in self.gpu_hour.items() if _plain(name) == wanted), None)


def load_prices(path: Path | None = None) -> Prices:
    """The prices in a file (None: those that come with Libra); ConfigError names file, entry and what is allowed."""
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
        raise ConfigError(f"--prices {path}: gpu_hour: got {gpus!r}; allowed is an entry for each GPU; {example}")
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
        raise ConfigError(f"--prices {path}: {where}.price: got {number!r}; allowed is a number from 0 on")
    if not isinstance(day, date):
        raise ConfigError(f"--prices {path}: {where}.date: got {day!r}; allowed is a date as 2026-11-09")
    return Price(float(number), str(entry["source"]), day)


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")
