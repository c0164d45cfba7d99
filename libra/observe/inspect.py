"""`libra inspect RUN`: trajectories of a run in the terminal, as text, JSON or HTML."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from libra.errors import ModelError
from libra.observe.html import piece, render, table
from libra.observe.run_directory import check_run_directory, written
from libra.observe.trajectory_view import Decode, as_json, headline, load_decode, segments, spelled, terminal_view
from libra.store.observations import observations_of
from libra.store.run_records import batch_path, read_batch_facts, read_late
from libra.store.trajectory_store import TrajectoryStore
from libra.types import Trajectory, TrajectoryId
from libra.untrusted import shown, shown_json

logger = logging.getLogger(__name__)

_HELP = "n next   p previous   t tokens on or off   q quit"
_COLUMNS: Final = {
    "turn": "turn", "tool": "tool", "status": "status", "num_calls": "calls", "prompt_tokens": "context",
    "generated_tokens": "generated", "observation_tokens": "observed", "stop_reason": "stop", "generate_s": "generate s",
    "tool_s": "tool s", "worker": "worker",
}  # fmt: skip


def inspect_run(
    run_dir: str | Path,
    *,
    tokens: bool = False,
    limit: int = 1,
    as_json: bool = False,
    html: Path | None = None,
    console: Console | None = None,
    read_key: Callable[[], str] | None = None,
    **choice: Any,
) -> None:
    """Show committed trajectories of a run, finished or running.

    On a terminal, keys (``read_key``) step through them. If stdin is not a terminal, or with
    ``index``, ``as_json`` or a ``limit`` other than 1, the first ``limit`` are printed. ``tokens``
    adds text, log-probability and versions of every token; ``html`` writes a page instead;
    ``choice`` is passed to `matching_rows`.

    RunDirectoryError if ``run_dir`` has no trajectories; StoreError if the store cannot be read.
    """
    run_dir, console = Path(run_dir), console or Console()
    store = TrajectoryStore.open(check_run_directory(run_dir, "inspect", "trajectories.zarr") / "trajectories.zarr")
    rows = matching_rows(store.columns(), **choice).tolist()
    filters = {name: value for name, value in choice.items() if name != "order" and value not in (None, False)}
    words = ", ".join(f"{name}={value}" for name, value in filters.items()) or "no filter"
    if not rows and not as_json:
        iterations = store.columns()["iteration"]
        span = f", iterations {iterations.min()} to {iterations.max()}" if len(iterations) else ""
        _say(console, f"No trajectory matches ({words}); the store holds {store.num_trajectories}{span}.")
        return
    decode = _decode_or_ids(run_dir, None if as_json else console)
    if html is not None:
        write_page(html, store, rows[:limit], decode, f"{run_dir.name}: {words}")
        _say(console, f"{html}: {min(limit, len(rows))} of {len(rows)} selected trajectories")
    elif as_json:
        for row in rows[:limit]:
            _print_json(console, store, row, decode, tokens)
    elif read_key is not None or (choice.get("index") is None and limit == 1 and sys.stdin.isatty()):
        _step(console, store, rows, decode, tokens, read_key or click.getchar)
    else:
        for place in range(min(limit, len(rows))):
            _show(console, store, rows, place, decode, tokens)


def matching_rows(
    columns: Mapping[str, NDArray[Any]],
    *,
    index: int | None = None,
    failed: bool = False,
    order: str | None = None,
    **equal: Any,
) -> NDArray[np.int64]:
    """Matching rows of the trajectory columns, in display order.

    ``index``: position in the store (negative from the end). ``failed``: only rows with a failure
    class. ``order``: ``best`` or ``worst`` by reward, ungraded last. ``equal``: column values; None
    matches any.
    """
    fits = np.ones(len(columns["reward"]), bool)
    for name, value in equal.items():
        if value is not None:
            fits &= columns[name] == value
    if failed:
        fits &= columns["failure"] != "none"
    if index is not None:
        fits &= np.arange(len(fits)) == (index if index >= 0 else len(fits) + index)
    rows = np.flatnonzero(fits)
    if order is None:
        return rows
    rewards = columns["reward"][rows]
    return rows[np.argsort(-rewards if order == "best" else rewards, kind="stable")]  # NaN sorts last both ways


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(shown(text), style=style, highlight=False, markup=False)


def _show(
    console: Console, store: TrajectoryStore, rows: Sequence[int], place: int, decode: Decode | None, tokens: bool
) -> None:
    index = rows[place]
    where = f"{place + 1} of {len(rows)} selected, index {index} of {store.num_trajectories}"
    console.rule()
    view = terminal_view(store.trajectory(index), _row(store, index), place=where, decode=decode, tokens=tokens)
    for part in view:  # a pipe gets whole lines; only a terminal wraps them
        console.print(part, soft_wrap=isinstance(part, Text) and not console.is_terminal)


def _print_json(console: Console, store: TrajectoryStore, index: int, decode: Decode | None, tokens: bool) -> None:
    page = as_json(store.trajectory(index), _row(store, index), index=index, decode=decode, tokens=tokens)
    line = json.dumps(_with_nulls(page), separators=(",", ":"), ensure_ascii=False)
    console.out(shown_json(line.encode(errors="surrogatepass").decode(errors="replace")), highlight=False)


def _step(
    console: Console,
    store: TrajectoryStore,
    rows: Sequence[int],
    decode: Decode | None,
    tokens: bool,
    read_key: Callable[[], str],
) -> None:
    place, key = 0, ""
    while key != "q":
        _show(console, store, rows, place, decode, tokens)
        console.print(_HELP, style="reverse", highlight=False)
        try:
            while (key := read_key()) not in ("n", "p", "t", "q", " ", "\r"):
                pass
        except (EOFError, KeyboardInterrupt):
            return
        tokens ^= key == "t"
        place = (place + {"p": -1, "t": 0}.get(key, 1)) % len(rows)


def _row(store: TrajectoryStore, index: int) -> dict[str, Any]:
    row, run_dir = store.row(index), Path(store.path).parent
    trajectory = TrajectoryId(row["iteration"], row["group"], row["sample"], row["split"])
    large = [asdict(each) for each in observations_of(run_dir, str(trajectory))]
    return row | late_of(run_dir, trajectory, row["batch"]) | ({"observations": large} if large else {})


def late_of(run_dir: Path, trajectory: TrajectoryId, trained: int) -> dict[str, Any]:
    """Late reward of a trajectory in batch ``trained``; empty if none was delivered.

    ``late_batch`` is the batch in which ``late_reward`` counts, ``late_delay`` its age there in
    versions; both are None until a batch takes the reward.
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


def _decode_or_ids(run_dir: Path, console: Console | None) -> Decode | None:
    try:
        return load_decode(run_dir)
    except ModelError as error:
        logger.info("token ids are shown, not text: %s", error)
        if console is not None:
            _say(console, f"Token ids are shown, not text: {error}", "yellow")
        return None


def _with_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_nulls(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_with_nulls(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_page(path: Path, store: TrajectoryStore, rows: Sequence[int], decode: Decode | None, title: str) -> None:
    """Write these rows of the store to ``path``; ConfigError if that is impossible."""
    head = [piece("soft", "Prompts and tool returns are grey; the rest was generated.")]
    head += [_trajectory(store.trajectory(row), row, decode) for row in rows]
    page = render("report.html", title=title, head=Markup().join(head), sections=(), scripts="")
    with written(path, "--html") as file:
        file.write_text(page, encoding="utf-8")


def trajectory_text(trajectory: Trajectory, decode: Decode | None, max_chars: float = math.inf) -> Markup:
    """A trajectory's text as HTML, cut to ``max_chars``, with marks around text that was not generated."""
    made: list[Markup] = []
    left = max_chars
    for origin, start, stop in segments(trajectory):
        words = spelled(trajectory, start, stop, decode)
        if len(words) > left:
            return Markup().join([*made, piece("part", origin == "generated", f"{words[: int(left)]} ... (cut here)")])
        made.append(piece("part", origin == "generated", words))
        left -= len(words)
    return Markup().join(made)


def _trajectory(trajectory: Trajectory, row: int, decode: Decode | None) -> Markup:
    prompt = f"{trajectory.prompt.prompt_id}  {dict(trajectory.prompt.facts)}"
    versions = f"weight versions {trajectory.oldest_version} to {trajectory.weight_version.max(initial=-1)}"
    facts = f"index {row}; advantage {trajectory.advantage:+.4f}; {versions}; epoch {trajectory.epoch}; prompt {prompt}"
    turns = [
        [f"{turn[name]:.3f}" if name.endswith("_s") else turn[name] for name in _COLUMNS] for turn in trajectory.turns
    ]
    listed = table(tuple(_COLUMNS.values()), turns, (0, 3, 4, 5, 6, 8, 9)) if turns else ""
    return piece("trajectory", headline(trajectory), facts, trajectory_text(trajectory, decode), listed)
