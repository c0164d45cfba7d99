"""A run directory out of a simulation in virtual time: a declared emulation of a run whose every second is known.

Fact log, store, metrics and configuration are of the form of a real run's, and hold what the simulation did. Tokens are fillers.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from libra import facts
from libra.config import config_from_dict, dump_config
from libra.hardware.virtual_engine import VirtualEngine
from libra.sim.simulated_trajectory import SimulatedTrajectory
from libra.sim.simulator import Simulator
from libra.store.trajectory_store import TrajectoryStore
from libra.types import NO_TOOL, EndReason, Phase, Prompt, StepSeconds, Trajectory, TrajectoryId


class RecordedSimulator(Simulator):
    """A simulator that remembers what it told the policy, and when."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.told: list[tuple[float, facts.Fact]] = []
        self.cached: dict[str, list[int]] = {}  # of each turn's context, what was in its engine

    def notify(self, event: facts.Fact) -> None:
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
    lines = [line for _, line in sorted(found, key=lambda ranked: (ranked[1].t_s, ranked[0]))]
    (directory / "events.jsonl").write_text("".join(facts.to_json(line) + "\n" for line in lines))
    _store(directory, workload, lines, simulator, {spec.name: spec for spec in engines})
    return outcome


Ranked = tuple[int, facts.Line]
"""A line of the log; the rank orders lines of one instant."""


def _line(rank: int, t_s: float, fact: facts.Fact) -> Ranked:
    return rank, facts.Line("emulated", t_s, fact)


def _events(simulator, engines, steps) -> Iterator[Ranked]:
    """The log of what a simulation did."""
    record, commit_s = simulator.record, simulator.options.commit_s
    yield _line(0, 0.0, facts.RunStarted(0, 0, len(record.gate_s), 1, "", ""))
    for spec in engines:
        if spec.name in steps:
            measured = {name: getattr(steps[spec.name], name) for name in StepSeconds.__dataclass_fields__}
            kv = spec.tables.kv_capacity_tokens
            kind = (spec.name, "transformers", spec.bucket, "emulated")
            fact = facts.EngineDeclared(*kind, kv, 0, 0, spec.slots, spec.tp, **measured)
            yield _line(1, 0.0, fact)
    yield _line(2, 0.0, facts.VersionPublished(0))
    for iteration, at_s in record.gate_s.items():
        yield _line(3, 0.0, facts.GateParked(iteration))
        yield _line(3, at_s, facts.OpenGate(iteration, ""))
    for batch, at_s in record.iteration_s.items():
        last_s = max(done for (iteration, _), done in record.group_s.items() if iteration == batch)
        members = tuple(sorted(place for place in record.group_s if place[0] == batch))
        yield _line(3, last_s + commit_s, facts.OpenBatch(batch, members, ""))
        yield _line(3, at_s, facts.StepFinished(batch, 0.0, 0.0))
        yield _line(3, at_s, facts.VersionPublished(batch + 1))
    for (iteration, group), at_s in record.group_s.items():
        yield _line(3, at_s + commit_s, facts.GroupCommitted("train", iteration, group, 0, None, {}))
    for given in record.dispatched:
        fact = facts.QuantumDispatched(given.key, given.phase, given.worker, given.quantum, (), given.reason, True)
        yield _line(6, given.at_s, fact)
    yield from _told(simulator)


def _told(simulator: RecordedSimulator) -> Iterator[Ranked]:
    where = {(given.key, given.quantum): given.worker for given in simulator.record.dispatched}
    quanta: dict[str, int] = {}
    homes: dict[str, str] = {}
    for at_s, event in simulator.told:
        match event:
            case facts.WorkerCapacity() | facts.WorkerWithdrawn():
                yield _line(1, at_s, event)
            case facts.TrajectoryParked():
                yield _line(5, at_s, event)
            case facts.QuantumFinished(key=key, phase=phase):
                inline = phase is Phase.ROLLOUT and bool(event.status)
                number = quanta.get(key, 0)
                quanta[key] = number + (2 if inline else 1)
                worker = where.get((key, number)) or homes[key]  # one that goes on has no dispatch
                if phase is Phase.ROLLOUT:
                    homes[key] = worker
                yield _line(4, at_s, msgspec.structs.replace(event, quantum=number, worker=worker))
            case facts.QuantumStarted(key=key, phase=phase):
                yield _line(5, at_s, facts.QuantumContinued(key, phase, event.worker, quanta[key]))
            case facts.TrajectoryEnded():
                yield _line(4, at_s, event)


def _store(directory, workload, lines, simulator, engines):
    """The trajectories, with the seconds that engines and tools took of each turn."""
    taken: dict[str, list[tuple[float, str, int]]] = {}
    for _, _, fact in lines:
        if type(fact) is facts.QuantumFinished and fact.phase is Phase.ROLLOUT:
            taken.setdefault(fact.key, []).append((fact.latency_s, fact.worker, fact.tokens))
    with TrajectoryStore.create(directory / "trajectories.zarr") as store:
        for iteration in sorted({plan.iteration for plan in workload.trajectories}):
            rows = []
            for plan in sorted(plan for plan in workload.trajectories if plan.iteration == iteration):
                key = workload.key(plan)
                rows.append(_trajectory(plan, taken[key], simulator.cached[key], engines, simulator.options))
            store.append(rows, batch=iteration)


def _trajectory(plan, taken, cached, engines, around):
    rows, context, parts = [], plan.prompt_tokens, iter(zip(taken, cached, strict=True))
    for index, turn in enumerate(plan.turns):
        (latency_s, worker, tokens), there = next(parts)
        while tokens < turn.new_tokens:  # `rollout.chunk_tokens`: each part is a quantum with its own overhead
            (more_s, worker, new), _ = next(parts)
            latency_s, tokens = latency_s + more_s - engines[worker].overhead.worker_s[0], tokens + new
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
