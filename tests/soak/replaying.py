"""The steps of a finished run taken again from its committed batches, undisturbed: by ``size`` processes in one group.

``python replaying.py RANK SIZE PORT`` reads run directories from its standard input and answers each with its steps as JSON.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

SAID = ("digest", "loss", "grad_norm", "action_tokens", "sequences")


def replay(directory: Path, group: Any) -> list[dict[str, Any]]:
    """What each step of a run comes to."""
    from libra.config import load_config, resolve_model
    from libra.store.run_records import read_batch_facts
    from libra.worker.run_spec import RunSpec
    from libra.worker.training.batch_rows import members_of
    from libra.worker.training.worker_trainer import make_replica

    config = load_config(str(directory / "config.resolved.yaml"))
    model_dir = Path(resolve_model(config.model.path))
    spec = RunSpec(config.run.name or "", 0, directory, str(model_dir), config)
    replica = make_replica(spec, model_dir, group)
    steps = []
    for batch in range(config.run.iterations):
        rows = read_batch_facts(spec.batches_dir, batch)["groups"]
        report = replica.step(members_of({"members": rows}, spec.groups_dir, of_the_step=True), batch)
        steps.append({name: report.as_dict()[name] for name in SAID})
    return steps


class Replayer:
    """The processes, kept for several runs; a context manager."""

    def __init__(self, size: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._processes = [
            subprocess.Popen([sys.executable, __file__, str(rank), str(size), str(port)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, env=environment,) for rank in range(size)
        ]  # fmt: skip

    def __enter__(self) -> Replayer:
        return self

    def __exit__(self, *error: Any) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def steps(self, directory: Path) -> list[dict[str, Any]]:
        """Of one run; every process has to come to the same."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{directory}\n")
            process.stdin.flush()
        answers = [json.loads(process.stdout.readline()) for process in self._processes if process.stdout is not None]
        assert all(answer == answers[0] for answer in answers), "replicas of one group disagree"
        found: list[dict[str, Any]] = answers[0]
        return found


def check_published(directory: Path, again: list[dict[str, Any]]) -> dict[str, Any]:
    """Of a run with one training worker: every version that is still kept has the digest of the undisturbed step."""
    from libra.weights import WeightStore

    store = WeightStore(directory / "weights")
    kept = [number for number in store.numbers() if number > 0]
    assert kept and max(kept) == len(again)
    for number in kept:
        assert store.get(number).digest == again[number - 1]["digest"], f"version {number} is another"
    metrics = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    rows = {row["step"]: row for row in metrics if "reward" in row}
    for number, step in enumerate(again):
        assert rows[number].get("grad_norm") == step["grad_norm"], f"step {number}: another gradient, or none on record"
    return {"steps": len(again), "versions": kept}


def main(rank: int, size: int, port: int) -> None:
    """Answer until the standard input ends."""
    import torch

    from libra.train.replica_group import Rendezvous, TrainGroup

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    torch.set_num_threads(1)
    token = "of replicas without a secret"
    rendezvous = Rendezvous(token, "127.0.0.1", port) if size > 1 and rank == 0 else None
    group = TrainGroup.join(("127.0.0.1", port), rank, size, token=token) if size > 1 else None
    for line in sys.stdin:
        answers.write(json.dumps(replay(Path(line.strip()), group)) + "\n")
        answers.flush()
    if rendezvous is not None:
        rendezvous.close()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
