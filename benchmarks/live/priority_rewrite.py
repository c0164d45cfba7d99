"""Cost of the plugin in Dask's scheduler: rewriting priorities, and quanta.

The scheduler, the plugin, C-MLFQ and the event log are real; trajectories are tasks without work
(`benchmarks.live.parked_tasks`).

* ``rewrites_per_s_<n>``: priorities rewritten per CPU second while n trajectories wait, from
  `SetPriority` to a line of the event log, ``ts.priority`` and the dispatcher's order, 16 commands
  at a time. Every rewrite must have its line.
* ``scheduler_us_per_quantum``: CPU of the scheduler's thread per finished quantum, Dask's own work
  included, with 10k waiting and all slots busy, median over windows.
* ``scheduler_over_bare``: the same over a loop that only parks tasks, releases them to free slots
  and hears their reports. ``_inline``: tools run within generations, so that trajectories keep
  their slots unless a better one waits.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.live.parked_tasks import RUN, Stage, parked
from benchmarks.report import Figure, command_parser, emit
from libra.facts import Priority, SetPriority
from libra.store.event_log import read_events
from libra.types import Phase

SIZES = {1_000: "1k", 10_000: "10k", 100_000: "100k"}
COMMANDS_AT_ONCE = 16
LEVELS = 80
GOAL_PER_S, GOAL_US, GOAL_OVER_BARE = 100_000.0, 150.0, 1.3


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


async def quantum_us(options: argparse.Namespace, **how: bool) -> float:
    """CPU of the scheduler per quantum, median of windows without the first."""
    found: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        async with parked(Path(directory), options.waiting, workers=4, **how) as stage:
            for _ in range(options.repeats + 1):
                began, cpu_s = stage.num_quanta, time.thread_time()
                while stage.num_quanta < began + options.quanta:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                found.append((time.thread_time() - cpu_s) / (stage.num_quanta - began))
    return 1e6 * statistics.median(found[1:])


async def measure(options: argparse.Namespace) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    for waiting in options.sizes:
        name = SIZES.get(waiting, str(waiting))
        value = await rewrites(waiting, options.rewrites, options.repeats)
        figures[f"rewrites_per_s_{name}"] = Figure(value, "1/s", "higher", GOAL_PER_S)
    us, bare_us = await quantum_us(options), await quantum_us(options, bare=True)
    inline_us = await quantum_us(options, inline=True)
    figures["scheduler_us_per_quantum"] = Figure(us, "us", "lower", GOAL_US)
    figures["scheduler_over_bare"] = Figure(us / bare_us, "ratio", "lower", GOAL_OVER_BARE)
    figures["scheduler_over_bare_inline"] = Figure(inline_us / bare_us, "ratio", "lower", GOAL_OVER_BARE)
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
