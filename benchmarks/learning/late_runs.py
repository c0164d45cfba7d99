"""Runs of the quick start whose rewards come late, for `benchmarks.learning.late`: learning, and a
kill with rewards to come.

A worker delivers the rewards of an iteration while it grades the one that comes so many versions
later, so that they are late by exactly that. Until then the reward is a guess that is wrong for one
trajectory in four.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import libra
from benchmarks.report import QUICKSTART
from libra import Late
from libra.cluster.connection import present_workers
from libra.config import RunConfig, dump_config, load_config
from libra.driver.run_session import Session, run
from libra.envs.tool_arithmetic import ToolArithmetic
from libra.errors import LateRefused
from libra.seals import sealed_text, unseal
from libra.store.run_records import batch_path, read_batch_facts
from libra.types import Episode

WRONG = 64
"""Of 256 provisional rewards, those that are wrong."""
PENDING = 20
"""Rewards to come when a run is killed: 5 groups of 4."""


def guess(value: float, seed: int, trajectory: str) -> float:
    lot = hashlib.blake2b(f"{seed}/{trajectory}".encode(), digest_size=1).digest()[0]
    return 1.0 - value if lot < WRONG else value


class LateArithmetic(ToolArithmetic):
    """`ToolArithmetic` whose rewards are ``delay`` versions late; ``known`` is a directory for
    them."""

    def __init__(self, *, delay: int, known: str, **same: Any) -> None:
        super().__init__(**same)
        self.delay, self.known = delay, Path(known)

    def grade(self, episode: Episode) -> float | Late:
        value, (split, iteration, group, sample) = super().grade(episode), episode.trajectory_id.split("-")
        if split == "eval" or not self.delay:
            return value
        self.known.mkdir(exist_ok=True)
        (self.known / episode.trajectory_id).write_text(sealed_text({"value": value}))
        due = f"{split}-{int(iteration) - self.delay}-{group}-{sample}"
        if (self.known / due).exists():
            with suppress(LateRefused):  # this grader ran before
                libra.deliver(due, unseal((self.known / due).read_bytes())["value"])
        return Late(fast=guess(value, self.seed, episode.trajectory_id))


class Unjudged(ToolArithmetic):
    """`ToolArithmetic` whose rewards nobody delivers; the guess is right."""

    def grade(self, episode: Episode) -> float | Late:
        return Late(fast=super().grade(episode))


def learned(directory: Path, delay: int, late: str, seed: int, overrides: Sequence[str]) -> float:
    name = f"{late}_{delay}_{seed}"
    args = f"environment.args={{delay: {delay}, known: {directory / f'known_{name}'}}}"
    typed = (
        f"run.dir={directory}", f"run.name={name}", f"run.seed={seed}", f"trainer.late={late}", args,
        "environment.name=benchmarks.learning.late_runs:LateArithmetic", "observe.progress=false", "observe.trackers=[]",
        "checkpoint.every=0", "cluster.dashboard_port=0", *overrides,
    )  # fmt: skip
    summary = run(load_config(QUICKSTART, typed))
    came = sum(row.get("late_came", 0) for row in summary.iterations)
    ages = {row["late_delay"] for row in summary.iterations if row.get("late_came")}
    final = float(summary.evaluations[-1]["reward"])
    late_words = f"{came:g} rewards counted by age {sorted(ages)}" if came else "rewards on time"
    print(f"{late}, {delay} versions late, seed {seed}: {final:.3f} held out; {late_words}", flush=True)
    return final


def times_applied(directory: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    batch = 0
    while batch_path(directory / "batches", batch).exists():
        late = read_batch_facts(directory / "batches", batch).get("late", {"came": []})
        found.update("-".join(["train", *map(str, place[:3])]) for place in late["came"])
        batch += 1
    return found


def killed(directory: Path) -> Counter[str]:
    """Kill a run with `PENDING` rewards, deliver them, kill the step that takes them, resume;
    `times_applied`."""
    typed = (
        f"run.dir={directory}", "run.name=killed", "run.iterations=3", "trainer.late=correct", "trainer.prompts=5",
        "trainer.group_size=4", "environment.name=benchmarks.learning.late_runs:Unjudged", "evaluation.prompts=0",
        "observe.progress=false", "observe.trackers=[]", "checkpoint.every=2", "cluster.dashboard_port=0",
    )  # fmt: skip
    config = load_config(QUICKSTART, typed)
    (directory / "config.yaml").write_text(dump_config(config))
    killed_in_step(directory / "config.yaml", 1)
    for group in range(5):
        for sample in range(4):
            libra.deliver(f"train-0-{group}-{sample}", float(sample % 2), run=directory / "killed")
    killed_in_step(directory / "config.yaml", 2)
    command = [sys.executable, "-m", "libra", "resume", str(directory / "killed")]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return times_applied(directory / "killed")


def killed_in_step(config_file: Path, step: int) -> None:
    """Run or resume ``config_file`` until its driver, trainer and workers are killed in a step."""
    with tempfile.TemporaryFile() as output:
        command = [sys.executable, "-m", "benchmarks.learning.late_runs", str(config_file), str(step)]
        driver = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        code = driver.wait()
        with suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        output.seek(0)
        if code != -signal.SIGKILL:
            raise RuntimeError(
                f"the driver ended with {code}, not killed in step {step}: {output.read().decode()[-2000:]}"
            )


def dies_in_its_step(run: str, driver: int, step: int, dask_worker: Any) -> None:
    replica = dask_worker.plugins[f"libra-{run}"].trainer.replica
    take = replica.step

    def die(trajectories: Any, number: int) -> Any:
        if number == step:
            os.kill(driver, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        return take(trajectories, number)

    replica.step = die


def _drive(config_file: str, step: str) -> None:
    config: RunConfig = load_config(Path(config_file))
    assert config.run.name is not None
    with Session(config, resume=(config.run.dir / config.run.name).exists()) as session:
        found = present_workers(session.client)
        (address,) = (each for each, worker in found.items() if worker["name"].startswith("train"))
        session.client.run(dies_in_its_step, config.run.name, os.getpid(), int(step), workers=[address])
        for _ in session.iterations():
            pass


if __name__ == "__main__":
    _drive(*sys.argv[1:])
