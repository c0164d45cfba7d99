"""Engines shared out among versions: who is emptied, who takes what it had, and what is too much for the others."""

from __future__ import annotations

from libra.policy import TrajectoryEnded, TrajectoryParked, VersionPublished, WorkerJoined
from libra.sim.own_versions import Handover
from libra.sim.version_window import VersionWindow
from libra.types import Phase

MEMORY = dict.fromkeys("abcd", 1000)


def begun() -> VersionWindow:
    """Four engines of two slots with two trajectories of version 0 each, then version 1 with six more that wait."""
    placement = VersionWindow(2)
    for worker in "abcd":
        placement.handle(WorkerJoined(worker, rollout_slots=2))
    for key in "12345678":
        placement.handle(TrajectoryParked(key, 0, Phase.ROLLOUT, 0, "0-0", "", 0))
    assert [place.worker for place in placement.dispatch(Phase.ROLLOUT)] == [*"aabbccdd"]
    placement.handle(VersionPublished(1))
    for key in "ABCDEF":
        placement.handle(TrajectoryParked(key, 1, Phase.ROLLOUT, 0, "1-0", "", 0))
    return placement


def ended(placement: VersionWindow, *keys: str) -> None:
    for key in keys:
        placement.handle(TrajectoryEnded(key))


def test_engines_above_the_share_of_their_version_are_emptied_and_take_the_newest() -> None:
    placement = begun()
    ended(placement, *"1234")  # one of version 0 is left on each engine: 4 x 4 / (4 + 6) engines are its share
    assert placement.repack(dict.fromkeys("5678", 100), MEMORY) == (Handover("a", "c"), Handover("b", "d"))
    assert [placement.residents(worker) for worker in "abcd"] == [0, 0, 2, 2]
    placed = placement.dispatch(Phase.ROLLOUT)
    assert [place.worker for place in placed if place.key in "ABCDEF"] == [*"aabb"]
    assert [placement.version_of(worker) for worker in "abcd"] == [1, 1, 0, 0] and placement.loads == {"a", "b"}
    assert placement.repack(dict.fromkeys("5678ABCD", 100), MEMORY) == ()


def test_nothing_is_handed_over_where_it_does_not_fit() -> None:
    placement = begun()
    assert placement.repack(dict.fromkeys("12345678", 100), MEMORY) == ()  # no slot is free
    ended(placement, *"1234")
    assert placement.repack(dict.fromkeys("5678", 100), dict.fromkeys("abcd", 150)) == ()  # no memory
    assert [placement.residents(worker) for worker in "abcd"] == [1, 1, 1, 1]
