"""Seconds per iteration of live runs whose steps are streamed, over runs whose steps are not: `python -m benchmarks.pipeline_live`.

Real are scheduler, workers, groups, records, the waves and their gradients, and the publication of each version, which engines load
and check. Emulated are the seconds of generations: an engine waits for as long as its tokens would take, instead of computing
them. On a machine with few cores engines and trainer would otherwise share them, and nothing could overlap. Lengths have a
long tail, and are the same on both sides; all trajectories of an iteration run at once, so that an iteration is as long as its
longest and what is trained after it.

Sides alternate within one cluster. The first iteration of a run, in which everything is loaded, does not count.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client

from benchmarks.random_training import save_random_model
from benchmarks.report import Figure, alternate, command_parser, emit
from libra.cluster.local import local_cluster
from libra.config import RunConfig, config_from_dict
from libra.config.model_paths import resolve_model
from libra.driver.session import run
from libra.rollout.transformers_engine import TransformersEngine
from libra.types import StopReason, TurnOutput, TurnRequest

TOKEN_S = 0.02
"""Emulated seconds of a token, whatever the batch: decoding is bound by memory traffic."""
MEDIAN_TOKENS, SIGMA, MOST_TOKENS = 60.0, 0.7, 256
"""Lognormal lengths of generations: P99 over median is 5.1, as in agents' traces, before they are cut."""
PROMPTS, GROUP = 12, 4
GOAL = 1.15


class PacedEngine(TransformersEngine):
    """The transformers engine, with random tokens after emulated seconds in place of forward passes."""

    def __init__(self, model_dir: Path, *, slots: int, max_context_tokens: int, version: int) -> None:
        super().__init__(model_dir, slots=slots, max_context_tokens=max_context_tokens, version=version, threads=1)

    async def generate(self, request: TurnRequest) -> TurnOutput:
        """Tokens by the request's seed only."""
        rng = np.random.default_rng(request.seed)
        count = min(request.max_new_tokens, max(2, round(MEDIAN_TOKENS * math.exp(SIGMA * rng.standard_normal()))))
        await asyncio.sleep(count * TOKEN_S)
        tokens = rng.integers(32, 96, count).astype(np.int32)
        tokens[-1] = request.stop_ids[0] if request.stop_ids else tokens[-1]
        versions = np.full(count, self.version, np.int32)
        logp = np.full(count, -math.log(96), np.float32)
        return TurnOutput(tokens, logp, versions, versions.copy(), StopReason.STOP, busy_s=count * TOKEN_S)


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


def configured(model: Path, directory: Path, name: str, streaming: str, iterations: int) -> RunConfig:
    """One run."""
    return config_from_dict(
        {
            "run": {"name": name, "dir": str(directory), "iterations": iterations},
            "model": {"path": str(model)},
            "environment": {"name": "libra.testing:FixedTurns"},
            "rollout": {
                "engine": "benchmarks.pipeline_live:PacedEngine",
                "max_turns": 1,
                "max_new_tokens": MOST_TOKENS,
                "max_context_tokens": 2 * MOST_TOKENS,
                "slots": PROMPTS * GROUP,
            },
            "trainer": {"prompts": PROMPTS, "group_size": GROUP, "lr": 1e-6, "streaming": streaming},
            "checkpoint": {"every": 0},
            "cluster": {"threads": 1, "dashboard_port": 0},
            "observe": {"progress": False, "tensorboard": False},
        }
    )


class Sides:
    """Runs of both kinds on one cluster."""

    def __init__(self, model: Path, directory: Path, client: Client, iterations: int) -> None:
        self._model, self._directory, self._client, self._iterations = model, directory, client, iterations
        self.rows: dict[str, list[dict[str, Any]]] = {"off": [], "on": []}

    def iteration_s(self, streaming: str) -> float:
        """Mean seconds of the iterations of one more run."""
        name = f"{streaming}_{len(self.rows[streaming])}"
        config = configured(self._model, self._directory, name, streaming, self._iterations + 1)
        rows = run(config, client=self._client).iterations[1:]
        shutil.rmtree(self._directory / name)
        self.rows[streaming] += rows
        return statistics.mean(float(row["iteration_s"]) for row in rows)

    def mean(self, streaming: str, number: str) -> float:
        """Mean of a metric over the iterations of all runs of one kind."""
        return statistics.mean(float(row[number]) for row in self.rows[streaming])


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

            def told(index: int, off_s: float, on_s: float) -> None:
                print(
                    f"pair {index}: {off_s:.2f} s not streamed, {on_s:.2f} s streamed, {off_s / on_s:.3f}", flush=True
                )

            pairs = alternate(
                lambda: sides.iteration_s("off"), lambda: sides.iteration_s("on"), pairs=given.pairs, after_pair=told
            )
    figures = {
        "streaming_ratio": Figure(pairs.ratio, "ratio", "higher", GOAL),
        "iteration_s": Figure(pairs.medians[0], "s", "lower"),
        "streamed_iteration_s": Figure(pairs.medians[1], "s", "lower"),
        "train_s": Figure(sides.mean("off", "train_s"), "s", "lower"),
        "streamed_train_s": Figure(sides.mean("on", "train_s"), "s", "lower"),
        "streamed_frac": Figure(sides.mean("on", "streamed_frac"), "ratio", "higher"),
        "waves": Figure(sides.mean("on", "waves"), "waves", "lower"),
    }
    emit("pipeline_live", figures, arguments=arguments, as_json=given.json)


if __name__ == "__main__":
    main()
