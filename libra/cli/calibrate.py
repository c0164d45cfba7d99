"""``libra calibrate``: seconds of a run's own workers, from its logs."""

from __future__ import annotations

import json
from pathlib import Path

import click

from libra.errors import ConfigError
from libra.hardware.run_calibration import UNBOUNDED_TOKENS, EngineOfRun, RunCalibration
from libra.sim.measured_run import calibration_of
from libra.sim.run_record import RunRecord


def calibrate_command(run_dir: Path, *, save: Path | None, as_json: bool) -> None:
    """Calibrate from a run directory; see `libra.cli.main`."""
    found = calibration_of(RunRecord.read(run_dir))
    if save is not None:
        try:
            save.write_text(found.to_json())
        except OSError as error:
            raise ConfigError(
                f"--save: {save} cannot be written: {error.strerror or error}; type the path of a file such as mine.json"
            ) from error
    if as_json:
        click.echo(json.dumps(json.loads(found.to_json())))
        return
    click.echo("\n".join(_run_lines(found)))
    use = "use it with simulation.calibration=FILE (libra simulate) or planner.calibration=FILE (libra plan)"
    click.echo(f"\nwritten: {save}; {use}" if save is not None else f"\nType --save FILE.json to keep it; {use}.")


def _between_s(engine: EngineOfRun) -> float:
    return sum(sum(samples) / len(samples) for samples in (engine.overhead.transport_s, engine.overhead.worker_s))


def _run_lines(found: RunCalibration) -> list[str]:
    lines = [
        f"{found.model} (sizes {found.digest[:12] or 'unknown'}), by the declared capacity of its engines",
        "",
        f"{'worker':<16} {'engine':<14} {'slots':>5} {'KV tokens':>10} {'pass ms':>8} {'+ sequence':>10} {'+ 1k context':>12} "
        f"{'+ 1k prefill':>12} {'wall':>5} {'between ms':>10} {'error':>7}",
    ]
    for engine in found.engines:
        steps = engine.steps
        kv_tokens = str(engine.kv_tokens) if engine.kv_tokens < UNBOUNDED_TOKENS else "unknown"
        lines.append(
            f"{engine.worker:<16} {engine.engine + f' tp{engine.tp}':<14} {engine.slots:>5} {kv_tokens:>10} "
            f"{1e3 * steps.fixed_s:>8.3f} {1e3 * steps.sequence_s:>10.4f} {1e6 * steps.context_token_s:>12.4f} "
            f"{1e6 * steps.prefill_token_s:>12.3f} {engine.wall_over_passes:>5.2f} "
            f"{1e3 * _between_s(engine):>10.2f} {100 * steps.error_frac:>6.1f}%"
        )
    if found.trainer is None:
        lines.append("trainer: too few steps to fit")
    else:
        trainer = found.trainer
        lines.append(
            f"trainer: {trainer.num_steps} steps, {1e3 * trainer.fixed_s:.1f} ms and {1e6 * trainer.token_s:.2f} us a token, "
            f"error {100 * trainer.error_frac:.1f}%; publishing {1e3 * found.update_s:.1f} ms, loading {1e3 * found.load_s:.1f} ms"
        )
    lines.append(
        "Errors are measured on parts of the run left out of the fit. wall: seconds of turns over those of their passes. between: "
        "seconds of a generation outside the engine, in transport and on the worker."
    )
    return lines
