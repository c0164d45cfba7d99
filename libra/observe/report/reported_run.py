"""One run as the report reads it: everything that is there, and of everything else why it is not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from libra.errors import StoreError
from libra.hardware.prices import Price, Prices
from libra.observe.log_facts import LogFacts, log_facts, trainers_of
from libra.observe.plots import RUN_COLORS
from libra.observe.run_directory import (
    evaluations,
    finite,
    iteration_rows,
    metric_rows,
    read_config,
    setting,
    state_of,
    whole_number,
)
from libra.observe.worker_states import RunTime
from libra.store.trajectories import TrajectoryStore

HOUR_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Cost:
    """What the worker time of a run cost: ``unit`` is GPU or core, ``units_per_worker`` of each worker-second (of each GPU, 1)."""

    price: Price
    currency: str
    unit: str
    units: float
    by_state: Mapping[str, float]

    @property
    def total(self) -> float:
        """Of all states."""
        return sum(self.by_state.values())


class ReportedRun:
    """A run directory, read once.

    Attributes
    ----------
    name : str
        The run's name, followed by a number where several of a report have the same.
    log_error, store_error : str
        Why log and store are not there, or end early; empty: they are whole.
    """

    def __init__(
        self, directory: Path, prices: Prices, *, name: str = "", place: int = 0, gpu: str | None = None
    ) -> None:
        self.directory = directory
        self.config = read_config(directory)
        self.name = name or str(setting(self.config, "run", "name", directory.name))
        self.color = RUN_COLORS[place % len(RUN_COLORS)]
        self._prices, self._gpu = prices, gpu
        self.metrics = metric_rows(directory)
        self.rows = iteration_rows(self.metrics)
        self.evaluations = evaluations(directory)
        self.iterations = whole_number(self.config, "run", "iterations", 0)
        self.state = state_of(directory, self.config, len(self.rows))
        self.facts: LogFacts
        self.facts, self.log_error = log_facts(directory / "events.jsonl", trainers_of(self.config))
        self.time: RunTime = self.facts.run.times.times()
        self.store: TrajectoryStore | None = None
        self.store_error = ""
        self._open_store()

    def _open_store(self) -> None:
        try:
            self.store = TrajectoryStore.open(self.directory / "trajectories.zarr")
            self.store.columns()
        except (StoreError, OSError, KeyError, ValueError) as error:
            self.store, self.store_error = None, f"the store cannot be read: {error}"
        if self.store is not None and not self.store.num_trajectories:
            self.store_error = "the store has no trajectory yet"

    @property
    def is_on_gpu(self) -> bool:
        """Whether its training used a GPU, as its metrics record."""
        return any(row.get("train_on_gpu") for row in self.rows.values())

    @property
    def threads(self) -> int:
        """Cores of each worker, as configured; 1 if it was left to the machine."""
        return whole_number(self.config, "cluster", "threads", 1)

    @cached_property
    def cost(self) -> Cost | str:
        """The cost of its engines and training workers, or a sentence that says why it is not known."""
        seconds = self.time.gpu_s
        if not seconds:
            return "the cost is not known without an event log"
        if not self.is_on_gpu:
            price, unit, units = self._prices.core_hour, "core", float(self.threads)
            if price is None:
                return f"{self._prices.path} has no core_hour: add one to see what the run cost"
        else:
            gpu = self._gpu or str(setting(self.config, "planner", "gpu", ""))
            if not gpu:
                return "the run does not record its kind of GPU: name it with --gpu to see what the run cost"
            price, unit, units = self._prices.of(gpu), f"{gpu} GPU", 1.0
            if price is None:
                return f"{self._prices.path} has no price of {gpu}: add one, and name the file with --prices"
        by_state = {state: value * units / HOUR_S * price.price for state, value in seconds.items()}
        return Cost(price, self._prices.currency, unit, units, by_state)

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """A metric by iteration, without what is missing."""
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
