"""Seconds per iteration of live runs whose steps are streamed, over runs whose steps are not: `python -m benchmarks pipeline_live`.

Three sides take turns within one cluster of two engines, one of which may train, and one trainer: steps that are not streamed,
streamed ones, and streamed ones whose tail leaves that engine to training (``trainer.turning``). ``streaming_ratio`` is the first
over the second, ``turning_ratio`` the second over the third: the median over iterations, each with those of the same number on the
other sides of its round. ``live_over_simulated`` says by how much the simulator misses them: of both ratios the larger factor
between live and simulated (`benchmarks.live.pipeline_predicted`), in whichever direction.

Real are scheduler, workers, groups, records, the waves and their gradients, changes of roles, and the publication of each version,
which engines load and check. Emulated are the seconds of generations: an engine waits for as long as its tokens would take, instead
of computing them (`benchmarks.live.tailed_engines`). On a machine with few cores engines and trainer would otherwise share them, and
nothing could overlap. So two processes compute at once at most, the trainer and the engine that turned. With ``--real`` engines
compute their tokens; what the simulator says then leaves out that they share cores, and has no goal.

``gradients_equal`` is the share of the last streamed steps, one with and one without turning, whose gradient and weights are those
of the whole step on the same record to 1e-12 in float64 (`benchmarks.live.streamed_gradients`).

Each engine has slots for half of the trajectories: both are needed at first, one in the tail. The first iteration of a run, in
which everything is loaded, does not count. A first change of roles is assumed to cost `CHANGE_S`, later ones what the run measured.
With ``--partial`` the figures of all rounds so far are printed after each round, so that they are there if the rest is cut off.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed import Client

from benchmarks.live.pipeline_predicted import RunSeen, group_tokens, measured, seen, simulated_s
from benchmarks.live.random_training import save_random_model
from benchmarks.live.streamed_gradients import Apart, apart
from benchmarks.live.tailed_engines import MOST_TOKENS
from benchmarks.report import MIN_PAIRS, Figure, command_parser, emit
from libra.cluster.local import local_cluster
from libra.config import RunConfig, config_from_dict
from libra.config.model_paths import resolve_model
from libra.driver.session import run
from libra.sim.from_run import RunSetting, run_setting
from libra.store.event_log import read_events

TURNS = 4
PROMPTS, GROUP = 12, 4
PAYLOAD_CHARS = 48
"""Of what a tool answers: it is trained on and not generated, so that an unstreamed step takes about 1.2 rollouts."""
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


def configured(model: Path, directory: Path, name: str, side: str, iterations: int, *, real: bool = False) -> RunConfig:
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
                "engine": f"benchmarks.live.tailed_engines:{'TailedEngine' if real else 'PacedEngine'}",
                "max_turns": TURNS, "max_new_tokens": MOST_TOKENS, "max_context_tokens": 3 * TURNS * MOST_TOKENS,
                "slots": PROMPTS * GROUP // 2, "ignore_eos": real,
            },
            "trainer": {
                "prompts": PROMPTS, "group_size": GROUP, "lr": 1e-6, "streaming": streaming, "turning": turning,
            },
            "planner": {"change_cost_s": CHANGE_S}, "checkpoint": {"every": 0},
            "cluster": {"rollout_workers": 2, "hybrid_workers": 1, "threads": 1, "dashboard_port": 0},
            "observe": {"progress": False, "tensorboard": False},
        }
    )  # fmt: skip


class Sides:
    """Runs of all sides on one cluster."""

    def __init__(self, model: Path, directory: Path, client: Client, iterations: int, *, real: bool = False) -> None:
        self._model, self._directory, self._client, self._iterations = model, directory, client, iterations
        self._real = real
        self.rows: dict[str, list[Mapping[str, Any]]] = {side: [] for side in SIDES}
        self.seen: dict[str, list[RunSeen]] = {side: [] for side in SIDES}
        self.last: dict[str, Path] = {}
        self.turned = 0
        self.setting: RunSetting | None = None  # of the last run that was not streamed

    def run(self, side: str) -> None:
        config = self._config(side, f"{side}_{len(self.seen[side])}")
        self.rows[side] += run(config, client=self._client).iterations[1:]
        directory = self._directory / config.run.name
        events = read_events(directory / "events.jsonl").events
        self.turned += sum(event["name"] == "engine_turned" and event["to"] == "training" for event in events)
        self.seen[side].append(seen(events))
        if side == "off":
            self.setting = run_setting(directory)
        if side in self.last:
            shutil.rmtree(self.last[side])
        self.last[side] = directory

    def _config(self, side: str, name: str) -> RunConfig:
        return configured(self._model, self._directory, name, side, self._iterations + 1, real=self._real)

    def round(self) -> str:
        words = []
        for side in SIDES:
            began_s = time.perf_counter()
            self.run(side)
            each = " ".join(f"{seconds:.2f}" for seconds in self.seen[side][-1].iterations_s())
            words.append(f"{side} {each} s (run {time.perf_counter() - began_s:.0f} s)")
        return ", ".join(words)

    def iterations_s(self, side: str) -> list[float]:
        return [seconds for run in self.seen[side] for seconds in run.iterations_s()]

    def mean(self, side: str, number: str) -> float:
        return statistics.mean(float(row[number]) for row in self.rows[side])

    def simulated_s(self) -> dict[str, float]:
        """Seconds per iteration of each side in virtual time, from what all runs measured."""
        assert self.setting is not None
        gradients_s = [float(row["forward_backward_s"]) for row in self.rows["off"]]
        prices = measured(self.seen, gradients_s, group_tokens(self.setting.workload), CHANGE_S)
        print("prices:", ", ".join(f"{name} {value:.4g}" for name, value in prices._asdict().items()), flush=True)
        return simulated_s(
            self.setting, prices, {side: self._config(side, side) for side in SIDES}, frozenset({HYBRID})
        )

    def gradients(self) -> dict[str, Apart]:
        """The last step of the last run of each streamed side, taken again."""
        return {side: apart(self.last[side], self._iterations, os.cpu_count() or 1) for side in STREAMED}

    def figures(self, simulated: Mapping[str, float], again: Mapping[str, Apart]) -> dict[str, Figure]:
        """Of all rounds so far. ``simulated``: seconds per iteration by side; ``again``: empty before the last round.

        Below `MIN_PAIRS` iterations of a side ratios have no goal.
        """
        found, misses = {}, []
        live = {side: self.iterations_s(side) for side in SIDES}
        enough = len(live["off"]) >= MIN_PAIRS
        for name, (first, second) in RATIOS.items():
            ratio = statistics.median(a / b for a, b in zip(live[first], live[second], strict=True))
            predicted = simulated[first] / simulated[second]
            misses.append(max(ratio / predicted, predicted / ratio))
            found[name] = Figure(ratio, "ratio", "higher", GOALS[name] if enough and not self._real else None)
            found[f"simulated_{name}"] = Figure(predicted, "ratio", "higher")
        goal = GOALS["live_over_simulated"] if enough and not self._real else None
        found["live_over_simulated"] = Figure(max(misses), "ratio", "lower", goal)
        for side in SIDES:
            found[f"{side}_iteration_s"] = Figure(statistics.median(live[side]), "s", "lower")
            found[f"{side}_simulated_s"] = Figure(simulated[side], "s", "lower")
            found[f"{side}_train_s"] = Figure(self.mean(side, "train_s"), "s", "lower")
        for side in STREAMED:
            found[f"{side}_streamed_frac"] = Figure(self.mean(side, "streamed_frac"), "ratio", "higher")
            found[f"{side}_waves"] = Figure(self.mean(side, "waves"), "waves", "lower")
        found["turns"] = Figure(self.turned / len(self.rows["turning"]), "per iteration", "higher")
        if again:
            equal = statistics.mean(each.equal for each in again.values())
            found["gradients_equal"] = Figure(equal, "share", "higher", GOALS["gradients_equal"])
        for side, each in again.items():
            found[f"{side}_gradient_apart"] = Figure(each.gradient, "ratio", "lower")
            found[f"{side}_weights_apart"] = Figure(each.weights, "ratio", "lower")
            norm = float(self.rows[side][-1]["grad_norm"])  # live, in float32
            found[f"{side}_live_norm_apart"] = Figure(abs(norm / each.grad_norm - 1), "ratio", "lower")
        return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("pipeline_live", __doc__)
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side (default 2)")
    parser.add_argument("--iterations", type=int, default=3, help="iterations of a run that count (default 3)")
    parser.add_argument("--real", action="store_true", help="engines that compute their tokens")
    parser.add_argument("--partial", action="store_true", help="print the figures so far after each round")
    given = parser.parse_args(arguments)
    if given.rounds < 1 or given.iterations < 1 or (given.rounds * given.iterations < MIN_PAIRS and not given.partial):
        parser.error(
            f"--rounds {given.rounds} --iterations {given.iterations}: a comparison rests on at least {MIN_PAIRS} iterations "
            f"of each side; type --rounds {-(-MIN_PAIRS // max(1, given.iterations))}, or --partial for figures without goals"
        )
    with tempfile.TemporaryDirectory() as scratch:
        model, directory = made_model(Path(scratch) / "model"), Path(scratch)
        first = configured(model, directory, "first", "off", 1)
        with local_cluster(first) as cluster, Client(cluster) as client:
            sides = Sides(model, directory, client, given.iterations, real=given.real)
            for index in range(given.rounds):
                print(f"round {index}: {sides.round()}", flush=True)
                if given.partial:
                    found = sides.figures(sides.simulated_s(), {})
                    _emit(found, given.json, arguments, index + 1, given.rounds)
        figures = sides.figures(sides.simulated_s(), sides.gradients())
    _emit(figures, given.json, arguments, given.rounds, given.rounds)


def _emit(
    figures: Mapping[str, Figure], as_json: bool, arguments: Sequence[str] | None, done: int, rounds: int
) -> None:
    emit("pipeline_live", figures, arguments=arguments, as_json=as_json, beside={"rounds": done, "of": rounds})
