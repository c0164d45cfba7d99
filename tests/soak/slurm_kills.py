"""Kills by ``scancel``: Libra's workers as jobs of a real Slurm, one of which is cancelled in mid-run."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from distributed import Client

import single_node
from libra.cluster.scheduler_address import Contact

REPOSITORY = Path(__file__).resolve().parents[2]
LIBRA = [sys.executable, "-c", "from libra.cli.main import main; main()"]
KEEPING = (
    "from libra.driver import run_checkpoints; run_checkpoints.prune_groups = lambda spec, first, before: before; "
)
"""Records of groups are what is replayed."""
VICTIMS = ("rollout-1", "train-0", "rollout-0", "tool-0")
WORKERS = 4
WAIT_S = 180.0


class SlurmCluster:
    """Four jobs, each a worker; a run on them, and one of them cancelled."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self.directory, self.environment = directory, environment

    def libra(self, *arguments: str) -> None:
        """A command that has to succeed."""
        done = subprocess.run(
            [*LIBRA, *arguments], env=self.environment, cwd=self.directory, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]

    def run_cancelled(self, kill: Any) -> dict[str, Any]:
        """A run; when its iteration ``kill.after`` is over and ``kill.nth`` quanta more are done, a job is cancelled."""
        victim, name = VICTIMS[kill.seed // 5 % len(VICTIMS)], f"kill{kill.seed}"
        contact = Contact.read(self.directory / "slurm" / "cluster.json")
        reports: queue.Queue[dict[str, Any]] = queue.Queue()
        with Client(contact.address, security=contact.security(), timeout=60, set_as_default=False) as client:
            client.wait_for_workers(WORKERS, timeout=WAIT_S)
            client.subscribe_topic("libra", lambda event: reports.put(event[1]))
            command = [*LIBRA[:2], KEEPING + LIBRA[2], "run", "my.yaml", "--scheduler", "slurm/cluster.json"]
            command += [f"run.name={name}", f"run.eta={kill.eta}", f"run.seed={kill.seed}"]
            run = subprocess.Popen(
                command, env=self.environment, cwd=self.directory, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                text=True,
            )  # fmt: skip
            try:
                said = self._cancel_at(kill, name, victim, reports)
                _, errors = run.communicate()
            finally:
                run.kill()
                run.wait()
        assert run.returncode == 0, errors[-3000:]
        return {"directory": self.directory / "runs" / name, "killed": said}

    def _cancel_at(self, kill: Any, name: str, victim: str, reports: queue.Queue[dict[str, Any]]) -> dict[str, Any]:
        over, quanta = False, 0
        while quanta < kill.nth:
            event = reports.get(timeout=WAIT_S)
            if not isinstance(event, dict) or event.get("run") != name:
                continue
            over = over or (event["kind"] == "iteration" and event["iteration"] == kill.after)
            quanta += over and event["kind"] == "quantum"
        job = json.loads((self.directory / "slurm" / "jobs.json").read_text())[victim]
        subprocess.run(["scancel", "--signal=KILL", "--full", job], env=self.environment, check=True)
        subprocess.run(["scancel", job], env=self.environment, check=True)
        return {"worker": victim, "job": job}


@contextlib.contextmanager
def slurm_cluster() -> Iterator[SlurmCluster]:
    """A Slurm of its own, with Libra's jobs up."""
    with (
        tempfile.TemporaryDirectory(prefix="libra-slurm-") as name,
        single_node.single_node_slurm(Path(name)) as environment,
    ):
        path = os.pathsep.join(filter(None, [str(REPOSITORY), environment.get("PYTHONPATH")]))
        environment |= {"PYTHONPATH": path}
        job = {"cpus": 1, "memory": "2 GiB", "walltime": "01:00:00"}
        settings = {
            "run": {"iterations": 4}, "environment": {"name": "libra.testing:FixedTurns"},
            "rollout": {"max_new_tokens": 6, "max_turns": 3, "ignore_eos": True, "slots": 8},
            "trainer": {"prompts": 2, "group_size": 3, "lr": 1e-3, "normalize_std": False, "entropy_coef": 0.01},
            "checkpoint": {"every": 2, "keep": 1}, "cluster": {"dashboard_port": 0, "threads": 1},
            "observe": {"progress": False, "tensorboard": False},
            "slurm": {"host": "127.0.0.1", "reconcile_s": 1.0, "setup": [f"export PYTHONPATH={path}"]},
            "slurm_rollout": {**job, "jobs": 2, "partition": "rollout", "gpus": 1},
            "slurm_train": {**job, "partition": "train", "gpus": 1}, "slurm_tool": {**job, "partition": "train"},
        }  # fmt: skip
        (Path(name) / "my.yaml").write_text(yaml.safe_dump(settings))
        cluster = SlurmCluster(Path(name), environment)
        cluster.libra("cluster", "slurm", "my.yaml", "up")
        try:
            yield cluster
        finally:
            cluster.libra("cluster", "slurm", "my.yaml", "down")
