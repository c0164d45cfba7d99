"""From the trainer's weights to an engine that serves them, checked: random models of 135 M
parameters and of 1 GB, ``--versions`` steps each.

* ``trainer_stall_s``, at 135 M: wall time in which the trainer can compute nothing, beside a
  publication and the next step's passes. Where a publication takes longer than the passes, the rest
  is a stall. Median over the versions.
* ``served_over_memcpy_1gb``: from the announcement until an engine has loaded and checked it, over
  one copy in memory of the file's size, in pairs.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.live.random_training import random_trajectories, save_random_model
from benchmarks.report import MIN_PAIRS, Figure, Pairs, command_parser, emit, seconds_of
from libra.errors import ConfigError
from libra.facts import Fact, VersionChecked
from libra.rollout import TransformersEngine
from libra.train import Replica, TrainSettings
from libra.types import Trajectory
from libra.weights import WeightStore
from libra.worker.engine.verified_engine import Serving
from libra.worker.training.publications import Publications

CONTEXT, SLOTS = 256, 4
SEQUENCE = 64
TOKENS = {"135m": 512, "1gb": 128}
"""Tokens of the step beside a publication, in sequences of `SEQUENCE`."""
STEP_SIZE = 1e-3
SIZES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "135m": (
        "llama",
        "bfloat16",
        {
            "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
            "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
        },
    ),
    "1gb": (
        "llama",
        "bfloat16",
        {
            "vocab_size": 32768, "hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 14,
            "num_attention_heads": 12, "num_key_value_heads": 12, "tie_word_embeddings": False,
        },
    ),
}  # fmt: skip
"""Family, type of the weights and configuration of each model."""


def make_model(size: str, directory: Path) -> str:
    from transformers import AutoConfig

    family, dtype, shape = SIZES[size]
    save_random_model(AutoConfig.for_model(family, **shape, max_position_embeddings=2048), directory, dtype=dtype)
    return dtype


def take_step(replica: Replica, generator: torch.Generator) -> None:
    with torch.no_grad():
        for parameter in replica.model.parameters():
            signs = torch.randint(0, 2, parameter.shape, generator=generator, dtype=torch.int8)
            parameter.add_(signs.to(parameter.dtype).mul_(2).sub_(1), alpha=STEP_SIZE)
    replica.steps_done += 1
    replica.content = None


def passes(replica: Replica, batch: list[Trajectory], step: int) -> tuple[float, float]:
    began = time.perf_counter()
    replica.accumulate(batch, step)
    return began, time.perf_counter()


async def measure(size: str, versions: int, threads: int | None, directory: Path) -> dict[str, list[float]]:
    """Seconds by name, one entry per version."""
    dtype = make_model(size, directory / "model")
    replica = Replica(directory / "model", TrainSettings(), dtype=dtype, threads=threads)
    store, generator = WeightStore(directory / "weights"), torch.Generator().manual_seed(1)
    reports: list[Fact] = []
    publications = Publications(store, CONTEXT, lambda _: None)
    publications.of(replica, alone=True)
    vocab = int(replica.model.config.vocab_size)

    async def newest() -> Any:
        return store.latest()

    def build(path: Path, version: int) -> TransformersEngine:
        return TransformersEngine(
            path, slots=SLOTS, max_context_tokens=CONTEXT, dtype=dtype, threads=threads, version=version
        )

    serving = Serving(directory / "model", build=build, newest=newest, report=reports.append, store=store)
    num_bytes, times = publications.publish(0).num_bytes, defaultdict[str, list[float]](list)
    source, target = np.ones(num_bytes, np.uint8), np.full(num_bytes, 2, np.uint8)
    await serving.start()
    try:
        await serving.pull()
        for version in range(1, versions + 1):
            take_step(replica, generator)
            batch = random_trajectories(TOKENS[size] // SEQUENCE, SEQUENCE, SEQUENCE // 2, vocab, version)
            ended = time.perf_counter()
            publication = asyncio.create_task(asyncio.to_thread(seconds_of, lambda v=version: publications.publish(v)))
            began, done = await asyncio.to_thread(passes, replica, batch, version)
            waited_s = await asyncio.to_thread(publications.before_change, version)
            replica.abandon()
            times["stall"].append(began - ended + waited_s)
            times["passes"].append(done - began)
            times["publication"].append(await publication)
            announced = time.perf_counter()
            serving.announced = version
            await serving.pull()
            served = time.perf_counter()
            last = reports[-1]
            if not isinstance(last, VersionChecked) or len(reports) != 2 * (version + 1):
                raise ConfigError(f"{size}: version {version} was not served as it should: {last}")
            times["served"].append(served - announced)
            times["memcpy"].append(seconds_of(lambda: np.copyto(target, source)))
            store.drop(keep_last=3)
    finally:
        await serving.close()
    medians = ", ".join(f"{name} {statistics.median(each):.3f} s" for name, each in times.items())
    print(
        f"{size}: {num_bytes / 1e6:.1f} MB, {TOKENS[size]} tokens; {medians}; the check said {last.method}", flush=True
    )
    return times


def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("weight_sync", __doc__)
    parser.add_argument("--versions", type=int, default=MIN_PAIRS, help=f"versions per model, at least {MIN_PAIRS}")
    parser.add_argument("--threads", type=int, help="torch threads; default: all cores")
    options = parser.parse_args(arguments)
    if options.versions < MIN_PAIRS:
        raise ConfigError(f"--versions: got {options.versions}; type --versions {MIN_PAIRS} or more")
    measured = {}
    for size in SIZES:
        with tempfile.TemporaryDirectory(prefix="libra-weight-sync-") as directory:
            measured[size] = asyncio.run(measure(size, options.versions, options.threads, Path(directory)))
    large = measured["1gb"]
    figures = {
        "trainer_stall_s": Figure(statistics.median(measured["135m"]["stall"]), "s", "lower", 0.1),
        "served_over_memcpy_1gb": Figure(
            Pairs(tuple(large["served"]), tuple(large["memcpy"])).ratio, "ratio", "lower", 10.0
        ),
    }
    emit("weight_sync", figures, arguments=arguments, as_json=options.json)
