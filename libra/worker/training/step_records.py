"""The result of each step, as a file of the run: a replica that is asked to repeat an earlier step returns it from there.

Dask recomputes a step when a result that depends on it is lost with a worker. The ranks of a group may have taken later
steps by then, and so may a replica that was restarted and given the next step first. Rank 0 writes the record before its
task ends, so every earlier step has one. A resumed run takes from it the metrics of a step that is in the checkpoint and not in
``metrics.jsonl``.
"""

from __future__ import annotations

from typing import Any

from libra.errors import TrainError, disk_refusal
from libra.seals import sealed_text, unseal
from libra.worker.run_spec import RunSpec


def write_step_record(spec: RunSpec, step: int, numbers: dict[str, Any]) -> None:
    """Write the record of a step; one that an earlier start of the run wrote is replaced."""
    path = spec.steps_dir / f"step-{step:06d}.json"
    unfinished = path.with_name(f".{path.name}")
    try:
        path.parent.mkdir(exist_ok=True)
        unfinished.write_text(sealed_text(numbers) + "\n")
        unfinished.replace(path)
    except OSError as fault:
        raise TrainError(f"step {step}: {disk_refusal(path, fault)}") from fault


def read_step_record(spec: RunSpec, step: int) -> dict[str, Any]:
    """The record of a step; TrainError if there is none."""
    path = spec.steps_dir / f"step-{step:06d}.json"
    try:
        return unseal(path.read_bytes())
    except (OSError, ValueError) as fault:
        raise TrainError(
            f"step {step}: training has passed it and {path} cannot be read: {fault}; resume the run"
        ) from fault


def step_numbers(spec: RunSpec, step: int) -> dict[str, int | float]:
    """Metrics of a step, from its record; empty if it has none, as steps of an older Libra."""
    try:
        record = read_step_record(spec, step)
    except TrainError:
        return {}
    return {k: v for k, v in record.items() if isinstance(v, int | float) and k not in ("rank", "step")}
