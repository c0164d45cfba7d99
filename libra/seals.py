"""JSON objects that carry a digest of their content (a seal), so that a reader notices changes.

1. `unseal` returns the values given to `seal`, or raises: no changed value, added key or missing
   key passes.
2. Spaces and the order of keys are not content.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

SEAL = "seal"


def seal(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values``, which must be JSON-able, with their digest as the last key."""
    return {**values, SEAL: _digest(json.loads(json.dumps(values)))}  # as a reader finds it: keys are strings


def sealed_text(values: Mapping[str, Any], *, indent: int | None = None) -> str:
    """`seal` as JSON text without a final newline. TypeError or ValueError if not JSON-able."""
    return json.dumps(seal(values), indent=indent)


def parsed_json(text: str | bytes) -> Any:
    """The value in ``text``; ValueError, also if it is nested more deeply than Python's stack."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def unseal(text: str | bytes) -> dict[str, Any]:
    """The object in ``text``, without its digest; ValueError if not a JSON object, or changed."""
    values = parsed_json(text)
    if not isinstance(values, dict):
        raise ValueError(f"got {type(values).__name__}, not a JSON object")
    if values.pop(SEAL, None) != _digest(values):
        raise ValueError("its content is not what was sealed: a value was changed")
    return values


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=8).hexdigest()
