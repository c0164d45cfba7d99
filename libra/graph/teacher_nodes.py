"""Task functions of the teacher, and what batches and waves make of its scores (``distil``).

``teach-k-g`` runs on a worker that holds the teacher, or has its service, after group g has its record, and commits the scores
beside it. No batch depends on it through Dask: scores are looked for when the batch or wave is made, as late rewards are, and its
file says which groups were trained with them.
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
from libra.facts import GroupScored, LateRewardsTaken
from libra.store.run_records import batch_path, group_path, read_group, read_scores, scores_path, write_scores
from libra.types import Trajectory
from libra.worker.context import WorkerContext
from libra.worker.host import LibraHost, host_here
from libra.worker.teacher_service import Scored, ToTeach, scoring_of

logger = logging.getLogger(__name__)

LOOK_S = 0.05
"""Seconds between two looks for scores that a batch waits for."""
SIGN_S = 5.0
"""Seconds between two reports of a batch that waits: signs of life for the watchdog."""


async def teach(run: str, group: dict[str, Any] | None, iteration: int, number: int) -> dict[str, Any]:
    """Score a finished group, unless it was scored before; ``group`` is what its node returned.

    One that a service did not score in time stays without scores, as one whose scores come too late (``distil.wait_s``).
    """
    host, began_s = host_here(run), time.time()
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


async def _scored(host: LibraHost, members: Sequence[Trajectory]) -> Scored:
    """What the teacher says of a group: a service of this worker, or the model that it holds."""
    config = host.spec.config
    if (service := config.distil.service) is not None:
        assert host.services is not None, f"{host.context.name} was given a group to score and has no services"
        asked = ToTeach(members, scoring_of(config, host.context.model_dir), config.run.seed)
        answer: Scored = await host.services.answer(service, asked)
        return answer
    assert host.teacher is not None, f"{host.context.name} was given a group to score and supplies no TEACHER"
    return await asyncio.to_thread(host.teacher.score, members)


async def with_scores(context: WorkerContext, batch: int, rows: Sequence[dict[str, Any]]) -> None:
    """Note in the ``rows`` of groups which the teacher has scored (``taught``), after waiting for it up to ``distil.wait_s``.

    Where rewards do not count, trajectories without scores take no part in the step. No effect in a run without a teacher.
    """
    spec, distil = context.spec, context.spec.config.distil
    if distil.teacher is None:
        return
    paths = [scores_path(spec.groups_dir / Path(row["path"]).name) for row in rows]
    wanted = [path for path, row in zip(paths, rows, strict=True) if any(row["trains"])]
    if distil.wait_s > 0:
        await _wait(context, batch, wanted)
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


async def _wait(context: WorkerContext, batch: int, wanted: Sequence[Path]) -> None:
    """Until all of ``wanted`` are there, the batch was made before, or it has waited for its time."""
    spec, began_s, signed_s = context.spec, time.monotonic(), -SIGN_S
    limit_s = spec.config.distil.wait_s
    while missing := [path for path in wanted if not path.exists()]:
        waited_s = time.monotonic() - began_s
        if waited_s >= limit_s or batch_path(spec.batches_dir, batch).exists():
            return
        if waited_s - signed_s >= SIGN_S:
            context.report(LateRewardsTaken(batch=batch, awaited=len(missing)))
            signed_s = waited_s
        await asyncio.sleep(min(LOOK_S, limit_s - waited_s))


def taught_numbers(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Metrics of a batch with a teacher: groups without its scores; there is something to learn where it scored."""
    if not any("taught" in row for row in rows):
        return {}
    learns = {"no_signal": ""} if any(row["taught"] for row in rows) else {}
    return learns | {"late_taught": sum(not row["taught"] and "spare" not in row for row in rows)}
