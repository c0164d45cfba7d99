"""Brings a replica to the weights that the committed batches lead to: after a resume, or when its worker was lost."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from libra.store.batch_membership import read_batch_facts
from libra.worker.batch_members import members_of

if TYPE_CHECKING:
    from libra.worker.host import LibraHost

logger = logging.getLogger(__name__)

_one_at_a_time = threading.Lock()


def catch_up(host: LibraHost, steps: int, *, or_next: bool = False) -> list[dict[str, Any]]:
    """Bring the host's replica to the weights after ``steps`` steps: the newest checkpoint, then every committed batch since.

    Nothing is generated, and a replica that is there or further is left alone. Where a version that was published comes out
    otherwise (another machine, another number of threads), the published weights are taken: tokens were sampled from those.
    ``or_next``: a checkpoint after one step more will do, for whoever is asked for that step again. Returns the numbers of each
    step taken. In a group a collective, unless all are there already.
    """
    from libra.train.checkpoint import newest, step_of

    writer, replica = host.checkpoints, host.replica
    assert writer is not None and replica is not None, "only a worker with a replica is asked to catch up"
    replayed: list[dict[str, Any]] = []
    with _one_at_a_time:
        if replica.steps_done < steps:
            found = None
            if replica.group.rank == 0:
                found = newest(host.spec.directory / "checkpoints", steps + or_next)
            found = replica.group.from_first(None if found is None else str(found))
            checkpoint = None if found is None else Path(found)
            if checkpoint is not None and replica.steps_done < step_of(checkpoint):
                writer.load(checkpoint)
        while replica.steps_done < steps:
            batch = replica.steps_done
            rows = read_batch_facts(host.spec.batches_dir, batch)["groups"]
            result = writer.step(members_of({"members": rows}, host.spec.groups_dir, of_the_step=True), batch)
            logger.info("batch %d was committed before: its step is taken again", batch)
            replayed.append(result.as_dict())
            _take_published(host, batch + 1, result.digest)
    return replayed


def _take_published(host: LibraHost, version: int, content: str) -> None:
    if version not in host.weights.numbers():
        return
    published = host.weights.get(version)
    if published.digest != content and host.checkpoints is not None:
        logger.warning(
            "run %s: step %d taken again gave weights %s, version %d was published as %s; the published ones are taken. "
            "Is this another machine, or another number of threads?",
            host.spec.run, version - 1, content, version, published.digest,
        )  # fmt: skip
        host.checkpoints.take_weights(host.weights.read(published))
