"""Training systems on one batch size, each tuned: ``python -m benchmarks systems CONFIG``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.systems.against import TUNING_SEED, Comparison, compare
from benchmarks.systems.disciplines import DISCIPLINES, disciplines, named
from benchmarks.systems.gpu_seconds import PipelineResult, Shares, lines, shares_of
from benchmarks.systems.tuning import DEGREES, STEPS, Cell, Setting, play, step_s
from libra.config import load_config
from libra.config.load import RunConfig
from libra.config.model_paths import resolve_model
from libra.errors import ConfigError
from libra.planner.from_config import planned_gpu
from libra.sim.configured import drawn_workload, expected_teacher_token_s, layout_of
from libra.sim.from_run import run_setting
from libra.sim.workload import Trace, Workload, load_traces

ALL = "all"
FEWEST = 1 + DEGREES[0]
"""GPUs of the smallest split: one that trains, and an engine."""


def simulate_against(
    config: RunConfig,
    *,
    against: str,
    gpus: str | None,
    seeds: int,
    from_run: Path | None,
    as_json: bool,
) -> None:
    """Compare and print; ConfigError for an unsuitable system or number of GPUs."""
    base, source = cell_of(config, from_run)
    names = [] if against == ALL else named([name.strip() for name in against.split(",")], base.eta)
    if base.eta not in STEPS:
        raise ConfigError(f"run.eta: got {base.eta}; --against compares systems at {', '.join(map(str, STEPS))}")
    chosen = disciplines(names, base.eta)
    if missing := [name for name in names if name not in chosen]:
        etas = ", ".join(map(str, DISCIPLINES[missing[0]].etas))
        raise ConfigError(f"--against: {missing[0]} is defined for run.eta {etas}, got {base.eta}")
    yardsticks = {name: each for name, each in disciplines([], base.eta).items() if each.static}
    chosen = yardsticks | chosen
    found = []
    for count in gpu_counts(gpus, base.gpus, "configuration" if from_run is None else "run"):
        found.append(compared(replace(base, gpus=count), list(chosen), seeds))
        if not as_json:
            comparison, went = found[-1]
            print("\n".join([*comparison.lines(), *lines(went)]))
    about = (
        f"seconds of engines and gradients: {Path(base.model).name} on {base.gpu} by the hardware model, nothing is fitted; "
        "seconds of updates, of changes of roles and of fetches from host memory are assumed; "
        f"trajectories {source}; each system is tuned (training GPUs, TP degree, rule of turning) on a seed that is not scored"
    )
    if as_json:
        rows = [
            {
                "gpus": each.cell.gpus, "eta": each.cell.eta, "bound_s": each.bound_s,
                "systems": [
                    row
                    | {"gpu_frac": {cause: share.mean for cause, share in went[row["system"]].items()}}
                    | {"gpu_frac_95": {cause: share.half for cause, share in went[row["system"]].items()}}
                    for row in each.rows()
                ],
            }
            for each, went in found
        ]  # fmt: skip
        print(json.dumps({"about": about, "seeds": seeds, "comparisons": rows}))
        return
    print(about)


def compared(cell: Cell, systems: Sequence[str], seeds: int) -> tuple[Comparison, Mapping[str, Shares]]:
    """The systems of one cell, and where the GPU-seconds of the scored simulations go."""
    played = dict[tuple[str, Setting, int], PipelineResult]()

    def seconds(system: str, tried: Sequence[tuple[Setting, int]], limit_s: float) -> list[float]:
        for setting, seed in tried:
            scored = seed != TUNING_SEED
            played[system, setting, seed] = play(cell, DISCIPLINES[system], setting, seed, limit_s, causes=scored)
        return [step_s(cell, played[system, setting, seed]) for setting, seed in tried]

    found = compare(cell, systems, seeds, seconds)
    went = {
        one.system: shares_of([played[one.system, one.setting, seed] for seed in range(len(one.step_s))])
        for one in found.scored
        if one.step_s
    }
    return found, went


def cell_of(config: RunConfig, from_run: Path | None) -> tuple[Cell, str]:
    """Batch, model, GPU and bound of a configuration or a run, and the source of its trajectories."""
    if from_run is not None:
        setting = run_setting(from_run)
        own, traces, source = setting.record.config, as_traces(setting.workload), f"of {from_run}"
    else:
        own, path = config, config.planner.trace
        if path is None:
            traces, source = as_traces(drawn_workload(config)), "synthetic"
        else:
            traces, source = tuple(load_traces(path, seed=config.run.seed)), f"drawn from {path}"
    own, trainer = own.model_copy(update={"planner": config.planner}), own.trainer
    gpus = sum(tp * count for tp, count in layout_of(own).items()) + own.cluster.train_workers
    gpu, model = config.planner.gpu or planned_gpu(None).name, str(resolve_model(own.model.path))
    cell = Cell(traces, trainer.group_size, 0.0, trainer.prompts, gpus, own.run.eta, gpu=gpu, model=model)
    return replace(cell, teacher_token_s=expected_teacher_token_s(own, None, cell.workload(0, 1))), source


def as_traces(workload: Workload) -> tuple[Trace, ...]:
    """The trajectories of a workload as traces to draw from; one prompt is one task."""
    return tuple(
        Trace(plan.prompt or workload.group_key(plan), plan.prompt_tokens, plan.turns, plan.family)
        for plan in workload.trajectories
    )


def gpu_counts(text: str | None, own: int, whose: str) -> list[int]:
    if text is None:
        if own < FEWEST:
            raise ConfigError(f"--gpus: the {whose} has {own} GPUs; type {FEWEST} or more, e.g. --gpus 16,48,96")
        return [own]
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < FEWEST:
        raise ConfigError(f"--gpus: got {text!r}; type numbers of GPUs of {FEWEST} or more, e.g. --gpus 16,48,96")
    return counts


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks systems", description=__doc__)
    parser.add_argument("config", metavar="CONFIG", help="as of libra simulate")
    parser.add_argument("overrides", nargs="*", metavar="SECTION.NAME=VALUE")
    systems = "systems (benchmarks/systems/disciplines.py lists them)"
    parser.add_argument("--against", default=ALL, metavar="all|NAME,...", help=systems)
    parser.add_argument("--gpus", metavar="N,...", help="numbers of GPUs; default: those of the run")
    parser.add_argument("--seeds", type=int, default=5, help="seeds that are scored")
    parser.add_argument("--from-run", type=Path, metavar="RUN", help="with the trajectories of this run")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_intermixed_args(arguments)
    try:
        simulate_against(
            load_config(given.config, given.overrides), against=given.against, gpus=given.gpus, seeds=given.seeds,
            from_run=given.from_run, as_json=given.json,
        )  # fmt: skip
    except ConfigError as error:
        parser.error(str(error))
