"""The content of a run directory, read once: configuration, event log, metrics and the turns of its training
trajectories."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from libra.hardware.run_calibration import UNBOUNDED_TOKENS, EngineOfRun, RunCalibration
from libra.hardware.run_quanta import Quantum, TurnsTaken, binned, quanta_of, transport_s
from libra.hardware.run_step_fit import fit_trainer
from libra.hardware.shapes import shape_digest
from libra.observe.metrics import read_metrics
from libra.store.event_log import read_events
from libra.store.trajectory_store import TrajectoryStore
from libra.types import Phase, StepSeconds


class RealisedRun(NamedTuple):
    """The measured times of a run, for comparison with its simulation.

    ``rollout_s`` are seconds of each iteration from gate to last trajectory; ``makespan_s`` is from the first gate to the last
    trajectory, less the time until the driver submitted an iteration that could have begun (held-out questions).
    """

    makespan_s: float
    rollout_s: tuple[float, ...]
    moves: int


SECONDS = ("fixed_s", "sequence_s", "context_token_s", "prefill_token_s", "num_steps", "error_frac")
"""Fields of `libra.facts.EngineDeclared` that are measured."""


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
        return sum(told[-1]["tool_slots"] for told in self.capacities.values())

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
        if self.config.distil.late != "wait":
            return {}
        return {
            (each["iteration"], each["group"]): (each["t_s"], each["score_s"]) for each in self.named("group_scored")
        }

    def publish_s(self) -> float:
        """Mean seconds in which a version was published beside the next step; 0: none was."""
        published = {event["version"]: event["t_s"] for event in self.named("version_published")}
        return _mean([published[step + 1] - t_s for step, t_s in self._ended_s().items() if step + 1 in published])

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

    # ---------------------------------------------------------------- calibration

    def calibration(self) -> RunCalibration:
        """The run's hardware; ConfigError if no engine declared its seconds."""
        declared = self.declared()
        if not declared:
            raise ConfigError(
                f"{self.directory}: no engine declared its seconds, which takes 32 forward passes; continue the run "
                "(libra resume RUN), or take another one"
            )
        engines = self._declared_engines(declared)
        tools = [quantum for quantum in self.quanta if quantum.phase == Phase.TOOL]
        called = self._called_s()
        waits = [q.latency_s - called[q.place].pop(0) for q in tools if called.get(q.place)]
        model = next((str(event["model"]) for event in declared.values()), "") or self.config.model.path
        rows = [row for row in self.metrics if row.get("train_s") and row.get("forwarded_tokens")]
        loads = [event["load_s"] for event in self.named("version_served") if event["version"] > 0]
        published = {event["version"]: event["t_s"] for event in self.named("version_published")}
        updates = [
            published[event["step"] + 1] - event["t_s"]
            for event in self.named("step_finished")
            if event["step"] + 1 in published
        ]
        return RunCalibration(
            model=model,
            digest=digest_of(self.config.model.path),
            engines=engines,
            trainer=fit_trainer([row["train_s"] for row in rows], [row["forwarded_tokens"] for row in rows]),
            train_gpus=self.config.cluster.train_workers,
            update_s=_mean(updates),
            load_s=_mean(loads),
            tool_transport_s=transport_s(tools),
            tool_worker_s=binned(waits),
            gate_s=_mean(self._gates_to_first()),
            commit_s=_mean(self._commits()),
            source=str(self.directory),
        )

    def declared(self) -> dict[str, Mapping[str, Any]]:
        """The seconds that each engine declared last; one that ran too few passes gets those of its bucket's best measured
        engine."""
        told = list(self.named("engine_declared"))
        measured: dict[str, Mapping[str, Any]] = {
            event["worker"]: event for event in told if event["fixed_s"] is not None
        }
        known = list(measured.values())
        for event in told:
            alike = [each for each in known if each["bucket"] == event["bucket"]] or [
                each for each in known if each["tp"] == event["tp"]
            ]
            if event["worker"] not in measured and alike:
                best = max(alike, key=lambda each: int(each["num_steps"]))
                measured[event["worker"]] = {**event, **{name: best[name] for name in SECONDS}}
        return measured

    def _declared_engines(self, declared: Mapping[str, Mapping[str, Any]]) -> tuple[EngineOfRun, ...]:
        turns = self._turns()
        engines = []
        for worker, event in sorted(declared.items()):
            mine = [q for q in self.quanta if q.worker == worker and q.phase == Phase.ROLLOUT]
            steps = StepSeconds(
                event["fixed_s"], event["sequence_s"], event["context_token_s"], event["prefill_token_s"],
                event["num_steps"], event["error_frac"] or 0.0,
            )  # fmt: skip
            taken = turns.get(worker)
            engines.append(
                EngineOfRun(
                    worker, event["engine"], self._bucket(worker, event["bucket"]), event["tp"], event["slots"],
                    event["kv_tokens"] or UNBOUNDED_TOKENS, steps,
                    taken.wall_over_passes(steps) if taken is not None else 1.0,
                    transport_s(mine),
                    taken.worker_s() if taken is not None else (0.0,),
                )
            )  # fmt: skip
        return tuple(engines)

    def _bucket(self, worker: str, otherwise: str) -> str:
        told = self.capacities.get(worker)
        return str(told[-1]["bucket"]) if told else otherwise

    def announced(self, worker: str) -> tuple[tuple[float, WorkerCapacity], ...]:
        """The events about an engine that the policy received, each with the seconds after the first gate; of those before
        it, only the last."""
        gate_s = min(self.gates_s().values(), default=0.0)
        names = WorkerCapacity.__struct_fields__
        told = [
            (event["t_s"] - gate_s, WorkerCapacity(**{name: event[name] for name in names if name in event}))
            for event in self.capacities.get(worker, ())
            if event["rollout_slots"] > 0
        ]
        before = [entry for entry in told if entry[0] <= 0.0][-1:]
        return (*before, *(entry for entry in told if entry[0] > 0.0))

    def _turns(self) -> dict[str, TurnsTaken]:
        """Generations of the last attempt of each stored trajectory, by worker."""
        with TrajectoryStore.open(self.directory / "trajectories.zarr") as store:
            whole, turns = store.columns(), store.columns("turn")
        generated: dict[tuple[int, ...], list[Quantum]] = {}
        for quantum in self.quanta:
            if quantum.phase == Phase.ROLLOUT and quantum.tokens > 0:
                generated.setdefault(quantum.place, []).append(quantum)
        rows: dict[str, list[tuple[float, ...]]] = {}
        for row, split in enumerate(whole["split"].tolist()):
            place = tuple(int(whole[name][row]) for name in ("iteration", "group", "sample"))
            start, stop = (int(whole["turn_offset"][row]) + more for more in (0, int(whole["num_turns"][row])))
            lengths = turns["generated_tokens"][start:stop].tolist() if split == "train" else []
            mine = _whole_turns(generated.get(place, []), lengths)
            for at, whole_turn in enumerate(mine, start):
                if whole_turn is None:
                    continue
                context = float(turns["prompt_tokens"][at])
                rows.setdefault(whole_turn.worker, []).append(
                    (
                        whole_turn.told_s, whole_turn.latency_s, float(turns["queued_s"][at]), float(turns["generate_s"][at]),
                        float(turns["tool_s"][at]) if whole_turn.inline is not None else 0.0, float(whole_turn.tokens), context,
                        context - max(0.0, float(turns["cached_tokens"][at])),
                    )
                )  # fmt: skip
        return {worker: TurnsTaken.of(mine) for worker, mine in rows.items()}

    def _called_s(self) -> dict[tuple[int, ...], list[float]]:
        """Tool seconds of the actions of each stored trajectory, in order; without those that ran within generations."""
        with TrajectoryStore.open(self.directory / "trajectories.zarr") as store:
            whole, turns = store.columns(), store.columns("turn")
        inline = self.inline_tools
        found: dict[tuple[int, ...], list[float]] = {}
        for row, split in enumerate(whole["split"].tolist()):
            if split != "train" or whole["attempt"][row]:
                continue
            start, count = int(whole["turn_offset"][row]), int(whole["num_turns"][row])
            place = tuple(int(whole[name][row]) for name in ("iteration", "group", "sample"))
            found[place] = [
                float(turns["tool_s"][at])
                for at in range(start, start + count)
                if turns["status"][at] and turns["tool"][at] not in inline
            ]
        return found

    def _gates_to_first(self) -> list[float]:
        first: dict[int, float] = {}
        for event in self.named("trajectory_parked"):
            key = keys.parse(event["key"])
            if key is not None and key.split == "train":
                first.setdefault(key.indices[0], event["t_s"])
        return [first[k] - at_s for k, at_s in self.gates_s().items() if k in first]

    def _commits(self) -> list[float]:
        last: dict[tuple[int, ...], float] = {}
        for place, t_s in self.ends_s().items():
            last[place[:2]] = max(t_s, last.get(place[:2], t_s))
        committed = (event for event in self.named("group_committed") if event["split"] == "train")
        places = ((event["iteration"], event["group"], event["t_s"]) for event in committed)
        return [t_s - last[iteration, group] for iteration, group, t_s in places if (iteration, group) in last]


def digest_of(model: str) -> str:
    """Digest of the shape of ``model.path``; empty if its sizes are not available, or it is not a dense model."""
    try:
        return shape_digest(load_shape(resolve_model(model)))
    except (ModelError, ConfigError):
        return ""


def _whole_turns(quanta: Sequence[Quantum], lengths: Sequence[int]) -> list[Quantum | None]:
    """The quantum of each turn of a trajectory's last attempt, by the tokens of its turns; None: it took several, or is unknown.

    Without any if the quanta do not add up to the turns.
    """
    found: list[Quantum | None] = []
    end = len(quanta)
    for length in reversed(lengths):
        begin, tokens = end, 0
        while begin and tokens < length:
            begin -= 1
            tokens += quanta[begin].tokens
        if tokens != length:
            return []
        found.append(quanta[begin] if end - begin == 1 else None)
        end = begin
    return found[::-1]


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else 0.0
