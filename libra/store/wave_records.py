"""Waves of a streamed step, committed one after the other while other groups of their batch are still being generated.

1. The groups of a wave are committed once, flushed to the device, before its gradient is computed, and never change.
2. The waves of a batch are numbered from 0 without gaps. The batch itself repeats their groups in the same order, so that the
   records of a committed batch are not needed any more.
3. A file that was cut or altered is never read as a wave: it is sealed (`libra.seals`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from libra.errors import StoreError
from libra.seals import sealed_text, unseal
from libra.store.exclusive_files import create_exclusive

WAVE = "wave"
"""Name of the fact of a batch's group that has the number of its wave."""

Rows = list[dict[str, Any]]
"""Facts of groups, as `libra.store.batch_membership.commit_batch` gets them."""


def wave_path(root: str | Path, batch: int, wave: int) -> Path:
    """File of one wave."""
    return Path(root) / f"wave-{batch:06d}-{wave:02d}.json"


def commit_wave(root: str | Path, batch: int, wave: int, rows: Sequence[dict[str, Any]]) -> None:
    """Create the record of a wave, flushed to the device; RecordExists if it was committed before."""
    text = sealed_text({"batch": batch, "wave": wave, "groups": [row | {WAVE: wave} for row in rows]})
    create_exclusive(wave_path(root, batch, wave), text.encode() + b"\n", fsync=True)


def read_waves(root: str | Path, batch: int) -> list[Rows]:
    """The committed waves of a batch, in order; StoreError if one of them is torn."""
    waves: list[Rows] = []
    while (path := wave_path(root, batch, len(waves))).exists():
        try:
            content = unseal(path.read_bytes())
            if (content["batch"], content["wave"]) != (batch, len(waves)):
                raise ValueError("it is of another wave")
            waves.append(content["groups"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise StoreError(f"{path}: torn or altered ({error}); type libra repair {path.parent.parent}") from error
    return waves


def in_waves(rows: Rows) -> list[Rows]:
    """The groups of a committed batch by wave, in order; empty if its step was not streamed."""
    waves: dict[int, Rows] = {}
    for row in rows:
        if WAVE in row:
            waves.setdefault(row[WAVE], []).append(row)
    return [waves[number] for number in sorted(waves)]


def groups_of(rows: Rows) -> tuple[tuple[int, int], ...]:
    """Groups of a wave, as (iteration, group)."""
    return tuple((row["iteration"], row["group"]) for row in rows)
