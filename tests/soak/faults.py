"""Loaded into every Dask worker of a soak case: kills one process for real, at one stage, once.

The plan comes as JSON in LIBRA_SOAK: {"stage", "moment", "nth", "victim", "directory"}. ``directory`` holds the process id of
each possible victim and the marker that says the kill has happened.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

STAGES = ("generation", "action", "group", "batch", "step", "checkpoint", "publish")
VICTIMS = ("driver", "scheduler", "train-0", "rollout-0", "tool-0")


class Plan:
    """When to kill whom."""

    def __init__(self, text: str) -> None:
        values = json.loads(text)
        self.stage, self.moment, self.victim = values["stage"], values["moment"], values["victim"]
        self.directory, self.nth = Path(values["directory"]), values["nth"]
        self.seen = 0
        self.lock = threading.Lock()

    def reached(self, stage: str, moment: str) -> None:
        """A stage is reached in this process; kills at the nth time."""
        if (stage, moment) != (self.stage, self.moment):
            return
        with self.lock:
            self.seen += 1
            if self.seen != self.nth:
                return
            try:
                os.close(os.open(self.directory / "killed", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
            os.kill(int((self.directory / f"{self.victim}.pid").read_text()), signal.SIGKILL)

    def around(self, owner: Any, name: str, stage: str | Callable[..., str]) -> None:
        """Wrap ``owner.name`` so that the plan hears of it before and after."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            what = stage(*args) if callable(stage) else stage
            self.reached(what, "before")
            result = function(*args, **kwargs)
            self.reached(what, "after")
            return result

        setattr(owner, name, wrapped)


def dask_setup(worker: Any) -> None:
    """Called by Dask in each worker process, when it starts."""
    text = os.environ.get("LIBRA_SOAK")
    if text is None:
        return
    plan = Plan(text)
    (plan.directory / f"{worker.name}.pid").write_text(str(os.getpid()))
    from libra.graph import batch_nodes, rollout_nodes
    from libra.store.trajectory_journal import Journal
    from libra.train import checkpoint
    from libra.train.replica import Replica
    from libra.weights import WeightStore

    plan.around(Journal, "append", lambda journal, name, quantum, record: record["kind"])
    plan.around(rollout_nodes, "write_group", "group")
    plan.around(batch_nodes, "commit_batch", "batch")
    plan.around(Replica, "step", "step")
    plan.around(checkpoint, "_sync", "checkpoint")  # a checkpoint is half written then
    plan.around(WeightStore, "publish", "publish")
