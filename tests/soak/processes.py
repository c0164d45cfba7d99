"""The processes of a soak: clusters, which serve case after case until one is killed, and the driver of one run."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from faults import FILLER, STRUCK

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
LIBRA = "from libra.cli.main import main; main()"
KEEPING = f"from libra.driver import submitted_graphs; submitted_graphs.prune_groups = lambda spec, first, before: before; {LIBRA}"
"""`libra` that keeps every record of a group: they are what is replayed."""
DISK_MIB = 64


class Cluster:
    """Scheduler and workers; started when they are needed, and again where the scheduler was killed.

    Section ``cluster`` of ``config`` counts, the workers ``apart`` have nannies that are processes of their own, and each start
    has a hash seed from ``hash_seeds``.
    """

    def __init__(self, config: Path, apart: tuple[str, ...], hash_seeds: random.Random) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="soak-cluster-"))
        self.config, self.apart, self.hash_seeds = self.directory / "cluster.yaml", apart, hash_seeds
        shutil.copy(config, self.config)
        self.log = self.directory / "processes.log"
        self._process: subprocess.Popen[str] | None = None
        self.contact = ""

    def environment(self) -> dict[str, str]:
        """Of a process, with another hash seed each time."""
        return {
            **os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(HERE), os.environ.get("PYTHONPATH", "")]),
            "PYTHONHASHSEED": str(self.hash_seeds.randint(1, 1 << 31)), "LIBRA_SOAK": str(self.directory),
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip

    def ensure(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._kill()  # workers whose scheduler is gone
        command = [sys.executable, str(HERE / "cluster.py"), str(self.config), str(self.directory)]
        environment = {**self.environment(), "DASK_DISTRIBUTED__WORKER__PRELOAD": str(HERE / "faults.py")}
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                [*command, *self.apart], env=environment, stdout=subprocess.PIPE, stderr=log, text=True,
                start_new_session=True,
            )  # fmt: skip
        (self.directory / "scheduler.pid").write_text(str(self._process.pid))
        assert self._process.stdout is not None
        self.contact = self._process.stdout.readline().strip()
        assert self.contact, "the cluster did not start: " + self.log.read_text()[-3000:]

    def plan(self, directory: Path, moments: list[dict[str, Any]]) -> None:
        """Tell the workers, those of now and later, what is struck in the run under ``directory``."""
        (directory / STRUCK).mkdir()
        unfinished = self.directory / ".plan.json"
        unfinished.write_text(json.dumps({"directory": str(directory), "moments": moments}))
        unfinished.replace(self.directory / "plan.json")

    def drive(self, directory: Path, config: Path, keeping: bool, limit_s: float) -> int:
        """Run ``config``, or resume it where it has begun, and make space again; the exit code of ``libra``."""
        run = directory / "run"
        what = ["resume", str(run)] if (run / "epochs").is_dir() else ["run", str(config)]
        command = [sys.executable, "-c", KEEPING if keeping else LIBRA, *what, "--scheduler", self.contact]
        with self.log.open("a") as log:
            log.write(f"libra {' '.join(what)}\n")
            log.flush()
            how = {"env": self.environment(), "start_new_session": True, "cwd": directory}
            driver = subprocess.Popen(command, stdout=log, stderr=log, **how)
        (self.directory / "driver.pid").write_text(str(driver.pid))
        try:
            return driver.wait(limit_s)
        finally:
            if driver.poll() is None:
                driver.kill()
                driver.wait()
            (directory / FILLER).unlink(missing_ok=True)

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def stop(self) -> None:
        self._kill()
        shutil.rmtree(self.directory, ignore_errors=True)


def may_mount() -> None:
    """Go on as root of a namespace of its own, where an ordinary user may make one: such a root can mount a small file system."""
    enter = ["unshare", "--map-root-user", "--mount"]
    if not os.geteuid() or not shutil.which("unshare"):
        return
    if not subprocess.run([*enter, "true"], capture_output=True).returncode:
        os.execvp("unshare", [*enter, sys.executable, *sys.argv])


def why_no_small_disk() -> str:
    """Why this user cannot mount a small file system; empty where that is possible."""
    with tempfile.TemporaryDirectory() as name, contextlib.suppress(FileNotFoundError):
        done = _mount(Path(name))
        if not done.returncode:
            _unmount(Path(name))
        return done.stderr.strip()
    return "there is no mount command"


def _mount(place: Path) -> subprocess.CompletedProcess[str]:
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(place)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _unmount(place: Path) -> None:
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@contextlib.contextmanager
def place_of_a_run(small: bool) -> Iterator[Path]:
    """A directory, on a small file system of its own where ``small``."""
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        place = Path(name)
        if small:
            done = _mount(place)
            assert not done.returncode, done.stderr
        try:
            yield place
        finally:
            if small:
                _unmount(place)
