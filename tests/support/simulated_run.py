"""A run directory out of a simulation in virtual time: a declared emulation of a run whose every second is known.

Fact log, store, metrics and configuration are of the form of a real run's, and hold what the simulation did. Tokens are fillers.
"""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from libra.config import config_from_dict, dump_config
from libra.facts import SCHEMA, Fact, QuantumFinished, QuantumStarted, TrajectoryEnded, TrajectoryParked, WorkerCapacity
from libra.hardware.virtual_engine import VirtualEngine
from libra.sim import Simulator
from libra.sim.simulated_trajectory import SimulatedTrajectory
from libra.store.trajectory_store import TrajectoryStore
from libra.types import NO_TOOL, EndReason, Phase, Prompt, StepSeconds, Trajectory, TrajectoryId


class RecordedSimulator(Simulator):
    """A simulator that remembers what it told the policy, and when."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.told: list[tuple[float, Fact]] = []
        self.cached: dict[str, list[int]] = {}  # of each turn's context, what was in its engine

    def notify(self, event: Fact) -> None:
        self.told.append((self.agenda.now_s, event))
        super().notify(event)

    def generate(self, run: SimulatedTrajectory, worker: str) -> VirtualEngine:
        before = self.running_engines[worker].counters.cached_tokens
        engine = super().generate(run, worker)
        # No request waits in an engine that has as many contexts as slots, so this is what the new one found.
        self.cached.setdefault(run.key, []).append(engine.counters.cached_tokens - before)
        return engine


def write_simulated_run(directory, workload, engines, steps, ordering, options, *, config, declares=True):
    """Simulate, and write the run down in ``directory``, which is made; ``steps`` is what each engine declares."""
    simulator = RecordedSimulator(workload, engines, ordering, options=options)
    outcome = simulator.run()
    directory.mkdir(parents=True)
    (directory / "config.resolved.yaml").write_text(dump_config(config_from_dict(config)))
    found = _events(simulator, engines, steps if declares else {})
    lines = sorted(found, key=lambda line: (line["t_s"], line.pop("_rank")))
    with (directory / "events.jsonl").open("w") as log:
        for line in lines:
            log.write(json.dumps({"schema": SCHEMA, "run": workload.name, **line}) + "\n")
    _store(directory, workload, lines, simulator, {spec.name: spec for spec in engines})
    return outcome


Line = dict[str, Any]


def _line(rank: int, name: str, t_s: float, **fields: Any) -> Line:
    """A line of the log; ``_rank`` orders those of one instant."""
    return {"name": name, "t_s": t_s, **fields, "_rank": rank}


def _events(simulator, engines, steps):
    """The log of what a simulation did."""
    record, commit_s = simulator.record, simulator.options.commit_s
    yield _line(0, "run_started", 0.0, epoch=0, eta=0, family="")
    for spec in engines:
        if spec.name in steps:
            measured = {name: getattr(steps[spec.name], name) for name in StepSeconds.__dataclass_fields__}
            yield _line(
                1, "engine_declared", 0.0, worker=spec.name, engine="transformers", bucket=spec.bucket, model="emulated",
                kv_tokens=spec.tables.kv_capacity_tokens, kv_bytes=0, kv_token_bytes=0, slots=spec.slots, tp=spec.tp, **measured,
            )  # fmt: skip
    yield _line(2, "version_published", 0.0, version=0)
    for iteration, at_s in record.gate_s.items():
        yield _line(3, "gate_parked", 0.0, iteration=iteration)
        yield _line(3, "gate_opened", at_s, iteration=iteration)
    for batch, at_s in record.iteration_s.items():
        last_s = max(done for (iteration, _), done in record.group_s.items() if iteration == batch)
        members = sorted(place for place in record.group_s if place[0] == batch)
        yield _line(3, "batch_opened", last_s + commit_s, batch=batch, members=members)
        yield _line(3, "step_finished", at_s, step=batch)
        yield _line(3, "version_published", at_s, version=batch + 1)
    for (iteration, group), at_s in record.group_s.items():
        yield _line(3, "group_committed", at_s + commit_s, split="train", iteration=iteration, group=group)
    for given in record.dispatched:
        where = {"key": given.key, "phase": str(given.phase), "quantum": given.quantum, "worker": given.worker}
        yield _line(6, "quantum_dispatched", given.at_s, **where)
    yield from _told(simulator)


def _told(simulator: RecordedSimulator) -> Iterator[Line]:
    """What the policy was told."""
    where = {(given.key, given.quantum): given.worker for given in simulator.record.dispatched}
    quanta: dict[str, int] = {}
    homes: dict[str, str] = {}
    for at_s, event in simulator.told:
        match event:
            case WorkerCapacity():
                fields = {name: getattr(event, name) for name in WorkerCapacity.__struct_fields__}
                yield _line(1, "worker_capacity", at_s, **fields)
            case TrajectoryParked(key=key, phase=phase, quanta=number):
                yield _line(5, "trajectory_parked", at_s, key=key, phase=str(phase), quanta=number)
            case QuantumFinished(key=key, phase=phase):
                inline = phase is Phase.ROLLOUT and bool(event.status)
                number = quanta.get(key, 0)
                quanta[key] = number + (2 if inline else 1)
                worker = where.get((key, number)) or homes[key]  # one that goes on has no dispatch
                if phase is Phase.ROLLOUT:
                    homes[key] = worker
                yield _line(
                    4, "quantum_finished", at_s, key=key, phase=str(phase), quantum=number, tokens=event.tokens,
                    tool=event.tool, status=event.status, payload_tokens=event.payload_tokens, latency_s=event.latency_s,
                    worker=worker, end="",
                )  # fmt: skip
            case QuantumStarted(key=key, phase=phase):
                more = {"key": key, "phase": str(phase), "quantum": quanta[key], "worker": event.worker}
                yield _line(5, "quantum_continued", at_s, **more)
            case TrajectoryEnded(key=key):
                yield _line(4, "trajectory_ended", at_s, key=key, completed=True)


def _store(directory, workload, lines, simulator, engines):
    """The trajectories, with the seconds that engines and tools took of each turn."""
    taken: dict[str, list[tuple[float, str]]] = {}
    for line in lines:
        if line["name"] == "quantum_finished" and line["phase"] == Phase.ROLLOUT:
            taken.setdefault(line["key"], []).append((line["latency_s"], line["worker"]))
    with TrajectoryStore.create(directory / "trajectories.zarr") as store:
        for iteration in sorted({plan.iteration for plan in workload.trajectories}):
            rows = []
            for plan in sorted(plan for plan in workload.trajectories if plan.iteration == iteration):
                key = workload.key(plan)
                rows.append(_trajectory(plan, taken[key], simulator.cached[key], engines, simulator.options))
            store.append(rows, batch=iteration)


def _trajectory(plan, taken, cached, engines, around):
    rows, context = [], plan.prompt_tokens
    for index, (turn, (latency_s, worker), there) in enumerate(zip(plan.turns, taken, cached, strict=True)):
        inline_s = turn.tool_s if turn.status != NO_TOOL and turn.tool in around.inline_tools else 0.0
        rows.append(
            {
                "turn": index, "tool": turn.tool, "status": str(turn.status),
                "prompt_tokens": context, "cached_tokens": there, "generated_tokens": turn.new_tokens,
                "observation_tokens": turn.payload_tokens, "queued_s": 0.0, "tool_s": turn.tool_s,
                "generate_s": latency_s - inline_s - engines[worker].overhead.worker_s[0], "worker": worker,
            }
        )  # fmt: skip
        context += turn.new_tokens + turn.payload_tokens
    # No two trajectories have a token in common but those of their prompt.
    tokens = np.full(context, 1 + plan.iteration + 1000 * (plan.group + 1000 * plan.sample), np.int32)
    tokens[: plan.prompt_tokens] = 1 + plan.group
    nothing = np.full(context, -1, np.int32)
    return Trajectory(
        TrajectoryId(plan.iteration, plan.group, plan.sample), Prompt(f"q{plan.iteration}-{plan.group}", ()), tokens,
        np.zeros(context, bool), np.zeros(context, np.float32), nothing, nothing, rows, EndReason.ANSWERED, reward=0.0,
    )  # fmt: skip
