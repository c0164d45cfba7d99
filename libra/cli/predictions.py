"""Commands that predict or repeat runs: ``libra plan``, ``simulate``, ``calibrate`` and ``replay``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from libra.cli.arguments import CONFIG, JSON, OVERRIDES, PATH, RUN, warn_of_ignored

if TYPE_CHECKING:
    from libra.hardware.run_calibration import RunCalibration


@click.command()
@CONFIG
@OVERRIDES
@click.option("--trace", type=PATH, metavar="FILE", help="A CSV of agents' turns to draw the batch from.")
@click.option(
    "--from-run", type=PATH, metavar="RUN", help="Draw the batch from this run's trajectories, and train on the same share."
)  # fmt: skip
@click.option(
    "--why", multiple=True, metavar="CHOICE", help="Compare another choice: train=16, tp=4 or engines.2=8. May be repeated."
)  # fmt: skip
@click.option("--what-if", is_flag=True, help="Also plan layouts that engine and trainer do not support yet.")
@click.option(
    "--write", type=PATH, metavar="FILE", help="Write a configuration that extends CONFIG and starts the plan."
)
@JSON
def plan(config: str, overrides: tuple[str, ...], **choice: Any) -> None:
    """Plan how many GPUs train and how many generate, in which engines, with predicted times and reasons.

    Section `planner` of CONFIG describes the hardware and the workload; nothing is started.

    \b
    libra plan configs/qwen3_4b_gpu.yaml planner.gpu=H100-80G planner.num_gpus=64 --what-if
    libra plan configs/qwen3_4b_gpu.yaml planner.num_gpus=64 --trace turns.csv --why train=16
    libra plan configs/qwen3_4b_gpu.yaml --from-run runs/NAME
    libra plan configs/qwen3_4b_gpu.yaml --write plan.yaml && libra run plan.yaml
    """
    from libra.cli.plan_command import print_plan
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
    "--from-run", metavar="RUN", type=PATH,
    help="Simulate this run: its trajectories, engines, trainer and policy, except for the overrides.",
)  # fmt: skip
@click.option("--workload", type=PATH, metavar="FILE", help="Simulate a saved workload.")
@click.option("--save-workload", type=PATH, metavar="FILE", help="Save the simulated workload.")
@JSON
def simulate(config: str, overrides: tuple[str, ...], **choice: Any) -> None:
    """Simulate CONFIG, or a recorded run, in virtual time.

    Engines, tools and training take measured seconds, or seconds of the hardware model.

    \b
    libra simulate libra/quickstart
    libra simulate libra/quickstart model.path=Qwen3-14B rollout.engine=vllm 'cluster.engines=[{tp: 4, count: 4}]'
    libra simulate libra/quickstart --from-run runs/NAME                     # predict its time
    libra simulate libra/quickstart --from-run runs/NAME policy.name=fifo    # predict it under another policy
    libra simulate libra/quickstart planner.calibration=FILE cluster.rollout_workers=4
    """
    from libra.cli.simulate import simulate_run
    from libra.config import load_config

    loaded = load_config(config, overrides)
    warn_of_ignored(loaded, "simulate", overrides, {"--from-run": choice["from_run"], "--workload": choice["workload"]})
    simulate_run(loaded, overrides=overrides, **choice)


@click.command()
@RUN
@click.option("--save", metavar="FILE", type=PATH, help="Save the run's constants as JSON.")
@JSON
def calibrate(run_dir: Path, save: Path | None, as_json: bool) -> None:
    """Fit the cost model to the steps of RUN, and print its seconds and errors by engine.

    \b
    libra calibrate runs/NAME
    libra calibrate runs/NAME --save mine.json   # for planner.calibration
    """
    from libra.observe.run_directory import written
    from libra.sim.engines_of_run import calibration_of
    from libra.sim.run_record import RunRecord

    found = calibration_of(RunRecord.read(run_dir))
    if save is not None:
        with written(save, "--save") as file:
            file.write_text(found.to_json())
    if as_json:
        click.echo(json.dumps(json.loads(found.to_json())))
        return
    click.echo("\n".join(_run_lines(found)))
    use = "use it with planner.calibration=FILE (libra plan, libra simulate)"
    click.echo(f"\nwritten: {save}; {use}" if save is not None else f"\nType --save FILE.json to keep it; {use}.")


def _run_lines(found: RunCalibration) -> Iterator[str]:
    from libra.hardware.run_calibration import UNBOUNDED_TOKENS

    yield f"{found.model} (sizes {found.digest[:12] or 'unknown'}), by the declared capacity of its engines\n"
    yield (
        f"{'worker':<16} {'engine':<14} {'slots':>5} {'KV tokens':>10} {'pass ms':>8} {'+ sequence':>10} {'+ 1k context':>12} "
        f"{'+ 1k prefill':>12} {'wall':>5} {'between ms':>10} {'error':>7}"
    )
    for engine in found.engines:
        steps, overhead = engine.steps, engine.overhead
        kv_tokens = str(engine.kv_tokens) if engine.kv_tokens < UNBOUNDED_TOKENS else "unknown"
        between_s = sum(sum(samples) / len(samples) for samples in (overhead.transport_s, overhead.worker_s))
        yield (
            f"{engine.worker:<16} {engine.engine + f' tp{engine.tp}':<14} {engine.slots:>5} {kv_tokens:>10} "
            f"{1e3 * steps.fixed_s:>8.3f} {1e3 * steps.sequence_s:>10.4f} {1e6 * steps.context_token_s:>12.4f} "
            f"{1e6 * steps.prefill_token_s:>12.3f} {engine.wall_over_passes:>5.2f} {1e3 * between_s:>10.2f} "
            f"{100 * steps.error_frac:>6.1f}%"
        )
    if (trainer := found.trainer) is None:
        yield "trainer: too few steps to fit"
    else:
        yield (
            f"trainer: {trainer.num_steps} steps, {1e3 * trainer.fixed_s:.1f} ms and {1e6 * trainer.token_s:.2f} us a token, "
            f"error {100 * trainer.error_frac:.1f}%; publishing {1e3 * found.update_s:.1f} ms, loading {1e3 * found.load_s:.1f} ms"
        )
    yield (
        "Errors are measured on parts of the run left out of the fit. wall: seconds of turns over seconds of their passes. "
        "between: seconds of a generation outside the engine, in transport and on the worker."
    )


@click.command()
@RUN
@click.option("--from-snapshot", is_flag=True, help="Start at the last snapshot in the log instead of its first line.")
@click.option(
    "--key", "keys", multiple=True, metavar="KEY",
    help="Show the history of this trajectory (train-3-0-7), gate (gate-3) or batch (batch-3). May be repeated.",
)  # fmt: skip
@click.option(
    "--decision", "decisions", type=int, multiple=True, metavar="LINE",
    help="Show the history of the decision in this line of events.jsonl. May be repeated.",
)  # fmt: skip
@JSON
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
