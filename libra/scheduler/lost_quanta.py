"""What the scheduler writes where no worker is left to: the failure of a trajectory whose quantum killed its workers."""

from __future__ import annotations

import logging

from libra.errors import RecordExists, StoreError
from libra.scheduler.run_state import Tracked
from libra.store.journal import Journal
from libra.types import FailureClass, TrajectoryId

logger = logging.getLogger(__name__)


def record_worker_failure(tracked: Tracked, address: str) -> None:
    """Write the record that ends a trajectory as a ``worker`` failure; one that was written after all stays."""
    state = tracked.run
    record = {
        "kind": "failure",
        "failure": str(FailureClass.WORKER),
        "detail": f"quantum {tracked.quanta} was lost {tracked.lost} times, the last time with {address}",
        "worker": address,
        "start_s": 0.0,
        "stop_s": 0.0,
        "epoch": state.epoch,
    }
    iteration, group, sample = tracked.parsed.indices
    tid = TrajectoryId(iteration, group, sample, tracked.parsed.split)
    try:
        Journal(state.directory / "journal").append(str(tid), tracked.quanta, record)
    except RecordExists:
        return  # only its report was lost
    except StoreError as error:
        logger.error("%s: its failure could not be recorded: %s", tracked.key, error)
