"""Checks of what a user may choose for a reward."""

from __future__ import annotations

from collections.abc import Sequence

from libra.errors import ConfigError


def one_of(name: str, value: object, allowed: Sequence[object]) -> None:
    """ConfigError where ``value`` is not among ``allowed``."""
    if value not in allowed:
        shown = ", ".join(repr(each) for each in allowed)
        raise ConfigError(f"reward option {name}: got {value!r}; allowed are {shown}")
