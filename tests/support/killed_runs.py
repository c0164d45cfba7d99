"""A run that is killed in a step: its driver, trainer and workers, by SIGKILL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from libra.cluster.connection import present_workers
from libra.config import RunConfig, load_config
from libra.driver.run_session import Session


def killed_in_step(config_file: Path, step: int) -> None:
    """Run or resume ``config_file`` until its driver, trainer and workers are killed in a step."""
    with tempfile.TemporaryFile() as output:
        command = [sys.executable, __file__, str(config_file), str(step)]
        driver = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        code = driver.wait()
        with suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        output.seek(0)
        if code != -signal.SIGKILL:
            said = output.read().decode()[-2000:]
            raise RuntimeError(f"the driver ended with {code}, not killed in step {step}: {said}")


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
