"""`libra inspect RUN --invariants`: a run's promises, checked against its store.

Only stored training trajectories count. DORA's conditions (arXiv:2604.26256): C1, one version per
trajectory; C2, no started prompt is dropped; C3, the training version exceeds a trajectory's oldest
version by at most the bound. A two-sample Kolmogorov-Smirnov test compares lengths of trained and
generated trajectories, since age or failure may remove longer ones; the samples overlap, so the
test errs towards "holds".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.errors import ConfigError
from libra.observe.run_directory import check_run_directory, read_config, setting, whole_number
from libra.store.trajectory_store import TrajectoryStore
from libra.types import FailureClass

SIGNIFICANCE = 0.01
"""Significance level below which lengths count as different."""
READ_TOKENS = 4_000_000
"""Tokens per read."""


@dataclass(frozen=True, slots=True)
class Promise:
    """A promise: ``broken`` of ``of`` ``what`` violate it.

    ``required``: the configuration promises it. ``detail``: further numbers as text.
    """

    name: str
    broken: int
    of: int
    what: str
    required: bool = True
    detail: str = ""

    @property
    def verdict(self) -> str:
        """Verdict in one or two words; for a broken promise, whether it was required."""
        if not self.broken:
            return "holds"
        return "BROKEN" if self.required else "not promised"

    def __str__(self) -> str:
        counted = f"{self.broken} of {self.of} {self.what}"
        return f"{self.verdict:12}  {self.name}: {counted}{self.detail and f'; {self.detail}'}"


@dataclass(frozen=True, slots=True)
class StoredVersions:
    """Training trajectories, one row each, with ``columns`` of the store.

    ``generated``: tokens; ``fresh``: tokens within the staleness bound at their batch; ``spread``:
    newest minus oldest version.
    """

    columns: Mapping[str, NDArray[Any]]
    generated: NDArray[np.int64]
    fresh: NDArray[np.int64]
    spread: NDArray[np.int64]


def check_invariants(run_dir: Path) -> list[Promise]:
    """Every promise of a run; ConfigError, RunDirectoryError or StoreError if it cannot be read."""
    directory = check_run_directory(run_dir, "inspect")
    config = read_config(directory)
    eta, over_age = whole_number(config, "run", "eta", 0), setting(config, "staleness", "over_age", "wait")
    rows = read_versions(TrajectoryStore.open(directory / "trajectories.zarr"), eta)
    size, prompts = (whole_number(config, "trainer", name, 0) for name in ("group_size", "prompts"))
    if not size or not prompts:
        raise ConfigError(f"{directory}: its configuration has no size of groups and batches; type libra doctor RUN")
    one = setting(config, "staleness", "versions", "many") == "one"
    window = setting(config, "staleness", "window")
    iterations = whole_number(config, "run", "iterations", 0)
    return [
        *_bounded(rows, eta, str(over_age)),
        *_once(rows, size),
        *_dora(rows, eta, str(over_age), one, prompts, iterations),
        *([] if window is None else _within(rows, int(window))),
        _lengths(rows, eta, str(over_age)),
    ]


def read_versions(store: TrajectoryStore, eta: int) -> StoredVersions:
    """A store's training trajectories, with the versions of their tokens."""
    columns = store.columns()
    batch, length = columns["batch"], columns["length"].astype(np.int64)
    generated, fresh, spread = (np.zeros(len(length), np.int64) for _ in range(3))
    for first, last in _pieces(length):
        action, version = store.tokens(first, last, ("is_action", "weight_version"))
        owner = np.repeat(np.arange(first, last), length[first:last])[action]
        version = version[action].astype(np.int64)
        generated += np.bincount(owner, minlength=len(length))
        fresh += np.bincount(owner[batch[owner] - version <= eta], minlength=len(length))
        starts = np.flatnonzero(np.diff(owner, prepend=-1))
        if len(starts):
            spread[owner[starts]] = np.maximum.reduceat(version, starts) - np.minimum.reduceat(version, starts)
    train = np.flatnonzero(columns["split"] == "train")
    return StoredVersions(
        {name: values[train] for name, values in columns.items()}, generated[train], fresh[train], spread[train]
    )


def _pieces(length: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    ends, first = np.cumsum(length), 0
    while first < len(length):
        before = ends[first] - length[first]
        last = max(first + 1, int(np.searchsorted(ends, before + READ_TOKENS, side="right")))
        yield first, last
        first = last


def _sound(rows: StoredVersions) -> NDArray[np.bool_]:
    trains = np.isin(rows.columns["failure"], [str(failure) for failure in FailureClass if failure.trains])
    return np.asarray(trains & (rows.columns["batch"] >= 0))


def _lag(rows: StoredVersions) -> NDArray[np.int64]:
    oldest, batch = (rows.columns[name].astype(np.int64) for name in ("oldest_version", "batch"))
    return np.where((oldest >= 0) & (batch >= 0), batch - oldest, 0)


def _groups(rows: StoredVersions) -> NDArray[np.int64]:
    places = np.stack([rows.columns["iteration"], rows.columns["group"]])
    return np.asarray(np.unique(places, axis=1, return_inverse=True)[1], np.int64).reshape(-1)


def _trained(rows: StoredVersions, eta: int, over_age: str) -> NDArray[np.int64]:
    sound, group = _sound(rows), _groups(rows)
    late = np.isin(group, group[sound & (_lag(rows) > eta)])
    tokens = np.where(sound, rows.generated, 0)
    if over_age == "drop":  # a dropped group entered the loss without advantage
        return np.where(late & (rows.columns["advantage"] == 0), 0, tokens)
    return np.where(late & sound, rows.fresh, tokens) if over_age == "mask" else tokens


def _bounded(rows: StoredVersions, eta: int, over_age: str) -> Iterator[Promise]:
    tokens = _trained(rows, eta, over_age)
    stale = np.maximum(tokens - rows.fresh, 0)
    largest = int(_lag(rows)[tokens > 0].max(initial=0))
    yield Promise(
        "lag <= eta", int(stale.sum()), int(tokens.sum()), "tokens that train are older", over_age != "correct",
        f"largest lag of a trajectory that trains {largest}, run.eta={eta}, staleness.over_age={over_age}",
    )  # fmt: skip


def _once(rows: StoredVersions, size: int) -> Iterator[Promise]:
    columns = rows.columns
    ids = np.stack([columns[name] for name in ("iteration", "group", "sample")])
    times = np.unique(ids, axis=1, return_counts=True)[1]
    yield Promise("consumed once", int((times > 1).sum()), len(times), "trajectories are there more than once")
    group = _groups(rows)
    num = int(group.max(initial=-1)) + 1
    members = np.bincount(group, minlength=num)
    first, last = np.full(num, 2**31), np.full(num, -2)
    np.minimum.at(first, group, columns["batch"])
    np.maximum.at(last, group, columns["batch"])
    yield Promise(
        "whole groups", int(((members != size) | (first != last)).sum()), num,
        f"groups have not {size} members in one batch",
    )  # fmt: skip


def _dora(rows: StoredVersions, eta: int, over_age: str, one: bool, prompts: int, iterations: int) -> Iterator[Promise]:
    num = len(rows.spread)
    yield Promise("C1, one version each", int((rows.spread > 0).sum()), num, "trajectories have more", one)
    lag, sound, group = _lag(rows), _sound(rows), _groups(rows)
    batches = int(rows.columns["batch"].max(initial=-1)) + 1
    ended = batches >= iterations
    missing = batches * prompts - int(group.max(initial=-1)) - 1 if ended else 0
    dropped = len(set(group[sound & (lag > eta)])) if over_age == "drop" else 0
    so_far = "" if ended else f"{batches} of {iterations} batches so far, without open trajectories"
    yield Promise(
        "C2, no started prompt is dropped", missing + dropped, batches * prompts, "prompts were left out",
        missing > 0 or over_age != "drop", so_far,
    )  # fmt: skip
    yield Promise("C3, trajectories within the bound", int((lag > eta).sum()), num, "are beyond it", over_age == "wait")


def _within(rows: StoredVersions, window: int) -> Iterator[Promise]:
    wide = int((rows.spread >= window).sum())
    yield Promise(f"window of {window} versions", wide, len(rows.spread), "trajectories have tokens of more")


def _lengths(rows: StoredVersions, eta: int, over_age: str) -> Promise:
    from scipy.stats import ks_2samp  # slow import: most of a second

    trained = _trained(rows, eta, over_age)
    consumed, generated = trained[trained > 0], rows.generated[rows.generated > 0]
    if not len(consumed):
        return Promise("lengths", 0, len(generated), "trajectories were trained on: nothing to compare")
    found = ks_2samp(consumed, generated, method="asymp")
    detail = (
        f"KS distance {found.statistic:.6f}, p {found.pvalue:.6g}; mean {consumed.mean():.3f} tokens trained on, "
        f"{generated.mean():.3f} generated"
    )
    differs = int(found.pvalue < SIGNIFICANCE)
    return Promise("lengths as generated", differs, 1, "tests finds that trained trajectories differ", True, detail)
