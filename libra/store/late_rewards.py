"""Late rewards that were delivered, a file for each trajectory.

1. The first delivery for a trajectory counts: its file is created once, whole and flushed to the device; a second writer gets
   RecordExists.
2. Any process that reaches the run directory may deliver, also while the run stands still; none has to be alive afterwards.
3. A file never changes and is never removed: which batch took the reward is in the file of that batch.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from libra.errors import StoreError, shell_path
from libra.seals import sealed_text, unseal
from libra.store.exclusive_files import create_exclusive
from libra.types import TrajectoryId

SCHEMA = 1
_HERE: Counter[Path] = Counter()


@contextmanager
def run_here(directory: Path) -> Iterator[None]:
    """Within it, this process drives or works for the run in ``directory``."""
    _HERE[directory] += 1
    try:
        yield
    finally:
        _HERE[directory] -= 1
        if not _HERE[directory]:
            del _HERE[directory]


def runs_here() -> list[Path]:
    """Directories of the runs that this process drives or works for."""
    return list(_HERE)


def late_path(root: str | Path, trajectory: TrajectoryId) -> Path:
    """File of the reward of one trajectory."""
    return Path(root) / f"{trajectory}.json"


def write_late(root: str | Path, trajectory: TrajectoryId, value: float) -> Path:
    """Record that ``value`` was delivered; RecordExists if one was before, StoreError if it cannot be written."""
    path = late_path(root, trajectory)
    text = sealed_text({"schema": SCHEMA, "trajectory": list(trajectory), "value": value, "at_s": time.time()})
    create_exclusive(path, text.encode() + b"\n", fsync=True)
    return path


def read_late(root: str | Path, trajectory: TrajectoryId) -> float | None:
    """The value that was delivered, None if none was; StoreError if its file is torn, altered or of another trajectory."""
    path = late_path(root, trajectory)
    try:
        content = unseal(path.read_bytes())
        schema, value = content["schema"], float(content["value"])
        of = TrajectoryId(*content["trajectory"])
        if not math.isfinite(value):
            raise ValueError(f"its value is {value}")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"{path}: cannot read this reward: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise StoreError(
            f"{path}: torn or altered ({error!r}); remove it, and deliver the reward again with libra deliver "
            f"{shell_path(path.parent.parent)} {trajectory} VALUE"
        ) from error
    if schema != SCHEMA or of != trajectory:
        raise StoreError(
            f"{path}: schema {schema} of {of}; this Libra reads schema {SCHEMA} of {trajectory}; remove it"
        )
    return value


def came(root: str | Path, trajectories: Iterable[TrajectoryId]) -> dict[TrajectoryId, float]:
    """Those of ``trajectories`` whose reward was delivered, with its value."""
    found = {}
    for trajectory in trajectories:
        if (value := read_late(root, trajectory)) is not None:
            found[trajectory] = value
    return found
