"""Seconds per iteration of live runs whose steps are streamed, over runs whose steps are not.

Three sides take turns within one cluster of two engines, one of which may train, and one trainer:
steps that are not streamed, streamed ones, and streamed ones whose tail leaves that engine to
training (``trainer.turning``). ``streaming_ratio`` is the first over the second, ``turning_ratio``
the second over the third: the median over iterations of the same number in their runs.
``live_over_simulated``: of both ratios the larger factor between live and simulated
(`benchmarks.live.pipeline_predicted`). ``gradients_equal``: the share of the last streamed steps,
one with and one without turning, whose gradient and weights are those of the whole step on the same
record to 1e-12 in float64 (`benchmarks.live.streamed_gradients`).

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

from distributed import Client

from benchmarks.live.pipeline_predicted import RunSeen, group_tokens, measured, seen, simulated_s
from benchmarks.live.random_training import save_random_model
from benchmarks.live.streamed_gradients import apart
from benchmarks.live.tailed_engines import MOST_TOKENS
from benchmarks.report import MIN_PAIRS, Figure, command_parser, emit
from libra.cluster.local import local_cluster
from libra.config import RunConfig, config_from_dict
from libra.config.model_paths import resolve_model
from libra.driver.session import run
from libra.sim.from_run import run_setting
from libra.store.event_log import read_events

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
            "observe": {"progress": False, "tensorboard": False},
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
            found[f"simulated_{name}"] = Figure(predicted, "ratio", "higher")
        found["live_over_simulated"] = Figure(max(misses), "ratio", "lower", GOALS["live_over_simulated"])
        for side in SIDES:
            found[f"{side}_iteration_s"] = Figure(statistics.median(live[side]), "s", "lower")
            found[f"{side}_simulated_s"] = Figure(simulated[side], "s", "lower")
        print("gradients and weights apart:", *again)
        equal = statistics.mean(each.equal for each in again)
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
