"""Progress of a run in the driver: a live table on a terminal, plain lines in a pipe or CI log.

1. On a terminal, prints and log records of this process appear whole, above the table.
2. Plain lines have no control characters or line breaks. The first and last iteration always have a
   line, others at most one per ``PLAIN_INTERVAL_S``.
3. External text is never read as markup.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from libra.types import FailureClass
from libra.untrusted import shown

PLAIN_INTERVAL_S: Final = 1.0
PLAIN_WITHIN_S: Final = 30.0
"""Seconds between plain lines about progress within an iteration."""
RATE_WINDOW_S: Final = 5.0
"""Seconds over which tokens per second within an iteration are measured."""
TABLE_ROWS: Final = 8
SPARKLINE_ITERATIONS: Final = 60
REPORTED_IN_A_ROW: Final = 3
"""Consecutive iterations without signal that are reported again; single ones are usual."""


class TableColumn(NamedTuple):
    """A figure of an iteration: key, title, format, and minimum terminal width."""

    name: str
    title: str
    spec: str
    window_chars: int
    if_any: bool = False  # omitted while it is 0


COLUMNS: Final = (
    TableColumn("reward", "reward", ".3f", 0),
    TableColumn("tokens_per_s", "tokens/s", ",.0f", 0),
    TableColumn("lag", "lag", ".2f", 0),
    TableColumn("turns", "turns", ".1f", 0),
    TableColumn("failures", "failures", ",.0f", 0),
    TableColumn("resampled", "new attempts", ",.0f", 0, if_any=True),
    TableColumn("groups_without_signal", "no signal", ",.0f", 0, if_any=True),
    TableColumn("agent_sequences", "sequences", ",.0f", 90, if_any=True),
    TableColumn("iteration_s", "iteration s", ".1f", 0),
    TableColumn("rollout_s", "rollout s", ".1f", 90),
    TableColumn("train_s", "train s", ".1f", 90),
    TableColumn("loss", "loss", ".4f", 110),
    TableColumn("grad_norm", "grad norm", ".3f", 110),
)


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[TableColumn]:
    known = [each for each in COLUMNS if any(each.name in values for values in rows)]
    return [each for each in known if not each.if_any or any(values.get(each.name) for values in rows)]


def plain_in_notebooks() -> Console:
    """The console; in a notebook, which cannot move a cursor, one for plain lines."""
    console = Console()
    return Console(force_jupyter=False, force_terminal=False) if console.is_jupyter else console


def figure_text(value: Any, spec: str) -> str:
    """A formatted number, integers whole, a mapping as its sum; ``-`` for None and NaN."""
    if isinstance(value, Mapping):
        value = sum(value.values())
    if isinstance(value, int):
        return f"{value:,}"
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return format(value, spec)


def failure_causes(values: Mapping[str, Any]) -> str:
    """Failures not caused by the model, e.g. ``engine 2, reward 1``; empty without any."""
    counts: Counter[str] = Counter()
    for name, count in values.items():
        kind, _, failure = name.partition("/")
        if kind in ("failures", "resampled") and failure and not FailureClass(failure).trains:
            counts[failure] += int(count)
    return ", ".join(f"{failure} {count:,}" for failure, count in counts.most_common() if count)


def sparkline(values: Sequence[float], steps: str = "▁▂▃▄▅▆▇█") -> str:
    """One character per value, scaled from lowest to highest; a gap for NaN."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return " " * len(values)
    low, span = min(finite), max(finite) - min(finite)
    top = len(steps) - 1

    def step(value: float) -> str:
        if not math.isfinite(value):
            return " "
        return steps[round(top * (value - low) / span)] if span else steps[top // 2]

    return "".join(map(step, values))


class RunProgress:
    """Live progress of one run; a context manager for the driver.

    ``enabled=False`` writes nothing; ``console`` defaults to standard output; ``clock_s`` is
    monotonic; ``refreshes_per_s=0`` refreshes the table only at events.
    """

    def __init__(
        self,
        run: str,
        iterations: int,
        dashboard_url: str,
        enabled: bool = True,
        *,
        console: Console | None = None,
        clock_s: Callable[[], float] = time.monotonic,
        refreshes_per_s: float = 2.0,
    ) -> None:
        self.run, self.iterations, self.dashboard_url, self.enabled = run, iterations, dashboard_url, enabled
        self._console = console or plain_in_notebooks()
        self._clock_s = clock_s
        self._refreshes_per_s = refreshes_per_s
        self._rows: deque[Mapping[str, Any]] = deque(maxlen=TABLE_ROWS)
        self._rewards: deque[float] = deque(maxlen=SPARKLINE_ITERATIONS)
        self._num_done = self._without_signal = 0
        self._signal_reported = False
        self._started_s = self._printed_s = clock_s()
        self._unprinted: Mapping[str, Any] | None = None
        self._part, self._part_total, self._part_ended, self._ended = "", 0, 0, 0
        self._missing = self._training = ""
        self._tokens: deque[tuple[float, int]] = deque()
        self._live: Live | None = None
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._started_s = self._clock_s()
        if not self.enabled:
            return self
        self.message(f"{self.run}: {self.iterations} iterations, watch them at {self.dashboard_url}")
        if self._console.is_terminal:
            streams = (sys.stdout, sys.stderr)
            self._live = Live(
                console=self._console, get_renderable=self._render, auto_refresh=self._refreshes_per_s > 0,
                refresh_per_second=self._refreshes_per_s or 1, vertical_overflow="crop",
            )  # fmt: skip
            self._exits.callback(self._stop_live, self._live)
            try:
                self._live.start(refresh=True)
                self._move_log_handlers(streams)
            except BaseException:  # Ctrl-C: the terminal is given back
                self._exits.close()
                raise
        return self

    def _stop_live(self, live: Live) -> None:
        try:
            live.stop()
        except IndexError:  # Ctrl-C came before rich had put on its hook, which it now takes off
            self._console.show_cursor(True)

    def __exit__(self, *_: object) -> None:
        if self._unprinted is not None:
            self._print_plain(self._unprinted)
        self._exits.close()
        self._live = None

    def message(self, text: str) -> None:
        """Print a line above the live table."""
        if self.enabled:
            self._console.print(Text(shown(text)), soft_wrap=True, highlight=False)

    def evaluated(self, label: str, mean_reward: float, num: int) -> None:
        """Print an evaluation of the weights ``label`` on ``num`` held-out questions."""
        reward = figure_text(mean_reward, ".3f")
        self.message(f"evaluation, {label}: mean reward {reward} on {num:,} held-out questions")

    def iteration(self, values: Mapping[str, Any]) -> None:
        """Print a finished iteration: its 0-based ``iteration`` and the figures of ``COLUMNS``."""
        self._num_done = int(values["iteration"]) + 1
        reward = values.get("reward")
        self._rewards.append(math.nan if reward is None else float(reward))
        self._rows.append(values)
        if not self.enabled:
            return
        self._report_signal(values)
        if self._live is not None:
            self._live.refresh()
            return
        first, last = len(self._rewards) == 1, self._num_done == self.iterations
        if first or last or self._clock_s() - self._printed_s >= PLAIN_INTERVAL_S:
            self._print_plain(values)
        else:
            self._unprinted = values

    def part(self, label: str, trajectories: int) -> None:
        """Start an iteration or evaluation of ``trajectories`` trajectories."""
        self._part, self._part_total, self._part_ended = label, trajectories, self._ended

    def counted(self, ended: int, tokens: int, missing: str = "", training: str = "") -> None:
        """Update the totals since the run's start, about once a second.

        ``missing`` names work without a worker, e.g. "nobody generates", and replaces the remaining
        time. ``training`` describes the training step and replaces the rate after the last
        trajectory.
        """
        now_s = self._clock_s()
        self._ended, self._missing, self._training = ended, missing, training
        self._tokens.append((now_s, tokens))
        while self._tokens[0][0] < now_s - RATE_WINDOW_S and len(self._tokens) > 2:
            self._tokens.popleft()
        if self._live is None and self._part and now_s - self._printed_s >= PLAIN_WITHIN_S:
            self._printed_s = now_s
            self.message(f"{self._part_text()}{self._left_text()}")

    @property
    def _part_done(self) -> int:
        return min(self._ended - self._part_ended, self._part_total)

    def _part_text(self) -> str:
        if self._training and self._part_done == self._part_total:
            return f"{self._part}: {self._training}; all {self._part_total:,} trajectories have ended"
        (start_s, first), (end_s, last) = self._tokens[0], self._tokens[-1]
        rate = f", {(last - first) / (end_s - start_s):,.0f} tokens/s" if end_s > start_s else ""
        return f"{self._part}: {self._part_done:,} of {self._part_total:,} trajectories have ended{rate}"

    def _left_text(self) -> str:
        if self._missing:
            return f"; {self._missing}"
        within = self._part_done / self._part_total if self._part.startswith("iteration") and self._part_total else 0.0
        done, elapsed_s = self._num_done + within, self._clock_s() - self._started_s
        left_s = elapsed_s / done * (self.iterations - done) if done else 0.0
        return f", about {_minutes(left_s)} to go" if left_s else ""

    def _report_signal(self, values: Mapping[str, Any]) -> None:
        cause, before = str(values.get("no_signal", "")), self._without_signal
        self._without_signal = before + 1 if cause else 0
        if cause and (not self._signal_reported or self._without_signal == REPORTED_IN_A_ROW):
            in_a_row = f", {self._without_signal} iterations in a row" if before else ""
            self.message(f"iteration {values['iteration']}: nothing to learn{in_a_row}: {cause}")
            self._signal_reported = True
        elif before >= REPORTED_IN_A_ROW and not cause:
            self.message(f"iteration {values['iteration']}: something to learn again, after {before} without")

    def _print_plain(self, values: Mapping[str, Any]) -> None:
        self._printed_s, self._unprinted = self._clock_s(), None
        figures = ", ".join(f"{each.title} {figure_text(values[each.name], each.spec)}" for each in _columns([values]))
        if causes := failure_causes(values):
            figures += f"; not the model's: {causes}"
        number = int(values["iteration"])
        self.message(f"iteration {number} ({number + 1} of {self.iterations}): {figures}")

    def _render(self) -> RenderableType:
        elapsed = _minutes(self._clock_s() - self._started_s)
        line = Table.grid(padding=(0, 1))
        line.add_row(
            Text(self.run, style="bold"), ProgressBar(total=self.iterations, completed=self._num_done, width=24),
            Text(f"{self._num_done} of {self.iterations} iterations in {elapsed}{self._left_text()}"),
        )  # fmt: skip
        parts: list[RenderableType] = [line]
        if self._part and self._tokens:
            within = Table.grid(padding=(0, 1))
            bar = ProgressBar(total=max(self._part_total, 1), completed=self._part_done, width=24)
            within.add_row(bar, Text(self._part_text()))
            parts.append(within)
        if not self._rows:
            return Group(*parts)
        columns = [each for each in _columns(self._rows) if each.window_chars <= self._console.width]
        table = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=False)
        for title in ("iteration", *(column.title for column in columns)):
            table.add_column(title, justify="right", no_wrap=True)
        for values in self._rows:
            cells = [figure_text(values.get(column.name), column.spec) for column in columns]
            table.add_row(str(values["iteration"]), *cells, style="bold" if values is self._rows[-1] else "")
        return Group(*parts, self._reward_line(), table)

    def _reward_line(self) -> Text:
        finite = [reward for reward in self._rewards if math.isfinite(reward)]
        blocks = "▁▂▃▄▅▆▇█" if self._console.encoding.startswith("utf") else "_.-=+*#@"
        bounds = f"  {min(finite):.3f} to {max(finite):.3f}" if finite else ""
        shown = list(self._rewards)[-max(8, self._console.width - 28) :]
        return Text.assemble(("reward ", "dim"), (sparkline(shown, blocks), "green"), (bounds, "dim"))

    def _move_log_handlers(self, streams: tuple[TextIO, TextIO]) -> None:
        replacement = dict(zip(streams, (sys.stdout, sys.stderr), strict=True))
        loggers = [logging.getLogger(), *map(logging.getLogger, logging.root.manager.loggerDict)]
        for handler in {handler for logger in loggers for handler in logger.handlers}:
            if isinstance(handler, logging.StreamHandler) and handler.stream in replacement:
                self._exits.callback(handler.setStream, handler.stream)
                handler.setStream(replacement[handler.stream])


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


STAGES: Final = {
    "libraries": "the driver's imports",
    "model": "checks of the model and the configuration; the run directory",
    "workers": "processes of a local cluster, or the connection to one",
    "engines": "engines, replicas and environments on the workers",
    "check": "records of earlier starts are restored, and the engines have the weights",
}


class StartStages:
    """Start-up stages as a context manager that ends the last stage; ``enabled=False`` writes nothing."""

    def __init__(
        self, *, enabled: bool = True, stream: TextIO | None = None, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.enabled, self._stream, self._clock_s = enabled, stream or sys.stdout, clock_s
        self._stage, self._began_s, self._any = "", 0.0, False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end(failed=kind is not None)

    def say(self, text: str) -> None:
        """Print a separate line at once."""
        if self.enabled:
            self._write(text + "\n")

    def begin(self, stage: str) -> None:
        """End the previous stage and start a stage of `STAGES`."""
        self._end_stage()
        if self.enabled and self._stream.isatty():
            self._write(f"{', ' if self._any else 'start: '}{stage}")
        self._stage, self._began_s, self._any = stage, self._clock_s(), True

    def end(self, *, failed: bool = False) -> None:
        """End the last stage."""
        if not failed:
            self._end_stage()
        if self.enabled and self._any and self._stream.isatty():
            self._write("\n")
        self._stage, self._any = "", False

    def _end_stage(self) -> None:
        if self.enabled and self._stage:
            seconds = f"{self._clock_s() - self._began_s:.1f} s"
            self._write(f" {seconds}" if self._stream.isatty() else f"start: {self._stage} {seconds}\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
