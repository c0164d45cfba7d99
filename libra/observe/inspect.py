"""`libra inspect RUN`: trajectories of a run in the terminal, as text, JSON or HTML."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import click
import msgspec
import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from libra.errors import ModelError, RunDirectoryError, shell_path
from libra.observe.html import piece, render, table
from libra.observe.output_file import written
from libra.observe.trajectory_view import Decode, load_decode, segments, terminal_view
from libra.observe.trajectory_view import as_json as view_as_json
from libra.store.observations import observations_of
from libra.store.run_records import batch_path, read_batch_facts, read_late
from libra.store.trajectory_store import TrajectoryStore
from libra.types import FailureClass, Trajectory, TrajectoryId
from libra.untrusted import shown, shown_json, shown_line

logger = logging.getLogger(__name__)

_HELP = "n next   p previous   t tokens on or off   q quit"


@dataclass(frozen=True, slots=True)
class Selection:
    """The trajectories to show; a field that is None does not filter.

    ``index`` is the position in the store (negative from the end); ``failed`` selects trajectories
    with a failure class; ``order`` is ``best`` or ``worst`` by reward with ungraded ones last, or
    None for the store's order.
    """

    index: int | None = None
    split: str | None = None
    iteration: int | None = None
    group: int | None = None
    sample: int | None = None
    failed: bool = False
    order: str | None = None

    def __post_init__(self) -> None:
        if self.order not in ("best", "worst", None):
            raise ValueError(f"order: got {self.order!r}; allowed are 'best', 'worst' and None")

    def rows(self, columns: Mapping[str, NDArray[Any]]) -> NDArray[np.int64]:
        """Rows of the trajectory columns that match, in the order of display."""
        fits = np.ones(len(columns["reward"]), bool)
        for name in ("split", "iteration", "group", "sample"):
            if (value := getattr(self, name)) is not None:
                fits &= columns[name] == value
        if self.failed:
            fits &= columns["failure"] != "none"
        if self.index is not None:
            fits &= np.arange(len(fits)) == (self.index if self.index >= 0 else len(fits) + self.index)
        rows = np.flatnonzero(fits)
        if self.order is None:
            return rows
        rewards = columns["reward"][rows]
        return rows[
            np.argsort(-rewards if self.order == "best" else rewards, kind="stable")
        ]  # NaN sorts last both ways

    def __str__(self) -> str:
        filters = ((name, value) for name, value in asdict(self).items() if name != "order")
        return ", ".join(f"{name}={value}" for name, value in filters if value not in (None, False)) or "no filter"


def inspect_run(
    run_dir: str | Path,
    *,
    tokens: bool = False,
    limit: int = 1,
    as_json: bool = False,
    html: Path | None = None,
    console: Console | None = None,
    read_key: Callable[[], str] | None = None,
    **selection: Any,
) -> None:
    """Show the committed trajectories of a run, finished or running.

    In a terminal it steps through them by keys (``read_key``). If stdin is not a terminal, or with
    ``index``, ``as_json`` or a ``limit`` other than 1, it prints the first ``limit``. ``tokens``
    adds every token with text, log-probability and versions; ``html`` writes one page to that file
    instead; ``selection`` are fields of `Selection`.

    RunDirectoryError if ``run_dir`` holds no trajectories; StoreError if the store cannot be read.
    """
    run_dir, console, selected = Path(run_dir), console or Console(), Selection(**selection)
    store = TrajectoryStore.open(_store_path(run_dir))
    rows = selected.rows(store.columns())
    if not len(rows) and not as_json:
        _say_none_matches(store, selected, console)
        return
    viewer = _Viewer(store, rows, _decode_or_ids(run_dir, console, quiet=as_json), console)
    if html is not None:
        viewer.write_page(html, limit, f"{run_dir.name}: {selected}")
    elif as_json:
        viewer.print_json(limit, tokens)
    elif read_key is not None or (selected.index is None and limit == 1 and sys.stdin.isatty()):
        viewer.step(read_key or click.getchar, tokens)
    else:
        for place in range(min(limit, len(rows))):
            viewer.show(place, tokens)


def _say_none_matches(store: TrajectoryStore, selected: Selection, console: Console) -> None:
    iterations = store.columns()["iteration"]
    span = f", iterations {iterations.min()} to {iterations.max()}" if len(iterations) else ""
    text = f"No trajectory matches ({selected}); the store holds {store.num_trajectories}{span}."
    console.print(text, highlight=False, markup=False)


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
        trajectory, row = self.store.trajectory(index), self._row(index)
        self.console.rule()
        for part in terminal_view(trajectory, row, place=where, decode=self.decode, tokens=tokens):
            # In a pipe the text has the lines that it has; only a terminal wraps it.
            self.console.print(part, soft_wrap=isinstance(part, Text) and not self.console.is_terminal)

    def print_json(self, limit: int, tokens: bool) -> None:
        """Print the first ``limit`` of them, one JSON object per line."""
        for index in self.rows[:limit].tolist():
            page = view_as_json(
                self.store.trajectory(index), self._row(index), index=index, decode=self.decode, tokens=tokens
            )
            try:
                line = msgspec.json.encode(page).decode()
            except UnicodeEncodeError:  # a lone surrogate, from a fact: only an ASCII escape can express it
                line = json.dumps(_with_nulls(page), separators=(",", ":"))
            self.console.out(shown_json(line), highlight=False)

    def write_page(self, html: Path, limit: int, title: str) -> None:
        """Write the first ``limit`` of them to ``html``."""
        from libra.observe.inspect import write_page

        write_page(html, self.store, self.rows[:limit].tolist(), self.decode, title)
        told = f"{html}: {min(limit, len(self.rows))} of {len(self.rows)} selected trajectories"
        self.console.print(shown(told), highlight=False, markup=False)

    def _row(self, index: int) -> dict[str, Any]:
        row, run_dir = self.store.row(index), Path(self.store.path).parent
        trajectory = TrajectoryId(row["iteration"], row["group"], row["sample"], row["split"])
        large = [asdict(each) for each in observations_of(run_dir, str(trajectory))]
        return row | late_of(run_dir, trajectory, row["batch"]) | ({"observations": large} if large else {})

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


def late_of(run_dir: Path, trajectory: TrajectoryId, trained: int) -> dict[str, Any]:
    """The late reward of a trajectory that batch ``trained`` had; empty if none was delivered.

    ``late_batch`` is the batch from which ``late_reward`` counts, ``late_delay`` its age there in
    versions; both are None while no batch has taken it.
    """
    value = read_late(run_dir / "late", trajectory)
    if value is None:
        return {}
    batch = max(trained, 0)
    while batch_path(run_dir / "batches", batch).exists():
        for *place, age in read_batch_facts(run_dir / "batches", batch).get("late", {}).get("came", ()):
            if tuple(place) == trajectory[:3]:
                return {"late_reward": value, "late_batch": batch, "late_delay": age}
        batch += 1
    return {"late_reward": value, "late_batch": None, "late_delay": None}


def _store_path(run_dir: Path) -> Path:
    path = run_dir / "trajectories.zarr"
    if path.is_dir():
        return path
    runs = sorted(found.parent for found in run_dir.glob("*/trajectories.zarr"))
    hint = shell_path(runs[-1]) if runs else "RUN with a directory that `libra run` made"
    what = "holds no trajectories.zarr" if run_dir.exists() else "does not exist"
    raise RunDirectoryError(f"{run_dir}: {what}, so it is not a run directory; type libra inspect {hint}")


def _decode_or_ids(run_dir: Path, console: Console, *, quiet: bool) -> Decode | None:
    try:
        return load_decode(run_dir)
    except ModelError as error:
        logger.info("token ids are shown, not text: %s", error)
        if not quiet:
            console.print(
                shown(f"Token ids are shown, not text: {error}"), style="yellow", highlight=False, markup=False
            )
        return None


def _with_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_nulls(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_with_nulls(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_COLUMNS: Final = {
    "turn": "turn", "tool": "tool", "status": "status", "num_calls": "calls", "prompt_tokens": "context",
    "generated_tokens": "generated", "observation_tokens": "observed", "stop_reason": "stop", "generate_s": "generate s",
    "tool_s": "tool s", "worker": "worker",
}  # fmt: skip


def write_page(path: Path, store: TrajectoryStore, rows: Sequence[int], decode: Decode | None, title: str) -> None:
    """Write the trajectories in these rows of the store to ``path``; ConfigError if that is
    impossible."""
    head = [piece("soft", "Prompts and tool returns are grey; the rest was generated.")]
    head += [_trajectory(store.trajectory(row), row, decode) for row in rows]
    page = render("report.html", title=title, head=Markup().join(head), sections=(), scripts="")
    with written(path, "--html") as file:
        file.write_text(page, encoding="utf-8")


def headline(trajectory: Trajectory) -> str:
    """One line about a trajectory: name, reward, how it ended, failure."""
    reward = "not graded" if trajectory.reward != trajectory.reward else f"reward {trajectory.reward:g}"
    ended = f"{trajectory.end_reason}, {len(trajectory.turns)} turns, {trajectory.num_action_tokens} generated tokens"
    failed = trajectory.failure is not FailureClass.NONE
    detail = f"; {trajectory.failure}: {shown_line(trajectory.failure_detail)}" if failed else ""
    return f"{trajectory.trajectory_id}, {reward}, {ended}{detail}"


def trajectory_text(trajectory: Trajectory, decode: Decode | None, max_chars: int | None = None) -> Markup:
    """Its text as HTML, cut to ``max_chars``; what the model did not generate is marked."""
    made: list[Markup] = []
    left = max_chars
    for origin, start, stop in segments(trajectory):
        ids = trajectory.token_ids[start:stop].tolist()
        words = decode(ids) if decode else " ".join(map(str, ids)) + "\n"
        if left is not None:
            words, left = (words, left - len(words)) if len(words) <= left else (f"{words[:left]} ... (cut here)", 0)
        made.append(piece("part", origin == "generated", words))
        if left == 0:
            break
    return Markup().join(made)


def _trajectory(trajectory: Trajectory, row: int, decode: Decode | None) -> Markup:
    prompt = f"{trajectory.prompt.prompt_id}  {dict(trajectory.prompt.facts)}"
    versions = f"weight versions {trajectory.oldest_version} to {trajectory.weight_version.max(initial=-1)}"
    facts = f"index {row}; advantage {trajectory.advantage:+.4f}; {versions}; epoch {trajectory.epoch}; prompt {prompt}"
    turns = [
        [f"{turn[name]:.3f}" if name.endswith("_s") else turn[name] for name in _COLUMNS] for turn in trajectory.turns
    ]
    shown = table(tuple(_COLUMNS.values()), turns, (0, 3, 4, 5, 6, 8, 9)) if turns else ""
    return piece("trajectory", headline(trajectory), facts, trajectory_text(trajectory, decode), shown)
