"""Task functions of the teacher, and what batches and waves make of its scores (``distil``).

``teach-k-g`` runs on a worker that holds the teacher, or has its service, after group g has its record, and commits the scores
beside it. No batch depends on it through Dask: scores are read when the batch or wave is made, as late rewards
are, and its file lists the groups that were trained with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from libra.errors import RecordExists, ServiceTimeout
from libra.facts import GroupScored
from libra.graph.late_groups import wait_for
from libra.store.run_records import group_path, read_group, read_scores, scores_path, write_scores
from libra.types import Trajectory
from libra.worker.context import WorkerContext
from libra.worker.runtime import WorkerRuntime, runtime_here
from libra.worker.services.service_models import Scored, ToTeach, scoring_of

logger = logging.getLogger(__name__)


async def teach(run: str, group: dict[str, Any] | None, iteration: int, number: int) -> dict[str, Any]:
    """Score a finished group, unless it was scored before; ``group`` is the result of its node.

    A group that a service does not score in time stays without scores, as with scores that come too late.
    """
    host, began_s = runtime_here(run), time.time()
    path = group_path(host.spec.groups_dir, iteration, number)
    scores = scores_path(path)
    if not scores.exists():
        members, asked_s = read_group(path), time.perf_counter()
        try:
            found = await _scored(host, members)
        except ServiceTimeout as error:
            logger.warning("run %s: group %d of iteration %d is not scored: %s", run, number, iteration, error)
            return {"iteration": iteration, "group": number, "teach_s": time.time() - began_s}
        waited_s = max(0.0, time.perf_counter() - asked_s - found.seconds)
        with contextlib.suppress(RecordExists):
            write_scores(scores, found.taught)
            host.context.report(GroupScored(iteration, number, round(found.seconds, 6), round(waited_s, 6)))
    return {"iteration": iteration, "group": number, "teach_s": time.time() - began_s}


async def _scored(host: WorkerRuntime, members: Sequence[Trajectory]) -> Scored:
    """Scores by a service of this worker, or by the model that it holds."""
    config = host.spec.config
    if (service := config.distil.service) is not None:
        assert host.services is not None, f"{host.context.name} was given a group to score and has no services"
        asked = ToTeach(members, scoring_of(config, host.context.model_dir), config.run.seed)
        answer: Scored = await host.services.answer(service, asked)
        return answer
    assert host.teacher is not None, f"{host.context.name} was given a group to score and supplies no TEACHER"
    return await asyncio.to_thread(host.teacher.score, members)


async def with_scores(context: WorkerContext, batch: int, rows: Sequence[dict[str, Any]]) -> None:
    """Set ``taught`` in the ``rows`` of groups that the teacher has scored, after a wait of up to ``distil.wait_s``.

    Where rewards do not count, trajectories without scores take no part in the step. No effect without a teacher.
    """
    spec, distil = context.spec, context.spec.config.distil
    if distil.teacher is None:
        return
    paths = [scores_path(spec.groups_dir / Path(row["path"]).name) for row in rows]
    wanted = [path for path, row in zip(paths, rows, strict=True) if any(row["trains"])]
    if distil.wait_s > 0:
        await wait_for(context, batch, distil.wait_s, lambda: sum(not path.exists() for path in wanted))
    missing = [path.stem for path in wanted if not path.exists()]
    if missing:
        logger.warning(
            "run %s: batch %d trains %s %d of %d groups that the teacher has not scored (distil.wait_s=%g), the first is %s",
            spec.run, batch, "on rewards alone for" if distil.reward_coef else "without", len(missing), len(rows), distil.wait_s,
            missing[0],
        )  # fmt: skip
    for path, row in zip(paths, rows, strict=True):
        row["taught"] = path.exists() and any(row["trains"])
        if not distil.reward_coef:
            scores = read_scores(path, len(row["trains"])) if row["taught"] else [None] * len(row["trains"])
            row["trains"] = [bool(part and score) for part, score in zip(row["trains"], scores, strict=True)]


def taught_numbers(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Metrics of a batch with a teacher: groups without its scores; there is something to learn where it scored."""
    if not any("taught" in row for row in rows):
        return {}
    learns = {"no_signal": ""} if any(row["taught"] for row in rows) else {}
    return learns | {"late_taught": sum(not row["taught"] and "spare" not in row for row in rows)}
