"""The task function that ends an evaluation, and the file with its outcome."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from libra.envs.environment import BIN
from libra.errors import RecordExists
from libra.facts import EvaluationFinished
from libra.graph.batch_nodes import append
from libra.seals import sealed_text
from libra.store.exclusive_files import create_exclusive
from libra.store.run_records import evaluation_path, read_evaluation, read_group
from libra.types import FailureClass, Trajectory
from libra.worker.runtime import runtime_here


def evaluation(run: str, version: int, groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Store the trajectories of an evaluation and return their mean reward, overall and by bin."""
    host = runtime_here(run)
    if (made := read_evaluation(host.spec.evaluations_dir, version)) is not None:
        return made
    paths = [Path(meta["path"]) for meta in groups]
    trajectories = [member for path in paths for member in read_group(path)]
    append(host, trajectories, None)
    known = evaluation_outcome(version, trajectories)
    host.context.report(EvaluationFinished(version, known["reward"], known["num"]))
    with contextlib.suppress(RecordExists):
        create_exclusive(evaluation_path(host.spec.evaluations_dir, version), sealed_text(known).encode(), fsync=True)
    return read_evaluation(host.spec.evaluations_dir, version) or known


def evaluation_outcome(version: int, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """The content of an evaluation's file. JSON has no NaN: a reward that is not known is None.

    ``failures`` and ``left_out`` count as in the numbers of an iteration: trajectories that ended as a failure of any class, and
    those that have no reward because the failure was not the model's.
    """
    graded = [t for t in trajectories if t.failure.trains]
    by_bin: dict[str, list[float]] = {}
    for t in graded:
        if (name := t.prompt.facts.get(BIN)) is not None:
            by_bin.setdefault(str(name), []).append(t.reward)
    reward = float(np.mean([t.reward for t in graded])) if graded else float("nan")
    return {
        "version": version,
        "num": len(trajectories),
        "failures": sum(t.failure is not FailureClass.NONE for t in trajectories),
        "left_out": len(trajectories) - len(graded),
        "reward": reward if np.isfinite(reward) else None,
        "bins": {name: [float(np.mean(v)), len(v)] for name, v in sorted(by_bin.items(), key=_by_number)},
    }


def _by_number(entry: tuple[str, Any]) -> tuple[float, str]:
    first = entry[0].split(" ")[0]
    return (float(first) if first.isdecimal() else math.inf), entry[0]
