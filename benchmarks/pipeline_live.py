"""Seconds per iteration of live runs whose steps are streamed, over runs whose steps are not: `python -m benchmarks.pipeline_live`.

Three sides take turns within one cluster of two engines, one of which may train, and one trainer: steps that are not streamed,
streamed ones, and streamed ones whose tail leaves that engine to training (``trainer.turning``). ``streaming_ratio`` is the first
over the second, ``turning_ratio`` the second over the third. ``live_over_simulated`` says by how much the simulator misses
them: of both ratios the larger factor between live and simulated (`benchmarks.pipeline_predicted`), in whichever direction.

Real are scheduler, workers, groups, records, the waves and their gradients, changes of roles, and the publication of each version,
which engines load and check. Emulated are the seconds of generations: an engine waits for as long as its tokens would take, instead
of computing them. On a machine with few cores engines and trainer would otherwise share them, and nothing could overlap. So two
processes compute at once at most, the trainer and the engine that turned.

A trajectory is several turns long, and its length has a long tail; lengths are the same on all sides. Each engine has slots for
half of the trajectories: both are needed at first, one in the tail. The first iteration of a run, in which everything is loaded,
does not count. A first change of roles is assumed to cost `CHANGE_S`, later ones what the run measured.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import shutil
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client

from benchmarks.pipeline_predicted import measured, simulated_s
from benchmarks.random_training import save_random_model
from benchmarks.report import Figure, Pairs, command_parser, emit
from libra.cluster.local import local_cluster
from libra.config import RunConfig, config_from_dict
from libra.config.model_paths import resolve_model
from libra.driver.session import run
from libra.rollout.transformers_engine import TransformersEngine
from libra.sim.from_run import RunSetting, run_setting
from libra.store.event_log import read_events
from libra.types import EngineCapacity, StepSeconds, StopReason, TurnOutput, TurnRequest

TOKEN_S = 0.015
"""Emulated seconds of a token, whatever the batch: decoding is bound by memory traffic."""
TURNS = 4
MEDIAN_TOKENS, SIGMA, TURN_SIGMA = 15.0, 0.7, 0.25
"""Lognormal tokens of a turn, SIGMA among trajectories and TURN_SIGMA among turns of one: P99 over median of trajectories is 5.1,
as in agents' traces, before turns are cut."""
MOST_TOKENS = 64
"""Of a turn."""
PROMPTS, GROUP = 12, 4
PAYLOAD_CHARS = 48
"""Of what a tool answers: it is trained on and not generated, so that an unstreamed step takes about 1.2 rollouts."""
CHANGE_S = 2.0
GOALS = {"streaming_ratio": 1.15, "turning_ratio": 1.05, "live_over_simulated": 1.15}
RATIOS = {"streaming_ratio": ("off", "streaming"), "turning_ratio": ("streaming", "turning")}
HYBRID = "rollout-0"
SIDES = {"off": ("off", "off"), "streaming": ("on", "off"), "turning": ("on", "on")}
"""``trainer.streaming`` and ``trainer.turning`` by side."""


class PacedEngine(TransformersEngine):
    """The transformers engine, with random tokens after emulated seconds in place of forward passes."""

    def __init__(self, model_dir: Path, *, slots: int, max_context_tokens: int, version: int) -> None:
        super().__init__(model_dir, slots=slots, max_context_tokens=max_context_tokens, version=version, threads=1)

    async def generate(self, request: TurnRequest) -> TurnOutput:
        """Tokens by trajectory and turn only."""
        rng = np.random.default_rng(request.seed)
        count = min(request.max_new_tokens, num_tokens(request.trajectory_id, request.turn))
        await asyncio.sleep(count * TOKEN_S)
        tokens = rng.integers(32, 96, count).astype(np.int32)
        tokens[-1] = request.stop_ids[0] if request.stop_ids else tokens[-1]
        versions = np.full(count, self.version, np.int32)
        logp = np.full(count, -math.log(96), np.float32)
        return TurnOutput(tokens, logp, versions, versions.copy(), StopReason.STOP, busy_s=count * TOKEN_S)

    def capacity(self) -> EngineCapacity:
        """With the emulated seconds: a token's, whatever the batch."""
        return replace(super().capacity(), steps=StepSeconds(TOKEN_S, 0.0, 0.0, 0.0, num_steps=1, error_frac=0.0))


def num_tokens(trajectory: str, turn: int) -> int:
    """Tokens of a turn, at least 2: those of a typical turn of this trajectory, and the turn's own deviation."""
    parts = [trajectory, f"{trajectory}/{turn}"]
    seeds = [int.from_bytes(hashlib.blake2b(part.encode(), digest_size=8).digest()) for part in parts]
    whole, own = (np.random.default_rng(seed).standard_normal() for seed in seeds)
    return min(MOST_TOKENS, max(2, round(MEDIAN_TOKENS * math.exp(SIGMA * whole + TURN_SIGMA * own))))


def made_model(directory: Path) -> Path:
    """A random model whose gradient takes seconds, with the tokenizer of the one that ships."""
    from transformers import AutoConfig

    shipped = Path(resolve_model("libra/tiny-arithmetic"))
    shutil.copytree(shipped, directory)
    for weights in directory.glob("*.safetensors"):
        weights.unlink()
    config = AutoConfig.from_pretrained(shipped)
    config.update({"hidden_size": 384, "intermediate_size": 1152, "max_position_embeddings": 1024})
    save_random_model(config, directory)
    return directory


def configured(model: Path, directory: Path, name: str, side: str, iterations: int) -> RunConfig:
    """One run of a side."""
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
                "engine": "benchmarks.pipeline_live:PacedEngine",
                "max_turns": TURNS,
                "max_new_tokens": MOST_TOKENS,
                "max_context_tokens": 3 * TURNS * MOST_TOKENS,
                "slots": PROMPTS * GROUP // 2,
            },
            "trainer": {
                "prompts": PROMPTS,
                "group_size": GROUP,
                "lr": 1e-6,
                "streaming": streaming,
                "turning": turning,
            },
            "planner": {"change_cost_s": CHANGE_S},
            "checkpoint": {"every": 0},
            "cluster": {"rollout_workers": 2, "hybrid_workers": 1, "threads": 1, "dashboard_port": 0},
            "observe": {"progress": False, "tensorboard": False},
        }
    )


class Sides:
    """Runs of all sides on one cluster."""

    def __init__(self, model: Path, directory: Path, client: Client, iterations: int) -> None:
        self._model, self._directory, self._client, self._iterations = model, directory, client, iterations
        self.rows: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        self.seconds: dict[str, list[float]] = {side: [] for side in SIDES}
        self.turned = 0
        self.changed: list[Mapping[str, Any]] = []
        self.setting: RunSetting | None = None  # of the last run that was not streamed

    def run(self, side: str) -> None:
        """One more run of a side."""
        name = f"{side}_{len(self.seconds[side])}"
        config = configured(self._model, self._directory, name, side, self._iterations + 1)
        rows = run(config, client=self._client).iterations[1:]
        directory = self._directory / name
        events = read_events(directory / "events.jsonl").events
        self.turned += sum(event["name"] == "engine_turned" and event["to"] == "training" for event in events)
        self.changed += [event for event in events if event["name"] == "role_changed"]
        if side == "off":
            self.setting = run_setting(directory)
        shutil.rmtree(directory)
        self.rows[side] += rows
        self.seconds[side].append(statistics.mean(float(row["iteration_s"]) for row in rows))

    def round(self) -> str:
        """One more run of each side; their seconds in words."""
        for side in SIDES:
            self.run(side)
        return ", ".join(f"{side} {seconds[-1]:.2f} s" for side, seconds in self.seconds.items())

    def mean(self, side: str, number: str) -> float:
        """Mean of a metric over the iterations of all runs of a side."""
        return statistics.mean(float(row[number]) for row in self.rows[side])

    def simulated_s(self) -> dict[str, float]:
        """Seconds per iteration of each side in virtual time, from what all runs measured."""
        assert self.setting is not None
        return simulated_s(self.setting, measured(self.rows, self.changed, CHANGE_S), frozenset({HYBRID}))

    def figures(self, simulated: Mapping[str, float]) -> dict[str, Figure]:
        """Of all rounds: ratios are medians of those of the rounds. ``simulated``: seconds per iteration by side."""
        found, apart = {}, []
        for name, (first, second) in RATIOS.items():
            live = Pairs(tuple(self.seconds[first]), tuple(self.seconds[second])).ratio
            predicted = simulated[first] / simulated[second]
            apart.append(max(live / predicted, predicted / live))
            found[name] = Figure(live, "ratio", "higher", GOALS[name])
            found[f"simulated_{name}"] = Figure(predicted, "ratio", "higher")
        found["live_over_simulated"] = Figure(max(apart), "ratio", "lower", GOALS["live_over_simulated"])
        for side in SIDES:
            found[f"{side}_iteration_s"] = Figure(statistics.median(self.seconds[side]), "s", "lower")
            found[f"{side}_simulated_s"] = Figure(simulated[side], "s", "lower")
            found[f"{side}_train_s"] = Figure(self.mean(side, "train_s"), "s", "lower")
        for side in ("streaming", "turning"):
            found[f"{side}_streamed_frac"] = Figure(self.mean(side, "streamed_frac"), "ratio", "higher")
            found[f"{side}_waves"] = Figure(self.mean(side, "waves"), "waves", "lower")
        found["turns"] = Figure(self.turned / len(self.rows["turning"]), "per iteration", "higher")
        return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = command_parser("pipeline_live", __doc__, pairs=5)
    parser.add_argument("--iterations", type=int, default=2, help="iterations of a run that count (default 2)")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        model = made_model(Path(scratch) / "model")
        first = configured(model, Path(scratch), "first", "off", 1)
        with local_cluster(first) as cluster, Client(cluster) as client:
            sides = Sides(model, Path(scratch), client, given.iterations)
            for index in range(given.pairs):
                print(f"round {index}: {sides.round()}", flush=True)
    emit("pipeline_live", sides.figures(sides.simulated_s()), arguments=arguments, as_json=given.json)


if __name__ == "__main__":
    main()
