"""Cost of the plugin in Dask's scheduler: rewriting priorities, quanta, and the delay from a tool's
return to the new order.

The scheduler, the plugin, C-MLFQ and the event log are real; trajectories are tasks without work
(`benchmarks.live.parked_tasks`).

* ``rewrites_per_s_<n>``: priorities rewritten per CPU second while n trajectories wait, from
  `SetPriority` to a line of the event log, ``ts.priority`` and the dispatcher's order, 16 commands
  at a time. Every rewrite must have its line.
* ``scheduler_us_per_quantum``: CPU of the scheduler's thread per finished quantum, Dask's own work
  included, with 10k waiting and all slots busy, median over windows. ``_fifo``: another policy;
  ``_no_log``: without event log.
* ``scheduler_over_bare``: the same over a loop that only parks tasks, releases them to free slots
  and hears their reports. ``_inline``: tools run within generations, so that trajectories keep
  their slots unless a better one waits.
* ``signal_to_order_ms``: from a tool's return on the worker until the resulting ``ts.priority`` is
  set, at a moderate load (``scheduler_load``); ``_p99``; ``_saturated``: while the scheduler gets
  more reports than it can handle.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.live.parked_tasks import RUN, Stage, parked
from benchmarks.report import Figure, command_parser, emit
from libra.facts import Priority, QuantumFinished, SetPriority
from libra.scheduler import scheduler_internals
from libra.store.event_log import read_events
from libra.types import Phase

SIZES = {1_000: "1k", 10_000: "10k", 100_000: "100k"}
COMMANDS_AT_ONCE = 16
LEVELS = 80
GOAL_PER_S, GOAL_US, GOAL_OVER_BARE = 100_000.0, 150.0, 1.3
MODERATE = {"generation_s": 0.2, "tool_s": 0.1}
"""Seconds of quanta for `signal_to_order_ms`: with 64 slots per phase, a few hundred quanta a
second."""


def commands(stage: Stage, count: int, seed: int) -> list[tuple[SetPriority, ...]]:
    """So many rewrites of random waiting trajectories, in tuples as an ordering returns them."""
    rng = random.Random(seed)
    names = list(stage.plugin.trajectories.dispatcher.waiting(Phase.ROLLOUT))
    drawn = [
        SetPriority(key, Priority(0, rng.randrange(LEVELS), place), "benchmark: a class by tokens left")
        for place, key in enumerate(rng.choices(names, k=count))
    ]
    return [tuple(drawn[at : at + COMMANDS_AT_ONCE]) for at in range(0, count, COMMANDS_AT_ONCE)]


async def rewrites(waiting: int, count: int, repeats: int) -> float:
    with tempfile.TemporaryDirectory() as directory:
        async with parked(Path(directory), waiting) as stage:
            state, applier, found = stage.plugin.runs[RUN], stage.plugin.trajectories.applier, []
            before = rewrites_logged(stage)
            for repeat in range(repeats):
                todo = commands(stage, count, repeat)
                started = time.thread_time()
                for answer in todo:
                    applier.apply(state, answer)
                state.log.flush()
                found.append(count / (time.thread_time() - started))
                await asyncio.sleep(0)
            check(stage, rewrites_logged(stage) - before, repeats * count)
            return statistics.median(found)


def rewrites_logged(stage: Stage) -> int:
    stage.plugin.runs[RUN].log.flush()
    return sum(event["name"] == "priority_set" for event in read_events(stage.directory / "events.jsonl").events)


def check(stage: Stage, logged: int, asked: int) -> None:
    assert logged == asked, f"{asked} rewrites were requested, {logged} are in the log"
    tasks, waiting = stage.scheduler.tasks, stage.plugin.trajectories.dispatcher.waiting(Phase.ROLLOUT)
    assert all(tasks[key].priority == tuple(priority) for key, priority in waiting.items())


async def windows(stage: Stage, quanta: int, repeats: int) -> list[tuple[float, float]]:
    """CPU and wall seconds per quantum in windows of so many quanta, without the first window."""
    found: list[tuple[float, float]] = []
    for window in range(repeats + 1):
        began, cpu, wall = stage.num_quanta, time.thread_time(), time.perf_counter()
        while stage.num_quanta < began + quanta:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        done = stage.num_quanta - began
        if window:
            found.append(((time.thread_time() - cpu) / done, (time.perf_counter() - wall) / done))
    return found


async def quantum_us(options: argparse.Namespace, **how: Any) -> float:
    with tempfile.TemporaryDirectory() as directory:
        async with parked(Path(directory), options.waiting, workers=4, **how) as stage:
            return 1e6 * statistics.median(cpu for cpu, _ in await windows(stage, options.quanta, options.repeats))


class Delays:
    """Milliseconds from a tool's return to the new priority; a context manager that patches the
    plugin."""

    def __init__(self, stage: Stage) -> None:
        self._write = scheduler_internals.set_priority
        self._handlers = stage.plugin._handlers
        self._finished = self._handlers[QuantumFinished]
        self._returned_s: dict[str, float] = {}
        self.ms: list[float] = []

    def __enter__(self) -> Delays:
        def finished(state: Any, fact: QuantumFinished, worker: str) -> None:
            if fact.tool and fact.next:
                self._returned_s[fact.key] = fact.stop_s
            self._finished(state, fact, worker)

        def write(ts: Any, priority: Any) -> None:
            self._write(ts, priority)
            returned_s = self._returned_s.pop(ts.key, None)
            if returned_s is not None:
                self.ms.append(1e3 * (time.time() - returned_s))

        self._handlers[QuantumFinished], scheduler_internals.set_priority = finished, write
        return self

    def __exit__(self, *error: object) -> None:
        self._handlers[QuantumFinished], scheduler_internals.set_priority = self._finished, self._write


async def delays(options: argparse.Namespace, **how: float) -> Iterator[float]:
    """Median and 99th percentile of the delay in ms, and the scheduler's share of a core."""
    with tempfile.TemporaryDirectory() as directory:
        async with parked(Path(directory), options.waiting, workers=4, **how) as stage:
            with Delays(stage) as heard:
                spent = await windows(stage, options.quanta // 2, options.repeats)
            ordered = sorted(heard.ms)
            load = statistics.median(cpu / wall for cpu, wall in spent)
            return iter((statistics.median(ordered), ordered[int(0.99 * len(ordered))], load))


async def measure(options: argparse.Namespace) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    for waiting in options.sizes:
        name = SIZES.get(waiting, str(waiting))
        value = await rewrites(waiting, options.rewrites, options.repeats)
        figures[f"rewrites_per_s_{name}"] = Figure(value, "1/s", "higher", GOAL_PER_S)
    us = await quantum_us(options)
    figures["scheduler_us_per_quantum"] = Figure(us, "us", "lower", GOAL_US)
    bare_us = await quantum_us(options, bare=True)
    figures["scheduler_us_per_quantum_bare"] = Figure(bare_us, "us", "lower")
    figures["scheduler_over_bare"] = Figure(us / bare_us, "ratio", "lower", GOAL_OVER_BARE)
    inline_us = await quantum_us(options, inline=True)
    figures["scheduler_us_per_quantum_inline"] = Figure(inline_us, "us", "lower")
    figures["scheduler_over_bare_inline"] = Figure(inline_us / bare_us, "ratio", "lower", GOAL_OVER_BARE)
    figures["scheduler_us_per_quantum_fifo"] = Figure(await quantum_us(options, policy="fifo"), "us", "lower")
    median, slowest, load = await delays(options, **MODERATE)
    figures["signal_to_order_ms"] = Figure(median, "ms", "lower")
    figures["signal_to_order_ms_p99"] = Figure(slowest, "ms", "lower")
    figures["scheduler_load"] = Figure(load, "share of a core", "lower")
    figures["signal_to_order_ms_saturated"] = Figure(next(await delays(options)), "ms", "lower")
    return figures


def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("priority_rewrite", __doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="trajectories that wait")
    parser.add_argument("--rewrites", type=int, default=50_000, help="in each repeat")
    parser.add_argument("--waiting", type=int, default=10_000, help="waiting trajectories while quanta run")
    parser.add_argument("--quanta", type=int, default=4_000, help="in each window")
    parser.add_argument("--repeats", type=int, default=5, help="repeats and windows")
    options = parser.parse_args(arguments)
    logging.getLogger("distributed").setLevel(logging.ERROR)  # workers are killed while tasks of theirs are held
    emit("priority_rewrite", asyncio.run(measure(options)), arguments=arguments, as_json=options.json)
