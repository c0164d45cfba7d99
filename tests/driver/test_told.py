"""What a user reads in the terminal of the driver when processes of a run are lost: the words, and what to type."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from libra.cluster.settings import settings_yaml
from libra.config import RunConfig, dump_config

pytestmark = pytest.mark.live

LIMIT_S = 240.0
"""After this a process that says nothing is ended, and its test fails."""
RESOURCES = {"rollout-0": "ROLLOUT=8", "train-0": "TRAIN=1", "tool-0": "TOOL=8,GRADE=4,COMMIT=1"}


class Processes:
    """Scheduler, workers with their nannies, and a driver, each as its user would start it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "dask.yaml").write_text(settings_yaml())
        path = os.pathsep.join(filter(None, (str(Path.cwd()), os.environ.get("PYTHONPATH"))))
        own = {
            name: value for name, value in os.environ.items() if name != "DASK_LOGGING__DISTRIBUTED"
        }  # of local ones
        self.environment = {**own, "DASK_CONFIG": str(directory / "dask.yaml"), "PYTHONPATH": path}
        self.running: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str, *command: str) -> subprocess.Popen[str]:
        """Start a process of its own session; what it says comes through its ``stdout``."""
        self.running[name] = subprocess.Popen(
            [sys.executable, *command], env=self.environment, cwd=self.directory, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return self.running[name]

    def worker(self, name: str, command: str) -> None:
        """Start a worker with a ``dask worker`` command, whose log nobody reads."""
        words = shlex.split(command)[1:]
        local = [
            "--name",
            name,
            "--no-dashboard",
            "--host",
            "127.0.0.1",
            "--local-directory",
            str(self.directory / name),
        ]
        log = (self.directory / f"{name}.log").open("a")
        self.running[name] = subprocess.Popen(
            [sys.executable, "-m", "dask", *words, *local], env=self.environment, cwd=self.directory, text=True,
            start_new_session=True, stdout=log, stderr=log,
        )  # fmt: skip

    def kill(self, name: str) -> None:
        """SIGKILL to this process alone."""
        os.kill(self.running[name].pid, signal.SIGKILL)

    def end(self) -> None:
        """End all of them, with what they started."""
        for process in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Processes that end with the test."""
    started = Processes(tmp_path)
    yield started
    started.end()


def hear(process: subprocess.Popen[str], pattern: str, heard: list[str]) -> re.Match[str]:
    """Read what a process says until a line matches; every line goes to ``heard``."""
    assert process.stdout is not None
    for line in process.stdout:
        heard.append(line)
        if found := re.search(pattern, line):
            return found
    raise AssertionError(f"it never said {pattern!r}, but:\n{''.join(heard)}")


def test_a_killed_nanny_and_a_killed_scheduler_are_told_where_the_driver_runs(
    make_config: Callable[..., RunConfig], processes: Processes, tmp_path: Path
) -> None:
    config = make_config(run={"iterations": 100_000}, observe={"progress": True, "tensorboard": False})
    (tmp_path / "run.yaml").write_text(dump_config(config))
    place = ("--host", "127.0.0.1", "--port", "0", "--no-dashboard")
    scheduler = processes.start("scheduler", "-m", "dask", "scheduler", *place)
    heard: list[str] = []
    address = hear(scheduler, r"Scheduler at:\s+(tcp://\S+)", heard)[1]
    threading.Thread(target=list, args=(scheduler.stdout,), daemon=True).start()
    for name, resources in RESOURCES.items():
        processes.worker(name, f"dask worker {address} --nthreads 16 --resources {resources}")
    counted = f"import distributed; distributed.Client({address!r}).wait_for_workers({len(RESOURCES)}, {LIMIT_S})"
    subprocess.run([sys.executable, "-c", counted], env=processes.environment, check=True, capture_output=True)
    driver = processes.start("driver", "-m", "libra", "run", str(tmp_path / "run.yaml"), "--scheduler", address)
    limit = threading.Timer(LIMIT_S, driver.kill)
    limit.start()
    try:
        heard.clear()
        hear(driver, r"^iteration 0 ", heard)
        processes.kill("train-0")  # the nanny: its worker ends with it, and nobody starts another
        hear(driver, r"\(TRAIN\): worker train-0 has left the cluster", heard)
        typed = hear(driver, rf"type (dask worker {address} \S+ \d+ --resources TRAIN=1);", heard)
        assert f"Ctrl-C and libra resume {tmp_path / 'demo'}" in typed.string
        processes.worker("train-0", typed[1])
        hear(driver, r"TRAIN is there again", heard)
        hear(driver, r"^iteration ", heard)  # the run goes on
        processes.kill("scheduler")
        hear(driver, rf"the scheduler at {address} is lost", heard)
        assert f"type libra resume {tmp_path / 'demo'} --scheduler {address}" in heard[-1]
        rest = driver.stdout.read() if driver.stdout is not None else ""
        assert driver.wait() == 2
        assert "Traceback" not in "".join(heard) + rest
    finally:
        limit.cancel()
