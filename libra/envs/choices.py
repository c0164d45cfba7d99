"""Errors about what a user may choose for an environment or a reward."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from libra.errors import ConfigError


def nearest(given: object, known: Iterable[str]) -> str:
    """`` (did you mean 'NAME'?)`` with the most similar known name; empty if none is similar."""
    match = difflib.get_close_matches(str(given), list(known), n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""


def one_of(name: str, value: object, allowed: Sequence[object]) -> None:
    """ConfigError if ``value`` is not allowed; ``name`` is the setting."""
    if value not in allowed:
        raise ConfigError(f"{name}: got {value!r}; allowed are {', '.join(map(repr, allowed))}")
