"""Runs read from their directories for `libra page` and `libra report`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from libra.errors import StoreError
from libra.hardware.gpus import Price, Prices
from libra.observe.page_snapshots import Snapshot
from libra.observe.panels import RUN_COLORS
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
from libra.observe.timeline.recorded import RecordedTimeline, trainers_of
from libra.observe.timeline.states import RunTime
from libra.store.trajectory_store import TrajectoryStore

SHOWN_FORECASTS: Final = 256
FILES: Final = (STARTS_FILE, "events.jsonl", "metrics.jsonl", "evaluations")


class RecordedRun:
    """A run directory whose files may still grow; `snapshots` feeds `page_snapshots.Feed`.

    ``log_error`` is why the event log is missing or ends early, else empty.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = read_config(directory)
        self.timeline = RecordedTimeline(trainers_of(self.config))
        self._seen: tuple[Any, ...] = ()
        self._latest: list[Snapshot] = []

    def read(self) -> None:
        """Read the records, and new facts of the event log."""
        self.log_error = self.timeline.read_on(self.directory / "events.jsonl")
        self.metrics = metric_rows(self.directory)
        self.rows = iteration_rows(self.metrics)
        self.evaluations = evaluations(self.directory)
        self.iterations = whole_number(self.config, "run", "iterations", 0)
        self.state = state_of(self.directory, self.config, len(self.rows))

    def snapshots(self) -> list[Snapshot]:
        """One snapshot; the same list object while neither files nor driver change."""
        files = [self.directory / name for name in FILES]
        stats = ((path.stat().st_mtime_ns, path.stat().st_size) if path.exists() else None for path in files)
        seen = (*stats, has_driver(self.directory))
        if seen[:1] != self._seen[:1]:
            self.config = read_config(self.directory)  # a later start may have other iterations
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
        if not seen.num_facts:  # from the metrics
            snapshot["rewards"] = [[k, finite(row.get("reward"))] for k, row in sorted(rows.items())]
            snapshot["lag"] = [[k, finite(row.get("lag"))] for k, row in sorted(rows.items())]
            snapshot["iteration"] = max(rows, default=-1)
        return snapshot


HOUR_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a run's worker time; ``unit`` is GPU or core, ``units`` their number per worker."""

    price: Price
    currency: str
    unit: str
    units: float
    by_state: Mapping[str, float]

    @property
    def total(self) -> float:
        """Total over all states."""
        return sum(self.by_state.values())


class ReportedRun(RecordedRun):
    """A run directory, read once; ``store_error`` is why the store is missing, else empty."""

    def __init__(
        self, directory: Path, prices: Prices, *, name: str = "", place: int = 0, gpu: str | None = None
    ) -> None:
        super().__init__(directory)
        self.read()
        self.name = name or str(setting(self.config, "run", "name", directory.name))
        self.color = RUN_COLORS[place % len(RUN_COLORS)]
        self._prices, self._gpu = prices, gpu
        self.time: RunTime = self.timeline.workers.times()
        self.store: TrajectoryStore | None = None
        self.store_error = ""
        try:
            self.store = TrajectoryStore.open(directory / "trajectories.zarr")
            self.store.columns()
        except (StoreError, OSError, KeyError, ValueError) as error:
            self.store, self.store_error = None, f"the store cannot be read: {error}"
        if self.store is not None and not self.store.num_trajectories:
            self.store_error = "the store has no trajectory yet"

    @property
    def is_on_gpu(self) -> bool:
        """Whether its metrics record training on a GPU."""
        return any(row.get("train_on_gpu") for row in self.rows.values())

    @cached_property
    def cost(self) -> Cost | str:
        """Cost of engines and training workers, or why it is unknown."""
        if not (seconds := self.time.gpu_s):
            return "the cost is not known without an event log"
        price, unit, units, gpu = self._prices.core_hour, "core", 1.0, ""
        if self.is_on_gpu:
            if not (gpu := self._gpu or str(setting(self.config, "planner", "gpu", ""))):
                return "the run does not record its kind of GPU: name it with --gpu to see the cost"
            price, unit = self._prices.of(gpu), f"{gpu} GPU"
        else:
            units = float(whole_number(self.config, "cluster", "threads", 1))
        if price is None:
            missing = f"price of {gpu}" if gpu else "core_hour"
            return f"{self._prices.path} has no {missing}: add one, and name the file with --prices"
        by_state = {state: value * units / HOUR_S * price.price for state, value in seconds.items()}
        return Cost(price, self._prices.currency, unit, units, by_state)

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """A metric by iteration, without missing values."""
        pairs = [(k, finite(row.get(name))) for k, row in sorted(self.rows.items())]
        known = [(k, value) for k, value in pairs if value is not None]
        return [k for k, _ in known], [value for _, value in known]

    @cached_property
    def columns(self) -> Mapping[str, NDArray[Any]]:
        """Columns of the stored trajectories; empty without a store."""
        return {} if self.store is None or self.store_error else self.store.columns()

    @cached_property
    def generated_tokens(self) -> NDArray[np.int64]:
        """(trajectories,) tokens generated by each stored trajectory; empty without a store."""
        if self.store is None or not self.columns:
            return np.zeros(0, np.int64)
        turns = self.store.columns("turn")
        total = np.zeros(self.store.num_trajectories, np.int64)
        np.add.at(total, turns["trajectory"], np.maximum(turns["generated_tokens"], 0))
        return total

    @property
    def failures(self) -> dict[str, int] | None:
        """Failed training trajectories by class, from the log, else from the store."""
        if self.log_error and not self.columns:
            return None
        ended = self.timeline.failures
        if self.log_error:
            ended = Counter(self.columns["failure"][self.columns["split"] == "train"].tolist())
        return {name: count for name, count in ended.items() if count and name != "none"}

    @property
    def wall_s(self) -> float:
        """Seconds between the first and last line of metrics."""
        times = [float(row["wall_time_s"]) for row in self.metrics if "wall_time_s" in row]
        return max(times) - min(times) if times else 0.0
