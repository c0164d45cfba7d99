"""One GPU in one command: ``python -m benchmarks.gpu --json`` (at most nine minutes).

Models are random; nothing is downloaded. Each part is a process of its own (`benchmarks.gpu_parts`). A part that fails, or exceeds
its time limit, is reported with the first line of its error, and the others run.

* ``step_0b5``, ``step_1b5``: a training step of a Qwen3 of 0.5 and 1.5 billion parameters, bfloat16 with float32 master weights, on
  sequences of 4,096 tokens: tokens/s, model FLOPs utilisation (the peak is the datasheet's, named; recomputation does not count as
  useful), and the peak of allocated memory over what `libra plan` predicts for the same settings;
* ``engine``: tokens/s that TransformersEngine generates, by requests at once;
* ``weights``: seconds from the trainer's weights to a verified engine that serves them, and of its sleep and wake, as in a role
  change;
* ``gap``: mean and largest \\|log p(engine) - log p(trainer)\\| of generated tokens in bfloat16, both from the same weights;
* ``quickstart``: `libra run` with the quick start's settings and `cluster.device=cuda`, a few iterations.

Without a GPU it exits with 2. ``--device cpu --scale tiny`` runs every part on the CPU with models of a few thousand parameters, to
test every path. Its numbers mean nothing, and its figures are named ``smoke_...``.
"""

from __future__ import annotations

import argparse
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

PARTS: dict[str, float] = {"step_0b5": 80, "step_1b5": 110, "engine": 90, "weights": 80, "gap": 50, "quickstart": 120}
"""Seconds that each part may take, with the start of its process; together below nine minutes."""


def run_part(name: str, options: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    """The last line of a part's output; ``{"error": ...}`` if it failed."""
    with tempfile.TemporaryDirectory(prefix="libra-gpu-") as place:
        words = [sys.executable, "-m", "benchmarks.gpu_parts", name, options.device, options.scale, place]
        with (Path(place) / "output").open("w+") as output:
            process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return {"error": f"not done after {limit_s:.0f} s"}
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with the part's own processes
                process.wait()
            output.seek(0)
            lines = [line for line in output.read().splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    if code == 0 and last.startswith("{"):
        found: dict[str, Any] = json.loads(last)
        return found
    return {"error": last or f"its process ended with {code}"}


def figures_of(found: dict[str, dict[str, Any]], prefix: str) -> dict[str, Figure]:
    """The figures of the parts that did not fail."""
    return {
        f"{prefix}{name}": Figure(entry["value"], entry["unit"], entry["better"])
        for part in found.values()
        for name, entry in part.get("figures", {}).items()
    }


def check_device(device: str) -> str:
    """Name of the measured device; ConfigError without a GPU."""
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
    """Command line; exit code 0, 1 if a part failed, 2 if nothing could be measured."""
    parser = command_parser("gpu", __doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--scale", choices=["full", "tiny"], default="full")
    parser.add_argument("--part", choices=list(PARTS), action="append", help="only this one; may be repeated")
    parser.add_argument("--limit-s", type=float, default=sum(PARTS.values()), help="seconds for all parts together")
    options = parser.parse_args(arguments)
    try:
        device = check_device(options.device)
    except ConfigError as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 2
    until_s = time.monotonic() + options.limit_s
    found: dict[str, dict[str, Any]] = {}
    for name in options.part or PARTS:
        began_s = time.monotonic()
        left_s = until_s - began_s
        found[name] = run_part(name, options, min(PARTS[name], left_s)) if left_s > 1 else {"error": "no time was left"}
        took_s, text = time.monotonic() - began_s, found[name].get("error") or found[name].get("text", "")
        print(f"{name}: {'failed: ' if 'error' in found[name] else ''}{text} ({took_s:.0f} s)", flush=True)
    failed = {name: part["error"] for name, part in found.items() if "error" in part}
    prefix = "" if options.device == "cuda" and options.scale == "full" else "smoke_"
    beside = {"device": device, "failed": failed, "facts": {n: p["facts"] for n, p in found.items() if "facts" in p}}
    emit("gpu", figures_of(found, prefix), arguments=arguments, as_json=options.json, beside=beside)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
