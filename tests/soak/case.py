"""One soak case: a small run on real processes, one of which is killed; resumed until it is done; then looked at from outside.

``python tests/soak/case.py SEED [SEED ...]`` runs cases by hand. A case is (stage, moment, nth, victim), all from its seed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
import zarr

from faults import STAGES, VICTIMS
from libra.driver import damage
from libra.store.event_log import read_events

ITERATIONS, PROMPTS, GROUP_SIZE, TURNS = 4, 2, 2, 3
STARTS = 4
"""Starts allowed: the first, one after the kill, and two to spare."""
LIMIT_S = 150.0
REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Case:
    """What is killed, and when."""

    seed: int
    stage: str
    moment: str
    nth: int
    victim: str
    eta: int

    @classmethod
    def of_seed(cls, seed: int) -> Case:
        """The stages and victims in turn, so that 35 seeds have every pair; the rest at random."""
        rng = random.Random(seed)
        stage, victim = STAGES[seed % len(STAGES)], VICTIMS[seed % len(VICTIMS)]
        often = {"generation": 24, "action": 16, "group": 6, "batch": 3, "step": 3, "checkpoint": 3, "publish": 4}[
            stage
        ]
        return cls(seed, stage, rng.choice(("before", "after")), rng.randint(1, often), victim, rng.randint(0, 1))


def write_config(case: Case, directory: Path) -> Path:
    """The run of a case, as a user would write it."""
    path = directory / "soak.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "run": {
                    "dir": str(directory),
                    "name": "run",
                    "iterations": ITERATIONS,
                    "eta": case.eta,
                    "seed": case.seed,
                },
                "environment": {"name": "libra.testing:FixedTurns"},
                "rollout": {"max_new_tokens": 4, "max_turns": TURNS, "ignore_eos": True, "slots": 8},
                "trainer": {"prompts": PROMPTS, "group_size": GROUP_SIZE, "lr": 1e-3},
                "checkpoint": {"every": 2, "keep": 1},
                "cluster": {"threads": 1, "dashboard_port": 0},
                "observe": {"progress": False, "tensorboard": False},
            }
        )
    )
    return path


class Processes:
    """The cluster's process and the driver's, started again as often as needed."""

    def __init__(self, case: Case, directory: Path, config: Path) -> None:
        self.directory, self.config = directory, config
        plan = {**asdict(case), "directory": str(directory)}
        python_path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        self.environment = {**os.environ, "PYTHONPATH": python_path, "LIBRA_SOAK": json.dumps(plan)}
        self.environment["DASK_DISTRIBUTED__WORKER__PRELOAD"] = str(REPOSITORY / "tests" / "soak" / "faults.py")
        self.cluster: subprocess.Popen[str] | None = None
        self.address = ""
        self.log = (directory / "processes.log").open("w")

    def ensure_cluster(self) -> None:
        """Start scheduler and workers where they are not running."""
        if self.cluster is not None and self.cluster.poll() is None:
            return
        command = [sys.executable, str(REPOSITORY / "tests" / "soak" / "cluster.py"), str(self.config)]
        self.cluster = subprocess.Popen(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=self.log, text=True, start_new_session=True
        )
        (self.directory / "scheduler.pid").write_text(str(self.cluster.pid))
        assert self.cluster.stdout is not None
        self.address = self.cluster.stdout.readline().strip()
        assert self.address, "the cluster did not start: " + (self.directory / "processes.log").read_text()[-2000:]

    def drive(self, resume: bool, limit_s: float) -> int:
        """Run or resume; the exit code of ``libra``."""
        what = ["resume", str(self.directory / "run")] if resume else ["run", str(self.config)]
        command = [sys.executable, "-c", "from libra.cli.main import main; main()", *what, "--scheduler", self.address]
        driver = subprocess.Popen(
            command, env=self.environment, stdout=self.log, stderr=self.log, start_new_session=True
        )
        (self.directory / "driver.pid").write_text(str(driver.pid))
        try:
            return driver.wait(limit_s)
        finally:
            if driver.poll() is None:
                driver.kill()
                driver.wait()

    def stop(self) -> None:
        """End the cluster, workers included."""
        if self.cluster is not None and self.cluster.poll() is None:
            os.killpg(self.cluster.pid, signal.SIGKILL)
            self.cluster.wait()
        self.log.close()


def run_case(case: Case, directory: Path) -> dict[str, Any]:
    """Run, kill, resume until done; returns what `check_run` found."""
    config = write_config(case, directory)
    processes = Processes(case, directory, config)
    codes: list[int] = []
    began_s = time.monotonic()
    try:
        while not codes or codes[-1] != 0:
            left_s = LIMIT_S - (time.monotonic() - began_s)
            assert len(codes) < STARTS and left_s > 0, f"{case}: not done after starts {codes}: {_tail(directory)}"
            processes.ensure_cluster()
            codes.append(processes.drive(resume=(directory / "run" / "epochs").is_dir(), limit_s=left_s))
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"{case}: hangs after starts {codes}: {_tail(directory)}") from error
    finally:
        processes.stop()
    assert (directory / "killed").exists(), f"{case}: the moment never came, so nothing was tried"
    return {"starts": len(codes), **check_run(directory / "run")}


def check_run(directory: Path) -> dict[str, Any]:
    """What plain zarr and the logs say of a finished run; AssertionError where something was lost or done twice."""
    group = zarr.open_group(directory / "trajectories.zarr", mode="r")
    committed = group.attrs["committed"]["trajectories"]
    columns = {name: array[:committed] for name, array in group["trajectory"].arrays()}
    ids = list(zip(columns["iteration"].tolist(), columns["group"].tolist(), columns["sample"].tolist(), strict=True))
    expected = {(k, g, s) for k in range(ITERATIONS) for g in range(PROMPTS) for s in range(GROUP_SIZE)}
    assert len(ids) == len(set(ids)), f"stored twice: {[i for i, n in Counter(ids).items() if n > 1]}"
    consumed = {i for i, batch in zip(ids, columns["batch"].tolist(), strict=True) if batch >= 0}
    assert consumed == expected, f"lost: {sorted(expected - consumed)}, unknown: {sorted(consumed - expected)}"
    assert Counter(columns["batch"].tolist()) == dict.fromkeys(range(ITERATIONS), PROMPTS * GROUP_SIZE)
    assert (columns["length"] > 0).all() and np.isfinite(columns["reward"]).all()
    assert (columns["num_turns"] == TURNS).all()

    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if "reward" in row]
    assert steps == list(range(ITERATIONS)), f"the reward curve has steps {steps}"
    quanta = Counter(
        (event["key"].split("-e")[0], event["quantum"])
        for event in read_events(directory / "events.jsonl").events
        if event["name"] == "quantum_finished"
    )
    twice = [quantum for quantum, count in quanta.items() if count > 1]
    assert not twice, f"done twice: {twice}"
    damages = damage.check_run(directory).damages
    assert not damages, f"a death left damaged files: {damages}"
    checkpoint = sorted((directory / "checkpoints").glob("step-*"))[-1]
    assert checkpoint.name == f"step-{ITERATIONS:06d}"
    return {"epochs": len(list((directory / "epochs").iterdir())), "trajectories": len(ids)}


def _tail(directory: Path) -> str:
    return (directory / "processes.log").read_text()[-3000:]


def main(seeds: list[int]) -> int:
    """Run cases one after the other, a line each; the number of those that failed."""
    failed = 0
    for seed in seeds:
        case, began_s = Case.of_seed(seed), time.monotonic()
        with tempfile.TemporaryDirectory(prefix="soak-") as name:
            try:
                found: Any = run_case(case, Path(name))
            except AssertionError as error:
                failed += 1
                found = f"FAILED: {error}"
        print(f"{case}: {found}, {time.monotonic() - began_s:.0f} s", flush=True)
    print(f"{len(seeds) - failed} of {len(seeds)} cases passed", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(1 if main([int(number) for number in sys.argv[1:]]) else 0)
