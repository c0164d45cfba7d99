"""`LibraPlugin` on a real scheduler and real workers: order, capacity, two runs, gates, kept slots, quarantine."""

import asyncio
import random
from collections import Counter

from distributed import Reschedule

from libra import facts, keys
from libra.store.event_log import read_events
from libra.types import Phase

KEPT = {}
"""State of the two tasks below; functions of a module are not copied on their way to a worker of this process."""


class RandomOrder:
    """A policy that gives every arrival a place of its own, at random: the worst case for the queue."""

    name = "random_order"

    def __init__(self, seed):
        self.rng = random.Random(seed)

    def handle(self, event):
        if isinstance(event, facts.TrajectoryParked):
            place = facts.Priority(self.rng.randrange(3), self.rng.randrange(3), self.rng.randrange(100))
            return (facts.SetPriority(event.key, place, "random"),)
        return ()


def check_order_and_capacity(events, totals):
    """Invariants 1 and 2 of the plugin, read from its event log; returns the number of dispatches."""
    waiting = {str(phase): {} for phase in Phase}
    running = {}
    dispatched = 0
    for event in events:
        match event["name"]:
            case "trajectory_parked":
                waiting[event["phase"]][event["key"]] = None
            case "priority_set":
                (phase,) = (phase for phase, keys in waiting.items() if event["key"] in keys)
                waiting[phase][event["key"]] = event["priority"]
            case "quantum_dispatched":
                others = waiting[event["phase"]]
                assert event["priority"] == others.pop(event["key"])
                assert all(event["priority"] <= other for other in others.values()), (event, others)
                assert event["key"] not in running
                running[event["key"]] = event["phase"]
                assert sum(phase == event["phase"] for phase in running.values()) <= totals[event["phase"]]
                dispatched += 1
            case "quantum_finished" | "quantum_lost":
                del running[event["key"]]
    assert not running and not any(waiting.values())
    return dispatched


async def test_dispatch_order_equals_ts_priority(emulation, tmp_path):
    async with emulation.cluster(rollout=2, tool=3) as live:
        for seed, count in enumerate((1, 9, 24)):
            rng, run = random.Random(seed), f"run{seed}"
            lengths = [rng.randint(1, 6) for _ in range(count)]
            emulation.register(live, tmp_path / run, run)
            live.plugin.runs[run].policy = RandomOrder(seed)
            assert await live.client.gather(emulation.submit(live, run, lengths)) == lengths
            live.plugin.end_run(run)
            events = list(read_events(tmp_path / run / "events.jsonl").events)
            assert check_order_and_capacity(events, {"ROLLOUT": 2, "TOOL": 3}) == sum(lengths)


async def test_a_run_of_the_same_name_and_epoch_is_refused(emulation, tmp_path):
    async with emulation.cluster() as live:
        emulation.register(live, tmp_path / "a")
        assert "already on this scheduler" in emulation.register(live, tmp_path / "b")["error"]
        assert "error" not in emulation.register(live, tmp_path / "b", epoch=1)
        assert live.plugin.runs["demo"].epoch == 1


async def test_a_gate_waits_for_its_version_and_hears_nothing_of_an_older_epoch(emulation, tmp_path):
    async with emulation.cluster() as live:
        emulation.register(live, tmp_path, config=emulation.config_of(eta=1), epoch=3)
        gates = [keys.make("gate", (k,), epoch=3, run="demo") for k in range(3)]
        futures = [live.client.submit(int, k, key=key, resources={keys.PARK: 1}) for k, key in enumerate(gates)]
        assert await live.client.gather(futures[:2]) == [0, 1]
        emulation.publish(live, 9, epoch=2)
        assert live.plugin.runs["demo"].admission.version == 0
        await emulation.until(lambda: getattr(live.scheduler.tasks.get(gates[2]), "state", "") == "no-worker")
        emulation.publish(live, 1, epoch=3)
        assert await futures[2] == 2


async def keeps_its_slot(key):
    """Three generations: the second follows in the same slot, the third must park first because another waits."""
    emulation = KEPT["emulation"]
    if KEPT["begun"].is_set():
        emulation.report(key, "demo", 2, following=None)
        return "first"
    emulation.report(key, "demo", 0, following=Phase.ROLLOUT, goes_on=True)
    KEPT["begun"].set()
    await KEPT["told"].wait()
    emulation.report(key, "demo", 1, following=Phase.ROLLOUT)
    raise Reschedule()


async def waits(key):
    KEPT["emulation"].report(key, "demo", 0, following=None)
    return "second"


async def test_a_trajectory_keeps_its_slot_only_while_nobody_waits_for_one(emulation, tmp_path):
    told = []

    KEPT.update(emulation=emulation, begun=asyncio.Event(), told=asyncio.Event())
    async with emulation.cluster(rollout=1) as live:
        emulation.register(live, tmp_path)
        rollout = live.workers[0]
        free_again = asyncio.Event()

        def best_waiting(ahead):
            told.append(ahead)
            (KEPT["told"] if ahead else free_again).set()

        rollout.stream_handlers["libra-ahead"] = best_waiting
        joined = facts.EngineJoined("rollout-0", facts.EngineKindFields("transformers", "", 1, 1))
        emulation.say(live, joined, worker=rollout.address)
        first, second = (keys.make("trajectory", (0, 0, sample), epoch=0, run="demo") for sample in range(2))
        park = {keys.PARK: 1}
        one = live.client.submit(keeps_its_slot, first, key=first, resources=park)
        await KEPT["begun"].wait()
        other = live.client.submit(waits, second, key=second, resources=park)
        assert await live.client.gather([one, other]) == ["first", "second"]
        await free_again.wait()
        live.plugin.end_run("demo")
    assert told == [(0, 0, 1), None]
    names = Counter(event["name"] for event in read_events(tmp_path / "events.jsonl").events)
    assert (names["quantum_dispatched"], names["quantum_finished"], names["quantum_continued"]) == (3, 4, 1)


async def test_a_worker_with_a_quarantined_engine_generates_nothing_until_it_serves_again(emulation, tmp_path):
    checked = facts.VersionChecked(1, "rollout-0", "columns", 0.0, 0.0, None, 1, 1, 0.0, True, 0.1, 0.1)
    wrong = facts.EngineQuarantined(1, "rollout-0", "lm_head.weight", "columns", 0.5, 0.0, "", out=False)

    async with emulation.cluster() as live:
        for run in ("one", "two"):
            emulation.register(live, tmp_path / run, run)
        live.workers[0].stream_handlers["libra-ahead"] = lambda ahead: None
        at = {"run": "one", "worker": live.workers[0].address}
        emulation.say(live, wrong, **at)
        one, two = emulation.submit(live, "one", [3, 2, 1]), emulation.submit(live, "two", [3, 2, 5, 1])
        dispatch = live.plugin.trajectories
        await emulation.until(lambda: dispatch.dispatcher.num_waiting(Phase.ROLLOUT) == len(one) + len(two))
        dispatch.kick()
        await emulation.until(lambda: not dispatch.kicked)
        assert {live.scheduler.tasks[future.key].state for future in (*one, *two)} == {"no-worker"}
        emulation.say(live, facts.VersionServed(1, "rollout-0", 0.1, 1, "transformers-tp1"), checked, **at)
        assert await live.client.gather(one) == [3, 2, 1]
        assert await live.client.gather(two) == [3, 2, 5, 1]
        for run in ("one", "two"):
            live.plugin.end_run(run)
    names = [event["name"] for event in read_events(tmp_path / "one" / "events.jsonl").events]
    assert names.index("engine_quarantined") < names.index("version_checked") < names.index("quantum_dispatched")
