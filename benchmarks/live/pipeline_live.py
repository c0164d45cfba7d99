"""Seconds per iteration of live runs whose steps are streamed, over runs whose steps are not.

Three sides take turns within one cluster of two engines, one of which may train, and one trainer:
steps that are not streamed, streamed ones, and streamed ones whose tail leaves that engine to
training (``trainer.turning``). ``streaming_ratio`` is the first over the second, ``turning_ratio``
the second over the third: the median over iterations of the same number in their runs.
``live_over_simulated``: of both ratios the larger factor between live and simulated
(`benchmarks.live.pipeline_predicted`). ``gradients_equal``: the share of the last streamed steps,
one with and one without turning, whose gradient and weights equal the whole step's on the same
record to 1e-12 in float64.

Real are scheduler, workers, groups, records, waves and their gradients, changes of roles, and the
publication of each version. Emulated are the seconds of generations
(`benchmarks.live.tailed_engines`): on few cores engines and trainer would share them, and nothing
could overlap. Each engine has slots for half of the trajectories: both are needed at first, one in
the tail. The first iteration of a run does not count. A first change of roles is assumed to cost
`CHANGE_S`, later ones what the run measured.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from distributed import Client

from benchmarks.live.pipeline_predicted import RunSeen, group_tokens, measured, seen, simulated_s
from benchmarks.live.random_training import save_random_model
from benchmarks.live.tailed_engines import MOST_TOKENS
from benchmarks.report import MIN_PAIRS, Figure, command_parser, emit
from libra.cluster.local import local_cluster
from libra.config import RunConfig, config_from_dict, load_config
from libra.config.model_paths import resolve_model
from libra.driver.run_session import run
from libra.sim.from_run import run_setting
from libra.store.event_log import read_events
from libra.store.run_records import in_waves, read_batch_facts
from libra.store.trajectory_store import TrajectoryStore
from libra.train import Replica, TrainSettings
from libra.types import Trajectory
from libra.weights import WeightStore
from libra.worker.model_files import link_model

SAME = 1e-12
"""Norm of a difference over the norm, up to which gradients and weights count as equal."""


class Apart(NamedTuple):
    """Norm of the difference over the norm, of unclipped gradients and of weights after the step."""

    gradient: float
    weights: float


def recorded_waves(directory: Path, batch: int) -> list[list[Trajectory]]:
    """Stored trajectories of each wave of a committed batch, without those that the step left out."""
    rows = read_batch_facts(directory / "batches", batch)["groups"]
    with TrajectoryStore.open(directory / "trajectories.zarr", mode="r") as store:
        ids = zip(*(store.columns()[name].tolist() for name in ("split", "iteration", "group", "sample")), strict=True)
        index = {tuple(each): number for number, each in enumerate(ids)}
        waves = []
        for wave in in_waves(rows):
            members = []
            for row in wave:
                for sample, (advantage, trains) in enumerate(zip(row["advantages"], row["trains"], strict=True)):
                    one = store.trajectory(index["train", row["iteration"], row["group"], sample])
                    one.advantage = advantage
                    if trains or not one.failure.trains:
                        members.append(one)
            waves.append(members)
    return waves


def apart(directory: Path, batch: int, threads: int) -> Apart:
    """Take step ``batch`` of a streamed run in its waves and whole, with a fresh optimizer."""
    config, waves = load_config(directory / "config.resolved.yaml"), recorded_waves(directory, batch)
    assert waves, f"{directory}: step {batch} was not streamed"
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = Path(resolve_model(config.model.path))
        link_model(model_dir, WeightStore(directory / "weights").get(batch), Path(scratch))
        whole, streamed = (_Recorded(Path(scratch), model_dir, config, threads) for _ in range(2))
    whole.replica.step([one for wave in waves for one in wave], 0)
    for wave in waves:
        streamed.replica.accumulate(wave, 0)
    streamed.replica.close(0)
    ours, theirs = ([*each.replica.weights().values()] for each in (streamed, whole))
    return Apart(_apart(streamed.gradient, whole.gradient), _apart(ours, theirs))


class _Recorded:
    """A replica in float64 that keeps the gradient which it applies, before clipping."""

    def __init__(self, weights_dir: Path, model_dir: Path, config: RunConfig, threads: int) -> None:
        settings = TrainSettings.of_run(config)
        self.replica = Replica(
            weights_dir, settings, dtype=torch.float64, threads=threads, seed=config.run.seed, base_dir=model_dir
        )
        self.gradient: list[torch.Tensor] = []
        self._apply = self.replica.apply_gradient
        self.replica.apply_gradient = self._keep  # type: ignore[method-assign]

    def _keep(self, step: int, tally: Any) -> None:
        found = (parameter.grad for parameter in self.replica.optimized().values())
        self.gradient = [gradient.clone() for gradient in found if gradient is not None]
        self._apply(step, tally)


def _apart(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    difference, norm = (
        torch.cat([tensor.flatten() for tensor in tensors])
        for tensors in ([a - b for a, b in zip(ours, theirs, strict=True)], theirs)
    )
    return float(torch.linalg.norm(difference) / torch.linalg.norm(norm))


TURNS = 4
PROMPTS, GROUP = 12, 4
PAYLOAD_CHARS = 48
"""Length of a tool's answer; an unstreamed step then takes about 1.2 rollouts."""
CHANGE_S = 2.0
GOALS = {"streaming_ratio": 1.15, "turning_ratio": 1.05, "live_over_simulated": 1.15, "gradients_equal": 1.0}
RATIOS = {"streaming_ratio": ("off", "streaming"), "turning_ratio": ("streaming", "turning")}
HYBRID = "rollout-0"
SIDES = {"off": ("off", "off"), "streaming": ("on", "off"), "turning": ("on", "on")}
"""``trainer.streaming`` and ``trainer.turning`` by side."""
STREAMED = ("streaming", "turning")


def made_model(directory: Path) -> Path:
    """A random model whose gradient takes seconds, with the tokenizer of the one that ships."""
    from transformers import AutoConfig

    shipped = Path(resolve_model("libra/tiny-arithmetic"))
    shutil.copytree(shipped, directory)
    for weights in directory.glob("*.safetensors"):
        weights.unlink()
    config = AutoConfig.from_pretrained(shipped)
    config.update({"hidden_size": 320, "intermediate_size": 960, "max_position_embeddings": 1024})
    save_random_model(config, directory)
    return directory


def configured(model: Path, directory: Path, name: str, side: str, iterations: int) -> RunConfig:
    streaming, turning = SIDES[side]
    return config_from_dict(
        {
            "run": {"name": name, "dir": str(directory), "iterations": iterations},
            "model": {"path": str(model)},
            "environment": {
                "name": "libra.testing:FixedTurns",
                "args": {"inline": True, "payload_chars": PAYLOAD_CHARS},
            },
            "rollout": {
                "engine": "benchmarks.live.tailed_engines:PacedEngine",
                "max_turns": TURNS, "max_new_tokens": MOST_TOKENS, "max_context_tokens": 3 * TURNS * MOST_TOKENS,
                "slots": PROMPTS * GROUP // 2, "ignore_eos": False,
            },
            "trainer": {
                "prompts": PROMPTS, "group_size": GROUP, "lr": 1e-6, "streaming": streaming, "turning": turning,
            },
            "planner": {"change_cost_s": CHANGE_S}, "checkpoint": {"every": 0},
            "cluster": {"rollout_workers": 2, "hybrid_workers": 1, "threads": 1, "dashboard_port": 0},
            "observe": {"progress": False, "trackers": []},
        }
    )  # fmt: skip


class Sides:
    """Runs of all sides on one cluster."""

    def __init__(self, model: Path, directory: Path, client: Client, iterations: int) -> None:
        self._model, self._directory, self._client, self._iterations = model, directory, client, iterations
        self.gradients_s: list[float] = []  # of steps that are not streamed
        self.seen: dict[str, list[RunSeen]] = {side: [] for side in SIDES}
        self.last: dict[str, Path] = {}

    def config(self, side: str, name: str) -> RunConfig:
        return configured(self._model, self._directory, name, side, self._iterations + 1)

    def run(self, side: str) -> None:
        config = self.config(side, f"{side}_{len(self.seen[side])}")
        rows = run(config, client=self._client).iterations[1:]
        directory = self._directory / config.run.name
        self.seen[side].append(seen(read_events(directory / "events.jsonl").events))
        if side == "off":
            self.gradients_s += [float(row["forward_backward_s"]) for row in rows]
        if side in self.last:
            shutil.rmtree(self.last[side])
        self.last[side] = directory
        print(f"{side}:", " ".join(f"{seconds:.2f}" for seconds in self.seen[side][-1].iterations_s()), "s", flush=True)

    def figures(self) -> dict[str, Figure]:
        """Figures of all rounds."""
        setting = run_setting(self.last["off"])
        prices = measured(self.seen, self.gradients_s, group_tokens(setting.workload), CHANGE_S)
        configs = {side: self.config(side, side) for side in SIDES}
        simulated = simulated_s(setting, prices, configs, frozenset({HYBRID}))
        live = {side: [s for each in runs for s in each.iterations_s()] for side, runs in self.seen.items()}
        again = [apart(self.last[side], self._iterations, os.cpu_count() or 1) for side in STREAMED]
        found, misses = {}, []
        for name, (first, second) in RATIOS.items():
            ratio = statistics.median(a / b for a, b in zip(live[first], live[second], strict=True))
            predicted = simulated[first] / simulated[second]
            misses.append(max(ratio / predicted, predicted / ratio))
            found[name] = Figure(ratio, "ratio", "higher", GOALS[name])
        found["live_over_simulated"] = Figure(max(misses), "ratio", "lower", GOALS["live_over_simulated"])
        print("seconds simulated:", simulated)
        print("gradients and weights apart:", *again)
        equal = statistics.mean(max(each) <= SAME for each in again)
        return found | {"gradients_equal": Figure(equal, "share", "higher", GOALS["gradients_equal"])}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("pipeline_live", __doc__)
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side (default 2)")
    parser.add_argument("--iterations", type=int, default=3, help="iterations of a run that count (default 3)")
    given = parser.parse_args(arguments)
    if given.rounds < 1 or given.rounds * given.iterations < MIN_PAIRS:
        parser.error(f"--rounds {given.rounds}: a comparison rests on at least {MIN_PAIRS} iterations of each side")
    with tempfile.TemporaryDirectory() as scratch:
        model, directory = made_model(Path(scratch) / "model"), Path(scratch)
        first = configured(model, directory, "first", "off", 1)
        with local_cluster(first) as cluster, Client(cluster) as client:
            sides = Sides(model, directory, client, given.iterations)
            for _ in range(given.rounds):
                for side in SIDES:
                    sides.run(side)
        figures = sides.figures()
    emit("pipeline_live", figures, arguments=arguments, as_json=given.json)
