"""A snapshot with a run's own measurements (`planner.calibration`) in place of the GPU's tables.

Engines have their measured seconds, degree by degree. Training keeps the cost model, which accounts for sharding, scaled by
one factor: the seconds of the run's own steps over those that the model gives to its layout and its trajectories.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from libra.errors import PlanError
from libra.hardware.run_calibration import RunCalibration, read_calibration
from libra.hardware.shapes import shape_digest
from libra.planner.cost import training_table
from libra.planner.snapshot import Corrections, PlanningSnapshot

FIELD = "planner.calibration"


def calibrated(
    snapshot: PlanningSnapshot, path: Path, model: str, *, requested: Sequence[int], update_s: float | None
) -> tuple[PlanningSnapshot, str]:
    """``snapshot`` with the calibration in ``path``, and sentences on the source of its seconds.

    Parameters
    ----------
    model : str
        ``model.path``.
    requested : sequence of int
        Degrees that were requested by name; others of ``snapshot.tp`` are left out if they were not measured.
    update_s : float or None
        Of the configuration; None: as measured.

    Raises
    ------
    ConfigError
        The file cannot be read, or is of another model.
    PlanError
        It has none of the degrees, or lacks a requested one.
    """
    found = read_calibration(path, FIELD)
    found.check_model(model, shape_digest(snapshot.shape), FIELD)
    missing = [tp for tp in snapshot.tp if tp not in found.degrees]
    known = ", ".join(f"TP{tp}" for tp in found.degrees)
    if unknown := [tp for tp in requested if tp not in found.degrees]:
        raise PlanError(
            f"planner.tp, planner.fixed_engines: ask for engines of {', '.join(f'TP{tp}' for tp in unknown)}, and {path} measured "
            f"{known} only; ask for {known}, or calibrate from a run that has such an engine"
        )
    if len(missing) == len(snapshot.tp):
        raise PlanError(
            f"{FIELD}: {path} measured engines of {known}, and planner.tp with rollout.engine leave "
            f"{', '.join(f'TP{tp}' for tp in snapshot.tp)}; calibrate from a run that has such an engine"
        )
    degrees = tuple(tp for tp in snapshot.tp if tp in found.degrees)
    made = replace(
        snapshot,
        tp=degrees,
        engines={tp: found.of_tp(tp, FIELD).seconds for tp in degrees},
        update_s=found.update_s + found.load_s if update_s is None else update_s,
        beside_s=found.update_s if update_s is None else update_s,
        corrections=Corrections(snapshot.corrections.rollout, training_factor(snapshot, found)),
    )
    left = ", ".join(f"TP{tp}" for tp in missing)
    basis = f"Seconds of engines and training are as {path} measured; {snapshot.gpu.name} says how much memory training has."
    if found.trainer is None:
        basis = (
            f"Seconds of engines are as {path} measured. It has too few steps to say what training takes: its seconds and "
            f"its memory are those of {snapshot.gpu.name}; calibrate from a run of more iterations."
        )
    return made, f"{basis}\nNot planned, since it did not measure them: engines of {left}." if missing else basis


def rests_on(path: Path, gpu: str) -> str:
    """The source of the seconds of a plan with this calibration, in words; ``gpu`` is its datasheet's."""
    engines = f"what {path} measured"
    if read_calibration(path, FIELD).trainer is not None:
        return engines
    return f"{engines} of engines; it has too few steps to say what training takes, whose seconds are of the datasheet of {gpu}"


def training_factor(snapshot: PlanningSnapshot, found: RunCalibration) -> float:
    """Seconds of the run's optimizer steps over those that the cost model gives to its replicas; 1 if no trainer was fitted."""
    if found.trainer is None:
        return 1.0
    tokens, gpus = snapshot.trained_tokens, found.train_gpus
    node = max(snapshot.node_gpus, gpus)
    sheet = replace(snapshot.gpu, gpus_per_node=node)
    modelled = training_table(sheet, snapshot.shape, tokens, [gpus], snapshot.training)[gpus]
    return found.trainer.step_s(float(tokens.sum())) / modelled.step_s
