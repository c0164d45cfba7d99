"""The parts of `benchmarks.gpu`, one a process: ``python -m benchmarks.gpu_parts PART DEVICE SCALE
DIR``.

The last JSON line has ``figures`` (fields of `benchmarks.report.Figure`) and ``text``; a part that
measures several sizes prints one after each. A part that fails ends with the first line of its error
and exit code 1.
"""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.live.random_training import random_trajectories, save_random_model
from libra.cluster.hardware_inventory import gpu_name
from libra.config import RunConfig, config_from_dict
from libra.errors import LibraError
from libra.facts import Fact, VersionChecked
from libra.hardware import GPU, known_gpus, load_shape
from libra.planner.cost import TrajectoryTotals
from libra.planner.cost.training_cost import memory_parts_bytes
from libra.planner.from_config import snapshot_of
from libra.rollout.transformers_engine import TransformersEngine
from libra.train import Replica, TrainSettings
from libra.types import StopReason, TurnOutput, TurnRequest
from libra.weights import WeightStore
from libra.worker.engine.verified_engine import Serving
from libra.worker.training.publications import publish_checked

SHAPES: dict[str, dict[str, int]] = {
    "0b6": {
        "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    },
    "4b": {
        "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    },
    "tiny": {
        "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    },
}  # fmt: skip
"""Sizes of the random models: Qwen3-0.6B and Qwen3-4B."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """A step that prime-rl publishes for one H100 (``benchmarks/baselines``, RL, Recompute)."""

    model: str
    tokens: int
    mfu: float
    lora_rank: int | None = None
    sequences: int = 2
    steps: int = 1


BASELINES = {
    "0b6_16k": Baseline("0b6", 16384, 0.111, steps=3), "4b_16k": Baseline("4b", 16384, 0.217, lora_rank=16, steps=2),
    "0b6_64k": Baseline("0b6", 65536, 0.268), "4b_64k": Baseline("4b", 65536, 0.374, lora_rank=16, sequences=1),
}  # fmt: skip


class Bench:
    """Device, scale and directory of a part."""

    def __init__(self, device: str, scale: str, place: Path) -> None:
        self.device, self.is_full, self.place = torch.device(device), scale == "full", place

    def size(self, full: int, tiny: int) -> int:
        return full if self.is_full else tiny

    def shape(self, name: str) -> dict[str, int]:
        return SHAPES[name if self.is_full else "tiny"]

    def model(self, name: str) -> Path:
        """Directory of a random Qwen3 in bfloat16, tied; the first part that needs it makes it."""
        from transformers import Qwen3Config

        directory = self.place / f"model-{name}"
        if not directory.exists():
            config = Qwen3Config(
                **self.shape(name), tie_word_embeddings=True, max_position_embeddings=131072, pad_token_id=0
            )
            unfinished = self.place / f"unfinished-{name}"
            save_random_model(config, unfinished, dtype="bfloat16", device=self.device.type)
            unfinished.rename(directory)
            self.free()
        return directory

    def free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def peak_bytes(self) -> float:
        if self.device.type == "cuda":
            return float(torch.cuda.max_memory_allocated())
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0

    def sheet(self) -> GPU | None:
        if self.device.type != "cuda":
            return None
        properties = torch.cuda.get_device_properties(0)
        name = gpu_name(properties.name, properties.total_memory)
        if name not in known_gpus():
            raise LibraError(f"{name}: no datasheet in libra/hardware/gpus fits it; add one, the peak comes from there")
        return known_gpus()[name]


def timed(bench: Bench, work: Callable[[], Any]) -> float:
    bench.wait()
    began_s = time.perf_counter()
    work()
    bench.wait()
    return time.perf_counter() - began_s


def figure(value: float, unit: str, better: str, goal: float | None = None) -> dict[str, Any]:
    return {"value": value, "unit": unit, "better": better, "goal": goal}


def tell(found: dict[str, Any]) -> None:
    """Print what was measured so far; the last such line counts, also if the part does not end."""
    print(json.dumps(found, allow_nan=False), flush=True)


# ---------------------------------------------------------------- a training step


def trained_settings(model: Path, tokens: int, rows: int, lora_rank: int | None) -> RunConfig:
    return config_from_dict(
        {
            "model": {"path": str(model), "dtype": "bfloat16"},
            "rollout": {"max_context_tokens": tokens, "max_new_tokens": tokens // 2},
            "trainer": {
                "prompts": rows, "group_size": 1, "normalize_std": False, "max_row_tokens": tokens,
                "micro_batch_tokens": tokens, "gradient_checkpointing": True,
                "lora_rank": lora_rank,
            },
        }
    )  # fmt: skip


def token_flops(shape: dict[str, int], tokens: int, lora_rank: int | None) -> float:
    """Operations of a trained token by prime-rl's count (``PerfCounter._get_num_flop_per_token``).

    Its attention counts all pairs of tokens at a head size of hidden size / heads, below Qwen3's.
    """
    hidden, heads, layers = shape["hidden_size"], shape["num_attention_heads"], shape["num_hidden_layers"]
    queries, keys = heads * shape["head_dim"], shape["num_key_value_heads"] * shape["head_dim"]
    feed_forward = shape["intermediate_size"]
    layer = hidden * (2 * queries + 2 * keys + 3 * feed_forward)
    products = float(layers * layer + shape["vocab_size"] * hidden)
    attention = 12.0 * layers * heads * (hidden // heads) * tokens
    if lora_rank is None:
        return 6 * products + attention
    adapters = layers * lora_rank * (2 * (hidden + queries) + 2 * (hidden + keys) + 3 * (hidden + feed_forward))
    return 4 * products + 6 * adapters + attention


def step(bench: Bench, name: str) -> dict[str, Any]:
    """Tokens/s, utilisation and memory of a training step."""
    baseline = BASELINES[name]
    tokens, rank = bench.size(baseline.tokens, 48), baseline.lora_rank
    model, shape, count = bench.model(baseline.model), bench.shape(baseline.model), baseline.sequences
    config = trained_settings(model, tokens, count, rank)
    settings = TrainSettings(**config.trainer.model_dump())
    replica = Replica(model, settings, dtype="bfloat16", master_dtype="float32", device=bench.device)
    replica.digests = False
    trajectories = random_trajectories(count, tokens + 1, 1, shape["vocab_size"])  # the last token is a target only
    replica.step(trajectories[:1], 0)  # kernels are chosen, moments are made
    seconds = [timed(bench, partial(replica.step, trajectories, 1 + number)) for number in range(baseline.steps)]
    step_s, peak = statistics.median(seconds), bench.peak_bytes()
    lengths = TrajectoryTotals.of(np.ones(count), np.full(count, float(tokens)))
    layout = snapshot_of(config, lengths, what_if=True)[0].training
    parts = memory_parts_bytes(load_shape(model), np.full(count, float(tokens)), 1, layout)
    planned = sum(parts.values()) - parts.get("runtime", 0.0)  # torch does not count the driver's
    rate = count * tokens / step_s
    figures = {
        f"step_{name}_tokens_per_s": figure(rate, "tokens/s", "higher"),
        f"step_{name}_peak_gib": figure(peak / 2**30, "GiB", "lower"),
        f"step_{name}_predicted_over_measured_peak": figure(planned / peak, "ratio", "lower"),
    }
    text = (
        f"{count} x {tokens} tokens in {step_s:.3f} s; peak {peak / 2**30:.2f} GiB, planned {planned / 2**30:.2f} GiB"
    )
    if (sheet := bench.sheet()) is not None:
        utilisation = token_flops(shape, tokens, rank) * rate / sheet.flops_per_s
        goal = baseline.mfu if bench.is_full else None
        figures[f"step_{name}_mfu"] = figure(utilisation, "of the peak", "higher", goal)
        text += f"; {utilisation:.1%} of {sheet.flops_per_s / 1e12:.0f} TFLOP/s ({sheet.full_name})"
    return {"figures": figures, "text": text}


# ---------------------------------------------------------------- engines


def request(number: int, context: int, new: int, vocab: int) -> TurnRequest:
    ids = np.random.default_rng(number).integers(0, vocab, context).astype(np.int32)
    return TurnRequest(f"t{number}", 0, ids, new, seed=number)


async def generated(engine: TransformersEngine, requests: list[TurnRequest]) -> list[TurnOutput]:
    outputs = await asyncio.gather(*(engine.generate(each) for each in requests))
    for each in requests:
        engine.forget(each.trajectory_id)
    return list(outputs)


def engine(bench: Bench) -> dict[str, Any]:
    model, vocab = bench.model("0b6"), bench.shape("0b6")["vocab_size"]
    context, new = bench.size(512, 8), bench.size(128, 4)
    batches = [1, 16, 64, 256] if bench.is_full else [1, 4]
    rates: dict[int, float] = {}

    def found() -> dict[str, Any]:
        figures = {f"engine_tokens_per_s_{many}": figure(rate, "tokens/s", "higher") for many, rate in rates.items()}
        text = ", ".join(f"{many} at once {rate:.0f}/s" for many, rate in rates.items())
        return {"figures": figures, "text": f"{new} tokens each after {context}: {text}"}

    async def measure() -> None:
        served = _engine(bench, model, slots=batches[-1], max_context_tokens=context + new + 1)
        await served.start()
        try:
            await generated(served, [request(10**6 + number, context, 4, vocab) for number in range(2)])
            for many in batches:
                requests = [request(many * 1000 + number, context, new, vocab) for number in range(many)]
                began_s = time.perf_counter()
                outputs = await generated(served, requests)
                rates[many] = sum(len(output.token_ids) for output in outputs) / (time.perf_counter() - began_s)
                tell(found())
        finally:
            await served.close()

    asyncio.run(measure())
    return found()


def _engine(bench: Bench, model: Path, *, slots: int, max_context_tokens: int, version: int = 0) -> TransformersEngine:
    return TransformersEngine(
        model, slots=slots, max_context_tokens=max_context_tokens, dtype="bfloat16", version=version,
        device=bench.device.type,
    )  # fmt: skip


def move_weights(replica: Replica) -> None:
    with torch.no_grad():
        for parameter in replica.parameters().values():
            parameter.add_(torch.sign(torch.randn_like(parameter)), alpha=1e-3)
    replica.content = None


def weights(bench: Bench, name: str) -> dict[str, Any]:
    model, context = bench.model(name), 256
    replica = Replica(model, TrainSettings(), dtype="bfloat16", device=bench.device)
    store, reports = WeightStore(bench.place / f"weights-{name}"), list[Fact]()
    publish_checked(store, replica, 0, context)
    served_s: list[float] = []

    async def newest() -> Any:
        return store.latest()

    serving = Serving(
        model, build=lambda path, version: _engine(bench, path, slots=4, max_context_tokens=context, version=version),
        newest=newest, report=reports.append, store=store,
    )  # fmt: skip

    def found() -> dict[str, Any]:
        median, latest = statistics.median(served_s), store.latest()
        text = f"{(latest.num_bytes if latest else 0) / 1e9:.2f} GB served {median:.2f} s after the publication began"
        return {"figures": {f"publish_to_served_{name}_s": figure(median, "s", "lower")}, "text": text}

    async def measure() -> None:
        await serving.start()
        try:
            await serving.pull()
            for version in (1, 2) if name == "4b" else (1, 2, 3):
                move_weights(replica)
                bench.wait()
                began_s = time.perf_counter()
                publish_checked(store, replica, version, context)
                serving.announced = version
                await serving.pull()
                served_s.append(time.perf_counter() - began_s)
                if not isinstance(reports[-1], VersionChecked):
                    raise LibraError(f"version {version} was not served: {reports[-1]}")
                tell(found())
        finally:
            await serving.close()

    asyncio.run(measure())
    return found()


def gap(bench: Bench) -> dict[str, Any]:
    """Gap of engine and trainer log-probabilities over generated tokens, before any step."""
    model, vocab = bench.model("0b6"), bench.shape("0b6")["vocab_size"]
    context, new, many = bench.size(128, 8), bench.size(256, 6), bench.size(16, 4)

    async def sampled() -> list[TurnOutput]:
        served = _engine(bench, model, slots=many, max_context_tokens=context + new + 1)
        await served.start()
        try:
            return await generated(served, requests)
        finally:
            await served.close()

    requests = [request(number, context, new, vocab) for number in range(many)]
    outputs = asyncio.run(sampled())
    assert all(output.stop_reason is StopReason.LENGTH for output in outputs)
    trajectories = random_trajectories(many, context + new, context, vocab)
    for trajectory, asked, output in zip(trajectories, requests, outputs, strict=True):
        trajectory.token_ids[:] = np.concatenate([asked.context_ids, output.token_ids])
        trajectory.behaviour_logprob[context:] = output.logprobs
    settings = TrainSettings(lr=0.0, max_row_tokens=context + new, micro_batch_tokens=4 * (context + new))
    report = Replica(model, settings, dtype="bfloat16", device=bench.device).step(trajectories, 0)
    figures = {
        "logprob_gap_mean_nats": figure(report.mismatch_mean_abs, "nats", "lower"),
        "logprob_gap_max_nats": figure(report.mismatch_max_abs, "nats", "lower"),
    }
    text = f"{report.mismatch_tokens} tokens: mean {report.mismatch_mean_abs:.2g}, largest {report.mismatch_max_abs:.2g} nats"
    return {"figures": figures, "text": text}


def quickstart(bench: Bench) -> dict[str, Any]:
    """A few iterations of the quick start by the command itself, on this device."""
    iterations = bench.size(4, 1)
    given = [
        f"run.dir={bench.place}", "run.name=quickstart", f"run.iterations={iterations}", "cluster.dashboard_port=0",
        f"cluster.device={bench.device.type}", "observe.progress=false", f"evaluation.prompts={bench.size(32, 4)}",
    ]  # fmt: skip
    given += [] if bench.is_full else ["trainer.prompts=2", "trainer.group_size=2", "checkpoint.every=0"]
    words = [sys.executable, "-c", "from libra.cli.main import main; main()", "run", "libra/quickstart", *given]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise LibraError(said[-1] if said else f"libra run ended with {done.returncode}")
    lines = (bench.place / "quickstart" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "iteration_s" in row]
    seconds = [row["iteration_s"] for row in rows[1:] or rows]
    figures = {"quickstart_iteration_s": figure(statistics.median(seconds), "s", "lower")}
    return {"figures": figures, "text": f"{len(rows)} iterations, {statistics.median(seconds):.2f} s each"}


PARTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    **{f"step_{name}": partial(step, name=name) for name in BASELINES},
    **{f"weights_{name}": partial(weights, name=name) for name in ("0b6", "4b")}, "engine": engine, "gap": gap,
    "quickstart": quickstart,
}  # fmt: skip


def main() -> int:
    name, device, scale, place = sys.argv[1:]
    try:
        found = PARTS[name](Bench(device, scale, Path(place)))
    except Exception as error:  # noqa: BLE001  the boundary of a part: the others go on, and this one's reason is reported
        if not isinstance(error, LibraError):
            import traceback

            traceback.print_exc()
        print(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        return 1
    tell(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
