"""Measured hardware of a run: seconds of engines, tools, trainer, and everything in between.

The life of a quantum: dispatched, sent to a worker, waiting there for the end of a pass, generated,
decoded, recorded, reported. The log has start, end and worker seconds; the store has engine
seconds. Held-out questions are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from libra.errors import ConfigError
from libra.facts import EngineDeclared, StepFinished, VersionServed
from libra.hardware.run_calibration import (
    UNBOUNDED_TOKENS,
    EngineOfRun,
    QuantumOverhead,
    RunCalibration,
    fit_trainer,
)
from libra.planner.from_config import digest_of
from libra.sim.run_record import Place, Quantum, RunRecord, mean_s
from libra.store.trajectory_store import TrajectoryStore
from libra.types import Phase, StepSeconds

Array = NDArray[np.float64]
Columns = Mapping[str, NDArray[Any]]
SECONDS = ("fixed_s", "sequence_s", "context_token_s", "prefill_token_s", "num_steps", "error_frac")
"""Measured fields of `libra.facts.EngineDeclared`."""


def calibration_of(record: RunRecord) -> RunCalibration:
    """The hardware of a run; ConfigError if no engine declared its seconds."""
    declared = _declared(record)
    if not declared:
        raise ConfigError(
            f"{record.directory}: no engine declared its seconds, which takes 32 forward passes; continue the run "
            "(libra resume RUN), or take another one"
        )
    with TrajectoryStore.open(record.directory / "trajectories.zarr") as store:
        whole, turns = store.columns(), store.columns("turn")
    stored = _stored(whole)
    tools = [quantum for quantum in record.quanta if quantum.phase is Phase.TOOL]
    called = {  # action seconds in order; tools within generations are left out
        place: [
            float(turns["tool_s"][at])
            for at in rows
            if turns["status"][at] and turns["tool"][at] not in record.inline_tools
        ]
        for place, attempt, rows in stored
        if not attempt
    }
    waits = [q.latency_s - called[q.place].pop(0) for q in tools if called.get(q.place)]
    steps = [row for row in record.metrics if row.get("train_s") and row.get("forwarded_tokens")]
    published, committed = record.published_s(), record.committed_s()
    last, first = dict[Place, float](), dict[int, float]()
    for place, t_s in record.ends_s().items():
        last[place[:2]] = max(t_s, last.get(place[:2], t_s))
    for place, t_s in record.arrivals_s().items():
        first.setdefault(place[0], t_s)
    return RunCalibration(
        model=next((each.model for each in declared.values()), "") or record.config.model.path,
        digest=digest_of(record.config.model.path),
        engines=_engines(record, declared, _turns(record, stored, turns)),
        trainer=fit_trainer([row["train_s"] for row in steps], [row["forwarded_tokens"] for row in steps]),
        train_gpus=record.config.cluster.train_workers,
        update_s=mean_s(
            [published[step.step + 1] - t_s for t_s, step in record.of(StepFinished) if step.step + 1 in published]
        ),
        load_s=mean_s([served.load_s for _, served in record.of(VersionServed) if served.version > 0]),
        tools=_overhead(record, tools, binned(waits)),
        gate_s=mean_s([first[k] - at_s for k, at_s in record.gates_s().items() if k in first]),
        commit_s=mean_s([t_s - last[place] for place, t_s in committed.items() if place in last]),
        source=str(record.directory),
    )


def _stored(whole: Columns) -> list[tuple[Place, int, range]]:
    names = ("split", "iteration", "group", "sample", "attempt", "turn_offset", "num_turns")
    rows = zip(*(whole[name].tolist() for name in names), strict=True)
    return [
        (tuple(map(int, place)), int(attempt), range(int(start), int(start) + int(count)))
        for split, *place, attempt, start, count in rows
        if split == "train"
    ]


def _declared(record: RunRecord) -> dict[str, EngineDeclared]:
    """Last declaration of each engine; with few passes, its bucket's best-measured times."""
    facts = [fact for _, fact in record.of(EngineDeclared)]
    measured = {fact.worker: fact for fact in facts if fact.fixed_s is not None}
    known = list(measured.values())
    for fact in facts:
        alike = [each for each in known if each.bucket == fact.bucket] or [each for each in known if each.tp == fact.tp]
        if fact.worker not in measured and alike:
            best = max(alike, key=lambda each: each.num_steps)
            measured[fact.worker] = msgspec.structs.replace(fact, **{name: getattr(best, name) for name in SECONDS})
    return measured


def _engines(
    record: RunRecord, declared: Mapping[str, EngineDeclared], turns: Mapping[str, TurnsTaken]
) -> tuple[EngineOfRun, ...]:
    engines = []
    for worker, fact in sorted(declared.items()):
        mine = [q for q in record.quanta if q.worker == worker and q.phase is Phase.ROLLOUT]
        steps = StepSeconds(
            fact.fixed_s or 0.0, fact.sequence_s or 0.0, fact.context_token_s or 0.0, fact.prefill_token_s or 0.0,
            fact.num_steps, fact.error_frac or 0.0,
        )  # fmt: skip
        taken, capacities = turns.get(worker), record.capacities.get(worker)
        engines.append(
            EngineOfRun(
                worker, fact.engine, capacities[-1].bucket if capacities else fact.bucket, fact.tp, fact.slots,
                fact.kv_tokens or UNBOUNDED_TOKENS, steps, 1.0 if taken is None else taken.wall_over_passes(steps),
                _overhead(record, mine, (0.0,) if taken is None else taken.worker_s()),
            )
        )  # fmt: skip
    return tuple(engines)


def _overhead(record: RunRecord, quanta: Sequence[Quantum], worker_s: tuple[float, ...]) -> QuantumOverhead:
    sent = [quantum for quantum in quanta if quantum.dispatched]
    spent = np.array([quantum.transport_s for quantum in sent])
    if len(sent) < 2:
        return QuantumOverhead(binned(spent), worker_s)
    begun_s = np.array([quantum.begun_s for quantum in sent])
    beside = np.searchsorted(np.sort([quantum.begun_s for quantum in record.quanta]), begun_s, "right")
    beside -= np.searchsorted(np.sort([quantum.reported_s for quantum in record.quanta]), begun_s, "right")
    in_flight, mean = np.maximum(beside, 1.0), float(spent.mean())
    spread = float(in_flight.var())
    slope = float(np.cov(in_flight, spent, bias=True)[0, 1]) / spread if spread > 0.0 else 0.0
    idle_frac = 1.0 - slope * float(in_flight.mean()) / mean if mean > 0.0 else 1.0
    return QuantumOverhead(binned(spent), worker_s, min(1.0, max(0.0, idle_frac)), float(in_flight.mean()))


def _turns(record: RunRecord, stored: Sequence[tuple[Place, int, range]], turns: Columns) -> dict[str, TurnsTaken]:
    generated: dict[Place, list[Quantum]] = {}
    for quantum in record.quanta:
        if quantum.phase is Phase.ROLLOUT and quantum.tokens > 0:
            generated.setdefault(quantum.place, []).append(quantum)
    rows: dict[str, list[tuple[float, ...]]] = {}
    for place, _, at_rows in stored:
        lengths = [int(turns["generated_tokens"][at]) for at in at_rows]
        for at, parts in zip(at_rows, _parts_of_turns(generated.get(place, []), lengths), strict=False):
            context = float(turns["prompt_tokens"][at])
            computed = context - max(0.0, float(turns["cached_tokens"][at]))
            for part in parts:
                share = part.tokens / float(turns["generated_tokens"][at])
                rows.setdefault(part.worker, []).append(
                    (
                        part.reported_s, part.latency_s, float(turns["queued_s"][at]) * share,
                        float(turns["generate_s"][at]) * share,
                        float(turns["tool_s"][at]) if part.inline is not None else 0.0, float(part.tokens), context, computed,
                    )
                )  # fmt: skip
                context, computed = context + part.tokens, 1.0  # KV of earlier parts is cached
    return {worker: TurnsTaken(*np.asarray(mine, float).T) for worker, mine in rows.items()}


def _parts_of_turns(quanta: Sequence[Quantum], lengths: Sequence[int]) -> list[list[Quantum]]:
    """Quanta of each turn of the last attempt, matched by turn lengths; empty without a match."""
    found: list[list[Quantum]] = []
    end = len(quanta)
    for length in reversed(lengths):
        begin, tokens = end, 0
        while begin and tokens < length:
            begin -= 1
            tokens += quanta[begin].tokens
        if tokens != length:
            return []
        found.append(list(quanta[begin:end]))
        end = begin
    return found[::-1]


# ---------------------------------------------------------------- distributions

BINS = 16
"""Numbers that represent a distribution: the means of equally large bins."""


def binned(values: ArrayLike) -> tuple[float, ...]:
    """Up to `BINS` numbers to sample from, with the mean of ``values``; (0,) without values.

    Negative values, from clock skew of microseconds between processes, count as 0.
    """
    found = np.sort(np.maximum(np.asarray(values, float), 0.0))
    if not len(found):
        return (0.0,)
    # Interpolating the cumulative sum gives equally large bins and keeps the mean.
    total = np.interp(np.linspace(0, len(found), BINS + 1), np.arange(len(found) + 1), np.r_[0.0, np.cumsum(found)])
    return tuple(round(float(value), 9) for value in np.diff(total) * BINS / len(found))


class TurnsTaken(NamedTuple):
    """Generations of one engine, each array (n,).

    Seconds: report, on the worker, in the engine's queue, in its passes, in tools within those
    passes. Tokens: generated, context, and computed context.
    """

    reported_s: Array
    latency_s: Array
    queued_s: Array
    busy_s: Array
    inline_s: Array
    tokens: Array
    context: Array
    computed: Array

    def worker_s(self) -> tuple[float, ...]:
        """Samples of worker seconds outside passes, tools and waits for KV memory.

        Queue time beyond one pass counts as waiting for KV memory.
        """
        passes_s = np.minimum(self.queued_s, self.busy_s / np.maximum(self.tokens, 1.0))
        return binned(self.latency_s - self.busy_s - self.inline_s - self.queued_s + passes_s)

    def wall_over_passes(self, steps: StepSeconds) -> float:
        """Wall seconds of these turns over those predicted by ``steps``, given concurrent turns."""
        start, stop = self.reported_s - self.busy_s, self.reported_s
        beside, order = running_beside(start, stop), np.argsort(start)
        begun, computed = start[order], np.concatenate([[0.0], np.cumsum(self.computed[order])])
        # Every prefill during a turn delays it, including its own.
        held = computed[np.searchsorted(begun, stop, "right")] - computed[np.searchsorted(begun, start, "left")]
        context = self.context + 0.5 * self.tokens
        step_s = steps.fixed_s + beside * (steps.sequence_s + steps.context_token_s * context)
        # Concurrent turns share the engine's seconds.
        explained = float(((self.tokens * step_s + steps.prefill_token_s * held) / beside).sum())
        return float((self.busy_s / beside).sum()) / explained if explained > 0.0 else 1.0


def running_beside(start_s: Array, stop_s: Array) -> Array:
    """(n,) mean number of concurrent intervals during each interval, itself included."""
    times = np.concatenate([start_s, stop_s])
    change = np.concatenate([np.ones(len(start_s)), -np.ones(len(stop_s))])
    order = np.argsort(times, kind="stable")
    at, running = times[order], np.cumsum(change[order])
    area = np.concatenate([[0.0], np.cumsum(np.diff(at) * running[:-1])])
    spent = np.interp(stop_s, at, area) - np.interp(start_s, at, area)
    return np.asarray(spent / np.maximum(stop_s - start_s, 1e-12))
