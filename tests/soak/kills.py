"""Seeded kills of what trains, generates and fetches: no wrong update, and nothing consumed twice.

``python tests/soak/kills.py --seeds 20`` kills, in turn, by SIGKILL:

* ``core``: a rank of the training group in the middle of the sum of gradients;
* ``engine``: a rollout worker in the middle of a turn;
* ``fetch``: a rollout worker that has a part of new weights;
* ``hybrid``: a hybrid replica in the middle of its gradient (processes of their own, no run).

After each the run goes on to its end by itself, and then: every (iteration, group, sample) is in the store once and in one
batch; and the committed batches, replayed by undisturbed replicas from the first weights on, give the digest, loss and gradient
norm that each step of the run had. Of ``hybrid`` the merged gradient is compared with an undisturbed replica's, to 1e-12.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "support")]
import deaths
import numpy as np
import whole_run
from distributed import Client
from replaying import SAID, Replayer

import factories
from libra.cluster.connection import present_workers
from libra.cluster.local import local_cluster
from libra.config import RunConfig, config_from_dict
from libra.driver import submitted_graphs
from libra.driver.run_session import Session
from libra.store.event_log import read_events

KINDS = ("core", "engine", "fetch", "hybrid")
ITERATIONS, PROMPTS, GROUP_SIZE = 4, 2, 3
TRAIN_WORKERS = 2
HYBRID_STEPS = 9


@dataclass(frozen=True)
class Kill:
    """What is killed, and when; everything follows from the seed."""

    seed: int
    kind: str
    after: int  # iteration (hybrid: step) after which the victim is armed
    nth: int  # of the moments it could die in
    fraction: float
    victim: int
    eta: int

    @classmethod
    def of_seed(cls, seed: int) -> Kill:
        """Kinds in turn, the rest at random."""
        rng = random.Random(seed)
        return cls(
            seed, KINDS[seed % len(KINDS)], rng.randrange(ITERATIONS - 1), rng.randint(1, 6), rng.uniform(0.05, 0.95),
            rng.randrange(2), rng.randrange(2),
        )  # fmt: skip


def make_config(kill: Kill, directory: Path) -> RunConfig:
    """The run that is disturbed: two training ranks, two engines, weights and rows from peer to peer."""
    run = {"dir": str(directory), "name": f"kill{kill.seed}", "iterations": ITERATIONS}
    # Of the entropy there is a gradient in every step, whatever the rewards are.
    loss = {"prompts": PROMPTS, "group_size": GROUP_SIZE, "lr": 1e-3, "normalize_std": False, "entropy_coef": 0.01}
    return config_from_dict(
        {
            "run": run | {"seed": kill.seed, "eta": kill.eta},
            "environment": {"name": "libra.testing:FixedTurns"},
            "rollout": {"max_new_tokens": 6, "max_turns": 3, "ignore_eos": True, "slots": 8},
            "trainer": {**loss, "dispatch": ("peer", "storage")[kill.seed // len(KINDS) % 2]},
            "checkpoint": {"every": 2, "keep": 1},
            "weights": {"transfer": "peer"},
            "cluster": {"threads": 1, "dashboard_port": 0, "rollout_workers": 2, "train_workers": TRAIN_WORKERS},
            "observe": {"progress": False, "trackers": []},
        }
    )


class Stage:
    """What several cases need, started when the first of them does; a context manager."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._made: dict[str, Any] = {}

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._made:
            self._made[name] = self._stack.enter_context(make())
        return self._made[name]

    @property
    def client(self) -> Client:
        """Of a cluster whose nannies start a worker again that was killed."""
        config = make_config(Kill(0, "core", 0, 1, 0.5, 0, 0), Path())
        cluster = self._once("cluster", lambda: local_cluster(config))
        client: Client = self._once("client", lambda: Client(cluster))
        client.wait_for_workers(3 + TRAIN_WORKERS)
        return client

    def replayer(self, size: int) -> Replayer:
        replayer: Replayer = self._once(f"replayer {size}", lambda: Replayer(size))
        return replayer


def run_killed(kill: Kill, stage: Stage, directory: Path) -> dict[str, Any]:
    """A run, one worker of which is killed; what the checks found."""
    marker, client = directory / "killed", stage.client
    with Session(make_config(kill, directory), client=client) as session:
        rows = session.iterations()
        for row in rows:
            if row["iteration"] == kill.after:
                arm(kill, client, session.spec.run, marker)
    assert marker.exists(), "the moment never came, so nothing was tried"
    where = json.loads(marker.read_text())
    events = read_events(session.directory / "events.jsonl").events
    lost = [event["name"] for event in events if event["name"] in ("worker_lost", "gang_lost")]
    assert "worker_lost" in lost and ("gang_lost" in lost) == (kill.kind == "core"), lost
    steps = [json.loads(path.read_text()) for path in sorted((session.directory / "steps").glob("step-*.json"))]
    whole_run.check_stored_once(session.directory, ITERATIONS, PROMPTS, GROUP_SIZE)
    return {"killed": where, **check_steps(steps, stage.replayer(TRAIN_WORKERS).steps(session.directory))}


def arm(kill: Kill, client: Client, run: str, marker: Path) -> None:
    """Have the victim die at its moment; of engines and fetches whichever comes to it first."""
    workers = {str(w["name"]): address for address, w in present_workers(client).items()}
    engines = [workers["rollout-0"], workers["rollout-1"]]
    told: dict[str, Any] = {"run": run, "marker": str(marker)}
    if kill.kind == "core":
        victim = workers[f"train-{kill.victim}"]
        client.run(deaths.in_reduction, **told, during=kill.nth > 3, workers=[victim])
    elif kill.kind == "engine":
        client.run(deaths.in_turn, **told, nth=kill.nth, workers=engines)
    else:
        client.run(deaths.in_fetch, **told, fraction=kill.fraction, workers=engines)


def check_steps(steps: list[dict[str, Any]], again: list[dict[str, Any]]) -> dict[str, Any]:
    """Each step of the run is the one that undisturbed replicas take on the same batch, bit for bit."""
    assert len(steps) == len(again), f"{len(steps)} steps are on record, {len(again)} batches"
    for number, (step, other) in enumerate(zip(steps, again, strict=True)):
        for name in SAID:
            assert step[name] == other[name], f"step {number}: {name} {step[name]}, undisturbed {other[name]}"
    moved = sum(step["grad_norm"] > 0 for step in steps)
    assert moved, "no step had a gradient, so nothing could have gone wrong"
    return {"steps": len(steps), "moved": moved}


def hybrid_killed(kill: Kill, directory: Path) -> dict[str, Any]:
    """Core and two hybrids in processes; one hybrid dies in its gradient, and the merged one is that of a replica alone."""
    process = _group_process()
    settings = {"aggregation": ("token-mean", "seq-mean-token-sum")[kill.victim]}
    # Of the vocabulary that `group_process.make_batch` draws from.
    model_dir = factories.save_model(directory / "model", vocab_size=48)
    alone, core = process.Recorded(str(model_dir), settings), process.Recorded(str(model_dir), settings)
    pool = core.listen()
    running = [process.Process(model_dir, directory) for _ in range(2)]
    lost_at = None
    try:
        mortal, steady = running
        mortal.ask("serve", settings=settings, address=pool.address, die_at=kill.nth)
        steady.ask("serve", settings=settings, address=pool.address)
        for k in range(HYBRID_STEPS):
            if k:
                assert pool.wait_for(1 if lost_at is not None else 2)
            report, gradients = core.step(k)
            expected, theirs = alone.step(k)
            for ours, other in zip(gradients, theirs, strict=True):
                assert np.linalg.norm(ours - other) <= 1e-12 * np.linalg.norm(other), f"step {k}: another gradient"
            assert abs(report["grad_norm"] - expected["grad_norm"]) <= 1e-9 * expected["grad_norm"]
            if report["hybrids_lost"]:
                assert lost_at is None
                lost_at = k
        assert lost_at is not None, "the moment never came, so nothing was tried"
        assert mortal.popen.wait() < 0
        slices = steady.ask("leave")
    finally:
        for one in running:
            one.close()
        pool.close()
    return {"killed": {"step": lost_at}, "steps": HYBRID_STEPS, "slices_of_the_other": slices}


def _group_process() -> Any:
    """``tests/train/group_process.py``: a replica in a process of its own."""
    if "group_process" not in sys.modules:
        path = Path(__file__).parents[1] / "train" / "group_process.py"
        spec = importlib.util.spec_from_file_location("group_process", path)
        assert spec is not None and spec.loader is not None
        module = sys.modules["group_process"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["group_process"]


def run_case(kill: Kill, stage: Stage, directory: Path) -> dict[str, Any]:
    """Carry out one kill; AssertionError where something went wrong after it."""
    return hybrid_killed(kill, directory) if kill.kind == "hybrid" else run_killed(kill, stage, directory)


def main() -> int:
    """Carry out all of them, a line each; the number of those that went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="how many, from 0 on")
    parser.add_argument("--seed", type=int, nargs="+", help="these instead")
    options = parser.parse_args()
    kills = [Kill.of_seed(seed) for seed in options.seed or range(options.seeds)]
    failed: list[int] = []
    counts: Counter[str] = Counter()
    with Stage() as stage:
        for kill in kills:
            began_s = time.monotonic()
            with tempfile.TemporaryDirectory(prefix="kill-") as name:
                try:
                    found: Any = run_case(kill, stage, Path(name))
                    counts[kill.kind] += 1
                except Exception as error:  # noqa: BLE001 - whatever it is, the other seeds are tried too
                    failed.append(kill.seed)
                    found = f"FAILED: {type(error).__name__}: {error}"
            print(f"{kill}: {found}, {time.monotonic() - began_s:.0f} s", flush=True)
    print(json.dumps({"passed": dict(counts), "failed_seeds": failed}), flush=True)
    return len(failed)


# Records of groups are kept, whatever checkpoints there are: they are what is replayed.
submitted_graphs.prune_groups = lambda spec, first, before: before

if __name__ == "__main__":
    sys.exit(main())
