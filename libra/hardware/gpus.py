"""GPU datasheets, one YAML file each in ``gpus/``; prices of GPU-hours and core-hours."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Final

import msgspec
import yaml

from libra.errors import ConfigError, nearest_name

_FOLDER = Path(__file__).parent / "gpus"
Positive = Annotated[float, msgspec.Meta(gt=0)]
AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True, slots=True)
class GPU:
    """Datasheet of one kind of GPU; peaks are without sparsity."""

    name: str  # e.g. "A800-80G"
    full_name: str  # the vendor's
    memory_bytes: Positive
    memory_bytes_per_s: Positive
    flops_per_s: Positive  # dense bfloat16 (float16 before Ampere) products, float32 accumulation
    clock_hz: Positive  # boost clock, to which the peak operations refer
    num_sms: AtLeastOne  # streaming multiprocessors, which compute the tiles of a matrix product
    l2_bytes: Positive
    link_bytes_per_s: Positive  # one direction, to all GPUs of its machine (half of a "bidirectional" figure)
    network_bytes_per_s: Positive  # one direction, its share of the machine's network
    gpus_per_node: AtLeastOne


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
    try:
        return msgspec.convert(values, GPU, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error


def load_gpu(name: str) -> GPU:
    """A GPU by name ("A800-80G", "a100_80g"; an unambiguous "h100"), or from the file ``name``.

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


class Price(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Price of one hour of one unit, its source, and the date it was read."""

    price: Annotated[float, msgspec.Meta(ge=0, le=1e9)]
    source: str
    date: date


class Prices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of prices. GPU names are those of datasheets, or any other."""

    currency: str
    core_hour: Price | None = None
    gpu_hour: dict[str, Price] = {}
    path: Path = SHIPPED

    def of(self, gpu: str) -> Price | None:
        """Price per GPU-hour, ignoring case and ``-`` or ``_`` in the name; None if unknown."""
        wanted = _key(gpu)
        return next((price for name, price in self.gpu_hour.items() if _key(name) == wanted), None)


def load_prices(path: Path | None = None) -> Prices:
    """Prices in a file, by default Libra's own; ConfigError names file, entry and the expected form."""
    path = SHIPPED if path is None else path
    example = f"copy {SHIPPED} and change the numbers"
    try:
        found = msgspec.convert(yaml.safe_load(path.read_text(encoding="utf-8")), Prices)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--prices {path}: cannot be read as YAML ({error}); {example}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"--prices {path}: {error}; it has currency, core_hour and gpu_hour, whose entries have price (0 or more), source and "
            f"date (as 2026-11-09); {example}"
        ) from error
    return msgspec.structs.replace(found, path=path)
