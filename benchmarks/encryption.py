"""What the key of a local cluster costs: throughput of a rollout with TLS between all processes over that without.

64 trajectories of 4 turns of exactly ``--tokens`` tokens, as in `benchmarks.rollout_overhead`, on two clusters: one as
`libra run` starts it, and one that is open. Both are there all the time; pairs alternate. ``--tool-slot`` dispatches each turn
and runs each action on a worker of its own, which sends the most messages per token.

Figures: ``tls_throughput_ratio`` (of seconds from the first dispatch to the last report) and ``tls_cpu_ratio`` (of CPU seconds of
all processes, which other work on the machine disturbs less).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from distributed.security import Security

from benchmarks import even_words as task
from benchmarks.report import Figure, command_parser, emit
from benchmarks.rollout_overhead import Side
from libra.cluster import local

GOAL = 0.95


class OpenWorkers(local.LocalWorkers):
    """A local cluster that lets everybody in."""

    def __init__(self, workers: dict[str, Any], scheduler: dict[str, Any], **options: Any) -> None:
        for each in (scheduler, *workers.values()):
            each["options"]["protocol"] = "tcp://"
        super().__init__(workers=workers, scheduler=scheduler, **options)


@contextlib.contextmanager
def opened() -> Iterator[None]:
    """Local clusters started inside are open."""
    with (
        mock.patch.object(local, "LocalWorkers", OpenWorkers),
        mock.patch.object(local, "new_security", return_value=Security(require_encryption=False)),
    ):
        yield


def once(side: Side) -> tuple[float, float]:
    """Wall seconds of one iteration's generation, and CPU seconds of all processes in it."""
    client = side.session.client

    def cpu_s() -> float:
        return time.process_time() + sum(client.run(time.process_time).values())

    before = cpu_s()
    wall_s = side.libra_s()
    return wall_s, cpu_s() - before


def measure(model_dir: Path, directory: Path, options: argparse.Namespace) -> dict[str, float]:
    """Median ratios over all pairs: open over encrypted in seconds (throughput), encrypted over open in CPU seconds."""
    walls, cpus = [], []
    inline = not options.tool_slot
    with contextlib.ExitStack() as stack:
        with opened():
            bare = stack.enter_context(Side(model_dir, directory / "open", options.tokens, options, inline=inline))
        keyed = stack.enter_context(Side(model_dir, directory / "keyed", options.tokens, options, inline=inline))
        addresses = [str(side.session.client.scheduler.address) for side in (keyed, bare)]
        assert [each.partition(":")[0] for each in addresses] == ["tls", "tcp"]
        once(keyed), once(bare)
        for pair in range(options.pairs):
            order = (keyed, bare) if pair % 2 == 0 else (bare, keyed)
            found = {side: once(side) for side in order}
            walls.append(found[bare][0] / found[keyed][0])
            cpus.append(found[keyed][1] / found[bare][1])
            print(f"pair {pair + 1}: throughput {walls[-1]:.3f}, CPU {cpus[-1]:.3f}", flush=True)
    return {"tls_throughput_ratio": statistics.median(walls), "tls_cpu_ratio": statistics.median(cpus)}


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = command_parser("encryption", __doc__, pairs=9)
    parser.add_argument("--tokens", type=int, default=64, help="tokens per turn")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--concurrent", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch threads of the engine")
    parser.add_argument("--tool-slot", action="store_true", help="run every action on a TOOL slot, not within its turn")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="encryption-") as name:
        task.save_model(Path(name) / "model")
        found = measure(Path(name) / "model", Path(name), options)
    goals = {"tls_throughput_ratio": ("higher", GOAL), "tls_cpu_ratio": ("lower", 1 / GOAL)}
    figures = {name: Figure(value, "ratio", *goals[name]) for name, value in found.items()}
    emit("encryption", figures, arguments=arguments, as_json=options.json)


if __name__ == "__main__":
    main()
