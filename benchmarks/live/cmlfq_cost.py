"""Cost of C-MLFQ's posterior in the scheduler's event loop with many trajectories.

``tool_return_us_<n>``, ``finish_us_<n>``, ``memory_mb_<n>``, ``load_s_<n>`` for n of 1k, 10k, 100k
trajectories of 40 turns, *all of them running at once* in groups of 16: the worst case for memory.

A tool return is the events of the finished generation and tool, two parkings, and ``remaining``. A
finish is the last generation and the end. Times are CPU of the thread, medians over chunks of a
thousand. Memory is the growth of the process; loading is ``json.loads`` and ``restore``.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.report import Figure, command_parser, emit, status_bytes
from libra.facts import QuantumFinished, TrajectoryEnded, TrajectoryParked
from libra.policy.posterior.forecaster import Posterior
from libra.types import Phase, ToolStatus

TURNS = 40
GROUP = 16
CHUNK = 1000
SIZES = {1_000: "1k", 10_000: "10k", 100_000: "100k"}
GOALS = {"tool_return_us_100k": 30.0, "finish_us_100k": 150.0, "memory_mb_100k": 100.0, "load_s_100k": 2.0}
TOOLS = [f"tool_{number}" for number in range(30)]
LEARN_EVERY = 64
"""Finishes between two calls of ``learn``."""


def chunks(count: int) -> Iterator[range]:
    return (range(first, min(first + CHUNK, count)) for first in range(0, count, CHUNK))


class Load:
    """``count`` trajectories with lengths, tools, groups and families drawn in advance."""

    def __init__(self, count: int, rng: np.random.Generator) -> None:
        self.count = count
        self.keys = [f"trajectory-train-{i // GROUP}-0-{i % GROUP}-e0-bench" for i in range(count)]
        slow = np.exp(rng.normal(0.0, 0.5, count // GROUP + 1))[np.arange(count) // GROUP]
        self.pace = slow * np.exp(rng.normal(5.0, 0.4, count))  # tokens per turn, alike in a group
        self.rng = rng

    def park(self, subject: Posterior) -> None:
        for i, key in enumerate(self.keys):
            subject.handle(
                TrajectoryParked(key, 0, Phase.ROLLOUT, 0, f"prompt-{i // GROUP}", f"family-{i // GROUP % 8}")
            )

    def turn(self, subject: Posterior, number: int) -> list[float]:
        handle, remaining, found = subject.handle, subject.remaining, list[float]()
        tokens = (self.pace * np.exp(self.rng.normal(0.0, 0.5, self.count)) + 1).astype(int).tolist()
        tools = self.rng.zipf(1.5, self.count) % len(TOOLS)
        failed = self.rng.random(self.count) < 0.1
        payload = self.rng.integers(0, 2000, self.count).tolist()
        for chunk in chunks(self.count):
            events = [
                (
                    self.keys[i], QuantumFinished(self.keys[i], Phase.ROLLOUT, tokens[i], "", "", 1.0),
                    TrajectoryParked(self.keys[i], 0, Phase.TOOL, 2 * number + 1, f"prompt-{i // GROUP}"),
                    QuantumFinished(
                        self.keys[i], Phase.TOOL, 0, TOOLS[tools[i]], ToolStatus.ERROR if failed[i] else ToolStatus.OK,
                        0.1, payload[i],
                    ),
                    TrajectoryParked(self.keys[i], 0, Phase.ROLLOUT, 2 * number + 2, f"prompt-{i // GROUP}"),
                )
                for i in chunk
            ]  # fmt: skip
            started = time.thread_time()
            for key, generated, parked, returned, again in events:
                handle(generated)
                handle(parked)
                handle(returned)
                handle(again)
                remaining(key)
            found.append(1e6 * (time.thread_time() - started) / len(events))
        return found

    def finish(self, subject: Posterior, which: Sequence[int]) -> float:
        """Microseconds per finish, without learning."""
        spent = 0.0
        for at, i in enumerate(which):
            last, ended = QuantumFinished(self.keys[i], Phase.ROLLOUT, 50, "", "", 1.0), TrajectoryEnded(self.keys[i])
            started = time.thread_time()
            subject.handle(last)
            subject.handle(ended)
            spent += time.thread_time() - started
            if at % LEARN_EVERY == LEARN_EVERY - 1:
                subject.learn()
        return 1e6 * spent / len(which)


def measure(count: int) -> dict[str, Figure]:
    name = SIZES.get(count, str(count))
    rng = np.random.default_rng(0)
    warm = Load(1024, rng)  # something is learned before, so that every signal is in use
    load = Load(count, rng)
    gc.collect()
    before = status_bytes("VmRSS")
    subject = Posterior()
    warm.keys = [f"warm-{key}" for key in warm.keys]
    warm.park(subject)
    for number in range(TURNS):
        warm.turn(subject, number)
    warm.finish(subject, range(warm.count))
    load.park(subject)
    returns = [us for number in range(TURNS) for us in load.turn(subject, number)]
    gc.collect()
    grown = status_bytes("VmRSS") - before
    text = json.dumps(subject.snapshot(), allow_nan=False)
    other = Posterior()
    started = time.thread_time()
    other.restore(json.loads(text))
    loading = time.thread_time() - started
    del other
    finishes = [load.finish(subject, chunk) for chunk in list(chunks(count))[:20]]
    values = {
        "tool_return_us": (statistics.median(returns), "us"), "finish_us": (statistics.median(finishes), "us"),
        "memory_mb": (grown / 1e6, "MB"), "load_s": (loading, "s"),
    }  # fmt: skip
    return {
        f"{figure}_{name}": Figure(value, unit, "lower", GOALS.get(f"{figure}_{name}"))
        for figure, (value, unit) in values.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("cmlfq_cost", __doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="trajectories alive at once")
    options = parser.parse_args(arguments)
    figures: dict[str, Figure] = {}
    for count in options.sizes:
        figures |= measure(count)
    emit("cmlfq_cost", figures, arguments=arguments, as_json=options.json)
