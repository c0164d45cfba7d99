"""Loaded into every Dask worker of a soak: strikes one process, or the disk, at one moment after another.

LIBRA_SOAK names the directory of a cluster. It holds the process id of each possible victim, and ``plan.json`` with the moments of
the run that is under way: {"directory": of the run, "moments": [{"stage", "moment", "nth", "victim", "stop_s"}, ...]}. A moment is
armed when the one before it has come and a batch has been committed since. ``directory/struck`` gets a file when one has come.
"""

import functools
import inspect
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

STAGES = ("generation", "action", "group", "batch", "step", "checkpoint", "publish")
TURNS = ("draining", "turning", "slice", "wave", "leaving", "returning")
"""Stages of an engine that turns and returns; ``slice`` is its part of a wave, ``wave`` the part of the trainer."""
WORKERS = ("train-0", "rollout-0", "tool-0")
STRUCK, FILLER = "struck", "filler"


def fill(directory: Path) -> None:
    """A file that takes every byte that is left on a file system."""
    with (directory / FILLER).open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue


class Plan:
    """Which moment is armed, and how often this process has seen it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.lock = threading.Lock()
        self.read_at_ns = self.seen = 0
        self.seen_of = -1
        self.values: dict[str, Any] = {"moments": []}

    def reached(self, stage: str, moment: str) -> None:
        with self.lock:
            self._read()
            armed = self._armed()
            if armed is None:
                return
            number, run, what = armed
            if (stage, moment) != (what["stage"], what["moment"]):
                return
            self.seen = self.seen + 1 if self.seen_of == number else 1
            self.seen_of = number
            if self.seen < what["nth"]:
                return
            try:
                handle = os.open(run / STRUCK / f"{number:03d}", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            except (FileExistsError, FileNotFoundError):  # another process was faster, or the case is over
                return
            os.write(handle, str(_batches(run)).encode())
            os.close(handle)
            self._strike(what, run)

    def _read(self) -> None:
        path = self.directory / "plan.json"
        try:
            changed_ns = path.stat().st_mtime_ns
        except FileNotFoundError:
            return
        if changed_ns != self.read_at_ns:
            self.read_at_ns, self.seen_of = changed_ns, -1
            self.values = json.loads(path.read_text())

    def _armed(self) -> tuple[int, Path, dict[str, Any]] | None:
        moments = self.values["moments"]
        if not moments:
            return None
        run = Path(self.values["directory"])
        struck = sorted((run / STRUCK).glob("*"))
        if len(struck) == len(moments) or (struck and _batches(run) <= int(struck[-1].read_text() or 1 << 30)):
            return None
        return len(struck), run, moments[len(struck)]

    def _strike(self, what: dict[str, Any], run: Path) -> None:
        victim = what["victim"]
        if victim == "disk":
            fill(run)
            return
        process = int((self.directory / f"{victim}.pid").read_text())
        if what["stop_s"]:
            later = f"sleep {what['stop_s']}; kill -CONT {process}"
            subprocess.Popen(["sh", "-c", later], start_new_session=True)
        os.kill(process, signal.SIGSTOP if what["stop_s"] else signal.SIGKILL)

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

        @functools.wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            what = stage(*args) if callable(stage) else stage
            self.reached(what, "before")
            result = await function(*args, **kwargs)
            self.reached(what, "after")
            return result

        setattr(owner, name, awaited if inspect.iscoroutinefunction(function) else wrapped)


def _batches(run: Path) -> int:
    return len(list((run / "run" / "batches").glob("batch-*.json")))


def dask_setup(worker: Any) -> None:
    """Called by Dask in each worker process, when it starts."""
    text = os.environ.get("LIBRA_SOAK")
    if text is None:
        return
    plan = Plan(Path(text))
    (plan.directory / f"{worker.name}.pid").write_text(str(os.getpid()))
    from libra.graph import batch_nodes, rollout_nodes
    from libra.policy.role_changes import Role
    from libra.store.record_codec import unpack
    from libra.store.trajectory_journal import Journal
    from libra.train import checkpoint
    from libra.train.replica import Replica
    from libra.train.slice_gradient import SliceGradient
    from libra.weights import WeightStore
    from libra.worker.role_member import RoleMember

    plan.around(Journal, "append", lambda _, name, quantum, *records: unpack(records[-1], source=name)["kind"])
    plan.around(rollout_nodes, "write_group", "group")
    plan.around(batch_nodes, "commit_batch", "batch")
    plan.around(Replica, "step", "step")
    plan.around(checkpoint, "sync", "checkpoint")  # a checkpoint is half written then
    plan.around(WeightStore, "publish", "publish")
    plan.around(RoleMember, "_drain", lambda member, number: "leaving" if member.training.in_pool else "draining")
    plan.around(RoleMember, "_take_up", lambda _, to, *more: "turning" if to.role is Role.TRAIN else "returning")
    plan.around(SliceGradient, "accumulate", "wave" if worker.name == "train-0" else "slice")
