"""``libra calibrate``: constants and tables of a GPU from profiles, or of a run's own workers from its logs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from libra.errors import ConfigError
from libra.hardware.profile_calibration import GpuCalibration, calibrate
from libra.hardware.profiles import Profile, read_directory, read_profiles
from libra.hardware.run_calibration import UNBOUNDED_TOKENS, EngineOfRun, RunCalibration
from libra.hardware.shipped import save_tables


def calibrate_command(paths: tuple[Path, ...], *, gpu: str | None, save: Path | None, as_json: bool) -> None:
    """Calibrate from a run directory, or from profile files and directories of them; see `libra.cli.main`."""
    if len(paths) == 1 and (paths[0] / "events.jsonl").is_file():
        if gpu is not None:
            raise ConfigError(f"--gpu {gpu}: it is for profiles, and {paths[0]} is a run; leave --gpu out")
        _from_run(paths[0], save, as_json)
        return
    profiles = _profiles(paths)
    if not profiles:
        raise ConfigError(
            f"calibrate: no profile in {', '.join(map(str, paths))}, and no run; type files of profiles (docs/hardware.md has "
            "their layouts), or RUN, the directory of a run"
        )
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
                    f"{path}: its columns match no known profile format; allowed are Vidur's and Frontier's CSV files and "
                    "Sailor's JSON, see docs/hardware.md"
                )
            found += here
        else:
            raise ConfigError(
                f"{path}: no such file or directory; type files of profiles, or RUN, the directory of a run"
            )
    return found


def _profiles_document(result: GpuCalibration) -> dict[str, Any]:
    return {
        "gpu": result.tables.gpu.name,
        "efficiencies": asdict(result.tables.efficiencies),
        "errors": [asdict(error) for error in result.errors],
        "skipped": list(result.skipped),
    }


def _from_run(run_dir: Path, save: Path | None, as_json: bool) -> None:
    from libra.sim.run_record import RunRecord

    found = RunRecord.read(run_dir).calibration()
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
    return sum(engine.transport_s) / len(engine.transport_s) + sum(engine.worker_s) / len(engine.worker_s)


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
