"""`libra inspect RUN`: step through the trajectories of a run in the terminal, or print some of them, as text or JSON."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from libra.errors import ModelError, RunDirectoryError
from libra.observe.token_text import Decode, load_decode
from libra.observe.trajectory_view import as_json as view_as_json
from libra.observe.trajectory_view import render
from libra.store.trajectories import TrajectoryStore

logger = logging.getLogger(__name__)

_HELP = "n next   p previous   t tokens on or off   q quit"


def inspect_run(
    run_dir: str | Path,
    *,
    index: int | None = None,
    split: str | None = None,
    iteration: int | None = None,
    group: int | None = None,
    sample: int | None = None,
    failed: bool = False,
    order: str | None = None,
    tokens: bool = False,
    limit: int = 1,
    as_json: bool = False,
    console: Console | None = None,
    read_key: Callable[[], str] | None = None,
) -> None:
    """Show trajectories of a run that fit every filter given.

    In a terminal it steps through them by keys; where stdin is no terminal, or ``index``, ``as_json`` or a ``limit``
    other than 1 is given, it prints the first ``limit`` of them.

    Parameters
    ----------
    run_dir
        A run directory, finished or running: what is committed is shown.
    index : int or None
        Position in the store, from 0; negative counts from the end.
    failed : bool
        Only trajectories with a failure class.
    order : "best", "worst" or None
        By reward, ungraded ones last; None: in the order of the store.
    tokens : bool
        Also every token with text, log-probability and versions.
    as_json : bool
        One JSON object per line instead of text.
    console : Console or None
        Where to print; None: standard output.
    read_key : callable or None
        Gives the next key and makes stepping interactive; None: the terminal.

    Raises
    ------
    RunDirectoryError
        ``run_dir`` holds no trajectories.
    StoreError
        The store cannot be read.
    """
    run_dir, console = Path(run_dir), console or Console()
    store = TrajectoryStore.open(_store_path(run_dir))
    wanted = {"split": split, "iteration": iteration, "group": group, "sample": sample}
    rows = select(store.columns(), index=index, wanted=wanted, failed=failed, order=order)
    if not len(rows) and not as_json:
        console.print(_nothing_fits(store, index, wanted, failed), highlight=False, markup=False)
        return
    decode = _decode_or_ids(run_dir, console, quiet=as_json)
    viewer = _Viewer(store, rows, decode, console)
    if as_json:
        viewer.print_json(limit, tokens)
    elif read_key is not None or (index is None and limit == 1 and sys.stdin.isatty()):
        viewer.step(read_key or click.getchar, tokens)
    else:
        for place in range(min(limit, len(rows))):
            viewer.show(place, tokens)


def select(
    columns: Mapping[str, NDArray[Any]],
    *,
    index: int | None,
    wanted: Mapping[str, Any],
    failed: bool,
    order: str | None,
) -> NDArray[np.int64]:
    """Rows of the trajectory columns that fit, in the order to show them.

    ``wanted`` maps a column to the value it must have; None fits all. Raises ValueError for an unknown order.
    """
    fits = np.ones(len(columns["reward"]), bool)
    for name, value in wanted.items():
        if value is not None:
            fits &= columns[name] == value
    if failed:
        fits &= columns["failure"] != "none"
    if index is not None:
        fits &= np.arange(len(fits)) == (index if index >= 0 else len(fits) + index)
    rows = np.flatnonzero(fits)
    if order is None:
        return rows
    if order not in ("best", "worst"):
        raise ValueError(f"order: got {order!r}; allowed are 'best', 'worst' and None")
    rewards = columns["reward"][rows]
    return rows[np.argsort(-rewards if order == "best" else rewards, kind="stable")]  # NaN sorts last both ways


class _Viewer:
    """The selected trajectories of one store, shown one at a time."""

    def __init__(
        self, store: TrajectoryStore, rows: NDArray[np.int64], decode: Decode | None, console: Console
    ) -> None:
        self.store, self.rows, self.decode, self.console = store, rows, decode, console

    def show(self, place: int, tokens: bool) -> None:
        """Print one of them; ``place`` counts from 0 within the selection."""
        index = int(self.rows[place])
        where = f"{place + 1} of {len(self.rows)} selected, index {index} of {self.store.num_trajectories}"
        page = render(self.store.trajectory(index), self._row(index), place=where, decode=self.decode, tokens=tokens)
        self.console.rule()
        self.console.print(page)

    def print_json(self, limit: int, tokens: bool) -> None:
        """Print the first ``limit`` of them, one JSON object per line."""
        for index in self.rows[:limit].tolist():
            page = view_as_json(
                self.store.trajectory(index), self._row(index), index=index, decode=self.decode, tokens=tokens
            )
            self.console.out(json.dumps(page, allow_nan=False), highlight=False)

    def step(self, read_key: Callable[[], str], tokens: bool) -> None:
        """Show them by keys, until ``q`` or the end of input."""
        place = 0
        while True:
            self.show(place, tokens)
            self.console.print(_HELP, style="reverse", highlight=False)
            try:
                key = read_key()
                while key not in ("n", "p", "t", "q", " ", "\r"):
                    key = read_key()
            except (EOFError, KeyboardInterrupt):
                return
            if key == "q":
                return
            if key == "t":
                tokens = not tokens
            else:
                place = (place + (-1 if key == "p" else 1)) % len(self.rows)

    def _row(self, index: int) -> dict[str, Any]:
        return {
            name: str(values[index]) if values.dtype.kind == "T" else values[index].item()
            for name, values in self.store.columns().items()
        }


def _store_path(run_dir: Path) -> Path:
    path = run_dir / "trajectories.zarr"
    if path.is_dir():
        return path
    runs = sorted(found.parent.name for found in run_dir.glob("*/trajectories.zarr")) if run_dir.is_dir() else []
    hint = (
        f"type libra inspect {run_dir / runs[-1]}"
        if runs
        else "type libra inspect RUN with a directory that `libra run` made"
    )
    what = "does not exist" if not run_dir.exists() else "holds no trajectories.zarr"
    raise RunDirectoryError(f"{run_dir}: {what}, so it is no run directory; {hint}")


def _nothing_fits(store: TrajectoryStore, index: int | None, wanted: Mapping[str, Any], failed: bool) -> str:
    filters = {"index": index, **wanted, "failed": failed or None}
    asked = ", ".join(f"{name}={value}" for name, value in filters.items() if value is not None) or "no filter"
    iterations = store.columns()["iteration"]
    span = f", iterations {iterations.min()} to {iterations.max()}" if len(iterations) else ""
    return f"No trajectory fits ({asked}); the store holds {store.num_trajectories}{span}."


def _decode_or_ids(run_dir: Path, console: Console, *, quiet: bool) -> Decode | None:
    try:
        return load_decode(run_dir)
    except ModelError as error:
        logger.info("token ids are shown, not text: %s", error)
        if not quiet:
            console.print(f"Token ids are shown, not text: {error}", style="yellow", highlight=False, markup=False)
        return None
