"""One version for each trajectory, in any order of events: no engine changes under one, and each gets the newest at last; and how
many engines a version keeps."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra import facts
from libra.policy import Dispatcher, OneVersion
from libra.policy.one_version import version_shares
from libra.types import Phase

MOVES = st.lists(
    st.tuples(st.sampled_from(["new", "start", "park", "end", "fail", "publish", "join", "leave", "mute"]), st.integers(0, 9)),
    max_size=120,
)  # fmt: skip
SLOTS, KV = 4, 100


def parked(key, quanta=0, context=30):
    return facts.TrajectoryParked(key, 0, Phase.ROLLOUT, quanta, context_tokens=context)


class Played:
    """Engines and trajectories that do what they are told; every answer is checked."""

    def __init__(self, rounded):
        self.one, self.newest = OneVersion(rounded=rounded), -1
        self.serves = {}
        self.at = {}  # under way
        self.running = {}
        self.began = {}
        self.lost = False

    def told(self, event):
        again = OneVersion()
        again.restore(json.loads(json.dumps(self.one.snapshot())))
        commands = self.one.handle(event)
        assert again.handle(event) == commands and again.snapshot() == self.one.snapshot()
        for command in commands:
            if isinstance(command, facts.LoadVersion):
                assert command.version == self.newest > self.serves.get(command.worker, -1)
                assert command.worker not in self.at.values(), "its trajectories would have two versions"
                self.serves[command.worker] = command.version
                continue
            assert isinstance(command, facts.Vacate) and self.one.rounded
            assert self.able(self.serves[command.worker]) - {command.worker}, "others of its version are left"
            for key in command.keys:
                assert self.at.pop(key) == command.worker and key not in self.running

    def able(self, version):
        return {each for each in self.serves if self.serves[each] == version and each not in self.one.emptying}

    def forget(self, key, *tables):
        for table in tables:
            table.pop(key, None)

    def start(self, key, number):
        places = [each for each in self.serves if self.serves[each] >= 0 and self.one.may(key, each)]
        version = self.began.get(key, self.newest)
        assert self.able(version) or self.lost or key not in self.began or not self.one.rounded, (
            "what it was given away for keeps its version"
        )
        assert set(places) == {each for each in self.able(version) or self.able(self.newest) if self.serves[each] >= 0}
        if places:
            place = places[number % len(places)]
            self.at[key], self.began[key], self.running[key] = place, self.serves[place], place
            self.told(facts.QuantumStarted(key, Phase.ROLLOUT, place))

    def lose(self, worker, event):
        self.lost |= self.serves.pop(worker, None) is not None
        self.at = {key: place for key, place in self.at.items() if place != worker}
        self.running = {key: place for key, place in self.running.items() if place != worker}
        self.told(event)

    def move(self, move, number):
        worker, key = f"w{number % 3}", f"k{number}"
        match move:
            case "start" if key not in self.running:
                self.start(key, number)
            case "park" if key in self.running:
                del self.running[key]
                self.told(parked(key, 1))
            case "new" if key not in self.began:
                self.told(parked(key))
            case "end":
                self.forget(key, self.at, self.began, self.running)
                self.told(facts.TrajectoryEnded(key))
            case "fail":
                self.forget(key, self.at, self.running)
                self.told(facts.HomeForgotten(key))
            case "publish":
                self.newest += 1
                self.told(facts.VersionPublished(self.newest))
            case "join":
                self.serves.setdefault(worker, -1)
                self.told(facts.WorkerCapacity(worker, rollout_slots=SLOTS, kv_tokens=KV))
            case "leave" | "mute":
                self.lose(worker, facts.WorkerWithdrawn(worker) if move == "leave" else facts.WorkerCapacity(worker))


@given(MOVES, st.booleans())
def test_no_engine_changes_under_a_trajectory_and_all_get_the_newest_at_last(moves, rounded):
    run = Played(rounded)
    for move, number in moves:
        run.move(move, number)
    for key in list(run.began):
        run.move("end", int(key[1:]))
    assert all(version == run.newest for version in run.serves.values()) and not run.one.emptying
    assert all(run.one.may("new", worker) for worker in run.serves if run.newest >= 0)


def with_versions(under_way, *, context=10, slots=8):
    one = OneVersion(rounded=True)
    one.handle(facts.VersionPublished(0))
    for worker in under_way:
        one.handle(facts.WorkerCapacity(worker, rollout_slots=slots, kv_tokens=100))
    for worker, count in under_way.items():
        for number in range(count):
            key = f"{worker}-{number}"
            one.handle(parked(key, context=context))
            one.handle(facts.QuantumStarted(key, Phase.ROLLOUT, worker))
            one.handle(parked(key, 1, context))
    return one


def shared(one, waiting):
    found = list(one.handle(facts.VersionPublished(1)))
    for number in range(waiting):
        found += one.handle(parked(f"new-{number}"))
    return found


def test_an_old_version_keeps_its_share_of_the_engines_by_rounding():
    one = with_versions({"a": 2, "b": 1, "c": 3, "d": 2})
    found = shared(one, waiting=9)
    vacated = [command.worker for command in found if isinstance(command, facts.Vacate)]
    assert vacated == ["b", "a"]  # the thinnest first, as soon as the rule says so
    assert [(c.worker, c.version) for c in found if isinstance(c, facts.LoadVersion)] == [("b", 1), ("a", 1)]
    assert found[0] == facts.Vacate(
        "b", ("b-0",), "version 0 has 8 of 9 trajectories, and 3 of 4 engines by rounding; it had 4"
    )
    assert Counter(one.told.values()) == version_shares(4, {0: 8, 1: 9})
    assert all(one.may("a-0", worker) is (worker in "cd") for worker in "abcd")
    assert all(one.may("new-0", worker) is (worker in "ab") for worker in "abcd")


@pytest.mark.parametrize("kept", [{"slots": 3}, {"context": 40}])
def test_an_engine_keeps_what_others_of_its_version_have_no_room_for(kept):
    one = with_versions({"a": 2, "b": 2}, **kept)
    assert shared(one, waiting=40) == []
    found = [each for key in ("b-1", "b-0") for each in one.handle(facts.TrajectoryEnded(key))]
    assert found[0] == facts.Vacate("b", ("b-0",), found[0].reason) if kept == {"slots": 3} else found[-1].worker == "b"


def test_what_is_given_away_waits_for_another_engine_with_the_price_of_its_kv():
    dispatcher = Dispatcher()
    for worker in ("a", "b"):
        dispatcher.handle(facts.WorkerCapacity(worker, "tp1", 1, 0, 10_000, 0.01, 0.02, 1e-1, kv_token_bytes=1000))
    dispatcher.handle(parked("k", 0, 100))
    dispatcher.apply([facts.SetPriority("k", facts.Priority(0, 0, 0), "")])
    (first,) = dispatcher.dispatch(Phase.ROLLOUT)
    other = {"a": "b", "b": "a"}[first.worker]
    dispatcher.handle(parked("k", 1, 100))
    dispatcher.apply(
        [facts.SetPriority("k", facts.Priority(0, 0, 0), ""), facts.Vacate(first.worker, ("k", "unknown"), "")]
    )
    dispatcher.allowed = lambda key, worker: worker == other
    (place,) = dispatcher.dispatch(Phase.ROLLOUT)
    assert place.worker == other
    assert place.move is not None and place.move.home == first.worker and place.move.sends


def test_shares_are_rounded_and_the_newest_version_has_the_rest():
    assert version_shares(16, {3: 40, 4: 120, 5: 352}) == {3: 1, 4: 4, 5: 11}
    assert version_shares(4, {1: 1, 2: 999}) == {1: 1, 2: 3}  # it has work, and so an engine
    assert version_shares(4, {1: 0, 2: 7}) == {2: 4}
    assert version_shares(4, {}) == {}


@given(st.integers(1, 40), st.dictionaries(st.integers(0, 5), st.integers(0, 500), max_size=4))
def test_all_engines_have_a_version_with_trajectories(engines, under_way):
    live = {version for version, count in under_way.items() if count}
    shares = version_shares(engines, under_way)
    assert set(shares) == live and all(share >= 1 for share in shares.values())
    if live:
        assert sum(shares.values()) == max(engines, len(live))
        exact = {version: engines * under_way[version] / sum(under_way.values()) for version in live - {max(live)}}
        if all(count >= 1 for count in exact.values()) and engines >= len(live):
            assert all(abs(shares[version] - count) <= 1.5 for version, count in exact.items())
