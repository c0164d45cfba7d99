"""Errors about what a user may choose for an environment or a reward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from libra.errors import ConfigError, nearest_name


def nearest(given: object, known: Iterable[str]) -> str:
    """`` (did you mean 'NAME'?)`` with the most similar known name; empty if none is similar."""
    match = nearest_name(given, known)
    return f" (did you mean {match!r}?)" if match else ""


def one_of(name: str, value: object, allowed: Sequence[object]) -> None:
    """ConfigError if ``value`` is not allowed; ``name`` is the setting."""
    if value not in allowed:
        raise ConfigError(f"{name}: got {value!r}; allowed are {', '.join(map(repr, allowed))}")
