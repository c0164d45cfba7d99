"""Cost of durability, and time to resume, on the quick start's model and environment.

*Cost*: every durable call of a run is timed in its process: journal, groups, batch memberships,
store, versions, epoch, checkpoints. ``overhead_frac`` is their CPU seconds over the wall seconds of
the iterations: the share of one core. Publishing, checkpoints and packing are printed only.

*Resume*: a run's driver is killed (SIGKILL), and ``libra resume`` continues. ``resume_s``: from its
start to the first dispatch, Python, scheduler and workers included. Plain zarr then counts ``lost``
trajectories; ``regenerated_tokens`` are tokens of committed quanta that were
generated again, from the event log of both starts.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict, deque
from itertools import product
from pathlib import Path
from typing import Any

import zarr
from distributed import Worker
from distributed.diagnostics.plugin import WorkerPlugin

from benchmarks.report import Figure, command_parser, emit
from libra.config import load_config
from libra.driver.run_session import Session
from libra.store.event_log import read_events

GOAL_FRAC = 0.03
POLL_S = 0.02
LIMIT_S = 300.0
JOURNAL = ("append", "read", "remove")
DURABLE = (*JOURNAL, "group", "batch", "store", "epoch")


class Timers(WorkerPlugin):
    """Times every durable call of a worker process."""

    name = "durability-timers"

    def setup(self, worker: Worker) -> None:
        from libra.graph import batch_nodes, rollout_nodes
        from libra.store.start_records import Epoch
        from libra.store.trajectory_journal import Journal
        from libra.store.trajectory_store import TrajectoryStore
        from libra.train import checkpoint
        from libra.weights import WeightStore

        self.spent: dict[str, float] = defaultdict(float)
        for name in (*JOURNAL, "pack"):
            self._time(Journal, name, name)
        self._time(rollout_nodes, "write_group", "group")
        self._time(batch_nodes, "commit_batch", "batch")
        self._time(TrajectoryStore, "append", "store")
        self._time(Epoch, "check", "epoch")
        self._time(WeightStore, "publish", "publish")
        self._time(checkpoint, "save_checkpoint", "checkpoint")

    def _time(self, owner: Any, name: str, kind: str) -> None:
        function = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began_s = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent[kind] += time.thread_time() - began_s

        setattr(owner, name, timed)


def taken(dask_worker: Worker) -> dict[str, float]:
    return dict(dask_worker.plugins["durability-timers"].spent)


def settings(runs_dir: Path, name: str, options: argparse.Namespace) -> list[str]:
    given = f"run.dir={runs_dir}", f"run.name={name}", f"run.iterations={options.iterations}"
    return [*given, "evaluation.prompts=0", "cluster.dashboard_port=0", "observe.progress=false"]


def cost(runs_dir: Path, options: argparse.Namespace) -> dict[str, Figure]:
    with Session(load_config("libra/quickstart", settings(runs_dir, "cost", options))) as session:
        assert session.client is not None
        session.client.register_plugin(Timers())
        steps = session.iterations()
        next(steps)  # imports and first pages, which do not matter in a run of hours
        before = session.client.run(taken)
        began_s = time.perf_counter()
        deque(steps, maxlen=0)
        run_s = time.perf_counter() - began_s
        after = session.client.run(taken)
    total: dict[str, float] = defaultdict(float)
    for address, kinds in after.items():
        for kind, cpu_s in kinds.items():
            total[kind] += cpu_s - before.get(address, {}).get(kind, 0.0)
    for kind, cpu_s in sorted(total.items(), key=lambda item: -item[1]):
        print(f"  {kind:10s} CPU {cpu_s:6.3f} s ({cpu_s / run_s:.2%})")
    return {"overhead_frac": Figure(sum(total[kind] for kind in DURABLE) / run_s, "fraction", "lower", GOAL_FRAC)}


def libra(*arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", "from libra.cli.main import main; main()", *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)


def until(what: str, condition: Any, process: subprocess.Popen[bytes]) -> float:
    """Seconds until ``condition()`` holds; an error if the process ends, or takes too long, before."""
    began_s = time.perf_counter()
    while not condition():
        if process.poll() is not None or time.perf_counter() - began_s > LIMIT_S:
            process.kill()
            assert process.stderr is not None
            raise SystemExit(f"durability: {what} did not come: {process.stderr.read().decode()[-2000:]}")
        time.sleep(POLL_S)
    return time.perf_counter() - began_s


def dispatched(directory: Path, epoch: int) -> bool:
    path, current = directory / "events.jsonl", -1
    if not path.exists():
        return False
    for event in read_events(path).events:  # its older segments are files of their own
        if event["name"] == "run_started":
            current = event["epoch"]
        if event["name"] == "quantum_dispatched" and current == epoch:
            return True
    return False


def resume(runs_dir: Path, options: argparse.Namespace) -> dict[str, Figure]:
    directory = runs_dir / "killed"
    first = libra("run", "libra/quickstart", *settings(runs_dir, "killed", options), "checkpoint.every=2")
    batch = directory / "batches" / f"batch-{options.iterations // 2:06d}.json"
    until("the middle of the run", batch.exists, first)
    iteration = options.iterations // 2 + 1
    until("the next iteration", lambda: any((directory / "journal").glob(f"train-{iteration}-*")), first)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    second = libra("resume", str(directory))
    resume_s = until("a quantum after the resume", lambda: dispatched(directory, 1), second)
    _, said = second.communicate(timeout=LIMIT_S)
    if second.returncode:
        raise SystemExit(f"durability: libra resume ended with {second.returncode}: {said.decode()[-2000:]}")
    trainer = load_config(directory / "config.resolved.yaml").trainer
    group = zarr.open_group(directory / "trajectories.zarr", mode="r")
    rows = group.attrs["committed"]["trajectories"]  # type: ignore[index,call-overload]
    columns = [group[f"trajectory/{name}"][:rows].tolist() for name in ("iteration", "group", "sample")]  # type: ignore[index]
    ids = set(zip(*columns, strict=True))
    expected = set(product(range(options.iterations), range(trainer.prompts), range(trainer.group_size)))
    tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
    for event in read_events(directory / "events.jsonl").events:
        if event["name"] == "quantum_finished":
            tokens[event["key"].split("-e")[0], event["quantum"]].append(event["tokens"])
    again = sum(sum(counts[1:]) for counts in tokens.values())
    return {
        "resume_s": Figure(resume_s, "s", "lower", 30.0),
        "regenerated_tokens": Figure(float(again), "tokens", "lower", 0.0),
        "lost": Figure(float(len(expected - ids)), "trajectories", "lower", 0.0),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("durability", __doc__)
    parser.add_argument("--iterations", type=int, default=8, help="iterations of each run, at least 4 (default 8)")
    options = parser.parse_args(arguments)
    if options.iterations < 4:
        parser.error(f"--iterations: got {options.iterations}; it is at least 4, type --iterations 4")
    with tempfile.TemporaryDirectory(prefix="durability-") as name:
        print("cost:", flush=True)
        figures = cost(Path(name), options)
        print("resume:", flush=True)
        figures |= resume(Path(name), options)
    emit("durability", figures, arguments=arguments, as_json=options.json)
