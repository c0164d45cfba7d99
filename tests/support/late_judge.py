"""An environment whose rewards come late, and a driver that is killed with rewards to come."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from libra import Late
from libra.config import load_config
from libra.driver.session import Session
from libra.testing import FixedTurns
from libra.types import Episode


class Judged(FixedTurns):
    """The reward of `FixedTurns` is provisional."""

    def grade(self, episode: Episode) -> float | Late:
        return Late(fast=super().grade(episode))


def dies_in_its_step(run: str, driver: int, step: int, dask_worker: Any) -> None:
    """From now on the trainer kills ``driver`` and itself in the midst of ``step``."""
    replica = dask_worker.plugins[f"libra-{run}"].trainer.replica
    add = replica.gradient.accumulate

    def die(samples: Any, number: int, tally: Any) -> float:
        if number == step:
            os.kill(driver, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        return float(add(samples, number, tally))

    replica.gradient.accumulate = die


def main(config_file: str, step: str) -> None:
    """A driver that dies in the midst of a step."""
    with Session(load_config(Path(config_file)), resume=Path(config_file).with_name("demo").exists()) as session:
        found = session.client.scheduler_info(n_workers=-1)["workers"]
        (address,) = (each for each, worker in found.items() if worker["name"].startswith("train"))
        session.client.run(dies_in_its_step, session.config.run.name, os.getpid(), int(step), workers=[address])
        for _ in session.iterations():
            pass


if __name__ == "__main__":
    main(*sys.argv[1:])
