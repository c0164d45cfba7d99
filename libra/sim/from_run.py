"""The simulation of a past run: its stored trajectories, turn by turn, on its measured engines."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.config import RunConfig
from libra.config.streaming import turns as engines_turn
from libra.errors import RunDirectoryError, StoreError
from libra.facts import HomeChanged, boundaries_of
from libra.hardware.engine_tables import EngineTables, HostPool
from libra.hardware.run_calibration import EngineOfRun, RunCalibration
from libra.policy import staleness_of
from libra.policy.engine_capacity import PRIOR_BYTES_PER_S
from libra.sim.engines_of_run import calibration_of
from libra.sim.run_record import RealisedRun, RunRecord, mean_s
from libra.sim.simulation_options import Announced, EngineSpec, SimulationOptions
from libra.sim.workload import SIMULATED, TrajectoryPlan, TurnPlan, Workload, checked
from libra.store.trajectory_store import TrajectoryStore
from libra.types import Phase, tool_outcome


@dataclass(frozen=True, eq=False)
class RunSetting:
    """A run's training trajectories, hardware, and measured times (None if it was resumed)."""

    record: RunRecord
    workload: Workload
    calibration: RunCalibration
    realised: RealisedRun | None

    @property
    def engines(self) -> tuple[EngineSpec, ...]:
        """Engines under their workers' names, with the facts that the policy received."""
        return tuple(
            engine_spec(engine, engine.worker, announced=self.record.announced(engine.worker))
            for engine in self.calibration.engines
        )


def run_setting(run_dir: Path) -> RunSetting:
    """Everything that a simulation needs of a run.

    RunDirectoryError if not a run, or nothing is stored; ConfigError if no engine declared its
    seconds.
    """
    record = RunRecord.read(run_dir)
    workload = workload_of_run(run_dir, family=record.family, arrivals_s=record.arrivals_s())
    iterations = 1 + max(plan.iteration for plan in workload.trajectories)
    return RunSetting(record, workload, calibration_of(record), record.realised(iterations))


def engine_spec(
    engine: EngineOfRun, name: str, *, slots: int | None = None, announced: tuple[Announced, ...] = ()
) -> EngineSpec:
    """A simulated engine with the measured times of ``engine``."""
    tables = EngineTables(engine.seconds, grain_tokens=1, max_contexts=engine.max_contexts)
    return EngineSpec(name, engine.tp, slots or engine.slots, tables, engine.bucket, engine.overhead, announced)


def run_options(setting: RunSetting, config: RunConfig) -> SimulationOptions:
    """Trainer, teacher and tools of a run; staleness bound, chunks and boundaries of ``config``."""
    record, calibration, steps_s, rollout = (
        setting.record,
        setting.calibration,
        setting.record.steps_s(),
        config.rollout,
    )
    acted = any(quantum.phase == Phase.TOOL for quantum in record.quanta)
    reserves = any(engine.max_contexts is not None for engine in calibration.engines)
    return SimulationOptions(
        **asdict(staleness_of(config)),
        train_s=mean_s(steps_s),
        steps_s=steps_s,
        load_s=calibration.load_s,
        publish_s=record.publish_s(),
        tool_slots=record.tool_slots if acted and record.tool_slots else None,
        inline_tools=record.inline_tools,
        tool_overhead=calibration.tools,
        gate_s=calibration.gate_s,
        commit_s=calibration.commit_s,
        boundaries=boundaries_of(config.policy.boundaries_tokens),
        chunk_tokens=rollout.chunk_tokens,
        host=host_pool(record),
        keeps_kv=rollout.keep_kv,
        reserve=(rollout.max_new_tokens, rollout.max_context_tokens) if reserves else None,
        teacher_token_s=measured_teacher_token_s(record, setting.workload),
    )


def host_pool(record: RunRecord) -> HostPool | None:
    """Host-memory KV pool of the run's engines; None if they had none.

    Fetch prices come from the run's transfers, else from the policy's assumption
    (`PRIOR_BYTES_PER_S`).
    """
    gib = record.config.rollout.kv_host_gib
    sizes = [declared[-1].kv_token_bytes for declared in record.capacities.values()]
    exchanging = [token_bytes for token_bytes in sizes if token_bytes]
    if gib is None or not exchanging:
        return None
    sent = [(move.tokens, move.took_s) for _, move in record.of(HomeChanged) if move.sent and move.num_bytes]
    taken = np.array(sent, float).reshape(-1, 2)
    token_s, latency_s = max(exchanging) / PRIOR_BYTES_PER_S, 0.0
    if len(taken):
        tokens, seconds = taken.T
        spread = float(tokens.var())
        slope = float(((tokens - tokens.mean()) * (seconds - seconds.mean())).mean()) / spread if spread else token_s
        token_s = min(max(slope, 1e-12), float(seconds.mean() / tokens.mean()))
        latency_s = float(seconds.mean() - token_s * tokens.mean())
    return HostPool(int(gib * 2**30 * len(exchanging) / max(exchanging)), latency_s, token_s)


def left_out(config: RunConfig) -> str:
    """Parts of a run that its simulation omits or repeats from the log, in one line."""
    trainer, rolls = config.trainer, config.planner.replan == "apply"
    absent = {
        "engines that keep a version (staleness.versions=one)": config.run.eta > 0
        and config.staleness.versions == "one",
        "engines of another degree after a change of roles (planner.replan=apply)": rolls,
    }
    repeated = {
        f"the part of a step after its last group (trainer.streaming={trainer.streaming})": trainer.streaming != "off",
        f"when engines turn and return (trainer.turning={trainer.turning})": engines_turn(config),
    }
    lines = {"not simulated": absent, "as in the run's log, also under overrides": repeated}
    found = {head: [part for part, is_there in parts.items() if is_there] for head, parts in lines.items()}
    return "; ".join(f"{head}: {', '.join(parts)}" for head, parts in found.items() if parts)


def measured_teacher_token_s(record: RunRecord, workload: Workload) -> float:
    """Measured seconds of a run's teacher per token; 0 without a teacher that batches wait for."""
    scored = [score_s for _, score_s in record.scores().values()]
    groups = len({(plan.iteration, plan.group) for plan in workload.trajectories})
    tokens = sum(plan.final_tokens for plan in workload.trajectories)
    return sum(scored) / len(scored) * groups / tokens if scored else 0.0


def workload_of_run(
    run_dir: Path, *, family: str = "", arrivals_s: Mapping[tuple[int, ...], float] | None = None
) -> Workload:
    """Stored training trajectories of a run; RunDirectoryError if there are none.

    All trajectories of an iteration arrive at once, so their order matters: ``arrivals_s`` by
    (iteration, group, sample) gives it, default (group, sample). Iterations and groups are
    renumbered so that each iteration has as many groups as the first; an incomplete last iteration
    is dropped. Repeated prompts keep their names.
    """
    path = run_dir / "trajectories.zarr"
    if not path.is_dir():
        raise RunDirectoryError(f"{run_dir}: holds no trajectories.zarr; name the directory of a run")
    with TrajectoryStore.open(path) as store:
        whole, turns, tokens = store.columns(), store.columns("turn"), store.columns("token")["token_ids"]
    groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
    columns = (whole["split"], whole["iteration"], whole["group"], whole["sample"])
    for row, (split, iteration, group, sample) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        if split == "train" and int(whole["num_turns"][row]) > 0:
            groups.setdefault((iteration, group), []).append((sample, row))
    if not groups:
        raise RunDirectoryError(f"{run_dir}: no training trajectory is stored yet")
    first = min(groups)[0]
    per_iteration = sum(iteration == first for iteration, _ in groups)
    plans: list[tuple[tuple[int, float], TrajectoryPlan]] = []
    numbers: dict[bytes, int] = {}
    names = whole["prompt_id"].tolist()
    repeats = Counter(names[members[0][1]] for members in groups.values())
    for index, (place, members) in enumerate(sorted(groups.items())):
        iteration, group = divmod(index, per_iteration)
        if iteration and iteration == len(groups) // per_iteration:
            break
        for sample, row in sorted(members):
            start, first_token = int(whole["turn_offset"][row]), int(whole["offset"][row])
            steps, contexts = [], []
            for i in range(start, start + int(whole["num_turns"][row])):
                context = tokens[first_token : first_token + int(turns["prompt_tokens"][i])]
                digest = hashlib.blake2b(np.ascontiguousarray(context).tobytes(), digest_size=16).digest()
                contexts.append(numbers.setdefault(digest, 1 + len(numbers)))
                steps.append(_turn_plan(path, turns, i))
            plan = TrajectoryPlan(
                iteration, group, sample, int(turns["prompt_tokens"][start]), tuple(steps), family,
                str(names[row]) if repeats[names[row]] > 1 else "", tuple(contexts),
            )  # fmt: skip
            plans.append(((iteration, (arrivals_s or {}).get((*place, sample), math.inf)), plan))
    plans.sort(key=lambda each: each[0])  # stable: (group, sample) order without recorded arrivals
    return checked(Workload(SIMULATED, tuple(plan for _, plan in plans)), str(path))


def _turn_plan(path: Path, turns: Mapping[str, NDArray[Any]], row: int) -> TurnPlan:
    word = str(turns["status"][row])
    try:
        status = tool_outcome(word)
    except ValueError as error:
        raise StoreError(f"{path}, row {row} of the turns: {error}; use the Libra that wrote it") from error
    return TurnPlan(
        max(1, int(turns["generated_tokens"][row])),
        str(turns["tool"][row]) if word else "",  # the call of a last turn was not run
        status,
        max(0, int(turns["observation_tokens"][row])),
        max(0.0, float(turns["tool_s"][row])) if word else 0.0,
    )
