"""``libra calibrate``: constants and tables of a GPU from profiles, or of a run's own workers from its logs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from libra.errors import ConfigError
from libra.hardware.calibrate import Calibration, calibrate
from libra.hardware.profiles import Profile, read_directory, read_profiles
from libra.hardware.run_steps import RunSteps, fit_run
from libra.hardware.shipped import save_tables


def calibrate_command(paths: tuple[Path, ...], *, gpu: str | None, save: Path | None, as_json: bool) -> None:
    """Calibrate from a run directory, or from profile files and directories of them; see `libra.cli.main`."""
    if len(paths) == 1 and (paths[0] / "events.jsonl").is_file():
        _from_run(paths[0], save, as_json)
        return
    profiles = _profiles(paths)
    result = calibrate(profiles, gpu)
    if save is not None:
        sources = sorted({profile.source for profile in profiles})
        save_tables(result.tables, save, source=f"libra calibrate: {', '.join(sources)}")
    if as_json:
        click.echo(json.dumps(_profiles_document(result)))
        return
    click.echo(
        f"{result.tables.gpu.name}: mean absolute error, of the fitted form and of a table of every second point\n"
    )
    click.echo(f"{'operator':<26} {'points':>7} {'form':>8} {'table':>8}")
    for error in result.errors:
        click.echo(
            f"{error.operator:<26} {error.num_points:>7} {100 * error.form_frac:>7.1f}% {100 * error.table_frac:>7.1f}%"
        )
    for line in result.skipped:
        click.echo(f"not used: {line}")
    click.echo(f"\nwritten: {save}" if save is not None else "\nType --save FILE.json to keep the tables.")


def _profiles(paths: tuple[Path, ...]) -> list[Profile]:
    found: list[Profile] = []
    for path in paths:
        if path.is_dir():
            found += read_directory(path)
        elif path.is_file():
            here = read_profiles(path, relative_to=path.parent)
            if not here:
                raise ConfigError(
                    f"{path}: its columns are those of no known profile; allowed are Vidur's and Frontier's CSV files and "
                    "Sailor's JSON, see docs/hardware.md"
                )
            found += here
        else:
            raise ConfigError(f"{path}: no such file or directory")
    return found


def _profiles_document(result: Calibration) -> dict[str, Any]:
    return {
        "gpu": result.tables.gpu.name,
        "efficiencies": asdict(result.tables.efficiencies),
        "errors": [asdict(error) for error in result.errors],
        "skipped": list(result.skipped),
    }


def _from_run(run_dir: Path, save: Path | None, as_json: bool) -> None:
    from libra.observe.metrics import read_metrics
    from libra.store.event_log import read_events

    metrics = read_metrics(run_dir) if (run_dir / "metrics.jsonl").is_file() else []
    steps = fit_run(read_events(run_dir / "events.jsonl").events, metrics)
    if save is not None:
        save.write_text(json.dumps(steps.as_dict(), indent=1) + "\n")
    if as_json:
        click.echo(json.dumps(steps.as_dict()))
        return
    click.echo("\n".join(_run_lines(steps)))
    click.echo(f"\nwritten: {save}" if save is not None else "\nType --save FILE.json to keep them.")


def _run_lines(steps: RunSteps) -> list[str]:
    lines = [f"{'worker':<20} {'generations':>11} {'fixed ms':>9} {'token ms':>9} {'and beside':>11} {'error':>7}"]
    for worker, engine in steps.engines.items():
        lines.append(
            f"{worker:<20} {engine.num_generations:>11} {1e3 * engine.fixed_s:>9.2f} {1e3 * engine.token_s:>9.3f} "
            f"{1e3 * engine.sequence_s:>11.4f} {100 * engine.error_frac:>6.1f}%"
        )
    if steps.trainer is None:
        lines.append("trainer: too few steps to fit")
    else:
        trainer = steps.trainer
        lines.append(
            f"trainer: {trainer.num_steps} steps, {1e3 * trainer.fixed_s:.1f} ms and {1e6 * trainer.token_s:.2f} us a token, "
            f"error {100 * trainer.error_frac:.1f}%"
        )
    lines.append("Errors are of parts of the run that were not fitted.")
    return lines
