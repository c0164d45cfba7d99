"""What a teacher says of the trajectories of finished groups, a file for each group (``distil.teacher``).

1. The file of a group is created once, whole and flushed to the device; a second writer gets RecordExists. So a group is scored
   once, however often tasks run again, and a resumed or replayed run reads what was scored.
2. It is made after the group's record, and may come after the batch of the group. Whether that trained with it is in its file
   (``taught`` of the group's row).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from libra.errors import StoreError
from libra.store.exclusive_files import create_exclusive
from libra.store.record_codec import pack, unpack
from libra.types import Taught

DIRECTORY = "teacher"
"""Of a run, beside that of its group records."""


def scores_path(group: str | Path) -> Path:
    """File of the teacher's scores of the group whose record is ``group``."""
    path = Path(group)
    return path.parent.with_name(DIRECTORY) / f"{path.stem}.scores"


def write_scores(path: Path, scores: Sequence[Taught | None]) -> None:
    """Create the file of a group, with one entry for each member; None for one that was not scored.

    RecordExists if it is there, StoreError if it cannot be written.
    """
    record = {"scores": [None if each is None else list(each) for each in scores]}
    create_exclusive(path, pack(record, source=str(path)), fsync=True)


def read_scores(path: Path, num_members: int | None = None) -> list[Taught | None]:
    """The scores of a group, one entry for each of its ``num_members``; StoreError names a file that is missing, torn or of another
    group."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path}: cannot read what the teacher scored: {error.strerror}") from error
    found = [None if each is None else Taught(*each) for each in unpack(data, source=path)["scores"]]
    if num_members not in (None, len(found)):
        raise StoreError(f"{path}: it has {len(found)} trajectories and its group {num_members}; it is of another run")
    return found
