"""The page's snapshot of a run from its directory: event log, metrics, evaluations. It follows files that still grow."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from libra.observe.log_facts import LogFacts, trainers_of
from libra.observe.page_snapshot import Snapshot, time_row
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

SHOWN_FORECASTS: Final = 256
FILES: Final = (STARTS_FILE, "events.jsonl", "metrics.jsonl", "evaluations")


class RecordedRun:
    """A run directory as a source of snapshots for `libra.observe.page_snapshot.Feed`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = read_config(directory)
        self.facts = LogFacts(trainers_of(self.config))
        self._seen: tuple[Any, ...] = ()
        self._latest: list[Snapshot] = []

    def snapshots(self) -> list[Snapshot]:
        """One snapshot; the same list as before if no file has changed and the driver is there, or not there, as before."""
        files = [self.directory / name for name in FILES]
        stats = ((path.stat().st_mtime_ns, path.stat().st_size) if path.exists() else None for path in files)
        seen = (*stats, has_driver(self.directory))
        if seen[:1] != self._seen[:1]:
            self.config = read_config(self.directory)  # a start may have other iterations
        if seen != self._seen:
            self._seen, self._latest = seen, [self._snapshot(iteration_rows(metric_rows(self.directory)))]
        return self._latest

    def _snapshot(self, rows: dict[int, dict[str, Any]]) -> Snapshot:
        error = self.facts.read_on(self.directory / "events.jsonl")
        facts, last = self.facts.run, rows[max(rows)] if rows else {}
        iterations = whole_number(self.config, "run", "iterations", 0)
        now_s = facts.times.now_s
        outcomes = [[round(first), round(half), tokens] for first, half, tokens in self.facts.forecasts]
        weights = {
            name.removeprefix("forecast_weight_"): value for name, value in last.items() if "forecast_weight_" in name
        }
        snapshot = facts.snapshot(now_s) | {
            "run": facts.run or str(setting(self.config, "run", "name", self.directory.name)),
            "iterations": iterations,
            "state": state_of(self.directory, self.config, len(rows)),
            "evaluations": [
                [version, finite(found.get("reward")), int(found.get("num") or 0)]
                for version, found in sorted(evaluations(self.directory).items())
            ],
            "buckets": [], "roles": [], "not_ready": [],
            "policy": {
                "name": facts.policy or str(setting(self.config, "policy", "name", "")),
                "objective": str(setting(self.config, "policy", "objective", "")),
                "skill": finite(last.get("forecast_skill")), "weights": weights, "outcomes": outcomes[-SHOWN_FORECASTS:],
            },
            "time": time_row(facts.times, now_s),
            "note": f"The event log is not whole: {error}." if error else "",
        }  # fmt: skip
        if not self.facts.num_events:  # what the metrics have
            snapshot["rewards"] = [[k, finite(row.get("reward"))] for k, row in sorted(rows.items())]
            snapshot["lag"] = [[k, finite(row.get("lag"))] for k, row in sorted(rows.items())]
            snapshot["iteration"] = max(rows, default=-1)
        return snapshot
