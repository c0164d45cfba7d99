"""Soak cases: small runs on real processes, struck at seeded moments, resumed until they are done, and looked at from outside.

``python tests/soak/case.py SEED [SEED ...]`` runs a case for each seed, which is struck once; with ``--together N`` the moments of
N seeds come in one run, one after another. With ``--turning`` steps are streamed, an engine turns in every tail, and SIGKILL comes
in mid-turn and in mid-wave. A moment is a stage (before it or after it, the nth time) and what happens then:

* SIGKILL of the driver, of the scheduler, of a training, rollout or tool worker, or of a nanny that is a process of its own;
* ``disk``: the run's file system is full; there is space again when `libra` has ended;
* ``stop``: SIGSTOP of driver, scheduler or a worker, and SIGCONT some seconds later.

Every start has another PYTHONHASHSEED. A driver that ended before the run did is followed by ``libra resume``; everything else has
to go on by itself. Then each (iteration, group, sample) is stored once and consumed by one batch, each quantum was reported once,
no file is damaged, and (even seeds, and ``--together``) undisturbed replicas that replay the committed batches come to the same
gradient norms and versions. Of runs whose engines turn each batch has the groups of its own iteration, the log explains every
decision, and an undisturbed replica comes to the same weights up to the rounding of sums.

Clusters serve case after case, as a shared one does; one that a case killed, or failed on, is replaced.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from processes import Cluster, may_mount, place_of_a_run, why_no_small_disk
from replaying import Replayer, check_published

from faults import STAGES, STRUCK, TURNS, WORKERS
from libra.config import RunConfig, load_config, resolve_model
from libra.policy import tail
from libra.store import run_files
from libra.store.trajectory_journal import Journal

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
import streamed_runs
import whole_run

ITERATIONS, PROMPTS, GROUP_SIZE, MAX_TURNS = 4, 2, 2, 3
WIDE = 6
"""Prompts of a batch where engines turn."""
TURNING_KINDS = ("driver", "train-0", "rollout-0", "rollout-1")
KINDS = ("driver", "scheduler", "train-0", "rollout-0", "tool-0", "nanny", "disk", "stop")
STOP_S = 6
"""At most so many seconds is a process stopped."""
OFTEN = {"generation": 24, "action": 16, "group": 6, "batch": 3, "step": 3, "checkpoint": 3, "publish": 4}
"""The highest ``nth`` of each stage in a run of `ITERATIONS`."""
SPARE_STARTS = 3
LIMIT_S, MORE_LIMIT_S = 300.0, 40.0
"""For a run that is struck once, and more for each other moment: a hang is a failure, and slowness on a busy machine is not."""


@dataclass(frozen=True)
class Moment:
    """When something happens, and what; ``stop_s``: seconds until SIGCONT, 0: SIGKILL."""

    stage: str
    moment: str
    nth: int
    victim: str
    stop_s: int

    @classmethod
    def of(cls, seed: int, rng: random.Random) -> Moment:
        """Stages and kinds in turn, so that 56 seeds have every pair; the rest at random."""
        stage, victim, stop_s = STAGES[seed % len(STAGES)], KINDS[seed % len(KINDS)], 0
        moment, nth = rng.choice(("before", "after")), rng.randint(1, OFTEN[stage])
        if victim == "nanny":
            victim = f"nanny of {rng.choice(WORKERS)}"
        if victim == "stop":
            victim, stop_s = rng.choice(("driver", "scheduler", *WORKERS)), rng.randint(1, STOP_S)
        return cls(stage, moment, nth, victim, stop_s)

    @classmethod
    def in_a_turn(cls, seed: int, rng: random.Random) -> Moment:
        """24 seeds have every pair; all are killed."""
        stage, victim = TURNS[seed % len(TURNS)], TURNING_KINDS[seed // len(TURNS) % len(TURNING_KINDS)]
        return cls(stage, rng.choice(("before", "after")), 1, victim, 0)


@dataclass(frozen=True)
class Case:
    """A run and what happens to it; everything follows from the seed."""

    seed: int
    moments: tuple[Moment, ...]
    eta: int
    apart: tuple[str, ...]
    """Workers whose nannies are processes of their own."""
    iterations: int = ITERATIONS
    replayed: bool = True
    turning: bool = False

    @classmethod
    def of_seed(cls, seed: int, *, turning: bool = False) -> Case:
        """Struck once."""
        rng = random.Random(seed)
        if turning:
            return cls(seed, (Moment.in_a_turn(seed, rng),), 0, (), turning=True)
        moment = Moment.of(seed, rng)
        return cls(seed, (moment,), rng.randint(0, 1), _apart([moment]), replayed=seed % 2 == 0)

    @classmethod
    def together(cls, seeds: list[int], *, turning: bool = False) -> Case:
        """One run with the moments of all ``seeds``; each of several comes within about one iteration, so that it is short."""
        if len(seeds) == 1:
            return cls.of_seed(seeds[0], turning=turning)
        cases = [cls.of_seed(seed, turning=turning) for seed in seeds]
        moments = [moment for case in cases for moment in case.moments]
        moments = [replace(m, nth=1 + (m.nth - 1) % max(1, OFTEN.get(m.stage, 1) // 4)) for m in moments]
        eta = 0 if turning else (seeds[0] // len(seeds) + 1) % 2
        iterations = 4 + 3 * len(moments) // 2
        return cls(seeds[0], tuple(moments), eta, _apart(moments), iterations, turning=turning)

    @property
    def prompts(self) -> int:
        return WIDE if self.turning else PROMPTS

    @property
    def small_disk(self) -> bool:
        """Whether it needs a file system that can be filled."""
        return any(moment.victim == "disk" for moment in self.moments)

    def __str__(self) -> str:
        stops = [f"{m.victim} stopped {m.stop_s} s" if m.stop_s else m.victim for m in self.moments]
        struck = [f"{who} {m.moment} {m.stage} {m.nth}" for who, m in zip(stops, self.moments, strict=True)]
        return f"{self.seed}: {'; '.join(struck)} (eta {self.eta})"


def _apart(moments: list[Moment]) -> tuple[str, ...]:
    return tuple(name for name in WORKERS if f"nanny of {name}" in {moment.victim for moment in moments})


def write_config(case: Case, directory: Path) -> Path:
    """The run of a case, as a user would write it."""
    path = directory / "soak.yaml"
    run = {"dir": str(directory), "name": "run", "iterations": case.iterations, "eta": case.eta, "seed": case.seed}
    settings: dict[str, Any] = {
        "run": run,
        "environment": {"name": "libra.testing:FixedTurns"},
        "rollout": {"max_new_tokens": 4, "max_turns": MAX_TURNS, "ignore_eos": True, "slots": 8},
        "trainer": {"prompts": PROMPTS, "group_size": GROUP_SIZE, "lr": 1e-3},
        "checkpoint": {"every": 2, "keep": 1},
        "cluster": {"threads": 1, "dashboard_port": 0},
        "observe": {"progress": False, "trackers": []},
    }
    if case.turning:
        for section, changes in _turning(case).items():
            settings[section] = settings.get(section, {}) | changes
    path.write_text(yaml.safe_dump(settings))
    return path


def _turning(case: Case) -> dict[str, Any]:
    """Every second seed with parts of turns and a pool of KV. A pass takes as long for eight as for one: two fit on one engine."""
    engines = [{"count": 2, "threads": 1, "min_pass_s": 0.05}]
    return {
        "environment": {"name": "tails:SlowTail", "args": {"groups": WIDE, "seconds": 1.5}},
        "rollout": {"chunk_tokens": 3, "kv_host_gib": 0.1} if case.seed % 2 else {},
        "trainer": {"prompts": WIDE, "lr": 1e-5, "streaming": "on", "turning": "on"},
        "planner": {"change_cost_s": 0.0},
        "cluster": {"engines": engines, "hybrid_workers": 1},
    }


class Soak:
    """What several cases share, started when the first of them needs it; ``keep`` gets directories of cases that failed."""

    def __init__(self, keep: Path | None = None) -> None:
        self._clusters: dict[tuple[Any, ...], Cluster] = {}
        self._replayer: Replayer | None = None
        self._keep = keep

    def __enter__(self) -> Soak:
        return self

    def __exit__(self, *error: Any) -> None:
        for cluster in self._clusters.values():
            cluster.stop()
        if self._replayer is not None:
            self._replayer.__exit__()

    def run(self, case: Case) -> dict[str, Any]:
        """Run, strike, resume until done; what the checks found. AssertionError where something went wrong."""
        with place_of_a_run(case.small_disk) as directory:
            config = write_config(case, directory)
            which = (case.turning, *case.apart)
            cluster = self._clusters.get(which)
            if cluster is None:
                cluster = self._clusters[which] = Cluster(config, case.apart, random.Random(case.seed))
            try:
                return self._run(case, cluster, directory, config)
            except BaseException:
                if self._keep is not None:
                    self._keep.mkdir(exist_ok=True)
                    kept = tempfile.mkdtemp(prefix=f"case-{case.seed}-", dir=self._keep)
                    shutil.copytree(directory, kept, symlinks=True, dirs_exist_ok=True)
                    shutil.copy(cluster.log, kept)
                self._clusters.pop(which).stop()
                raise

    def _run(self, case: Case, cluster: Cluster, directory: Path, config: Path) -> dict[str, Any]:
        codes: list[int] = []
        limit_s = LIMIT_S + MORE_LIMIT_S * (len(case.moments) - 1)
        began_s = time.monotonic()
        cluster.plan(directory, [asdict(moment) for moment in case.moments])
        while not codes or codes[-1] != 0:
            left_s = limit_s - (time.monotonic() - began_s)
            assert len(codes) <= len(case.moments) + SPARE_STARTS, f"not done after starts {codes}: {_tail(cluster)}"
            cluster.ensure()
            try:
                codes.append(cluster.drive(directory, config, case.replayed, left_s))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"hangs after starts {codes}: {_tail(cluster)}") from None
        struck = len(list((directory / STRUCK).iterdir()))
        assert struck == len(case.moments), f"moments from {case.moments[struck]} on never came"
        found = {"starts": len(codes), **check_run(case, directory / "run")}
        if case.turning:
            found |= check_turned(case, directory / "run")
        elif case.replayed:
            self._replayer = self._replayer or Replayer(1)
            found |= check_published(directory / "run", self._replayer.steps(directory / "run"))
        return found


def check_run(case: Case, directory: Path) -> dict[str, Any]:
    """What plain zarr and the logs say of a finished run; AssertionError where something was lost or done twice."""
    whole_run.check_stored_once(directory, case.iterations, case.prompts, GROUP_SIZE)
    columns, num = whole_run.columns(directory), case.iterations * case.prompts * GROUP_SIZE
    assert len(columns["batch"]) == num, "stored, and in no batch"
    assert (columns["length"] > 0).all() and np.isfinite(columns["reward"]).all()
    assert (columns["num_turns"] == MAX_TURNS).all()

    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if "reward" in row]
    assert steps == list(range(case.iterations)), f"the reward curve has steps {steps}"
    left = Journal(directory / "journal").trajectories()
    assert not left, f"records of quanta that nothing will remove: {left}"
    damages = run_files.check_run(directory).damages
    assert not damages, f"files are damaged: {damages}"
    checkpoint = sorted((directory / "checkpoints").glob("step-*"))[-1]
    assert checkpoint.name == f"step-{case.iterations:06d}"
    return {"epochs": len(list((directory / "epochs").iterdir())), "trajectories": num}


def check_turned(case: Case, directory: Path) -> dict[str, Any]:
    """What only a run whose engines turn has to show; AssertionError where it does not."""
    config: RunConfig = load_config(str(directory / "config.resolved.yaml"))
    model = config.model.model_copy(update={"path": str(resolve_model(config.model.path))})
    config = config.model_copy(update={"model": model})
    tail.price_s = lambda stage_s: 0.0  # type: ignore[assignment]
    streamed_runs.check_whole(directory, case.iterations, config)
    streamed_runs.check_taken_again(directory, config, case.iterations, alone=False)
    turns = Counter(event["to"] for event in whole_run.events_of(directory, "engine_turned"))
    hybrids = sum(event["hybrids"] for event in whole_run.events_of(directory, "wave_trained"))
    assert turns["training"] and turns["rollout"], f"turns: {turns}"
    return {"turns": dict(turns), "slices": hybrids}


def _tail(cluster: Cluster) -> str:
    return cluster.log.read_text()[-4000:]


def main() -> int:
    """Run the cases one after the other, a line each; the number of those that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--together", type=int, default=1, metavar="N", help="the moments of so many seeds in one run")
    parser.add_argument("--turning", action="store_true", help="streamed steps, and an engine that turns in every tail")
    parser.add_argument("--keep", type=Path, help="where the directories of cases that fail are copied to")
    asked = parser.parse_args()
    parts = [asked.seeds[i : i + asked.together] for i in range(0, len(asked.seeds), asked.together)]
    cases = [Case.together(part, turning=asked.turning) for part in parts]
    lacking = ""
    if any(case.small_disk for case in cases):
        may_mount()
        lacking = why_no_small_disk()
    if lacking:
        print(f"full disks are left out: a file system cannot be mounted: {lacking}", flush=True)
        cases = [replace(c, moments=tuple(m for m in c.moments if m.victim != "disk")) for c in cases]
        cases = [case for case in cases if case.moments]
    failed: list[int] = []
    with Soak(asked.keep) as soak:
        for case in cases:
            began_s = time.monotonic()
            try:
                found: Any = soak.run(case)
            except AssertionError as error:
                failed.append(case.seed)
                found = f"FAILED: {error}"
            print(f"{case}: {found}, {time.monotonic() - began_s:.0f} s", flush=True)
    print(f"{len(cases) - len(failed)} of {len(cases)} cases passed, failed: {failed}", flush=True)
    return len(failed)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
