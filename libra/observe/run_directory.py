"""A run directory without its event log: configuration, state, metrics, evaluations, `libra runs`.

Reading never writes. New, running, stopped and partly damaged runs have a summary, too.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
import yaml

from libra.errors import ConfigError, RunDirectoryError, StoreError, disk_refusal, shell_path
from libra.store.exclusive_files import lock_holder
from libra.store.line_log import LineReader
from libra.store.start_records import CONFIG_FILE, STARTS_FILE

logger = logging.getLogger(__name__)

State = Literal["running", "finished", "unevaluated", "stopped", "new"]
LARGEST: Final = 10**12
"""Maximum whole number in a run; larger values count as damage."""
LATEST_S: Final = 1e11
"""Maximum Unix time; later values count as damage."""


@dataclass(frozen=True, slots=True)
class RunSummaryRow:
    """One run in a list; ``reward`` and ``evaluation`` are the last means.

    ``state``: ``running`` with a driver; ``finished`` after all iterations and the last evaluation;
    ``unevaluated`` without that evaluation; ``new`` before the first iteration ended; else
    ``stopped``. ``of_iterations`` is 0 if unknown; ``changed_s`` is Unix time.
    """

    directory: Path
    name: str
    state: State
    iterations: int
    of_iterations: int
    reward: float | None
    evaluation: float | None
    changed_s: float
    size_bytes: int


class _Evaluation(msgspec.Struct):
    version: int
    reward: float | None = None
    num: int | None = 0
    bins: dict[str, Annotated[list[float], msgspec.Meta(min_length=1)]] | None = None


def check_run_directory(directory: Path, command: str, file: str = CONFIG_FILE) -> Path:
    """``directory`` if it is a run with this file; else RunDirectoryError with the words to type."""
    if (directory / file).exists():
        return directory
    found = sorted(path.parent for path in directory.glob(f"*/{file}")) if directory.is_dir() else []
    problem = f"holds no {file}" if directory.exists() else "does not exist"
    hint = shell_path(found[-1]) if found else "RUN with a directory that `libra run` made; libra runs DIR lists them"
    raise RunDirectoryError(f"{directory}: {problem}, so it is not a run directory; type libra {command} {hint}")


@contextlib.contextmanager
def written(output: Path, option: str) -> Iterator[Path]:
    """A temporary path that replaces ``output`` at the end; ConfigError, and no file, if impossible."""
    unfinished = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        yield unfinished
        unfinished.replace(output)
    except StoreError:
        raise  # also an OSError of a log that is being read
    except OSError as error:
        raise ConfigError(
            f"{option} {output}: {disk_refusal(output, error)}; type another file after {option}"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def read_config(directory: Path) -> dict[str, Any]:
    """Resolved configuration as plain values, with the last start's iterations; empty if unreadable."""
    try:
        values = yaml.safe_load((directory / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    if not isinstance(values, dict):
        return {}
    if (iterations := _resumed_for(directory)) is not None and isinstance(values.get("run"), dict):
        values["run"]["iterations"] = iterations
    return values


def _resumed_for(directory: Path) -> int | None:
    last: dict[str, Any] = {}
    with contextlib.suppress(StoreError):
        for _, start in LineReader(directory / STARTS_FILE):
            last = start
    found = last.get("iterations")
    return found if isinstance(found, int) else None


def setting(config: Mapping[str, Any], section: str, key: str, default: Any = None) -> Any:
    """One setting of a plain configuration."""
    values = config.get(section)
    found = values.get(key) if isinstance(values, Mapping) else None
    return default if found is None else found


def whole_number(config: Mapping[str, Any], section: str, key: str, default: int) -> int:
    """A whole-number setting; ``default`` for any other value in a damaged configuration."""
    found = setting(config, section, key, default)
    return found if type(found) is int and abs(found) <= LARGEST else default


def metric_rows(directory: Path) -> list[dict[str, Any]]:
    """A run's metrics up to the first damaged line; empty without metrics."""
    rows: list[dict[str, Any]] = []
    with contextlib.suppress(StoreError):
        rows.extend(row for _, row in LineReader(directory / "metrics.jsonl"))
    return rows


def iteration_rows(rows: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Metrics by iteration; the last line of each counts."""
    return {int(row["step"]): row for row in rows if "reward" in row and isinstance(row.get("step"), int)}


def evaluations(directory: Path) -> dict[int, dict[str, Any]]:
    """Evaluation outcomes by version, without damaged ones."""
    found = {}
    for path in sorted((directory / "evaluations").glob("version-*.json")):
        try:
            evaluation = msgspec.convert(json.loads(path.read_text(encoding="utf-8")), _Evaluation)
            found[evaluation.version] = msgspec.to_builtins(evaluation)
        except (OSError, ValueError, OverflowError, RecursionError) as error:
            _warn_of_damage(path, str(error))
    return found


@functools.cache
def _warn_of_damage(path: Path, wrong: str) -> None:
    logger.warning("%s: left out, as it is damaged (%.80s); type libra doctor RUN", path, wrong)


def has_driver(directory: Path) -> bool:
    """Whether a live driver has the run, as far as can be determined."""
    return lock_holder(directory / "driver") is not None


def state_of(directory: Path, config: Mapping[str, Any], ended: int) -> State:
    """State of a run with ``ended`` finished iterations."""
    if has_driver(directory):
        return "running"
    total = whole_number(config, "run", "iterations", 0)
    if not total or ended < total:
        return "stopped" if ended else "new"
    evaluated = (directory / "evaluations" / f"version-{total:06d}.json").exists()
    return "finished" if evaluated or not whole_number(config, "evaluation", "prompts", 0) else "unevaluated"


def finite(value: Any) -> float | None:
    """A finite number, or None."""
    return float(value) if isinstance(value, int | float) and abs(value) <= sys.float_info.max else None


def summary_row(directory: Path) -> RunSummaryRow:
    """Summary of one run."""
    config, rows = read_config(directory), metric_rows(directory)
    by_iteration, evaluated = iteration_rows(rows), evaluations(directory)
    last = by_iteration[max(by_iteration)] if by_iteration else {}
    total = whole_number(config, "run", "iterations", 0)
    failed = 0 < (finite(last.get("trajectories")) or 0) == finite(last.get("left_out"))  # all left out: the run ended
    started_s = (directory / CONFIG_FILE).stat().st_mtime
    changed_s = finite(rows[-1].get("wall_time_s")) if rows else None
    return RunSummaryRow(
        directory, str(setting(config, "run", "name", directory.name)),
        state=state_of(directory, config, len(by_iteration) - failed),
        iterations=len(by_iteration), of_iterations=total,
        reward=finite(last.get("reward")),
        evaluation=finite(evaluated[max(evaluated)].get("reward")) if evaluated else None,
        changed_s=changed_s if changed_s is not None and 0 < changed_s < LATEST_S else started_s,
        size_bytes=_size_bytes(directory),
    )  # fmt: skip


def list_runs(directory: Path) -> list[RunSummaryRow]:
    """The runs in ``directory``, or this run, newest first; RunDirectoryError if missing."""
    if not directory.is_dir():
        raise RunDirectoryError(
            f"{directory}: is not a directory; type libra runs DIR with the directory that has your runs"
        )
    here = [directory / CONFIG_FILE] if (directory / CONFIG_FILE).is_file() else directory.glob(f"*/{CONFIG_FILE}")
    rows = []
    for path in here:
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            rows.append(summary_row(path.parent))
    return sorted(rows, key=lambda row: (-row.changed_s, row.name))


def _size_bytes(directory: Path) -> int:
    """Files with several names (hard links), such as a journal log, count once."""
    sizes: dict[tuple[int, int], int] = {}
    for parent, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):  # removed meanwhile
                file = (Path(parent) / name).lstat()
                sizes[file.st_dev, file.st_ino] = file.st_size
    return sum(sizes.values())
