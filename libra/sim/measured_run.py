"""What a run says of its hardware: seconds of its engines, tools and trainer, and everything between them.

A quantum is dispatched, sent to a worker, waits there for the end of a pass, is generated, decoded and
recorded, and is reported. The log has its beginning, its end and the worker's share; the store has the
engine's. Held-out questions are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from libra import keys
from libra.errors import ConfigError
from libra.hardware.run_calibration import UNBOUNDED_TOKENS, EngineOfRun, RunCalibration, fit_trainer
from libra.sim.run_record import Quantum, RunRecord, digest_of, mean_s
from libra.store.trajectory_store import TrajectoryStore
from libra.types import Phase, StepSeconds

Array = NDArray[np.float64]

SECONDS = ("fixed_s", "sequence_s", "context_token_s", "prefill_token_s", "num_steps", "error_frac")
"""Fields of `libra.facts.EngineDeclared` that are measured."""


def calibration_of(record: RunRecord) -> RunCalibration:
    """The hardware of a run; ConfigError if no engine declared its seconds."""
    declared = _declared(record)
    if not declared:
        raise ConfigError(
            f"{record.directory}: no engine declared its seconds, which takes 32 forward passes; continue the run "
            "(libra resume RUN), or take another one"
        )
    engines = _declared_engines(record, declared)
    tools = [quantum for quantum in record.quanta if quantum.phase == Phase.TOOL]
    called = _called_s(record)
    waits = [q.latency_s - called[q.place].pop(0) for q in tools if called.get(q.place)]
    model = next((str(event["model"]) for event in declared.values()), "") or record.config.model.path
    rows = [row for row in record.metrics if row.get("train_s") and row.get("forwarded_tokens")]
    loads = [event["load_s"] for event in record.named("version_served") if event["version"] > 0]
    published = {event["version"]: event["t_s"] for event in record.named("version_published")}
    updates = [
        published[event["step"] + 1] - event["t_s"]
        for event in record.named("step_finished")
        if event["step"] + 1 in published
    ]
    return RunCalibration(
        model=model,
        digest=digest_of(record.config.model.path),
        engines=engines,
        trainer=fit_trainer([row["train_s"] for row in rows], [row["forwarded_tokens"] for row in rows]),
        train_gpus=record.config.cluster.train_workers,
        update_s=mean_s(updates),
        load_s=mean_s(loads),
        tool_transport_s=transport_s(tools),
        tool_worker_s=binned(waits),
        gate_s=mean_s(_gates_to_first(record)),
        commit_s=mean_s(_commits(record)),
        source=str(record.directory),
    )


def _declared(record: RunRecord) -> dict[str, Mapping[str, Any]]:
    """The seconds that each engine declared last; one that ran too few passes gets those of its bucket's best measured
    engine."""
    events = list(record.named("engine_declared"))
    measured: dict[str, Mapping[str, Any]] = {
        event["worker"]: event for event in events if event["fixed_s"] is not None
    }
    known = list(measured.values())
    for event in events:
        alike = [each for each in known if each["bucket"] == event["bucket"]] or [
            each for each in known if each["tp"] == event["tp"]
        ]
        if event["worker"] not in measured and alike:
            best = max(alike, key=lambda each: int(each["num_steps"]))
            measured[event["worker"]] = {**event, **{name: best[name] for name in SECONDS}}
    return measured


def _declared_engines(record: RunRecord, declared: Mapping[str, Mapping[str, Any]]) -> tuple[EngineOfRun, ...]:
    turns = _turns(record)
    engines = []
    for worker, event in sorted(declared.items()):
        mine = [q for q in record.quanta if q.worker == worker and q.phase == Phase.ROLLOUT]
        steps = StepSeconds(
            event["fixed_s"], event["sequence_s"], event["context_token_s"], event["prefill_token_s"],
            event["num_steps"], event["error_frac"] or 0.0,
        )  # fmt: skip
        taken = turns.get(worker)
        engines.append(
            EngineOfRun(
                worker, event["engine"], _bucket(record, worker, event["bucket"]), event["tp"], event["slots"],
                event["kv_tokens"] or UNBOUNDED_TOKENS, steps,
                taken.wall_over_passes(steps) if taken is not None else 1.0,
                transport_s(mine),
                taken.worker_s() if taken is not None else (0.0,),
            )
        )  # fmt: skip
    return tuple(engines)


def _bucket(record: RunRecord, worker: str, otherwise: str) -> str:
    declared = record.capacities.get(worker)
    return str(declared[-1]["bucket"]) if declared else otherwise


def _turns(record: RunRecord) -> dict[str, TurnsTaken]:
    """Generations of the last attempt of each stored trajectory, by worker."""
    with TrajectoryStore.open(record.directory / "trajectories.zarr") as store:
        whole, turns = store.columns(), store.columns("turn")
    generated: dict[tuple[int, ...], list[Quantum]] = {}
    for quantum in record.quanta:
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
                    whole_turn.reported_s, whole_turn.latency_s, float(turns["queued_s"][at]), float(turns["generate_s"][at]),
                    float(turns["tool_s"][at]) if whole_turn.inline is not None else 0.0, float(whole_turn.tokens), context,
                    context - max(0.0, float(turns["cached_tokens"][at])),
                )
            )  # fmt: skip
    return {worker: TurnsTaken.of(mine) for worker, mine in rows.items()}


def _called_s(record: RunRecord) -> dict[tuple[int, ...], list[float]]:
    """Tool seconds of the actions of each stored trajectory, in order; without those that ran within generations."""
    with TrajectoryStore.open(record.directory / "trajectories.zarr") as store:
        whole, turns = store.columns(), store.columns("turn")
    inline = record.inline_tools
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


def _gates_to_first(record: RunRecord) -> list[float]:
    first: dict[int, float] = {}
    for event in record.named("trajectory_parked"):
        key = keys.parse(event["key"])
        if key is not None and key.split == "train":
            first.setdefault(key.indices[0], event["t_s"])
    return [first[k] - at_s for k, at_s in record.gates_s().items() if k in first]


def _commits(record: RunRecord) -> list[float]:
    last: dict[tuple[int, ...], float] = {}
    for place, t_s in record.ends_s().items():
        last[place[:2]] = max(t_s, last.get(place[:2], t_s))
    committed = (event for event in record.named("group_committed") if event["split"] == "train")
    places = ((event["iteration"], event["group"], event["t_s"]) for event in committed)
    return [t_s - last[iteration, group] for iteration, group, t_s in places if (iteration, group) in last]


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


# ---------------------------------------------------------------- distributions

BINS = 16
"""Numbers that represent a distribution: each is the mean of equally many of its values."""


def binned(values: ArrayLike) -> tuple[float, ...]:
    """Up to `BINS` numbers to draw from, with the mean of ``values``; (0,) without values.

    Negative values count as 0: clocks of two processes differ by microseconds.
    """
    found = np.sort(np.maximum(np.asarray(values, float), 0.0))
    if not len(found):
        return (0.0,)
    # Interpolating the cumulative sum gives each bin equally many values, and keeps the mean.
    total = np.interp(np.linspace(0, len(found), BINS + 1), np.arange(len(found) + 1), np.r_[0.0, np.cumsum(found)])
    return tuple(round(float(value), 9) for value in np.diff(total) * BINS / len(found))


def transport_s(quanta: Sequence[Quantum]) -> tuple[float, ...]:
    """Seconds of the round trip between scheduler and worker, to draw from."""
    return binned([q.reported_s - q.begun_s - q.latency_s for q in quanta if q.begun_s == q.begun_s])


class TurnsTaken(NamedTuple):
    """Generations of one engine, each array (n,): seconds of the report, on the worker, in the engine's queue, in its passes and in
    tools that ran within them; tokens generated, tokens of context, and the computed tokens among those.
    """

    reported_s: Array
    latency_s: Array
    queued_s: Array
    busy_s: Array
    inline_s: Array
    tokens: Array
    context: Array
    computed: Array

    @classmethod
    def of(cls, rows: Sequence[Sequence[float]]) -> TurnsTaken:
        """From rows of these numbers."""
        return cls(*np.asarray(rows, float).reshape(-1, 8).T)

    @property
    def waited_for_a_pass_s(self) -> Array:
        """Seconds in the queue until the end of a pass; a longer wait is for KV memory."""
        return np.minimum(self.queued_s, self.busy_s / np.maximum(self.tokens, 1.0))

    def worker_s(self) -> tuple[float, ...]:
        """Seconds on the worker outside passes, tools and waits for KV memory, to draw from."""
        others = self.latency_s - self.busy_s - self.inline_s - self.queued_s
        return binned(others + self.waited_for_a_pass_s)

    def wall_over_passes(self, steps: StepSeconds) -> float:
        """Wall seconds of these turns over those by passes of ``steps``, given the turns that ran beside them."""
        stop = self.reported_s
        start = stop - self.busy_s
        beside = running_beside(start, stop)
        order = np.argsort(start)
        computed = np.concatenate([[0.0], np.cumsum(self.computed[order])])
        begun = start[order]
        # Every prefill during a turn delays it, its own included.
        held = computed[np.searchsorted(begun, stop, "right")] - computed[np.searchsorted(begun, start, "left")]
        context = self.context + 0.5 * self.tokens
        step_s = steps.fixed_s + beside * (steps.sequence_s + steps.context_token_s * context)
        explained = float((self.tokens * step_s + steps.prefill_token_s * held).sum())
        return float(self.busy_s.sum()) / explained if explained > 0.0 else 1.0


def running_beside(start_s: Array, stop_s: Array) -> Array:
    """(n,) mean number of intervals, itself included, that run while each does."""
    times = np.concatenate([start_s, stop_s])
    change = np.concatenate([np.ones(len(start_s)), -np.ones(len(stop_s))])
    order = np.argsort(times, kind="stable")
    at, running = times[order], np.cumsum(change[order])
    area = np.concatenate([[0.0], np.cumsum(np.diff(at) * running[:-1])])
    spent = np.interp(stop_s, at, area) - np.interp(start_s, at, area)
    return np.asarray(spent / np.maximum(stop_s - start_s, 1e-12))
