"""Whole runs on real worker processes: what their size and their settings change. What every run promises is in tests/core."""

import asyncio
from collections import Counter

import numpy as np
import pytest
import whole_run

from libra.driver.run_session import Session, run
from libra.errors import MismatchAlarm, RunDirectoryError
from libra.weights import WeightStore

pytestmark = pytest.mark.live

INLINE = {"name": "libra.testing:FixedTurns", "args": {"inline": True}}


def test_with_an_inline_tool_and_free_slots_a_trajectory_is_dispatched_once(make_config, client):
    directory = run(make_config(environment=INLINE, run={"iterations": 1}), client=client).directory
    events = whole_run.events_of(directory)
    names = Counter(event["name"] for event in events)
    assert names["quantum_dispatched"] == names["trajectory_parked"] == 4
    assert (names["quantum_finished"], names["quantum_continued"]) == (4 * 3, 4 * 2)
    waits = [(bool(e["status"]), e["tools_s"], e["latency_s"]) for e in events if e["name"] == "quantum_finished"]
    assert sum(returned for returned, _, _ in waits) == 4 * 2
    assert all(0.0 < tools_s <= took_s if returned else tools_s == 0.0 for returned, tools_s, took_s in waits)
    assert len(whole_run.columns(directory, "turn")["generated_tokens"]) == 4 * 3


def test_the_scheduler_holds_as_many_tasks_after_twenty_iterations_as_after_five(make_config, client):
    config = make_config(run={"iterations": 24}, trainer={"prompts": 1}, rollout={"max_turns": 1, "max_new_tokens": 1})
    counts = {}
    with Session(config, client=client) as session:
        for values in session.iterations():
            if values["iteration"] in (4, 20):
                wanted = [f.key for i in session.graphs.pending.values() for f in (i.end, *i.groups)]
                counts[values["iteration"]] = client.run_on_scheduler(settled_tasks, wanted)
    assert counts[4] == counts[20] > 0


async def settled_tasks(wanted, dask_scheduler):
    """Tasks of the scheduler, once what was released is forgotten and only the iteration ahead is left, parked at its gate."""
    ahead = {key.split("-")[2] for key in wanted}
    while any(str(key).split("-")[2] not in ahead for key in dask_scheduler.tasks if "-train-" in str(key)):  # noqa: ASYNC110
        await asyncio.sleep(0)  # the scheduler has no event for "forgotten"
    return len(dask_scheduler.tasks)


def test_the_same_seed_gives_the_same_trajectories(make_config, client):
    first, again = (run(make_config(run={"name": n, "iterations": 1}), client=client) for n in ("first", "again"))
    assert np.array_equal(*(whole_run.tokens(summary.directory)["token_ids"] for summary in (first, again)))
    with pytest.raises(RunDirectoryError):
        run(make_config(run={"name": "first"}), client=client)  # whose directory is left alone
    assert len(whole_run.columns(first.directory)["reward"]) == 4


@pytest.mark.parametrize(("action", "published"), [("pause", 1), ("stop", 0)])
def test_an_alarm_takes_no_further_step_until_the_run_is_resumed(action, published, make_config, client):
    alarm = {"mismatch_args": {"mean": 1e-12}, "mismatch_action": action}
    with pytest.raises(MismatchAlarm):
        run(make_config(run={"iterations": 3, "eta": 1}, trainer=alarm), client=client)
    again = make_config(run={"iterations": 3, "eta": 1})
    weights = WeightStore(again.run.dir / "demo" / "weights")
    assert weights.numbers()[-1] == published
    if action == "pause":
        assert run(again, client=client, resume=True).iterations[-1]["iteration"] == 2
        assert weights.numbers()[-1] == 3
