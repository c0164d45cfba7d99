"""`libra.deliver`: delivers a reward after its reward function returned `libra.Late`.

Any process that reaches the run directory may call it, even while the run is stopped. The value is
flushed to disk before the call returns; the next batch uses it (`libra.policy.late_rewards`).
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from numbers import Real
from pathlib import Path

from libra.config.load import RESOLVED_FILE, RunConfig, load_config
from libra.envs.grader import MAX_REWARD, plain_number
from libra.errors import LateRefused, RecordExists, RunDirectoryError
from libra.store.run_files import existing_run
from libra.store.run_records import batch_path, group_path, read_batch, read_group, read_late, runs_here, write_late
from libra.types import TrajectoryId
from libra.worker.run_spec import RunDirectory
from libra.worker.training.batch_rows import waiting_after

_ID = re.compile(r"(train|eval)-(\d{1,9})-(\d{1,9})-(\d{1,9})")


def deliver(trajectory_id: str | TrajectoryId, value: float, *, run: str | Path | None = None) -> str:
    """Deliver the reward of a trajectory whose reward function returned `libra.Late`.

    Parameters
    ----------
    trajectory_id : str
        ``episode.trajectory_id``, such as "train-3-0-7" (iteration, group, sample).
    value : float
        The reward.
    run : path, optional
        The run directory; by default the run that this process drives or works for.

    Returns
    -------
    str
        When the reward counts, in words.

    Raises
    ------
    LateRefused
        A reward was delivered before (the first counts), no batch would use the reward, or
        ``value`` is not one finite number.
    RunDirectoryError
        ``run`` contains no run, or is omitted and this process does not have exactly one run.
    StoreError
        The reward cannot be written.
    """
    files, config = _run(run)
    trajectory = _trajectory(trajectory_id, config)
    value = plain_number(value)
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or abs(value) > MAX_REWARD:
        raise LateRefused(
            f"{trajectory}: got the reward {value!r}; it must be one finite number, at most {MAX_REWARD:g}"
        )
    when = _when(files, config, trajectory)
    try:
        write_late(files.late_dir, trajectory, float(value))
    except RecordExists as error:
        first = read_late(files.late_dir, trajectory)
        raise LateRefused(
            f"{trajectory}: got {value:g}, and {first:g} was delivered before; the first one counts"
        ) from error
    return f"{trajectory}: {value:g} counts {when}"


def _run(run: str | Path | None) -> tuple[RunDirectory, RunConfig]:
    if run is None:
        here = runs_here()
        if len(here) != 1:
            found = f"this process has {', '.join(map(str, here))}" if here else "this process drives none"
            raise RunDirectoryError(f"deliver: run is missing, and {found}; give run=DIRECTORY, the directory of a run")
        run = here[0]
    directory = existing_run(Path(run))
    config = _config(directory)
    if config.trainer.late == "off":
        raise LateRefused(
            f"{directory}: this run takes no late rewards (trainer.late=off); type trainer.late=correct for a new one"
        )
    return RunDirectory(directory), config


@lru_cache(maxsize=16)
def _config(directory: Path) -> RunConfig:
    return load_config(directory / RESOLVED_FILE)


def _trajectory(given: str | TrajectoryId, config: RunConfig) -> TrajectoryId:
    match = _ID.fullmatch(str(given))
    if match is None:
        raise LateRefused(
            f"trajectory {str(given)[:80]!r}: give it as episode.trajectory_id is, train-ITERATION-GROUP-SAMPLE, e.g. train-3-0-7"
        )
    trajectory = TrajectoryId(int(match[2]), int(match[3]), int(match[4]), match[1])
    if trajectory.split == "eval":
        raise LateRefused(f"{trajectory}: an evaluation waits for no late reward; it counts the provisional value")
    for name, most in (("group", config.trainer.prompts), ("sample", config.trainer.group_size)):
        if (number := getattr(trajectory, name)) >= most:
            raise LateRefused(f"{trajectory}: there is no {name} {number}; this run has {name}s 0 to {most - 1}")
    return trajectory


def _when(files: RunDirectory, config: RunConfig, trajectory: TrajectoryId) -> str:
    record = group_path(files.groups_dir, trajectory.iteration, trajectory.group)
    member = read_group(record)[trajectory.sample] if record.exists() else None
    if member is not None and member.late is None:
        late = f"its reward {member.reward:g} did not come late"
        raise LateRefused(
            f"{trajectory}: no reward is to come; {late if member.failure.trains else f'it failed: {member.failure}'}"
        )
    eta, committed = config.run.eta, 0
    while batch_path(files.batches_dir, committed).exists():
        committed += 1
    near = range(max(0, trajectory.iteration - eta), min(committed, trajectory.iteration + eta + 1))
    batch = next((number for number in near if trajectory in read_batch(files.batches_dir, number)), None)
    if batch is None:
        return "in the batch of its group"
    if any(trajectory[:3] in group.places() for group in waiting_after(files, committed - 1)):
        return f"in batch {committed}, as a correction of batch {batch}"
    if (first := read_late(files.late_dir, trajectory)) is not None:
        raise LateRefused(f"{trajectory}: {first:g} was delivered before, and the first one counts")
    args = config.trainer.late_args
    why = {"drop": "trainer.late=drop", "wait": f"trainer.late=wait, for {args.get('wait_s', 0):g} s"}.get(
        config.trainer.late, f"a group waits for {args.get('versions')} versions (trainer.late_args)"
    )
    raise LateRefused(f"{trajectory}: too late; batch {batch} trained it, and no batch takes its reward ({why})")
