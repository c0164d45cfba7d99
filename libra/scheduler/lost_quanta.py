"""The failure record of a trajectory whose quantum killed its workers, written by the scheduler because no worker can."""

from __future__ import annotations

import logging

from libra.errors import RecordExists, StoreError
from libra.facts import FailureClassified
from libra.scheduler.run_state import Tracked
from libra.store.trajectory_journal import Journal
from libra.types import FailureClass, TrajectoryId

logger = logging.getLogger(__name__)
task_logger = logging.getLogger(__name__ + ".tasks")


def record_worker_failure(tracked: Tracked, address: str) -> bool:
    """Write the record that ends an attempt as a ``worker`` failure; returns whether a record exists now, this or an
    earlier one."""
    state = tracked.run
    detail = f"quantum {tracked.quanta} was lost {tracked.lost} times, the last time with {address}"
    record = {
        "kind": "failure",
        "failure": str(FailureClass.WORKER),
        "detail": detail,
        "worker": address,
        "start_s": 0.0,
        "stop_s": 0.0,
        "epoch": state.epoch,
    }
    iteration, group, sample = tracked.parsed.indices
    tid = TrajectoryId(iteration, group, sample, tracked.parsed.split)
    journal, written = Journal(state.directory / "journal"), 1
    try:
        journal.append(str(tid), tracked.quanta, record)
    except RecordExists:
        written = records_at(journal, str(tid), tracked.quanta)
        task_logger.debug("%s: quantum %d was written, only its report was lost", tracked.key, tracked.quanta)
    except StoreError as error:
        logger.error("%s: its failure could not be recorded: %s", tracked.key, error)
        return False
    else:
        state.log.emit(FailureClassified(tracked.key, str(FailureClass.WORKER), detail))
    tracked.quanta += written
    # Another attempt begins. If the trajectory has advanced or ended, its next report corrects this.
    tracked.lost = 0
    tracked.begin()
    return True


def records_at(journal: Journal, trajectory: str, quantum: int) -> int:
    """How many records were committed together from a quantum on; 1 where they cannot be read."""
    try:
        return len(journal.read_at(trajectory, quantum))
    except StoreError:
        return 1
