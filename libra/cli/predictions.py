"""Commands that predict or repeat: ``libra plan``, ``simulate``, ``calibrate`` and ``replay``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from libra.cli.options import CONFIG, OVERRIDES


@click.command()
@CONFIG
@OVERRIDES
@click.option(
    "--trace", type=click.Path(path_type=Path), metavar="FILE", help="A CSV of agents' turns to draw the batch from."
)
@click.option(
    "--from-run",
    "from_run",
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="Draw the batch from the trajectories of this run, of which as many are trained on as there.",
)
@click.option(
    "--why",
    multiple=True,
    metavar="CHOICE",
    help="Compare another choice: train=16, tp=4 or engines.2=8. May be repeated.",
)
@click.option("--what-if", is_flag=True, help="Also plan layouts that engine and trainer do not support yet.")
@click.option(
    "--write",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a configuration that extends CONFIG and starts the plan.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as one JSON object.")
def plan(config: str, overrides: tuple[str, ...], **choice: Any) -> None:
    """Plan how many GPUs train and how many generate, in which engines, with predicted times and reasons.

    Section `planner` of CONFIG describes the hardware and the workload; nothing is started.

    \b
    libra plan configs/qwen3_4b_gpu.yaml planner.gpu=H100-80G planner.num_gpus=64 --what-if
    libra plan configs/qwen3_4b_gpu.yaml planner.num_gpus=64 --trace turns.csv --why train=16
    libra plan configs/qwen3_4b_gpu.yaml --from-run runs/NAME
    libra plan configs/qwen3_4b_gpu.yaml --write plan.yaml && libra run plan.yaml
    """
    from libra.cli.plan import print_plan
    from libra.cli.projects import warn_of_ignored
    from libra.config import load_config

    loaded = load_config(config, overrides)
    # With --write, overrides go into a file that other commands read too.
    warn_of_ignored(loaded, None if choice["write"] else "plan", overrides, {
        "--trace": choice["trace"], "--from-run": choice["from_run"],
    })  # fmt: skip
    print_plan(loaded, config, **choice)


@click.command()
@CONFIG
@OVERRIDES
@click.option(
    "--from-run",
    "from_run",
    metavar="RUN",
    type=click.Path(path_type=Path),
    help="Simulate this run: its trajectories, engines, trainer and policy, except for the overrides.",
)
@click.option("--workload", type=click.Path(path_type=Path), metavar="FILE", help="Simulate a saved workload.")
@click.option("--save-workload", type=click.Path(path_type=Path), metavar="FILE", help="Save the simulated workload.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
def simulate(config: str, overrides: tuple[str, ...], **choice: Any) -> None:
    """Simulate CONFIG, or a recorded run, in virtual time.
    Engines, tools and training take measured seconds, or those of the hardware model.

    \b
    libra simulate libra/quickstart
    libra simulate libra/quickstart model.path=Qwen3-14B rollout.engine=vllm 'cluster.engines=[{tp: 4, count: 4}]'
    libra simulate libra/quickstart --from-run runs/NAME                     # predict its time
    libra simulate libra/quickstart --from-run runs/NAME policy.name=fifo    # predict it under another policy
    libra simulate libra/quickstart planner.calibration=FILE cluster.rollout_workers=4
    """
    from libra.cli.projects import warn_of_ignored
    from libra.cli.simulate import simulate_run
    from libra.config import load_config

    loaded = load_config(config, overrides)
    warn_of_ignored(loaded, "simulate", overrides, {"--from-run": choice["from_run"], "--workload": choice["workload"]})
    simulate_run(loaded, overrides=overrides, **choice)


@click.command()
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--save", metavar="FILE", type=click.Path(path_type=Path), help="Save the run's constants as JSON.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
def calibrate(run_dir: Path, **choice: Any) -> None:
    """Fit the cost model to the steps of RUN, and print its seconds and errors by engine.

    \b
    libra calibrate runs/NAME
    libra calibrate runs/NAME --save mine.json   # for planner.calibration
    """
    from libra.cli.calibrate import calibrate_command

    calibrate_command(run_dir, **choice)


@click.command()
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--from-snapshot", is_flag=True, help="Begin at the last snapshot in the log instead of its first line.")
@click.option(
    "--key",
    "keys",
    multiple=True,
    metavar="KEY",
    help="Show the history of this trajectory (train-3-0-7), gate (gate-3) or batch (batch-3). May be repeated.",
)
@click.option(
    "--decision",
    "decisions",
    type=int,
    multiple=True,
    metavar="LINE",
    help="Show what led to the decision in this line of events.jsonl. May be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
def replay(run_dir: Path, **choice: Any) -> None:
    """Repeat every scheduling decision of RUN from its event log; exit with 1 if one differs. With --key only, read the log.

    \b
    libra replay runs/demo
    libra replay runs/demo --key train-0-1-2      # a trajectory's history in the scheduler, with reasons
    libra replay runs/demo --decision 231         # the decision in line 231 of runs/demo/events.jsonl
    """
    from libra.cli.replay import replay_run

    if not replay_run(run_dir, **choice):
        raise click.exceptions.Exit(1)
