"""What each step came to, as a file of the run: a replica that is asked for a step long taken answers from it.

Dask asks again for a step when something that was made of it is lost with a worker. Ranks of a group, which keep each other's
state, may be further by then, and so may a replica that was restarted and given the next step first. Rank 0 writes the record
before its task is done, so no later step is without one.
"""

from __future__ import annotations

import json
from typing import Any

from libra.errors import TrainError
from libra.worker.run_spec import RunSpec


def write_step_record(spec: RunSpec, step: int, numbers: dict[str, Any]) -> None:
    """Write the record of a step; one that an earlier start of the run wrote is replaced."""
    path = spec.directory / "steps" / f"step-{step:06d}.json"
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_name(f".{path.name}")
    unfinished.write_text(json.dumps(numbers) + "\n")
    unfinished.replace(path)


def read_step_record(spec: RunSpec, step: int) -> dict[str, Any]:
    """The record of a step; TrainError where there is none."""
    path = spec.directory / "steps" / f"step-{step:06d}.json"
    try:
        numbers: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as fault:
        raise TrainError(
            f"step {step}: training is further and {path} cannot be read: {fault}; resume the run"
        ) from fault
    return numbers
