"""The Libra page of a scheduler with Libra's own plugin, against the run's event log."""

import asyncio
import contextlib
from collections import Counter
from types import SimpleNamespace

import pytest
from distributed import Client, Reschedule, Worker, get_worker
from made_events import worker_times

from libra import facts, keys
from libra.config import config_from_dict
from libra.facts import STREAM_OP, QuantumFinished, from_dict, pack
from libra.observe.page_snapshots import numbers
from libra.scheduler import LibraPlugin, RunRegistration
from libra.store.event_log import read_events
from libra.types import Phase

DONE = {}
"""Quanta finished so far, by key; workers of the emulation run in this process."""


def shown_by(events):
    """Expected figures of the page for these events, by ``data-libra`` name."""
    named = {}
    for event in events:
        named.setdefault(event["name"], []).append(event)
    quanta = Counter(event["phase"] for event in named["quantum_finished"])
    groups = [event for event in named["group_committed"] if event["split"] == "train"]
    return {
        "quanta_rollout": f"{quanta['ROLLOUT']:,}",
        "quanta_tool": f"{quanta['TOOL']:,}",
        "tokens": f"{sum(event['tokens'] for event in named['quantum_finished']):,}",
        "groups": f"{len(groups):,}",
        "version": f"v{max(event['version'] for event in named['version_published'])}",
        "reward": f"{named['iteration_finished'][-1]['reward']:.3f}",
        "iteration": f"{max(event['iteration'] for event in named['gate_opened'])}",
    }


def check_time(row, events, trainers):
    """The page's worker time agrees with the event log."""
    times = worker_times(map(from_dict, events), trainers).times(row["until_s"])
    assert row["busy_frac"] == pytest.approx(times.busy_frac)
    assert row["shares"] == pytest.approx(times.shares)
    assert {each["worker"]: each["seconds"] for each in row["workers"]} == {
        each.worker: pytest.approx(dict(each.seconds)) for each in times.workers
    }


def say(run, told):
    get_worker().batched_send({"op": STREAM_OP, "run": run, "epoch": 0, "packed": pack(told)})


def gate(run, iteration):
    return iteration


async def quantum(key, run, length):
    """Stand-in for a trajectory: ``length`` quanta, generations and actions in turn, 7 tokens each generation."""
    done = DONE.get(key, 0)
    DONE[key] = done + 1
    phase, more = (Phase.TOOL if done % 2 else Phase.ROLLOUT), done + 1 < length
    following = Phase.ROLLOUT if done % 2 else Phase.TOOL
    tokens, tool = (7, "") if phase is Phase.ROLLOUT else (0, "calculator")
    finished = QuantumFinished(
        key, phase, tokens, tool, "ok", 0.5, 3, quantum=done, worker=str(get_worker().name), version=0,
        end="" if more else "answered", next=str(following) if more else "", context_tokens=10 * (done + 1),
        stop_s=1000.5 + done,
    )  # fmt: skip
    say(run, [finished])
    if more:
        raise Reschedule
    return length


@contextlib.asynccontextmanager
async def emulated_cluster(live_scheduler):
    rollout, tool = {keys.ROLLOUT: 4, keys.GRADE: 4, keys.TRAIN: 1}, {keys.TOOL: 2, keys.COMMIT: 1}
    async with (
        live_scheduler() as scheduler,
        Worker(scheduler.address, nthreads=12, name="rollout-0", resources=rollout, dashboard=False),
        Worker(scheduler.address, nthreads=12, name="tool-0", resources=tool, dashboard=False),
        Client(scheduler.address, asynchronous=True) as client,
    ):
        await client.register_plugin(LibraPlugin())
        yield SimpleNamespace(scheduler=scheduler, client=client, plugin=scheduler.plugins[LibraPlugin.name])


def test_what_the_page_shows_of_the_plugin_agrees_with_the_event_log(live_scheduler, tmp_path):
    DONE.clear()
    lengths = [1, 3, 5, 5, 7, 2, 9, 1, 4]
    generations, actions = sum((n + 1) // 2 for n in lengths), sum(n // 2 for n in lengths)

    async def main():
        async with emulated_cluster(live_scheduler) as live:
            config = config_from_dict({"run": {"eta": 1, "iterations": 4}, "trainer": {"prompts": 2}})
            plain = config.model_dump(mode="json") | {"policy": {"name": "fifo"}}
            answer = live.plugin.register_run(RunRegistration("demo", 0, str(tmp_path), plain))
            assert "error" not in answer
            await live.client.submit(say, "demo", [facts.VersionPublished(0, "d0", 10)], key="say-0")
            opened = keys.make("gate", (0,), epoch=0, run="demo")
            assert await live.client.submit(gate, "demo", 0, key=opened, resources={keys.PARK: 1}) == 0
            named = {keys.make("trajectory", (0, 0, i), epoch=0, run="demo"): n for i, n in enumerate(lengths)}
            park = {keys.PARK: 1}
            tasks = [live.client.submit(quantum, key, "demo", n, key=key, resources=park) for key, n in named.items()]
            assert await live.client.gather(tasks) == lengths
            groups = (("train", 0), ("train", 1), ("eval", 2))
            happened = [
                *(facts.GroupCommitted(split, 0, g, 0, 0.5, {"tool": g}) for split, g in groups),
                facts.IterationFinished(0, 0.4375, 0.25),
                facts.VersionPublished(1, "d1", 10),
                facts.VersionServed(1, "rollout-0", 0.1),
                facts.VersionChecked(1, "rollout-0", "columns", 0.0, 0.0, 0.1, 1, 1, 0.0, True, 0.1, 0.1),
            ]
            await live.client.submit(say, "demo", happened, key="say-1")
            live.plugin.runs["demo"].log.flush()
            logged = read_events(tmp_path / "events.jsonl").events
            (snapshot,) = live.plugin.snapshots()
            expected = shown_by(logged)
            check_time(snapshot["time"], logged, ())
            assert expected["quanta_rollout"] == str(generations)
            assert expected["quanta_tool"] == str(actions)
            shown = {name: text for name, (text, _) in numbers(snapshot).items()}
            assert {name: shown[name] for name in expected} == expected
            assert (snapshot["rewards"], snapshot["lag"]) == ([[0, 0.4375]], [[0, 0.25]])
            return await live.client.get_task_stream()

    rows = asyncio.run(main())
    drawn = Counter(row["key"][0] for row in rows if not isinstance(row["key"], str))
    assert drawn == {"generate": generations, "calculator": actions}
    assert not any("trajectory" in row["key"] for row in rows if isinstance(row["key"], str))
