"""A long run on real processes, and what it leaves behind: memory of each process, files, seconds until a resume.

``python tests/soak/long_run.py --iterations 2000`` runs iterations of 64 short trajectories, with scheduler and driver in this
process as ``libra run`` has them, and prints one JSON object. A process's *growth* is the slope of a line through its samples
after the first ``--warm`` iterations, in bytes per trajectory. Every sample is taken after a collection of cyclic garbage: ``rss``
as it is, and ``trimmed`` after glibc has given back what it can, which tells fragments from objects.

``--samples FILE`` gets all samples, with objects by type; ``--trace`` adds bytes by line of code (tracemalloc; ten times slower).
"""

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client

from libra.cluster.connection import present_workers
from libra.cluster.local import local_cluster
from libra.config import RunConfig, config_from_dict
from libra.driver.run_session import Session
from libra.store.event_log import EventReader

PROMPTS, GROUP_SIZE = 16, 4
PER_ITERATION = PROMPTS * GROUP_SIZE


def make_config(directory: Path, iterations: int) -> RunConfig:
    """The cheapest run with all parts: the model that ships with Libra, two turns of two tokens."""
    return config_from_dict(
        {"run": {"name": "run", "dir": str(directory), "iterations": iterations, "eta": 1},
        "environment": {"name": "libra.testing:FixedTurns"}, "rollout": {"max_new_tokens": 2, "max_turns": 2,
        "ignore_eos": True, "slots": 32, "max_context_tokens": 128,},
        "trainer": {"prompts": PROMPTS, "group_size": GROUP_SIZE, "lr": 1e-5}, "checkpoint": {"every": 50, "keep": 1},
        "cluster": {"threads": 1, "tool_slots": 32, "dashboard_port": 0}, "observe": {"progress": False},}
    )  # fmt: skip


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def census(types: bool = True, trace: bool = False) -> dict[str, Any]:
    """Memory of this process, and what it holds: objects by type, and bytes by line of code where ``trace``."""
    gc.collect()
    found: dict[str, Any] = {"rss": rss_bytes()}
    ctypes.CDLL(None).malloc_trim(0)
    found["trimmed"] = rss_bytes()
    if types:
        found["types"] = dict(Counter(f"{type(o).__module__}.{type(o).__qualname__}" for o in gc.get_objects()))
    found["descriptors"] = len(list(Path("/proc/self/fd").iterdir()))
    if trace and not tracemalloc.is_tracing():  # the second sample has the lines
        tracemalloc.start(2)
    elif trace:
        snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(False, tracemalloc.__file__)])
        found["lines"] = {
            " < ".join(f"{frame.filename}:{frame.lineno}" for frame in reversed(each.traceback)): (each.size,
            each.count,) for each in snapshot.statistics("traceback") if each.size > 2000
        }  # fmt: skip
    return found


def containers(client: Client) -> dict[str, int]:
    """Lengths of what the scheduler and its plugin hold by task, trajectory or iteration."""
    assert client.cluster is not None
    scheduler = client.cluster.scheduler
    plugin: Any = scheduler.plugins["libra"]
    names = ("tasks", "task_groups", "task_prefixes", "computations", "transition_log")
    found = {name: len(getattr(scheduler, name)) for name in names}
    found["task_stream"] = len(scheduler.plugins["task-stream"].buffer)
    found["tracked"] = len(plugin.trajectories.tracked)
    found["futures"] = len(client.futures)
    return found


def directory_bytes(directory: Path) -> dict[str, int]:
    found: Counter[str] = Counter()
    for path in directory.rglob("*"):
        if path.is_file():
            found[path.relative_to(directory).parts[0]] += path.stat().st_size
    return dict(found)


def resume_s(directory: Path) -> float:
    """Seconds of ``libra resume`` of a finished run, in a process of its own: all that a start reads, and no iteration."""
    began_s = time.monotonic()
    command = [sys.executable, "-c", "from libra.cli.main import main; main()", "resume", str(directory)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.monotonic() - began_s


def growth(samples: list[dict[str, Any]], warm: int) -> dict[str, dict[str, float]]:
    """By process, bytes per trajectory after the warm-up: slopes of ``rss`` and ``trimmed``, and megabytes at the end."""
    kept = [sample for sample in samples if sample["iteration"] >= warm]
    if len(kept) < 2:
        return {}
    at = [sample["iteration"] * PER_ITERATION for sample in kept]
    found: dict[str, dict[str, float]] = {}
    for name in kept[-1]["processes"]:
        found[name] = {}
        for kind in ("rss", "trimmed"):
            values = [sample["processes"][name][kind] for sample in kept]
            found[name][f"{kind}_bytes_per_trajectory"] = round(float(np.polyfit(at, values, 1)[0]), 1)
            found[name][f"{kind}_mb"] = round(values[-1] / 1e6, 1)
    return found


def long_run(directory: Path, iterations: int, every: int, warm: int, trace: bool, out: Path | None) -> dict[str, Any]:
    """Run, or go on with the run that is there, and sample; returns the report. ``warm`` counts from where it begins."""
    config = make_config(directory, iterations)
    samples: list[dict[str, Any]] = []
    began_s, resume = time.monotonic(), (directory / "run").is_dir()
    with (
        local_cluster(config) as cluster,
        Client(cluster) as client,
        Session(config, client=client, resume=resume) as session,
    ):
        began_after_s, warm = time.monotonic() - began_s, warm + session.first
        for values in session.iterations():
            done = values["iteration"] + 1
            if done % every:
                continue
            look = (out is not None, trace and done >= warm)
            workers = client.run(census, *look)
            names = {address: str(worker["name"]) for address, worker in present_workers(client).items()}
            processes = {"driver": census(*look)} | {names[address]: found for address, found in workers.items()}
            at_s = round(time.monotonic() - began_s, 1)
            sample = {"iteration": done, "at_s": at_s, "processes": processes, "containers": containers(client)}
            if out is not None:
                with out.open("a") as file:
                    file.write(json.dumps(sample) + "\n")
            for found in processes.values():  # this process is measured too: of the samples it keeps the sizes
                for name in ("types", "lines"):
                    found.pop(name, None)
            samples.append(sample)
            megabytes = {name: round(found["rss"] / 1e6, 1) for name, found in processes.items()}
            print(f"iteration {done}, {at_s:.0f} s: RSS in MB {megabytes}", file=sys.stderr, flush=True)
    run, trajectories = directory / "run", iterations * PER_ITERATION
    return {
        "iterations": iterations, "trajectories": trajectories, "began_with": session.first,
        "began_after_s": round(began_after_s, 1), "wall_s": round(time.monotonic() - began_s, 1),
        "growth": growth(samples, warm), "containers": samples[-1]["containers"] if samples else {},
        "events": sum(1 for _ in EventReader(run / "events.jsonl").raw()), "disk_bytes_per_trajectory": {
        name: round(size / trajectories, 1) for name, size in directory_bytes(run).items()},
        "resume_s": round(resume_s(run), 2),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--every", type=int, default=25, help="iterations between two samples")
    parser.add_argument("--warm", type=int, default=350, help="iterations before the first sample that counts")
    parser.add_argument("--trace", action="store_true", help="say which lines of code allocated what was kept")
    parser.add_argument("--samples", type=Path, help="a file to which the samples are added, a line each")
    kept = "a directory for the run, which goes on if there is one; otherwise it is removed"
    parser.add_argument("--keep", type=Path, help=kept)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="long-run-") as name:
        directory = asked.keep or Path(name)
        print(json.dumps(long_run(directory, asked.iterations, asked.every, asked.warm, asked.trace, asked.samples)))


if __name__ == "__main__":
    main()
