"""A log recorded live is replayed to the same commands; what was applied is what was logged."""

import asyncio
import json
import os
import random
import subprocess
import sys
from collections import Counter

import msgspec
import pytest
from distributed import Worker

from libra import keys
from libra.errors import StoreError
from libra.facts import SCHEMA, GroupCommitted, SetPriority, from_dict, prompts_named
from libra.policy import CMLFQ, Admission, CommittedGroup
from libra.policy.log_replay import learned, replay
from libra.scheduler import scheduler_internals
from libra.store.event_log import from_last_snapshot, read_events

GROUPS, ITERATIONS = 2, 4


async def record(emulation, directory, policy=None):
    """Four iterations with eta 1 on two workers, one of which is lost and replaced: gates, batches, groups, quanta."""
    rng = random.Random(0)
    async with emulation.cluster(rollout=2, tool=2) as live:
        emulation.register(live, directory, config=emulation.config_of(1, ITERATIONS, GROUPS, policy))

        def node(name, k):
            return live.client.submit(int, k, key=keys.make(name, (k,), epoch=0, run="demo"), resources={keys.PARK: 1})

        for k in range(ITERATIONS):
            emulation.say(live, prompts_named("train", k, ["p0", "p1"]))
            batch = node("batch", k)
            assert await node("gate", k) == k
            lengths = [[rng.randint(1, 5) for _ in range(3)] for _ in range(GROUPS)]
            futures = {g: emulation.submit(live, "demo", lengths[g], iteration=k, group=g) for g in range(GROUPS)}
            if k == 1:
                spare = await Worker(live.scheduler.address, nthreads=4, name="spare", resources={keys.ROLLOUT: 2})
                await live.client.gather(futures[0])
                await spare.close()
            live.plugin.runs["demo"].emit_snapshot()
            for g in reversed(range(GROUPS)):
                await live.client.gather(futures[g])
                emulation.say(live, GroupCommitted("train", k, g, k, 0.5, {}))
            emulation.say(live, GroupCommitted("eval", k, 0, k, 0.5, {}))
            assert await batch == k
            del futures
            emulation.publish(live, k + 1)
        live.plugin.end_run("demo")


@pytest.fixture(scope="module")
def recorded(emulation, tmp_path_factory):
    directory = tmp_path_factory.mktemp("recorded")
    asyncio.run(record(emulation, directory))
    return directory / "events.jsonl"


def lines_of(path):
    return list(read_events(path).events)


def told(events):
    return list(replay((line, from_dict(event).fact) for line, event in enumerate(events, start=1)))


def commands(steps):
    return [entry.command for step in steps for entry in step.logged]


def test_a_log_recorded_live_is_replayed_to_the_same_commands(recorded):
    events = lines_of(recorded)
    steps = told(events)
    assert [step.difference for step in steps if step.difference] == []
    assert not any(step.cut for step in steps)
    names = Counter(event["name"] for event in events)
    kinds = Counter(type(command).__name__ for command in commands(steps))
    assert kinds == {"SetPriority": names["trajectory_parked"], "OpenGate": ITERATIONS, "OpenBatch": ITERATIONS}
    assert names["trajectory_parked"] > 24 and names["policy_snapshot"] == ITERATIONS + 1
    ended = Counter(event["key"] for event in events if event["name"] == "trajectory_ended" and event["completed"])
    assert len(ended) == 24 and set(ended.values()) == {1}  # one whose result is computed again completes once
    assert [now for step in steps for now in step.now] == commands(steps)


def test_what_was_learned_is_replayed_and_restored(emulation, tmp_path):
    policy = {"name": "cmlfq", "objective": "makespan", "patience": 100}
    asyncio.run(record(emulation, tmp_path, policy=policy))
    events = lines_of(tmp_path / "events.jsonl")
    assert first_difference(events) == (0, "")
    known = [event["order"]["forecaster"]["history"] for event in events if event["name"] == "policy_snapshot"]
    assert set(known[-1]["past"]) == {"p0", "p1"}
    assert first_difference([event for event in events if event["name"] != "prompts_named"])[1]

    reader = from_last_snapshot(tmp_path / "events.jsonl")
    whole = [(line, from_dict(event).fact) for line, event in enumerate(events, start=1)]
    snapshot, of_tail = learned(whole), learned([(line, from_dict(event).fact) for line, event in reader])
    assert snapshot is not None and of_tail is not None and snapshot["forecaster"]["all"][0] > 0
    assert of_tail["forecaster"]["all"] == pytest.approx(snapshot["forecaster"]["all"])
    died_at_once = learned([*whole, (len(whole) + 1, msgspec.structs.replace(whole[0][1], epoch=1))])
    assert died_at_once is not None and died_at_once["forecaster"]["all"] == snapshot["forecaster"]["all"]
    cut = next(at for at, (_, event) in enumerate(whole) if event.name == "quantum_dispatched")
    alive = learned(whole[: cut + 1])  # those that lived are not kept
    assert alive is not None and alive["trajectories"]["by_key"] == {} == alive["groups"] == alive["unbegun"]
    ordering = CMLFQ()
    ordering.restore(json.loads(json.dumps(snapshot)))
    assert ordering.snapshot() == snapshot
    assert learned([(1, msgspec.structs.replace(whole[0][1], policy="fifo"))]) is None is learned([])


def test_what_was_applied_is_what_was_logged(emulation, tmp_path, monkeypatch):
    priorities = []
    opened = []
    real_set, real_release = scheduler_internals.set_priority, scheduler_internals.release

    def set_priority(ts, priority):
        priorities.append((ts.key, tuple(priority)))
        real_set(ts, priority)

    def release(scheduler, releases, stimulus_id):
        opened.extend(r.key for r in releases if r.address is None)
        return real_release(scheduler, releases, stimulus_id)

    monkeypatch.setattr(scheduler_internals, "set_priority", set_priority)
    monkeypatch.setattr(scheduler_internals, "release", release)
    asyncio.run(record(emulation, tmp_path))
    logged = commands(told(lines_of(tmp_path / "events.jsonl")))
    assert priorities == [(c.key, tuple(c.priority)) for c in logged if isinstance(c, SetPriority)]
    assert opened == [
        keys.make(node, (getattr(c, attribute),), epoch=0, run="demo") for c in logged
        for node, attribute in (("gate", "iteration"), ("batch", "batch")) if hasattr(c, attribute)
    ]  # fmt: skip


def test_a_replay_begins_at_the_last_snapshot_and_reads_the_tail_only(recorded, tmp_path):
    events = lines_of(recorded)
    start = max(i for i, event in enumerate(events) if event["name"] == "policy_snapshot")
    whole = [step for step in told(events) if step.line > start + 1]
    damaged = recorded.read_bytes().split(b"\n")
    damaged[3] = b"not read at all"
    (tmp_path / "events.jsonl").write_bytes(b"\n".join(damaged))
    reader = from_last_snapshot(tmp_path / "events.jsonl")
    tail = list(replay((line, from_dict(event).fact) for line, event in reader))
    assert [step.line for step in tail] == [step.line for step in whole]
    assert [step.now for step in tail] == [step.now for step in whole]
    assert [step.difference for step in tail if step.difference] == []
    assert any(type(command).__name__ == "OpenBatch" for command in commands(tail))


@pytest.mark.live
def test_another_hash_seed_changes_no_command(recorded):
    code = "import sys; from libra.cli.main import main; main(['replay', sys.argv[1], '--json'])"
    command, environment = [sys.executable, "-c", code, str(recorded.parent)], os.environ | {"PYTHONHASHSEED": "12345"}
    result = json.loads(subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout)
    assert result["reproduced"] and result["differing_events"] == 0
    assert result["decisions"] == len(commands(told(lines_of(recorded))))


def first_difference(events):
    return next(((step.line, step.difference) for step in told(events) if step.difference), (0, ""))


def index_of(events, name, nth=0):
    return [i for i, event in enumerate(events) if event["name"] == name][nth]


def test_every_kind_of_tampering_is_found_and_named(recorded):
    events = lines_of(recorded)
    parked = 1 + next(i for i, event in enumerate(events) if event.get("quanta", 0) > 0)  # a trajectory gets its place
    gate, batch = index_of(events, "gate_opened", 2), index_of(events, "batch_opened", 1)
    snapshot = index_of(events, "policy_snapshot", 3)
    for at, change, words in (
        (parked, {"priority": [0, 0, 99]}, "priority"), (parked, {"reason": "because"}, "reason"),
        (parked, {"key": "trajectory-train-0-0-77-e0-demo"}, "0-0-77"),
        (index_of(events, "quantum_dispatched", 7), {"priority": [9, 9, 9]}, "was dispatched with priority [9, 9, 9]"),
        (gate, {"iteration": 9}, "iteration was 9, now 2"), (batch, {"members": [[0, 0]]}, "members was"),
        (snapshot, {"order": events[snapshot]["order"] | {"arrivals": 0}}, "order.arrivals"),
    ):  # fmt: skip
        line, text = first_difference([*events[:at], events[at] | change, *events[at + 1 :]])
        assert words in text and line <= at + 1, (line, at + 1, text)
    for missing in (parked, gate, batch):
        assert first_difference([*events[:missing], *events[missing + 1 :]])[1], events[missing]
    assert first_difference([*events[: gate + 1], events[gate], *events[gate + 1 :]])[1]


def test_a_log_whose_writer_died_is_replayed_up_to_where_it_breaks_off(recorded):
    events = lines_of(recorded)
    batch = index_of(events, "batch_opened", 2)
    steps = told(events[:batch])
    assert steps[-1].cut and not any(step.difference for step in steps)
    resumed = [*events[:batch], *({**event, "t_s": 0.0} for event in events[:5])]
    assert first_difference(resumed) == (0, "")


def test_an_unknown_schema_or_a_headless_log_is_refused(recorded):
    events = lines_of(recorded)
    for refused in (
        [*events[:5], events[5] | {"schema": SCHEMA + 1}], events[index_of(events, "version_published") :],
        [events[0] | {"policy": "lifo"}], [events[0], events[1] | {"order": {}}],
    ):  # fmt: skip
        with pytest.raises(StoreError):
            told(refused)


async def test_a_resumed_epoch_goes_on_from_what_it_was_given(emulation, tmp_path):
    restored = Admission.resumed(
        1, GROUPS, version=1, opened={0: ((0, 0), (0, 1))},
        committed=[CommittedGroup(0, 0, 0), CommittedGroup(0, 1, 0), CommittedGroup(1, 0, 0)], started={(1, 1): 0},
    ).snapshot()  # fmt: skip

    config = emulation.config_of(eta=1, groups=GROUPS)
    async with emulation.cluster() as live:
        emulation.register(live, tmp_path, config=config)
        emulation.register(live, tmp_path, config=config, epoch=1, restored=restored)
        batch = live.client.submit(int, 1, key=keys.make("batch", (1,), epoch=1, run="demo"), resources={keys.PARK: 1})
        emulation.say(live, GroupCommitted("train", 1, 1, 0, 0.5, {}), epoch=1)
        assert await batch == 1
        assert live.plugin.runs["demo"].members(1) == [[1, 0], [1, 1]]
        assert live.plugin.runs["demo"].members(0) == [[0, 0], [0, 1]]
        live.plugin.end_run("demo")
    events = lines_of(tmp_path / "events.jsonl")
    assert [event["epoch"] for event in events if event["name"] == "run_started"] == [0, 1]
    assert first_difference(events) == (0, "")
