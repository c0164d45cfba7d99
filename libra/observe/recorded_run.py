"""A run read from its directory: event log, metrics, evaluations. It follows files that still grow."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from libra.observe.run_directory import (
    STARTS_FILE,
    evaluations,
    finite,
    has_driver,
    iteration_rows,
    metric_rows,
    read_config,
    setting,
    state_of,
    whole_number,
)
from libra.observe.snapshots import Snapshot
from libra.observe.timeline.recorded import RecordedTimeline, trainers_of

SHOWN_FORECASTS: Final = 256
FILES: Final = (STARTS_FILE, "events.jsonl", "metrics.jsonl", "evaluations")


class RecordedRun:
    """A run directory; `snapshots` is a source of `libra.observe.snapshots.Feed`.

    Attributes
    ----------
    log_error : str
        Why there is no event log, or why it ends early; empty: it is whole.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = read_config(directory)
        self.timeline = RecordedTimeline(trainers_of(self.config))
        self._seen: tuple[Any, ...] = ()
        self._latest: list[Snapshot] = []

    def read(self) -> None:
        """Read the records, and of the event log the facts that were not read yet."""
        self.log_error = self.timeline.read_on(self.directory / "events.jsonl")
        self.metrics = metric_rows(self.directory)
        self.rows = iteration_rows(self.metrics)
        self.evaluations = evaluations(self.directory)
        self.iterations = whole_number(self.config, "run", "iterations", 0)
        self.state = state_of(self.directory, self.config, len(self.rows))

    def snapshots(self) -> list[Snapshot]:
        """One snapshot; the same list as before if no file has changed and the driver is there, or not there, as before."""
        files = [self.directory / name for name in FILES]
        stats = ((path.stat().st_mtime_ns, path.stat().st_size) if path.exists() else None for path in files)
        seen = (*stats, has_driver(self.directory))
        if seen[:1] != self._seen[:1]:
            self.config = read_config(self.directory)  # a start may have other iterations
        if seen != self._seen:
            self.read()
            self._seen, self._latest = seen, [self._snapshot()]
        return self._latest

    def _snapshot(self) -> Snapshot:
        seen, rows = self.timeline, self.rows
        last = rows[max(rows)] if rows else {}
        outcomes = [[round(first), round(half), tokens] for first, half, tokens in seen.forecasts]
        weights = {
            name.removeprefix("forecast_weight_"): value for name, value in last.items() if "forecast_weight_" in name
        }
        snapshot = seen.snapshot(seen.now_s) | {
            "run": seen.run or str(setting(self.config, "run", "name", self.directory.name)),
            "iterations": self.iterations, "state": self.state,
            "evaluations": [
                [version, finite(found.get("reward")), int(found.get("num") or 0)]
                for version, found in sorted(self.evaluations.items())
            ],
            "buckets": [], "roles": [], "not_ready": [],
            "policy": {
                "name": seen.policy or str(setting(self.config, "policy", "name", "")),
                "objective": str(setting(self.config, "policy", "objective", "")),
                "skill": finite(last.get("forecast_skill")), "weights": weights, "outcomes": outcomes[-SHOWN_FORECASTS:],
            },
            "note": f"The event log is not whole: {self.log_error}." if self.log_error else "",
        }  # fmt: skip
        if not seen.num_facts:  # what the metrics have
            snapshot["rewards"] = [[k, finite(row.get("reward"))] for k, row in sorted(rows.items())]
            snapshot["lag"] = [[k, finite(row.get("lag"))] for k, row in sorted(rows.items())]
            snapshot["iteration"] = max(rows, default=-1)
        return snapshot
