"""The parts of `benchmarks.gpu`, one a process: ``python -m benchmarks.gpu_parts PART DEVICE SCALE DIR``.

The last line is JSON: ``figures`` (value, unit, better), ``facts`` (what they rest on) and ``text``; or the first line of an error,
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
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.random_training import random_trajectories, save_random_model
from libra.cluster.hardware_inventory import gpu_name
from libra.config import RunConfig, config_from_dict
from libra.errors import LibraError
from libra.events.reports import EngineReport, ServedReport
from libra.hardware import GPU, known_gpus, load_shape
from libra.planner.cost import TrajectoryTotals, training_cost
from libra.planner.from_config import snapshot_of
from libra.rollout.transformers_engine import TransformersEngine
from libra.tensors import digest
from libra.train import Replica, TrainSettings
from libra.types import StopReason, TurnOutput, TurnRequest
from libra.weights import WeightStore
from libra.worker.verified_engine import Serving
from libra.worker.weight_publishing import publish_checked

SHAPES: dict[str, dict[str, int]] = {
    "0b5": {
        "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64,
    },
    "1b5": {
        "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128,
    },
    "tiny": {
        "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    },
}  # fmt: skip
"""Sizes of the random models: those of Qwen2.5-0.5B and -1.5B, as Qwen3."""
PASSES = 3
"""A backward pass takes twice the operations of the forward pass."""

Figures = dict[str, dict[str, Any]]


class Bench:
    """What every part has: where it computes, how large, and a directory.

    Attributes
    ----------
    device : torch.device
    is_full : bool
    place : Path
    """

    def __init__(self, device: str, scale: str, place: Path) -> None:
        self.device, self.is_full, self.place = torch.device(device), scale == "full", place

    def size(self, full: int, tiny: int) -> int:
        """One of two numbers, by scale."""
        return full if self.is_full else tiny

    def model(self, name: str) -> Path:
        """Directory of a random Qwen3 in bfloat16, tied, made on the device."""
        from transformers import Qwen3Config

        shape = SHAPES[name if self.is_full else "tiny"]
        config = Qwen3Config(**shape, tie_word_embeddings=True, max_position_embeddings=8192, pad_token_id=0)
        save_random_model(config, self.place / "model", dtype="bfloat16", device=self.device.type)
        self.free()
        return self.place / "model"

    def free(self) -> None:
        """Give back what nobody holds any more, and count the peak from here on."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def wait(self) -> None:
        """Until the device has done all it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def peak_bytes(self) -> float:
        """Most memory that was allocated at once; on a CPU that of the whole process."""
        if self.device.type == "cuda":
            return float(torch.cuda.max_memory_allocated())
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0

    def allocated_bytes(self) -> float:
        """Memory that is allocated now; on a CPU not known."""
        return float(torch.cuda.memory_allocated()) if self.device.type == "cuda" else 0.0

    def sheet(self) -> GPU:
        """The datasheet of this GPU; LibraError where there is none. On a CPU any, for the sake of the path."""
        if self.device.type != "cuda":
            return known_gpus()["A800-80G"]
        properties = torch.cuda.get_device_properties(0)
        name = gpu_name(properties.name, properties.total_memory)
        if name not in known_gpus():
            raise LibraError(
                f"{name}: no datasheet in libra/hardware/gpus fits it; add one, peak and memory come from there"
            )
        return known_gpus()[name]


def timed(bench: Bench, work: Callable[[], Any]) -> float:
    """Seconds that it takes, with all that the device does for it."""
    bench.wait()
    began_s = time.perf_counter()
    work()
    bench.wait()
    return time.perf_counter() - began_s


def figure(value: float, unit: str, better: str) -> dict[str, Any]:
    """As `benchmarks.report.Figure` takes it."""
    return {"value": value, "unit": unit, "better": better}


# ---------------------------------------------------------------- a training step


def trained_settings(bench: Bench, model: Path, tokens: int, rows: int) -> RunConfig:
    """The configuration whose step is taken and whose memory is planned."""
    return config_from_dict(
        {
            "model": {"path": str(model), "dtype": "bfloat16"},
            "rollout": {"max_context_tokens": tokens, "max_new_tokens": tokens // 2},
            "trainer": {
                "prompts": rows, "group_size": 1, "normalize_std": False, "max_row_tokens": tokens,
                "micro_batch_tokens": tokens, "share_prompts": False, "gradient_checkpointing": False,
            },
        }
    )  # fmt: skip


def step_flops(shape: dict[str, int], tokens: int, scored: int, count: int) -> float:
    """Useful operations of a step on ``count`` sequences: forward and backward, causal attention, the head where scored."""
    heads = shape["num_attention_heads"] * shape["head_dim"]
    projections = shape["hidden_size"] * (2 * heads + 2 * shape["num_key_value_heads"] * shape["head_dim"])
    layer = projections + 3 * shape["hidden_size"] * shape["intermediate_size"]
    dense = 2.0 * shape["num_hidden_layers"] * layer * tokens
    attention = 2.0 * shape["num_hidden_layers"] * heads * tokens**2  # half of 4 T^2, a token sees those before it
    head = 2.0 * shape["vocab_size"] * shape["hidden_size"] * scored
    return PASSES * count * (dense + attention + head)


def step(bench: Bench, name: str) -> dict[str, Any]:
    """Tokens/s, utilisation and memory of a training step."""
    tokens, count = bench.size(4096, 48), bench.size(4, 2)
    prompt_tokens = tokens // 8
    model = bench.model(name)
    shape = SHAPES[name if bench.is_full else "tiny"]
    config = trained_settings(bench, model, tokens, count)
    settings = TrainSettings(**config.trainer.model_dump())
    replica = Replica(model, settings, dtype="bfloat16", master_dtype="float32", device=bench.device)
    trajectories = random_trajectories(count, tokens, prompt_tokens, shape["vocab_size"])
    replica.step(trajectories, 0)  # kernels are chosen, moments are made
    bench.free()
    seconds = [timed(bench, partial(replica.step, trajectories, number)) for number in range(1, bench.size(4, 3))]
    peak, step_s = bench.peak_bytes(), statistics.median(seconds)
    # The content of the new weights is hashed on the host in every step, while the device waits: no part of the utilisation.
    hashing_s = timed(bench, lambda: digest(replica.weights()))
    computed_s = step_s - hashing_s
    sheet = bench.sheet()
    lengths = TrajectoryTotals.of(np.full(count, float(prompt_tokens)), np.full(count, float(tokens - prompt_tokens)))
    layout = snapshot_of(config, lengths, what_if=True)[0].training
    cost = training_cost(sheet, load_shape(model), np.full(count, float(tokens)), 1, layout)
    planned = cost.memory_bytes - cost.memory_parts_bytes.get("runtime", 0.0)  # torch does not count the driver's
    flops = step_flops(shape, tokens, tokens - prompt_tokens, count)
    utilisation = flops / computed_s / sheet.flops_per_s
    figures = {
        f"step_{name}_tokens_per_s": figure(count * tokens / step_s, "tokens/s", "higher"),
        f"step_{name}_mfu": figure(utilisation, "of the peak", "higher"),
        f"step_{name}_predicted_over_measured_peak": figure(planned / peak, "ratio", "lower"),
    }
    facts = {
        "step_s": step_s, "hashing_s": hashing_s, "sequences": count, "tokens_each": tokens,
        "useful_flops": flops, "peak_flops_per_s": sheet.flops_per_s, "peak_of": sheet.full_name,
        "measured_peak_bytes": peak, "predicted_peak_bytes": planned, "predicted_parts_bytes": cost.memory_parts_bytes,
        "predicted_step_s": cost.step_s, "gradient_checkpointing": settings.gradient_checkpointing,
    }  # fmt: skip
    text = (
        f"{count} x {tokens} tokens in {step_s:.3f} s, {hashing_s:.3f} s of it hashing; without that "
        f"{utilisation:.1%} of {sheet.flops_per_s / 1e12:.0f} TFLOP/s "
        f"({sheet.full_name}); peak {peak / 1e9:.2f} GB, planned {planned / 1e9:.2f} GB"
    )
    return {"figures": figures, "facts": facts, "text": text}


# ---------------------------------------------------------------- engines


def request(number: int, context: int, new: int, vocab: int) -> TurnRequest:
    """A turn that ends at ``new`` tokens."""
    ids = np.random.default_rng(number).integers(0, vocab, context).astype(np.int32)
    return TurnRequest(f"t{number}", 0, ids, new, seed=number)


async def generated(engine: TransformersEngine, requests: list[TurnRequest]) -> list[TurnOutput]:
    """All of them at once."""
    outputs = await asyncio.gather(*(engine.generate(each) for each in requests))
    for each in requests:
        engine.forget(each.trajectory_id)
    return list(outputs)


def engine(bench: Bench) -> dict[str, Any]:
    """Generated tokens per second, by requests at once."""
    model, vocab = bench.model("0b5"), SHAPES["0b5" if bench.is_full else "tiny"]["vocab_size"]
    context, new = bench.size(512, 8), bench.size(128, 4)
    batches = [1, 8, 32, 128] if bench.is_full else [1, 4]

    async def measured() -> dict[int, float]:
        served = _engine(bench, model, slots=batches[-1], max_context_tokens=context + new + 1)
        await served.start()
        try:
            await generated(served, [request(10**6, context, 4, vocab)])
            found = {}
            for many in batches:
                requests = [request(many * 1000 + number, context, new, vocab) for number in range(many)]
                began_s = time.perf_counter()
                outputs = await generated(served, requests)
                found[many] = sum(len(output.token_ids) for output in outputs) / (time.perf_counter() - began_s)
            return found
        finally:
            await served.close()

    found = asyncio.run(measured())
    figures = {f"engine_tokens_per_s_{many}": figure(rate, "tokens/s", "higher") for many, rate in found.items()}
    text = f"{new} tokens each after {context}: " + ", ".join(
        f"{many} at once {rate:.0f}/s" for many, rate in found.items()
    )
    return {"figures": figures, "facts": {"context_tokens": context, "new_tokens": new}, "text": text}


def _engine(bench: Bench, model: Path, *, slots: int, max_context_tokens: int, version: int = 0) -> TransformersEngine:
    return TransformersEngine(
        model,
        slots=slots,
        max_context_tokens=max_context_tokens,
        dtype="bfloat16",
        version=version,
        device=bench.device.type,
    )


def move_weights(replica: Replica) -> None:
    """Move every weight up or down by the same amount."""
    with torch.no_grad():
        for parameter in replica.parameters().values():
            parameter.add_(torch.sign(torch.randn_like(parameter)), alpha=1e-3)
    replica.content = None


async def wall_s(work: Awaitable[object]) -> float:
    """Wall seconds of ``work``."""
    began_s = time.perf_counter()
    await work
    return time.perf_counter() - began_s


def weights(bench: Bench) -> dict[str, Any]:
    """Publication to served, sleep and wake, of the model of 0.5 B."""
    model, context = bench.model("0b5"), 256
    replica = Replica(model, TrainSettings(), dtype="bfloat16", device=bench.device)
    store, reports = WeightStore(bench.place / "weights"), list[EngineReport]()

    publish_checked(store, replica, 0, context)

    async def newest() -> Any:
        return store.latest()

    serving = Serving(
        model,
        build=lambda path, version: _engine(bench, path, slots=4, max_context_tokens=context, version=version),
        newest=newest,
        report=reports.append,
        store=store,
    )

    async def measured() -> dict[str, list[float]]:
        times: dict[str, list[float]] = {name: [] for name in ("publish", "served", "sleep", "wake", "freed")}
        await serving.start()
        try:
            await serving.pull()
            for version in (1, 2, 3):
                move_weights(replica)
                began_s = time.perf_counter()
                publish_checked(store, replica, version, context)
                times["publish"].append(time.perf_counter() - began_s)
                serving.announced = version
                await serving.pull()
                times["served"].append(time.perf_counter() - began_s)
                if not isinstance(reports[-1], ServedReport):
                    raise LibraError(f"version {version} was not served: {reports[-1]}")
                held = bench.allocated_bytes()
                times["sleep"].append(await wall_s(serving.sleep()))
                times["freed"].append(held - bench.allocated_bytes())
                times["wake"].append(await wall_s(serving.wake()))
        finally:
            await serving.close()
        return times

    times = asyncio.run(measured())
    median = {name: statistics.median(values) for name, values in times.items()}
    latest = store.latest()
    figures = {
        "publish_to_served_s": figure(median["served"], "s", "lower"),
        "sleep_s": figure(median["sleep"], "s", "lower"),
        "wake_s": figure(median["wake"], "s", "lower"),
    }
    facts = {
        "trainer_stall_s": median["publish"],
        "bytes": latest.num_bytes if latest is not None else 0,
        "freed_bytes": median["freed"],
    }
    text = (
        f"{facts['bytes'] / 1e9:.2f} GB served {median['served']:.2f} s after the publication began (the trainer's part "
        f"{median['publish']:.2f} s); asleep in {median['sleep']:.2f} s, {median['freed'] / 1e9:.2f} GB freed, awake in "
        f"{median['wake']:.2f} s"
    )
    return {"figures": figures, "facts": facts, "text": text}


def gap(bench: Bench) -> dict[str, Any]:
    """Log-probabilities of engine and trainer apart, over generated tokens, before any step changes the weights."""
    model, vocab = bench.model("0b5"), SHAPES["0b5" if bench.is_full else "tiny"]["vocab_size"]
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
    return {"figures": figures, "facts": {"tokens": report.mismatch_tokens}, "text": text}


def quickstart(bench: Bench) -> dict[str, Any]:
    """A few iterations of the quick start through the command itself, which is told to compute on this device."""
    iterations = bench.size(8, 1)
    given = [
        f"run.dir={bench.place}",
        "run.name=quickstart",
        f"run.iterations={iterations}",
        "cluster.dashboard_port=0",
    ]
    given += [
        f"cluster.device={bench.device.type}",
        "observe.progress=false",
        f"evaluation.prompts={bench.size(128, 4)}",
    ]
    given += [] if bench.is_full else ["trainer.prompts=2", "trainer.group_size=2", "checkpoint.every=0"]
    words = [sys.executable, "-c", "from libra.cli.main import main; main()", "run", "libra/quickstart", *given]
    began_s = time.perf_counter()
    done = subprocess.run(words, capture_output=True, text=True)
    wall_s = time.perf_counter() - began_s
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise LibraError(said[-1] if said else f"libra run ended with {done.returncode}")
    lines = (bench.place / "quickstart" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "iteration_s" in row]
    seconds = [row["iteration_s"] for row in rows[1:] or rows]
    figures = {"quickstart_iteration_s": figure(statistics.median(seconds), "s", "lower")}
    facts = {"wall_s": wall_s, "iterations": len(rows), "rewards": [row["reward"] for row in rows]}
    text = f"{len(rows)} iterations, {statistics.median(seconds):.2f} s each, {wall_s:.0f} s in all"
    return {"figures": figures, "facts": facts, "text": text}


PARTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "step_0b5": lambda bench: step(bench, "0b5"),
    "step_1b5": lambda bench: step(bench, "1b5"),
    "engine": engine,
    "weights": weights,
    "gap": gap,
    "quickstart": quickstart,
}


def main() -> int:
    """Run one part."""
    name, device, scale, place = sys.argv[1:]
    try:
        found = PARTS[name](Bench(device, scale, Path(place)))
    except Exception as error:  # noqa: BLE001  the boundary of a part: the others go on, and this one's reason is told
        if not isinstance(error, LibraError):
            import traceback

            traceback.print_exc()
        print(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        return 1
    print(json.dumps(found, allow_nan=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
