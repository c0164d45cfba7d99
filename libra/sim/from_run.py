"""The simulation of a past run: its trajectories as its store holds them, turn by turn, on its own engines."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from libra.config import RunConfig
from libra.config.streaming import turns
from libra.errors import RunDirectoryError, StoreError
from libra.facts import HomeChanged, boundaries_of
from libra.hardware.engine_tables import EngineTables, HostPool
from libra.hardware.run_calibration import EngineOfRun, RunCalibration
from libra.orderings import ordering_of
from libra.policy import Ordering, staleness_of
from libra.policy.engine_capacity import PRIOR_BYTES_PER_S
from libra.sim.measured_run import calibration_of
from libra.sim.run_record import RealisedRun, RunRecord
from libra.sim.simulation_options import EngineSpec, SimulationOptions
from libra.sim.simulator import Simulator
from libra.sim.workload import SIMULATED, TrajectoryPlan, TurnPlan, Workload, checked
from libra.store.trajectory_store import TrajectoryStore
from libra.types import Phase, ToolOutcome, tool_outcome


def _outcome(path: Path, row: int, word: str) -> ToolOutcome:
    """The tool outcome of a stored turn; StoreError if its status is not an outcome."""
    try:
        return tool_outcome(word)
    except ValueError as error:
        raise StoreError(f"{path}, row {row} of the turns: {error}; use the Libra that wrote it") from error


@dataclass(frozen=True, eq=False)
class RunSetting:
    """The simulator's input from a run.

    Attributes
    ----------
    workload : Workload
        Its training trajectories.
    calibration : RunCalibration
    engines : tuple of EngineSpec
        Its own, by the names of their workers.
    options : SimulationOptions
        Its trainer, tools and staleness bound.
    realised : Realised or None
        Its own seconds and moves; None if it was resumed.
    """

    record: RunRecord
    workload: Workload
    calibration: RunCalibration
    engines: tuple[EngineSpec, ...]
    options: SimulationOptions
    realised: RealisedRun | None

    def ordering(self) -> Ordering:
        """A new object of the run's policy."""
        policy = self.record.config.policy
        return ordering_of(policy.name, objective=policy.objective, patience=policy.patience)

    def simulator(self) -> Simulator:
        """The run, in virtual time."""
        config = self.record.config
        return Simulator(self.workload, self.engines, self.ordering(), seed=config.run.seed, options=self.options)


def run_setting(run_dir: Path) -> RunSetting:
    """Everything that a simulation needs of a run.

    Raises
    ------
    RunDirectoryError
        Not a run, or one that stored nothing.
    ConfigError
        None of its engines declared its seconds.
    """
    record = RunRecord.read(run_dir)
    workload = workload_of_run(run_dir, family=record.family, arrivals_s=record.arrivals_s())
    calibration = calibration_of(record)
    iterations = 1 + max(plan.iteration for plan in workload.trajectories)
    return RunSetting(
        record,
        workload,
        calibration,
        tuple(engine_spec(engine, engine.worker, record) for engine in calibration.engines),
        run_options(record, calibration, workload),
        record.realised(iterations),
    )


def engine_spec(
    engine: EngineOfRun, name: str, record: RunRecord | None = None, slots: int | None = None
) -> EngineSpec:
    """An engine of a simulation as fast as ``engine``; with ``record`` the policy receives the same events about it as in
    the run."""
    tables = EngineTables(engine.seconds, grain_tokens=1, max_contexts=engine.max_contexts)
    return EngineSpec(
        name, engine.tp, slots or engine.slots, tables, engine.bucket, engine.overhead,
        () if record is None else record.announced(engine.worker),
    )  # fmt: skip


def run_options(record: RunRecord, calibration: RunCalibration, workload: Workload) -> SimulationOptions:
    """Trainer, teacher, tools and staleness bound of a run."""
    steps_s, rollout = record.steps_s(), record.config.rollout
    acted = any(quantum.phase == Phase.TOOL for quantum in record.quanta)
    reserves = any(engine.max_contexts is not None for engine in calibration.engines)
    return SimulationOptions(
        **asdict(staleness_of(record.config)),
        train_s=sum(steps_s) / len(steps_s) if steps_s else 0.0,
        steps_s=steps_s,
        load_s=calibration.load_s,
        publish_s=record.publish_s(),
        tool_slots=record.tool_slots if acted and record.tool_slots else None,
        inline_tools=record.inline_tools,
        tool_overhead=calibration.tools,
        gate_s=calibration.gate_s,
        commit_s=calibration.commit_s,
        boundaries=boundaries_of(record.config.policy.boundaries_tokens),
        chunk_tokens=rollout.chunk_tokens,
        host=host_pool(record),
        keeps_kv=rollout.keep_kv,
        reserve=(rollout.max_new_tokens, rollout.max_context_tokens) if reserves else None,
        teacher_token_s=measured_teacher_token_s(record, workload),
    )


def host_pool(record: RunRecord) -> HostPool | None:
    """KV that the run's engines kept in host memory and sent each other, at the seconds of its own transfers; None if they
    did not.

    Before a transfer was measured the price is the policy's own assumption (`PRIOR_BYTES_PER_S`).
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
    """Parts of a run that its simulation does not have, or repeats from its log, in one line; empty: none."""
    trainer, rolls = config.trainer, config.planner.replan == "apply"
    absent = {
        "engines that keep a version (staleness.versions=one)": config.run.eta > 0
        and config.staleness.versions == "one",
        "engines of another degree after a change of roles (planner.replan=apply)": rolls,
    }
    repeated = {
        f"the part of a step after its last group (trainer.streaming={trainer.streaming})": trainer.streaming != "off",
        f"when engines turn and return (trainer.turning={trainer.turning})": turns(config),
    }
    lines = {"not simulated": absent, "as in the run's log, also under overrides": repeated}
    found = {head: [part for part, is_there in parts.items() if is_there] for head, parts in lines.items()}
    return "; ".join(f"{head}: {', '.join(parts)}" for head, parts in found.items() if parts)


def measured_teacher_token_s(record: RunRecord, workload: Workload) -> float:
    """Seconds of a run's teacher per token, as it took for its groups; 0 without one that batches wait for."""
    scored = [score_s for _, score_s in record.scores().values()]
    groups = len({(plan.iteration, plan.group) for plan in workload.trajectories})
    tokens = sum(plan.final_tokens for plan in workload.trajectories)
    return sum(scored) / len(scored) * groups / tokens if scored else 0.0


def _digest(tokens: NDArray[np.int32]) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(tokens).tobytes(), digest_size=16).digest()


def workload_of_run(
    run_dir: Path, *, family: str = "", arrivals_s: Mapping[tuple[int, ...], float] | None = None
) -> Workload:
    """Training trajectories of ``run_dir`` with their own tokens and tool seconds; RunDirectoryError if it has none.

    Trajectories of one iteration stand in the order of ``arrivals_s``, by (iteration, group, sample) of the run, and by
    default in the order of group and sample: all arrive at the same instant, and with long tails their order matters.

    Iterations and groups are renumbered so that all iterations have equally many groups: as many as the first one. Groups
    of a last, incomplete iteration are left out. Prompts that came more than once keep their names.
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
            start, count = int(whole["turn_offset"][row]), int(whole["num_turns"][row])
            rows = range(start, start + count)
            steps = tuple(
                TurnPlan(
                    max(1, int(turns["generated_tokens"][i])),
                    str(turns["tool"][i]) if turns["status"][i] else "",  # a last turn's call was not run
                    _outcome(path, i, str(turns["status"][i])),
                    max(0, int(turns["observation_tokens"][i])),
                    max(0.0, float(turns["tool_s"][i])) if turns["status"][i] else 0.0,
                )
                for i in rows
            )
            prompt = str(names[row]) if repeats[names[row]] > 1 else ""
            first_token = int(whole["offset"][row])
            contexts = tuple(
                numbers.setdefault(
                    _digest(tokens[first_token : first_token + int(turns["prompt_tokens"][i])]), 1 + len(numbers)
                )
                for i in rows
            )
            prompt_tokens = int(turns["prompt_tokens"][start])
            arrived = (arrivals_s or {}).get((*place, sample), math.inf)
            plan = TrajectoryPlan(iteration, group, sample, prompt_tokens, steps, family, prompt, contexts)
            plans.append(((iteration, arrived), plan))
    plans.sort(key=lambda each: each[0])  # stable: by group and sample without recorded arrivals
    return checked(Workload(SIMULATED, tuple(plan for _, plan in plans)), str(path))
