"""Quanta in Dask's task stream, on a real scheduler with real workers in this process."""

import asyncio
import contextlib
import itertools
import logging
from types import SimpleNamespace

import pytest
from distributed import Client, Reschedule, Worker, get_worker
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.diagnostics.task_stream import TaskStreamPlugin, rectangles
from hypothesis import given
from hypothesis import strategies as st

from libra.observe.task_stream import PHASE_COLORS, QuantumStream
from libra.types import Phase

DONE = {}
"""Quanta finished so far, by key; workers run in this process."""


def trajectory(key, num_quanta, error=False):
    """Stand-in for a trajectory: reports each quantum, then reschedules, and returns or raises after the last."""
    done = DONE[key] = DONE.get(key, 0) + 1
    phase = Phase.ROLLOUT if done % 2 else Phase.TOOL
    get_worker().log_event("quanta", {"key": key, "phase": str(phase), "start_s": 100.0 + done, "stop_s": 100.5 + done})
    if done < num_quanta:
        raise Reschedule
    if error:
        raise ValueError("the last quantum failed")
    return done


class Reporter(SchedulerPlugin):
    """Hands reports of workers to the stream, as Libra's plugin does."""

    name = "reporter"

    def __init__(self, scheduler, stream):
        self.scheduler, self.stream = scheduler, stream

    def log_event(self, topic, msg):
        if topic == "quanta":
            worker = self.scheduler.tasks[msg["key"]].processing_on.address
            label = "generate" if msg["phase"] == "ROLLOUT" else "calculator"
            self.stream.add(msg["key"], worker, msg["phase"], msg["start_s"], msg["stop_s"], label)


@pytest.fixture
def emulated(live_scheduler):
    """``async with emulated()``: scheduler, two workers, client, stream; the stream's reporter is in place."""

    @contextlib.asynccontextmanager
    async def start():
        async with (
            live_scheduler() as scheduler,
            Worker(scheduler.address, nthreads=2, name="a", dashboard=False),
            Worker(scheduler.address, nthreads=2, name="b", dashboard=False),
            Client(scheduler.address, asynchronous=True) as client,
        ):
            stream = QuantumStream(scheduler)
            scheduler.add_plugin(Reporter(scheduler, stream))
            yield SimpleNamespace(scheduler=scheduler, client=client, stream=stream)

    DONE.clear()
    return start


def stock_of(scheduler):
    return scheduler.plugins[TaskStreamPlugin.name]


def test_every_quantum_is_in_the_clients_task_stream_once(emulated):
    lengths = {f"trajectory-train-0-0-{i}-e0-demo": 2 * i + 1 for i in range(4)}

    async def main():
        async with emulated() as live:
            futures = [live.client.submit(trajectory, key, n, key=key) for key, n in lengths.items()]
            plain = live.client.submit(sum, [1, 2], key="sum-of-two")
            assert await live.client.gather(futures) == list(lengths.values())
            assert await plain == 3
            return await live.client.get_task_stream(), stock_of(live.scheduler)

    rows, stock = asyncio.run(main())
    ours = [row["key"] for row in rows if not isinstance(row["key"], str)]
    expected = {
        ("generate" if n % 2 == 0 else "calculator", key, n) for key, length in lengths.items() for n in range(length)
    }
    assert len(ours) == len(set(ours)) == 16
    assert set(ours) == expected
    assert [row["key"] for row in rows if isinstance(row["key"], str)] == ["sum-of-two"]  # nothing of ours twice
    assert stock.index == len(stock.buffer) == 17


def test_rows_draw_with_a_name_a_colour_and_a_lane_of_their_own(emulated):
    key = "trajectory-train-0-0-0-e0-demo"

    async def main():
        async with emulated() as live:
            assert await live.client.submit(trajectory, key, 3, key=key) == 3
            drawn = stock_of(live.scheduler).rectangles(0)
            rows = await live.client.get_task_stream()
            return drawn, rectangles(rows), [row["worker"] for row in rows], set(live.scheduler.workers)

    drawn, by_client, workers, known = asyncio.run(main())
    assert drawn["name"] == by_client["name"] == ["generate", "calculator", "generate"]
    assert drawn["color"] == [PHASE_COLORS[Phase.ROLLOUT], PHASE_COLORS[Phase.TOOL], PHASE_COLORS[Phase.ROLLOUT]]
    assert drawn["duration"] == [500.0] * 3
    assert drawn["start"] == [1000 * (100.25 + n) for n in (1, 2, 3)]  # Dask centres its rectangles
    assert set(workers) <= known
    assert [lane.rsplit("-", 2)[1:] for lane in drawn["worker_thread"]] == [
        ["ROLLOUT", "0"], ["TOOL", "0"], ["ROLLOUT", "0"],
    ]  # fmt: skip


def test_a_failed_trajectory_keeps_dasks_own_row(emulated):
    key = "trajectory-train-0-0-0-e0-demo"

    async def main():
        async with emulated() as live:
            with pytest.raises(ValueError, match="the last quantum failed"):
                await live.client.submit(trajectory, key, 2, error=True, key=key)
            return await live.client.get_task_stream(), stock_of(live.scheduler).rectangles(0)

    rows, drawn = asyncio.run(main())
    assert [(row["key"], row["status"]) for row in rows] == [
        (("generate", key, 0), "OK"), (("calculator", key, 1), "OK"), (key, "error"),
    ]  # fmt: skip
    assert drawn["color"][2] == "black"


def test_buffer_keeps_its_bound_and_its_counter(live_scheduler):
    async def main():
        async with live_scheduler() as scheduler:
            scheduler.add_plugin(TaskStreamPlugin(scheduler, maxlen=10))
            stream, stock = QuantumStream(scheduler), stock_of(scheduler)
            for n in range(25):
                stream.add("k", "tcp://a", Phase.ROLLOUT, n, n + 1, "generate")
            stock.transition("k", "processing", "memory", startstops=[{}])  # the scheduler tells Dask's plugin first,
            stream.transition("k", "processing", "memory")  # then ours
            return [row["key"][2] for row in stock.collect(start_index=20)], len(stock.buffer), stock.index

    assert asyncio.run(main()) == ([20, 21, 22, 23, 24], 9, 25)


def test_a_quantum_that_ends_before_it_began_is_refused_and_counted(live_scheduler, caplog):
    async def main():
        async with live_scheduler() as scheduler:
            stream = QuantumStream(scheduler)
            with caplog.at_level(logging.WARNING, "libra.observe.task_stream"):
                stream.add("k", "tcp://a", Phase.ROLLOUT, 5.0, 4.0, "generate")
            stream.add("k", "tcp://a", Phase.TOOL, 5.0, 5.0, "")
            return stream.refused, [row["key"] for row in stock_of(scheduler).buffer]

    assert asyncio.run(main()) == (1, [("TOOL", "k", 0)])
    assert "compare the worker's clock" in caplog.text


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=40))
def test_lanes_never_overlap(spans):
    plugins = {}
    scheduler = SimpleNamespace(
        plugins=plugins, add_plugin=lambda plugin, name=None: plugins.update({name or plugin.name: plugin})
    )
    stream = QuantumStream(scheduler)
    spans = sorted(((start, start + length) for start, length in spans), key=lambda span: span[1])
    for start, stop in spans:  # quanta are reported when they end
        stream.add("k", "tcp://a", Phase.ROLLOUT, float(start), float(stop), "generate")
    lanes = {}
    for row in plugins[TaskStreamPlugin.name].buffer:
        (span,) = row["startstops"]
        lanes.setdefault(row["thread"], []).append((span["start"], span["stop"]))
    assert sum(map(len, lanes.values())) == len(spans)
    for rows in lanes.values():
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(rows))
