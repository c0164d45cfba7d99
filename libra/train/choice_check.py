"""The check that a named option is one of the allowed ones."""

from __future__ import annotations

from collections.abc import Iterable

from libra.errors import TrainError


def check_option(where: str, got: str, allowed: Iterable[str]) -> None:
    """TrainError naming ``where`` unless ``got`` is one of ``allowed``."""
    names = tuple(allowed)
    if got not in names:
        raise TrainError(f"{where}: got {got!r}; allowed are {', '.join(names)}")
