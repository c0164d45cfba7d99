"""Which files of a teacher's scores are damaged or gone (``distil``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from libra.errors import StoreError
from libra.store.group_records import read_group
from libra.store.teacher_scores import DIRECTORY, read_scores, scores_path
from libra.worker.run_spec import RunDirectory


def teacher_faults(
    files: RunDirectory, allows: Callable[[int], bool], needed: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Path within the run and fault of each.

    Parameters
    ----------
    allows : callable
        Whether so many more bytes may be read.
    needed : mapping of str to str
        Names of the group records whose scores a batch took that may be repeated, and what they are needed for.
    """
    directory = files.directory / DIRECTORY
    for path in sorted(directory.glob("*.scores"), reverse=True) if directory.is_dir() else ():
        group = files.groups_dir / f"{path.stem}.group"
        if allows(path.stat().st_size) and (what := _fault(path, group)):
            yield f"{DIRECTORY}/{path.name}", what
    for name, why in needed.items():
        path = scores_path(files.groups_dir / name)
        if not path.exists():
            yield f"{DIRECTORY}/{path.name}", f"it is gone, and {why}"


def _fault(path: Path, group: Path) -> str:
    """What is wrong with the scores of a group; empty: nothing. A group record that is damaged or gone says nothing of them."""
    try:
        scores = read_scores(path)
    except StoreError as error:
        return str(error).partition(": ")[2].partition(". Delete")[0]
    except (TypeError, KeyError) as error:  # whole, and not what a teacher says
        return f"it has no scores ({error})"
    try:
        lengths = [member.num_action_tokens for member in read_group(group)]
    except StoreError:
        return ""
    scored = [None if each is None else len(each.own_logp) for each in scores]
    same = len(scored) == len(lengths) and all(one in (None, other) for one, other in zip(scored, lengths, strict=True))
    return "" if same else "it has the scores of another group"
