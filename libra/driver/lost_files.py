"""Files of a run that are gone, or end early, by what other files of the run say.

A killed run may lack its newest ones: of each kind only what must have been there is named.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from libra.driver.start_records import CONFIG_FILE
from libra.facts import IterationFinished, RunStarted
from libra.seals import parsed_json
from libra.store.event_log import lines_of
from libra.worker.run_spec import RunDirectory

TIDIED = 3
"""From so many checkpoints on one was tidied, and scores written, whatever ended the run; see `libra.driver.run_checkpoints`."""


def lost_files(
    files: RunDirectory, checkpoints: Sequence[int], evaluated: Collection[int], stored: Collection[int]
) -> Iterator[tuple[str, str]]:
    """Path within the run and fault of each.

    Parameters
    ----------
    checkpoints : sequence of int
        Steps of all.
    evaluated, stored : collection of int
        Versions whose evaluation the metrics have, and whose trajectories of it the store has.
    """
    best = files.checkpoints_dir / "best"
    scores = files.checkpoints_dir / "scores.json"
    first, second = sorted(checkpoints)[:2] if len(checkpoints) > 1 else (0, 0)
    is_tidied = (
        len(checkpoints) >= TIDIED or first > second - first or best.is_symlink()
    )  # one before the first was removed
    if not scores.exists() and is_tidied:
        yield f"checkpoints/{scores.name}", "it is gone, and says which checkpoint is the best"
    for version in sorted(set(evaluated) & set(stored)):
        path = files.evaluations_dir / f"version-{version:06d}.json"
        if not path.exists():
            yield f"evaluations/{path.name}", "it is gone; metrics.jsonl and the store have that evaluation"
    for path in sorted(files.evaluations_dir.glob("version-*.json")) if files.evaluations_dir.is_dir() else ():
        text = path.stem.partition("-")[2]
        if not text.isdecimal() or int(text) < min(checkpoints, default=0) or int(text) not in stored:
            continue
        try:
            number = int(parsed_json(path.read_bytes())["num"])
        except (ValueError, KeyError, TypeError, OverflowError):  # the check of its seal names it
            continue
        for group in range(min(number, 10**6)):
            name = f"eval-{text}-{group:06d}.group"
            if not (files.groups_dir / name).exists():
                yield f"groups/{name}", "it is gone; the store would be made again from it"


def cut_log(directory: Path, logged: Collection[int]) -> str:
    """How the event log ends before the run did, by the iterations that its metrics have; empty: it does not.

    The newest two may be missing where the run was killed, or made again from records.
    """
    newest = max(
        (_number(line, "iteration") for line in lines_of(directory / "events.jsonl", IterationFinished)), default=-1
    )
    last = max(logged, default=-1)
    if newest >= last - 1 or newest_started(directory) < 0:
        return ""
    ends = f"ends in iteration {newest + 1}" if newest >= 0 else "ends before the first iteration did"
    return f"the event log {ends}, and metrics.jsonl has {last}: lines at its end are missing"


def newest_started(directory: Path) -> int:
    """The highest epoch that the event log has a start of, -1 if there is none."""
    return max((_number(line, "epoch") for line in lines_of(directory / "events.jsonl", RunStarted)), default=-1)


def logs_events(directory: Path) -> bool:
    """Whether the run has an event log, by its configuration."""
    config = directory / CONFIG_FILE
    return config.is_file() and b"event_log: false" not in config.read_bytes()


def _number(line: bytes, name: str) -> int:
    try:
        return int(parsed_json(line)[name])
    except (ValueError, KeyError, TypeError, OverflowError):
        return -1
