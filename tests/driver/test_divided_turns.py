"""Runs with `rollout.chunk_tokens`: the trajectories of the run without it, also after kills in mid-turn."""

import os
import signal
from collections import Counter
from functools import partial

import numpy as np
from whole_run import WIDE, address_of, events_of, named

from libra.driver.session import Session
from libra.events import from_dict
from libra.policy.log_replay import replay
from libra.store.record_codec import unpack
from libra.store.trajectories import TrajectoryStore
from libra.store.trajectory_journal import Journal

PROMPTS, GROUP = 6, 4
"""More trajectories than the engines have slots: some leave theirs after a part of a turn."""


def kill_at_part(run, first, dask_worker, *, after):
    """Let the first worker with a record of a third part of a first turn kill itself, ``after`` it or before.

    The trajectory is named in the file ``first``.
    """
    journal = dask_worker.plugins[f"libra-{run}"].context.journal
    append = journal.append

    def kill(name):
        try:
            with first.open("x") as file:
                file.write(name)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    def watched(name, quantum, *records):
        now = quantum == 2 and unpack(records[0], source=name).get("stop_reason") == "parked"
        if now and not after:
            kill(name)
        append(name, quantum, *records)
        if now:
            kill(name)

    journal.append = watched


kill_at_part.__module__ = "__main__"  # by value to the workers, which cannot import this file


def content(directory):
    """The training trajectories of a store, by name."""
    with TrajectoryStore.open(directory / "trajectories.zarr") as store:
        every = [store.trajectory(row) for row in range(store.num_trajectories)]
    return {str(one.trajectory_id): one for one in every if one.trajectory_id.split == "train"}


def turns_of(one):
    return [tuple(turn[name] for name in ("generated_tokens", "stop_reason", "text_chars")) for turn in one.turns]


def test_a_run_in_parts_of_turns_has_the_trajectories_of_the_run_without_and_two_killed_workers_cost_parts(
    make_config, client_wide, tmp_path
):
    """Of the workers one is killed before the record of a part, the other after it and before its report."""

    def configured(name, chunk_tokens):
        return make_config(
            run={"name": name},
            rollout={"max_new_tokens": 30, "max_context_tokens": 400, "chunk_tokens": chunk_tokens},
            trainer={"prompts": PROMPTS, "group_size": GROUP},
            cluster=WIDE,
            store={"keep_journals": True},
        )

    with Session(configured("whole", None), client=client_wide) as session:
        list(session.iterations())
    expected = content(session.directory)
    with Session(configured("parts", 7), client=client_wide) as session:
        for name, after in (("rollout-0", True), ("rollout-1", False)):
            kill = partial(kill_at_part, after=after)
            client_wide.run(kill, "parts", tmp_path / name, workers=[address_of(client_wide, name)])
        list(session.iterations())
    assert (tmp_path / "rollout-0").exists() and (tmp_path / "rollout-1").exists()
    found = content(session.directory)
    assert found.keys() == expected.keys() and len(found) == 2 * PROMPTS * GROUP
    for name, one in expected.items():
        for column in ("token_ids", "weight_version"):
            assert np.array_equal(getattr(one, column), getattr(found[name], column)), (name, column)
        np.testing.assert_allclose(one.behaviour_logprob, found[name].behaviour_logprob, atol=1e-4)
        assert turns_of(one) == turns_of(found[name])
    events = events_of(session.directory)
    assert named(events, "quantum_lost") and named(events, "quantum_continued")
    finished = named(events, "quantum_finished")
    assert set(Counter((event["key"], event["quantum"]) for event in finished).values()) == {1}
    generated = [event for event in finished if event["phase"] == "ROLLOUT"]
    turns = 3 * len(found)
    tokens = Counter(event["tokens"] for event in generated)
    assert (
        tokens[2] == turns and 4 * turns - 1 <= tokens[7] <= 4 * turns
    )  # of one part the report was lost, not the record
    assert tokens.keys() == {7, 2}
    assert all(event["unfinished"] == (event["tokens"] == 7) for event in generated)
    journal = Journal(session.directory / "journal")
    for name in journal.trajectories():
        parts = [(r["turn"], len(r["token_ids"])) for r in journal.read(name) if r["kind"] == "generation"]
        assert parts == [(turn, tokens) for turn in range(3) for tokens in (7, 7, 7, 7, 2)]
    told = list(replay((line, from_dict(event)) for line, event in enumerate(events, start=1)))
    assert [each.difference for each in told if each.difference] == []
