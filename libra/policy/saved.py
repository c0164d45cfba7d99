"""State of policies as JSON, for the log: the annotated attributes of a class.

Invariants
----------
1. ``restore(json.loads(json.dumps(snapshot())))`` changes no later answer; dicts keep their order.
2. A value that is not a snapshot of the object is refused with KeyError, TypeError or ValueError.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

import msgspec
import numpy as np


class Saved:
    """An object whose state is its class's annotated attributes, which start empty or 0."""

    _kinds: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        cls._kinds = {name: kind for name, kind in get_type_hints(cls).items() if get_origin(kind) is not ClassVar}

    def __init__(self) -> None:
        for name, kind in self._kinds.items():
            plain = get_origin(kind) or kind
            if plain in (bool, int, float, str, tuple, list, set, dict):
                setattr(self, name, plain())

    def snapshot(self) -> dict[str, Any]:
        return {name.lstrip("_"): _plain(getattr(self, name)) for name in self._kinds}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Take the state of ``snapshot``; KeyError, TypeError or ValueError if it is not one."""
        for name, kind in self._kinds.items():
            value, part = snapshot[name.lstrip("_")], getattr(self, name)
            if hasattr(part, "restore"):
                part.restore(value)
                continue
            try:
                typed = _typed(value, kind)
                if isinstance(part, np.ndarray) and part.shape != typed.shape:
                    raise ValueError(f"{name.lstrip('_')}: shape {typed.shape}, here it is {part.shape}")
                setattr(self, name, typed)
            except msgspec.ValidationError as error:
                raise ValueError(f"{name.lstrip('_')}: {error}") from error


def _plain(value: Any) -> Any:
    if hasattr(value, "snapshot"):
        return value.snapshot()
    if isinstance(value, dict):
        if any(type(key) is tuple for key in value):  # a tuple cannot be a name in JSON
            return [[*_plain(key), _plain(each)] for key, each in value.items()]
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, set):
        return sorted(map(_plain, value))
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    return msgspec.to_builtins(value)


def _typed(value: Any, kind: Any) -> Any:
    if np.ndarray in (kind, get_origin(kind)):
        return np.array(value, dtype=np.float64)
    arguments = get_args(kind)
    if get_origin(kind) is dict and get_origin(arguments[0]) is tuple:
        key, each = arguments
        return {msgspec.convert(row[:-1], key): _typed(row[-1], each) for row in value}
    return msgspec.convert(value, kind, str_keys=True)
