"""One GPU in one command: ``python -m benchmarks gpu --json --minutes 9 --out gpu.json``.

Models are random; nothing is downloaded. Each part is a process of its own
(`benchmarks.gpu_parts`). A part that fails or exceeds its time is reported with the first line of
its error, and the others run. Parts run in the order of their worth, and ``--out`` is written again
after each of them, so that a GPU that is taken away leaves figures.

* ``step_0b6_16k``, ``step_4b_16k``, ``step_0b6_64k``, ``step_4b_64k``: the four baselines that
  prime-rl publishes for one H100. A training step of Qwen3-0.6B (all weights, float32 master
  weights) and Qwen3-4B (LoRA, rank 16) in bfloat16 with activation checkpointing: tokens/s, model
  FLOPs utilisation by prime-rl's formula with prime-rl's figure as the goal, and planned over
  measured peak of allocated memory;
* ``engine``: tokens/s that TransformersEngine generates with a Qwen3-0.6B, by requests at once;
* ``weights_0b6``, ``weights_4b``: seconds from the trainer's weights to a verified engine that
  serves them;
* ``gap``: mean and largest \\|log p(engine) - log p(trainer)\\| of generated tokens in bfloat16,
  both from the same weights;
* ``quickstart``: `libra run` with the quick start's settings and `cluster.device=cuda`, a few
  iterations.

Without a GPU it exits with 2. ``--device cpu --scale tiny`` runs every part on the CPU with models
of a few thousand parameters, to test every path. Its numbers mean nothing, and its figures are
named ``smoke_...``.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.report import Figure, command_parser, emit
from libra.errors import ConfigError

PARTS: dict[str, float] = {
    "step_0b6_16k": 55, "step_4b_16k": 75, "engine": 60, "weights_0b6": 40, "gap": 35, "quickstart": 70,
    "step_0b6_64k": 65, "step_4b_64k": 95, "weights_4b": 60,
}  # fmt: skip
"""Seconds of each part in the default ``--minutes``. Unused time goes to later parts."""


def run_part(name: str, options: argparse.Namespace, limit_s: float, place: Path) -> dict[str, Any]:
    """The last JSON line of a part's output; ``error`` if it failed or timed out."""
    words = [sys.executable, "-X", "faulthandler", "-m", "benchmarks.gpu_parts", name, options.device, options.scale]
    with (place / f"{name}.output").open("w+") as output:
        process = subprocess.Popen(
            [*words, str(place)], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
            process.send_signal(signal.SIGABRT)  # faulthandler prints where it was
            with suppress(subprocess.TimeoutExpired):
                process.wait(2)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the part's own processes
            process.wait()
        output.seek(0)
        lines = [line for line in output.read().splitlines() if line.strip()]
    measured = [line for line in lines if line.startswith('{"figures"')]
    found: dict[str, Any] = json.loads(measured[-1]) if measured else {}
    if code == 0 and found:
        return found
    print(f"---- {name}", *lines[-100:], sep="\n", file=sys.stderr, flush=True)
    last = lines[-1] if lines else f"its process ended with {code}"
    return {**found, "error": f"not done after {limit_s:.0f} s" if code is None else last}


def figures_of(found: dict[str, dict[str, Any]], prefix: str) -> dict[str, Figure]:
    return {
        f"{prefix}{name}": Figure(**entry) for part in found.values() for name, entry in part.get("figures", {}).items()
    }


def check_device(device: str) -> str:
    import torch

    if device == "cpu":
        return "CPU"
    if not torch.cuda.is_available():
        raise ConfigError(
            f"--device cuda: torch {torch.__version__} sees no GPU here; run it on a machine with one, or type "
            "--device cpu --scale tiny to see that every part works"
        )
    return str(torch.cuda.get_device_name(0))


def main(arguments: list[str] | None = None) -> int:
    parser = command_parser("gpu", __doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--scale", choices=["full", "tiny"], default="full")
    parser.add_argument("--part", choices=list(PARTS), action="append", help="only this one; may be repeated")
    parser.add_argument("--minutes", type=float, default=sum(PARTS.values()) / 60, help="for all parts together")
    parser.add_argument("--out", type=Path, help="file for the JSON object, written again after each part")
    options = parser.parse_args(arguments)
    try:
        device = check_device(options.device)
    except ConfigError as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 2
    prefix = "" if options.device == "cuda" and options.scale == "full" else "smoke_"
    found: dict[str, dict[str, Any]] = {}

    def report(stream: io.TextIOBase | Any, as_json: bool) -> None:
        beside = {
            "device": device,
            "failed": {name: part["error"] for name, part in found.items() if "error" in part},
        }
        emit("gpu", figures_of(found, prefix), arguments=arguments, as_json=as_json, stream=stream, beside=beside)

    chosen = options.part or list(PARTS)
    scale = options.minutes * 60 / sum(PARTS[name] for name in chosen)
    until_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="libra-gpu-") as place:
        for name in chosen:
            began_s = time.monotonic()
            until_s += PARTS[name] * scale
            found[name] = run_part(name, options, until_s - began_s, Path(place))
            took_s, part = time.monotonic() - began_s, found[name]
            failed = f"failed: {part['error']} " if "error" in part else ""
            print(f"{name}: {failed}{part.get('text', '')} ({took_s:.0f} s)", flush=True)
            if options.out is not None:
                lines = io.StringIO()
                report(lines, as_json=True)
                options.out.write_text(lines.getvalue().splitlines()[-1] + "\n")
    report(sys.stdout, as_json=options.json)
    return 1 if any("error" in part for part in found.values()) else 0
