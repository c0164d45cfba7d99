"""The content of a run directory, read once: configuration, event log, metrics and the turns of its training
trajectories."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from libra import keys
from libra.config import RunConfig, load_config
from libra.config.model_paths import resolve_model
from libra.errors import ConfigError, ModelError, RunDirectoryError
from libra.facts import WorkerCapacity
from libra.hardware import load_shape
from libra.hardware.shapes import shape_digest
from libra.observe.metrics import read_metrics
from libra.store.event_log import read_events
from libra.types import Phase


class Quantum(NamedTuple):
    """A generation or an action of the log.

    In seconds of the log, ``begun_s`` is its dispatch (NaN: it continued in the slot of the previous
    quantum) and ``reported_s`` the report of its end; ``latency_s`` is wall time on the worker. ``inline``
    names a tool that ran within a generation (empty: a malformed call; None: no tool).
    """

    key: keys.Key
    phase: str
    worker: str
    begun_s: float
    reported_s: float
    latency_s: float
    tokens: int
    inline: str | None

    @property
    def place(self) -> tuple[int, ...]:
        """(iteration, group, sample)."""
        return self.key.indices


def quanta_of(events: Iterable[Mapping[str, Any]]) -> list[Quantum]:
    """Committed quanta of training trajectories, in log order."""
    given: dict[str, tuple[float, bool]] = {}
    found = []
    for event in events:
        name = event.get("name")
        if name in ("quantum_dispatched", "quantum_continued"):
            given[event["key"]] = event["t_s"], name == "quantum_dispatched"
        elif name == "quantum_finished":
            key = keys.parse(event["key"])
            begun_s, sent = given.get(event["key"], (0.0, False))
            if key is None or key.split != "train":
                continue
            inline = event["tool"] if event["phase"] == Phase.ROLLOUT and event["status"] else None
            found.append(
                Quantum(
                    key, event["phase"], event["worker"], begun_s if sent else float("nan"), event["t_s"],
                    event["latency_s"], event["tokens"], inline,
                )
            )  # fmt: skip
    return found


class RealisedRun(NamedTuple):
    """The measured times of a run, for comparison with its simulation.

    ``rollout_s`` are seconds of each iteration from gate to last trajectory; ``makespan_s`` is from the first gate to the last
    trajectory, less the time until the driver submitted an iteration that could have begun (held-out questions).
    """

    makespan_s: float
    rollout_s: tuple[float, ...]
    moves: int


@dataclass(frozen=True, eq=False)
class RunRecord:
    """One run directory. Events are those of its last start that generated anything: resuming a finished run does not."""

    directory: Path
    config: RunConfig
    events: tuple[Mapping[str, Any], ...]
    metrics: tuple[Mapping[str, Any], ...]
    starts: int

    @classmethod
    def read(cls, directory: Path) -> RunRecord:
        """RunDirectoryError if it is not a run with an event log."""
        for name, what in (("config.resolved.yaml", "a run"), ("events.jsonl", "a run with observe.event_log=true")):
            if not (directory / name).is_file():
                raise RunDirectoryError(f"{directory}: holds no {name}; name the directory of {what}")
        events = read_events(directory / "events.jsonl").events
        begun = [index for index, event in enumerate(events) if event.get("name") == "run_started"] or [0]
        starts = [events[first:end] for first, end in pairwise((*begun, len(events)))]
        busy = [start for start in starts if any(event.get("name") == "quantum_finished" for event in start)]
        metrics = read_metrics(directory) if (directory / "metrics.jsonl").is_file() else []
        config = load_config(directory / "config.resolved.yaml")
        return cls(directory, config, tuple((busy or starts)[-1]), tuple(metrics), max(1, len(busy)))

    def named(self, name: str) -> Iterator[Mapping[str, Any]]:
        """Events of this name, in order."""
        return (event for event in self.events if event.get("name") == name)

    @cached_property
    def quanta(self) -> list[Quantum]:
        """Committed quanta of training trajectories."""
        return quanta_of(self.events)

    @cached_property
    def capacities(self) -> dict[str, list[Mapping[str, Any]]]:
        """The events about each worker that the policy received, in order."""
        found: dict[str, list[Mapping[str, Any]]] = {}
        for event in self.named("worker_capacity"):
            found.setdefault(event["worker"], []).append(event)
        return found

    @property
    def tool_slots(self) -> int:
        """Actions at once, on all workers together."""
        return sum(declared[-1]["tool_slots"] for declared in self.capacities.values())

    @property
    def inline_tools(self) -> frozenset[str]:
        """Tools that ran within generations."""
        return frozenset(quantum.inline for quantum in self.quanta if quantum.inline is not None)

    @property
    def family(self) -> str:
        """Environment of its trajectories: the policy's family."""
        return str(next((event["family"] for event in self.named("run_started")), ""))

    def gates_s(self) -> dict[int, float]:
        """When each iteration's gate opened."""
        return {event["iteration"]: event["t_s"] for event in self.named("gate_opened")}

    def ends_s(self) -> dict[tuple[int, ...], float]:
        """When each training trajectory ended, by (iteration, group, sample)."""
        parsed = ((keys.parse(event["key"]), event["t_s"]) for event in self.named("trajectory_ended"))
        return {key.indices: t_s for key, t_s in parsed if key is not None and key.split == "train"}

    def arrivals(self) -> dict[tuple[int, ...], int]:
        """In which order training trajectories were parked first, by (iteration, group, sample): policies break ties by it."""
        found: dict[tuple[int, ...], int] = {}
        for event in self.named("trajectory_parked"):
            key = keys.parse(event["key"])
            if key is not None and key.split == "train":
                found.setdefault(key.indices, len(found))
        return found

    def steps_s(self) -> tuple[float, ...]:
        """Seconds of each batch from its opening, or the last score that it awaited, until its weights were published; where that
        was beside the next step, until its step ended."""
        over = {event["version"] - 1: event["t_s"] for event in self.named("version_published")}
        over |= self._ended_s()
        scored, found = self.scores(), list[float]()
        for opened in sorted(self.named("batch_opened"), key=lambda event: int(event["batch"])):
            if opened["batch"] not in over or opened["batch"] != len(found):
                break
            waits = (scored.get(tuple(member), (0.0, 0.0))[0] for member in opened.get("members", ()))
            found.append(over[opened["batch"]] - max(opened["t_s"], *waits, 0.0))
        return tuple(found)

    def scores(self) -> dict[tuple[int, ...], tuple[float, float]]:
        """When the teacher had scored each group that a batch waits for, and in how many seconds, by (iteration, group)."""
        if not self.config.distil.wait_s:
            return {}
        return {
            (each["iteration"], each["group"]): (each["t_s"], each["score_s"]) for each in self.named("group_scored")
        }

    def publish_s(self) -> float:
        """Mean seconds in which a version was published beside the next step; 0: none was."""
        published = {event["version"]: event["t_s"] for event in self.named("version_published")}
        return mean_s([published[step + 1] - t_s for step, t_s in self._ended_s().items() if step + 1 in published])

    def _ended_s(self) -> dict[int, float]:
        """When the steps ended beside which nothing waits for their publication."""
        if not self.config.run.eta:
            return {}
        return {event["step"]: event["t_s"] for event in self.named("step_finished") if event.get("beside")}

    def realised(self, iterations: int) -> RealisedRun | None:
        """The measured times of its first iterations; None if the run was resumed, or has finished fewer."""
        gates, ends = self.gates_s(), self.ends_s()
        last = {k: max((t_s for place, t_s in ends.items() if place[0] == k), default=None) for k in range(iterations)}
        if self.starts > 1 or any(k not in gates or last[k] is None for k in range(iterations)):
            return None
        published = {event["version"]: event["t_s"] for event in self.named("version_published")}
        asked = {event["iteration"]: event["t_s"] for event in self.named("gate_parked")}
        eta, paused = self.config.run.eta, 0.0
        for k in range(1, iterations):
            ready = max(published.get(k - eta, 0.0), gates[0])
            paused += max(0.0, asked.get(k, ready) - ready)
        rollout = tuple(float(last[k] or 0.0) - gates[k] for k in range(iterations))
        whole = max(float(end or 0.0) for end in last.values()) - gates[0]
        return RealisedRun(whole - paused, rollout, self._moves(iterations))

    def _moves(self, iterations: int) -> int:
        home: dict[tuple[int, ...], str] = {}
        moves = 0
        for quantum in self.quanta:
            if quantum.phase == Phase.ROLLOUT and quantum.place[0] < iterations:
                moves += home.get(quantum.place, quantum.worker) != quantum.worker
                home[quantum.place] = quantum.worker
        return moves

    def announced(self, worker: str) -> tuple[tuple[float, WorkerCapacity], ...]:
        """The events about an engine that the policy received, each with the seconds after the first gate; of those before
        it, only the last."""
        gate_s = min(self.gates_s().values(), default=0.0)
        names = WorkerCapacity.__struct_fields__
        events = [
            (event["t_s"] - gate_s, WorkerCapacity(**{name: event[name] for name in names if name in event}))
            for event in self.capacities.get(worker, ())
            if event["rollout_slots"] > 0
        ]
        before = [entry for entry in events if entry[0] <= 0.0][-1:]
        return (*before, *(entry for entry in events if entry[0] > 0.0))


def digest_of(model: str) -> str:
    """Digest of the shape of ``model.path``; empty if its sizes are not available, or it is not a dense model."""
    try:
        return shape_digest(load_shape(resolve_model(model)))
    except (ModelError, ConfigError):
        return ""


def mean_s(values: list[float]) -> float:
    """The mean; 0 of nothing."""
    return float(np.mean(values)) if values else 0.0
