"""One version for each trajectory, in any order of events: no engine changes under one, and each gets the newest at last."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from libra.policy import (
    HomeForgotten,
    LoadVersion,
    OneVersion,
    QuantumStarted,
    TrajectoryEnded,
    VersionPublished,
    WorkerJoined,
    WorkerLeft,
)
from libra.types import Phase

MOVES = st.lists(
    st.tuples(st.sampled_from(["start", "end", "fail", "publish", "join", "leave", "mute"]), st.integers(0, 9)),
    max_size=120,
)


@given(MOVES)
def test_no_engine_changes_under_a_trajectory_and_all_get_the_newest_at_last(moves: list[tuple[str, int]]) -> None:
    one, serves, newest = OneVersion(), dict[str, int](), -1
    at: dict[str, str] = {}  # under way
    began: dict[str, int] = {}

    def obeyed(commands: tuple[LoadVersion, ...]) -> None:
        for command in commands:
            assert command.version == newest > serves.get(command.worker, -1)
            assert command.worker not in at.values(), "its trajectories would have two versions"
            serves[command.worker] = command.version

    for move, number in moves:
        worker, key = f"w{number % 3}", f"k{number}"
        if move == "start":
            places = [each for each in serves if serves[each] >= 0 and one.may(key, each)]
            if key in began and began[key] in serves.values():
                assert {serves[each] for each in places} <= {began[key]} and places
            else:
                assert all(serves[each] == newest for each in places)
            if places:
                place = places[number % len(places)]
                at[key], began[key] = place, serves[place]
                obeyed(one.handle(QuantumStarted(key, Phase.ROLLOUT, place)))
        elif move == "end":
            at.pop(key, None)
            began.pop(key, None)
            obeyed(one.handle(TrajectoryEnded(key)))
        elif move == "fail":
            at.pop(key, None)
            obeyed(one.handle(HomeForgotten(key)))
        elif move == "publish":
            newest += 1
            obeyed(one.handle(VersionPublished(newest)))
        elif move == "join":
            serves.setdefault(worker, -1)
            obeyed(one.handle(WorkerJoined(worker, rollout_slots=1)))
        else:
            serves.pop(worker, None)
            at = {key: place for key, place in at.items() if place != worker}
            obeyed(one.handle(WorkerLeft(worker) if move == "leave" else WorkerJoined(worker)))
    for key in list(at):
        del at[key]
        obeyed(one.handle(TrajectoryEnded(key)))
    assert all(version == newest for version in serves.values())
    assert all(one.may("new", worker) for worker in serves if newest >= 0)
