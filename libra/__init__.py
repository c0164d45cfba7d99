"""Libra: agentic-RL post-training of language models, run as Dask graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["RunSummary", "Session", "__version__", "train"]

if TYPE_CHECKING:
    from libra.graph.api import train
    from libra.graph.driver import RunSummary, Session


def __getattr__(name: str) -> Any:
    """Public names, imported when they are first used: ``import libra`` alone loads neither torch nor Dask."""
    if name == "train":
        from libra.graph.api import train

        return train
    if name in ("Session", "RunSummary"):
        from libra.graph import driver

        return getattr(driver, name)
    raise AttributeError(f"module 'libra' has no attribute {name!r}")
