"""From the trainer's weights to an engine that serves them, checked: ``python -m benchmarks.weight_sync --json``.

Random models of three sizes: 2.4 M parameters (Qwen3, float32), 135 M (the shape of SmolLM2-135M: Llama, tied, bfloat16) and
1 GB (Llama, untied, bfloat16). Each takes ``--versions`` steps in which every weight moves by 1e-3, and each step is

* published by the trainer: tensors, digest, and what an engine must answer, beside the passes of the next step, as a training
  worker does (`libra.worker.publications`). ``trainer_stall_s``, at 135 M: wall time in which the trainer can compute nothing, from
  the end of the step to the begin of the passes, and from their end until the weights may change. The passes are of a few hundred
  tokens; where a publication takes longer than they do, the rest is a stall. ``publication_s_135m``: the publication, beside them;
* loaded and checked by a running engine, as a rollout worker does (``libra.worker.verified_engine``). *Served* is when the check
  has passed. ``published_to_served_s_135m`` is from the announcement on; ``check_s_135m`` is that less the loading;
* copied once in memory, as bytes of the file's size: ``served_over_memcpy_1gb`` is served over that copy, in pairs.

Medians over the versions. Also printed: bytes, how long the engine was stopped (loading, and answering questions), and a fetch
of each version from another process-local server over a loopback socket.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.random_training import random_trajectories, save_random_model
from benchmarks.report import MIN_PAIRS, Figure, Pairs, command_parser, emit
from libra.errors import ConfigError
from libra.facts import Fact, VersionChecked
from libra.rollout import RolloutEngine, TransformersEngine
from libra.train import Replica, TrainSettings
from libra.types import Trajectory
from libra.weights import WeightStore
from libra.weights.transfer import WeightServer, fetch
from libra.worker.publications import Publications
from libra.worker.verified_engine import Serving

CONTEXT, SLOTS = 256, 4
SEQUENCE = 64
TOKENS = {"2m4": 2048, "135m": 512, "1gb": 128}
"""Tokens of the step beside a publication, in sequences of `SEQUENCE`."""
STEP_SIZE = 1e-3
SIZES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "2m4": (
        "qwen3",
        "float32",
        {
            "vocab_size": 4096, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4,
            "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True,
        },
    ),
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


@dataclass(slots=True)
class Times:
    """Seconds of one model, one entry per version; ``num_bytes`` of its file."""

    num_bytes: int
    stall: list[float]
    passes: list[float]
    publication: list[float]
    served: list[float]
    check: list[float]
    stopped: list[float]
    memcpy: list[float]
    fetched: list[float]

    def median(self, name: str) -> float:
        """Of one of the lists."""
        return statistics.median(getattr(self, name))


def make_model(size: str, directory: Path) -> str:
    """Save a random model of this size; returns the type of its weights."""
    from transformers import AutoConfig

    family, dtype, shape = SIZES[size]
    save_random_model(AutoConfig.for_model(family, **shape, max_position_embeddings=2048), directory, dtype=dtype)
    return dtype


def build(engine: str, directory: Path, version: int, dtype: str, threads: int | None) -> RolloutEngine:
    """An engine, not started."""
    if engine == "transformers":
        return TransformersEngine(
            directory, slots=SLOTS, max_context_tokens=CONTEXT, dtype=dtype, threads=threads, version=version
        )
    try:
        from libra.rollout.vllm.async_engine import VLLMEngine
    except ImportError as error:
        raise ConfigError(
            f"--engine {engine}: vLLM is not there ({error}); type make setup-vllm, or --engine transformers"
        ) from error
    return VLLMEngine(directory, slots=SLOTS, max_context_tokens=CONTEXT, dtype=dtype, threads=threads, version=version)


def take_step(replica: Replica, generator: torch.Generator) -> None:
    """Move every weight up or down by the same amount."""
    with torch.no_grad():
        for parameter in replica.model.parameters():
            signs = torch.randint(0, 2, parameter.shape, generator=generator, dtype=torch.int8)
            parameter.add_(signs.to(parameter.dtype).mul_(2).sub_(1), alpha=STEP_SIZE)
    replica.steps_done += 1
    replica.content = None


def published_s(publications: Publications, version: int) -> float:
    """Seconds of a publication."""
    began = time.perf_counter()
    publications.publish(version)
    return time.perf_counter() - began


def passes(replica: Replica, batch: list[Trajectory], step: int) -> tuple[float, float]:
    """When the forward and backward passes of a step began and ended."""
    began = time.perf_counter()
    replica.accumulate(batch, step)
    return began, time.perf_counter()


def memcpy_s(num_bytes: int) -> float:
    """Seconds to copy so many bytes that are in memory to memory that is mapped."""
    source, target = np.ones(num_bytes, np.uint8), np.full(num_bytes, 2, np.uint8)
    began = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - began


def told(size: str, times: Times, method: str) -> str:
    """The medians of a size; ``method`` is that of the last check."""
    return (
        f"{size}: {times.num_bytes / 1e6:.1f} MB; trainer stalls {times.median('stall'):.3f} s beside {TOKENS[size]} tokens "
        f"({times.median('passes'):.3f} s; publication {times.median('publication'):.3f} s); published to served "
        f"{times.median('served'):.3f} s, of which the check {times.median('check'):.3f} s and the engine stopped "
        f"{times.median('stopped'):.3f} s; memcpy {times.median('memcpy'):.3f} s; fetched over loopback in "
        f"{times.median('fetched'):.3f} s; the check said {method}"
    )


async def measure(size: str, engine: str, versions: int, threads: int | None, directory: Path) -> Times:
    """Publish and serve ``versions`` versions of one model."""
    dtype = make_model(size, directory / "model")
    replica = Replica(directory / "model", TrainSettings(), dtype=dtype, threads=threads)
    store, generator = WeightStore(directory / "weights"), torch.Generator().manual_seed(1)
    reports: list[Fact] = []
    publications = Publications(store, CONTEXT, lambda _: None)
    publications.of(replica, alone=True)
    vocab = int(replica.model.config.vocab_size)

    async def newest() -> Any:
        return store.latest()

    serving = Serving(
        directory / "model",
        build=lambda path, version: build(engine, path, version, dtype, threads),
        newest=newest,
        report=reports.append,
        store=store,
    )
    times = Times(publications.publish(0).num_bytes, [], [], [], [], [], [], [], [])
    server = WeightServer(store, "secret", "127.0.0.1")
    await serving.start()
    try:
        await serving.pull()
        for version in range(1, versions + 1):
            take_step(replica, generator)
            batch = random_trajectories(TOKENS[size] // SEQUENCE, SEQUENCE, SEQUENCE // 2, vocab, version)
            ended = time.perf_counter()
            publication = asyncio.create_task(asyncio.to_thread(published_s, publications, version))
            began, done = await asyncio.to_thread(passes, replica, batch, version)
            waited_s = await asyncio.to_thread(publications.before_change, version)
            replica.abandon()
            times.stall.append(began - ended + waited_s)
            times.passes.append(done - began)
            times.publication.append(await publication)
            announced = time.perf_counter()
            serving.announced = version
            await serving.pull()
            served = time.perf_counter()
            last = reports[-1]
            if not isinstance(last, VersionChecked) or len(reports) != 2 * (version + 1):
                raise ConfigError(f"{size}: version {version} was not served as it should: {last}")
            times.served.append(served - announced)
            times.check.append(last.check_s)
            times.stopped.append(last.stopped_s)
            times.memcpy.append(memcpy_s(times.num_bytes))
            fetching = time.perf_counter()
            await asyncio.to_thread(fetch, version, [server.address], directory / "fetched", secret="secret")
            times.fetched.append(time.perf_counter() - fetching)
            store.drop(keep_last=3)
            WeightStore(directory / "fetched").drop(keep_last=1)
    finally:
        await serving.close()
        server.close()
    print(told(size, times, last.method), flush=True)
    return times


def main() -> None:
    """Command line."""
    parser = command_parser("weight_sync", __doc__)
    parser.add_argument("--engine", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--versions", type=int, default=MIN_PAIRS, help=f"versions per model, at least {MIN_PAIRS}")
    parser.add_argument("--threads", type=int, help="torch threads; default: all cores")
    options = parser.parse_args()
    if options.versions < MIN_PAIRS:
        raise ConfigError(f"--versions: got {options.versions}; type --versions {MIN_PAIRS} or more")
    measured = {}
    for size in SIZES:
        with tempfile.TemporaryDirectory(prefix="libra-weight-sync-") as directory:
            measured[size] = asyncio.run(
                measure(size, options.engine, options.versions, options.threads, Path(directory))
            )
    large, small = measured["1gb"], measured["135m"]
    figures = {
        "trainer_stall_s": Figure(small.median("stall"), "s", "lower", 0.1),
        "served_over_memcpy_1gb": Figure(Pairs(tuple(large.served), tuple(large.memcpy)).ratio, "ratio", "lower", 10.0),
        "publication_s_135m": Figure(small.median("publication"), "s", "lower"),
        "published_to_served_s_135m": Figure(small.median("served"), "s", "lower"),
        "check_s_135m": Figure(small.median("check"), "s", "lower"),
    }
    emit("weight_sync", figures, arguments=sys.argv[1:], as_json=options.json)


if __name__ == "__main__":
    main()
