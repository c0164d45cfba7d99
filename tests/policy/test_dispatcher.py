"""The dispatcher against a model: slots, homes, order, and who is left waiting."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.facts import (
    HomeForgotten,
    Prefer,
    Priority,
    QuantumFinished,
    SetPriority,
    TrajectoryEnded,
    TrajectoryParked,
    WorkerCapacity,
    WorkerWithdrawn,
    boundaries_of,
)
from libra.policy import CMLFQ, EVERYONE, Dispatcher, Place, leaves_slot
from libra.policy.dispatcher import PLANNED_FACTOR
from libra.policy.engine_capacity import degree_of
from libra.types import Phase, ToolStatus

ROLLOUT, TOOL = Phase.ROLLOUT, Phase.TOOL
KEYS = [f"k{i}" for i in range(8)]
WORKERS = {"a": ("tp1", 1), "b": ("tp1", 2), "c": ("tp4", 2)}
TOLD = {"kv_tokens": 10**9, "alone_s_per_token": 0.01, "full_s_per_token": 0.02}
"""Of an engine with room for everybody."""
MOVE = st.one_of(
    st.tuples(st.just("park"), st.sampled_from(KEYS), st.integers(-1, 3), st.sampled_from(Phase)),
    st.tuples(st.just("prefer"), st.sampled_from(KEYS), st.sampled_from(["tp1", "tp4"])),
    st.tuples(st.sampled_from(["finish", "end"]), st.sampled_from(KEYS)), st.tuples(st.just("dispatch")),
    st.tuples(st.sampled_from(["join", "leave"]), st.sampled_from(sorted(WORKERS))),
)  # fmt: skip
KEEPS = TOLD | {"kv_tokens": 1000, "kv_token_bytes": 100, "prefill_s_per_token": 1.0}
"""Of an engine that exchanges KV, and on which it is quicker to send KV than to compute it."""


def joined(name, **more):
    bucket, slots = WORKERS[name]
    return WorkerCapacity(name, bucket, rollout_slots=slots, tool_slots=slots, **(TOLD | more))


def park(dispatcher, key, order, *, phase=ROLLOUT, context=0):
    dispatcher.handle(TrajectoryParked(key, 0, phase, 0, "", "", context))
    dispatcher.apply([SetPriority(key, Priority(0, 0, order), "test")])


@given(st.lists(MOVE, max_size=80))
def test_nothing_is_lost_or_run_twice_and_no_slot_is_given_twice(moves):
    """Room for everybody, and moves free of charge: then it is work conserving without exception."""
    dispatcher = Dispatcher()
    waiting = {}
    running = {}
    there = set()
    for move, *what in moves:
        match move:
            case "park" if what[0] not in waiting:
                key, level, phase = what
                running.pop(key, None)
                waiting[key] = (phase, level)
                dispatcher.handle(TrajectoryParked(key, 0, phase, 0))
                dispatcher.apply([SetPriority(key, Priority(0, level, 0), "test")])
            case "prefer":
                dispatcher.apply([Prefer(what[0], (what[1],), "test")])
            case "finish" if what[0] in running:
                phase, _ = running.pop(what[0])
                dispatcher.handle(QuantumFinished(what[0], phase, 5, "t", "ok", 1.0, 3))
            case "end":
                waiting.pop(what[0], None)
                running.pop(what[0], None)
                dispatcher.handle(TrajectoryEnded(what[0]))
            case "join":
                there.add(what[0])
                dispatcher.handle(joined(what[0]))
            case "leave":
                there.discard(what[0])
                dispatcher.handle(WorkerWithdrawn(what[0]))
                running = {key: at for key, at in running.items() if at[1] != what[0]}
            case "dispatch":
                for phase in Phase:
                    for place in dispatcher.dispatch(phase):
                        assert waiting.pop(place.key)[0] is phase is place.phase
                        assert place.worker in there
                        running[place.key] = (phase, place.worker)
                    free = {w: WORKERS[w][1] - sum(at == (phase, w) for at in running.values()) for w in there}
                    assert min(free.values(), default=0) >= 0
                    left = [key for key, (kind, _) in waiting.items() if kind is phase]
                    assert not left or not any(free.values())
        for phase in Phase:
            assert dispatcher.num_waiting(phase) == sum(kind is phase for kind, _ in waiting.values())
            for worker in there:
                assert dispatcher.running_on(worker, phase) == sum(at == (phase, worker) for at in running.values())


@given(st.permutations(range(8)), st.integers(1, 8))
def test_trajectories_leave_in_the_order_of_their_priority(orders, slots):
    dispatcher = Dispatcher()
    for key, order in zip(KEYS, orders, strict=True):
        park(dispatcher, key, order)
    dispatcher.handle(WorkerCapacity("w", rollout_slots=slots))
    placed = [place.key for place in dispatcher.dispatch(ROLLOUT)]
    assert placed == sorted(KEYS, key=lambda key: orders[KEYS.index(key)])[:slots]


def two_workers(**more):
    dispatcher = Dispatcher()
    dispatcher.handle(joined("a", **more))
    dispatcher.handle(joined("b", **more))
    return dispatcher


def at_home(dispatcher, key, context):
    park(dispatcher, key, 0, context=context)
    (place,) = dispatcher.dispatch(ROLLOUT)
    return place.worker


def test_a_slot_goes_to_who_is_at_home_there_before_one_who_would_move():
    dispatcher = two_workers(prefill_s_per_token=1.0)
    homes = {key: at_home(dispatcher, key, 100) for key in ("x", "y", "z")}
    assert sorted(homes.values()) == ["a", "b", "b"]
    (mine,) = (key for key, home in homes.items() if home == "a")
    park(dispatcher, next(key for key, home in homes.items() if home == "b"), 0, context=100)
    assert [p.worker for p in dispatcher.dispatch(ROLLOUT)] == ["b"]
    park(dispatcher, mine, 9, context=100)
    assert dispatcher.dispatch(ROLLOUT) == (Place(mine, ROLLOUT, "a", "home"),)


def test_a_move_must_pay():
    for price, moved in ((0.001, True), (10.0, False)):
        dispatcher = Dispatcher()
        dispatcher.handle(WorkerCapacity("a", rollout_slots=1, prefill_s_per_token=price, **TOLD))
        for key in ("x", "y"):  # y waits for x's slot
            at_home(dispatcher, key, 100)
            dispatcher.handle(QuantumFinished(key, ROLLOUT, 10, "", "", 4.0))
        park(dispatcher, "x", 0, context=100)
        assert dispatcher.dispatch(ROLLOUT)[0].worker == "a"
        park(dispatcher, "y", 1, context=100)
        dispatcher.handle(WorkerCapacity("b", rollout_slots=1, prefill_s_per_token=price, **TOLD))
        places = dispatcher.dispatch(ROLLOUT)
        assert [place.worker for place in places] == (["b"] if moved else [])


def test_a_preferred_bucket_takes_it_as_soon_as_it_has_room():
    dispatcher = Dispatcher()
    dispatcher.handle(joined("a", prefill_s_per_token=1e9))
    at_home(dispatcher, "x", 100)
    dispatcher.handle(QuantumFinished("x", ROLLOUT, 10, "", "", 1.0))
    at_home(dispatcher, "blocker", 100)
    park(dispatcher, "x", 0, context=100)
    dispatcher.apply([Prefer("x", ("tp4",), "test")])
    assert dispatcher.dispatch(ROLLOUT) == ()
    dispatcher.handle(joined("c", prefill_s_per_token=1e9))
    assert dispatcher.dispatch(ROLLOUT) == (Place("x", ROLLOUT, "c", "preferred bucket"),)


def test_new_trajectories_do_not_push_out_the_kv_of_those_under_way_and_the_overdue_one_is_next():
    dispatcher = Dispatcher()
    dispatcher.handle(WorkerCapacity("a", rollout_slots=4, **(TOLD | {"kv_tokens": 1300})))
    assert at_home(dispatcher, "x", 700) == "a"
    park(dispatcher, "y", 0, context=700)
    park(dispatcher, "z", 5, context=200)
    dispatcher.apply([SetPriority("y", Priority(0, -1, 0), "overdue")])
    assert dispatcher.dispatch(ROLLOUT) == ()  # z would fit, but starts no earlier than y
    park(dispatcher, "x", 9, context=700)
    assert dispatcher.dispatch(ROLLOUT) == (Place("x", ROLLOUT, "a", "home"),)
    dispatcher.handle(TrajectoryEnded("x"))
    assert [(p.key, p.reason) for p in dispatcher.dispatch(ROLLOUT)] == [("y", "overdue"), ("z", "first home")]


def test_a_context_that_does_not_fit_any_more_waits_until_it_does_and_pushes_nobody_out():
    dispatcher = Dispatcher()
    dispatcher.handle(WorkerCapacity("a", rollout_slots=4, **(TOLD | {"kv_tokens": 1000})))
    assert at_home(dispatcher, "x", 400) == at_home(dispatcher, "y", 400) == "a"
    dispatcher.handle(QuantumFinished("x", ROLLOUT, 1, "", "", 1.0))
    dispatcher.handle(QuantumFinished("y", ROLLOUT, 300, "", "", 1.0))
    park(dispatcher, "x", 0, context=400)
    assert dispatcher.dispatch(ROLLOUT) == (), "700 tokens of y leave no room for the 400 of x"
    park(dispatcher, "y", 1, context=700)
    assert [(place.key, place.reason) for place in dispatcher.dispatch(ROLLOUT)] == [("y", "home")]
    dispatcher.handle(TrajectoryEnded("y"))
    assert [(place.key, place.reason) for place in dispatcher.dispatch(ROLLOUT)] == [("x", "first home")]


@pytest.mark.parametrize("asleep", [False, True])
def test_where_the_kv_of_those_is_whose_engine_dropped_it_or_was_put_to_sleep_is_not_forgotten(asleep):
    dispatcher = Dispatcher()
    dispatcher.handle(WorkerCapacity("a", rollout_slots=4, **KEEPS))
    assert at_home(dispatcher, "x", 400) == at_home(dispatcher, "y", 400) == "a"
    if asleep:
        dispatcher.handle(WorkerWithdrawn("a"))
    else:
        dispatcher.handle(QuantumFinished("x", ROLLOUT, 1, "", "", 1.0))
        dispatcher.handle(QuantumFinished("y", ROLLOUT, 300, "", "", 1.0))
    park(dispatcher, "x", 0, context=400)
    dispatcher.handle(WorkerCapacity("b", rollout_slots=1, **KEEPS))
    (place,) = dispatcher.dispatch(ROLLOUT)
    assert (place.key, place.worker, place.reason) == ("x", "b", "first home")
    assert place.move is not None and place.move.sends
    assert (place.move.home, place.move.tokens) == ("a", 400)


def test_the_only_engine_with_room_is_found_among_many():
    dispatcher = Dispatcher()
    for i in range(200):
        dispatcher.handle(WorkerCapacity(f"w{i}", rollout_slots=2, **(TOLD | {"kv_tokens": 1000})))
        at_home(dispatcher, f"k{i}", 900)
    dispatcher.handle(TrajectoryEnded("k137"))
    park(dispatcher, "new", 0, context=900)
    (place,) = dispatcher.dispatch(ROLLOUT)
    assert place.reason == "first home"
    assert dispatcher.running_on(place.worker, ROLLOUT) == 1


def test_siblings_begin_on_different_engines_whoever_is_first_in_order():
    """One of each group in turn, as many groups as engines: by number of residents alone a whole group would share an engine."""
    dispatcher = Dispatcher()
    for name in ("a", "b"):
        dispatcher.handle(WorkerCapacity(name, "tp1", 8, 0, 10**6, 0.01, 0.03))
    for order, (sample, group) in enumerate((s, g) for s in range(4) for g in ("g", "h")):
        key = f"{group}{sample}"
        dispatcher.handle(TrajectoryParked(key, 0, ROLLOUT, 0, group))
        dispatcher.apply([SetPriority(key, Priority(0, 0, order), "test"), Prefer(key, (), "test", 1000, 2000)])
    where = {}
    for place in dispatcher.dispatch(ROLLOUT):
        at = (place.key[0], place.worker)
        where[at] = where.get(at, 0) + 1
    assert where == {("g", "a"): 2, ("g", "b"): 2, ("h", "a"): 2, ("h", "b"): 2}


def test_where_an_engine_told_nothing_first_homes_go_by_free_slots_and_say_so():
    dispatcher = Dispatcher()
    dispatcher.handle(WorkerCapacity("fast", rollout_slots=2, **TOLD))
    dispatcher.handle(WorkerCapacity("silent", rollout_slots=4))
    for order in range(6):
        park(dispatcher, f"k{order}", order)
        dispatcher.apply([Prefer(f"k{order}", (), "test", 1000, 2000)])
    places = dispatcher.dispatch(ROLLOUT)
    assert [place.worker for place in places] == ["silent", "silent", "fast", "silent", "fast", "silent"]
    assert {p.reason for p in places[:5]} == {"first home: by free slots, for silent has not declared its speed"}


class Twice:
    """A dispatcher that is asked at any time, as a live one is, and one that is asked where the first placed something, as a
    replay's is; trajectories, engines and forecasts at random, in little memory."""

    def __init__(self, seed):
        self.rng, self.live, self.replayed = random.Random(seed), Dispatcher(), Dispatcher()
        self.context, self.left, self.running = dict[str, int](), dict[str, int](), dict[str, Place]()
        self.begun = 0
        for name in WORKERS:
            self.join(name)

    def handle(self, event):
        self.live.handle(event)
        self.replayed.handle(event)

    def join(self, name):
        step_s, kv_tokens = self.rng.uniform(0.01, 0.05), self.rng.choice((300, 400, 500))
        speed = {"alone_s_per_token": step_s, "full_s_per_token": 2 * step_s, "beside_s_per_token": step_s / 4}
        told = {"rollout_slots": self.rng.choice((3, 4)), "tool_slots": 4, "kv_tokens": kv_tokens}
        told |= speed if self.rng.random() < 0.5 else {}
        self.handle(WorkerCapacity(name, WORKERS[name][0], **told, max_context_tokens=300))

    def leave(self, name):
        self.handle(WorkerWithdrawn(name))
        for key in [key for key, place in self.running.items() if place.worker == name]:
            phase = self.running.pop(key).phase
            for each in (self.live, self.replayed):
                each.stopped(key)
            self.park(key, phase)

    def park(self, key, phase):
        self.handle(TrajectoryParked(key, 0, phase, 0, f"train-0-{int(key) // 4}", "", self.context[key]))
        commands = [SetPriority(key, Priority(1, 0, self.rng.randrange(50)), "test")]
        if self.rng.random() < 0.8:
            left = self.left[key] * self.rng.uniform(0.3, 3.0)
            commands.append(Prefer(key, (), "test", left, self.context[key] + 1.5 * left))
        for each in (self.live, self.replayed):
            each.apply(commands)

    def happens(self):
        rng, what = self.rng, self.rng.random()
        if what < 0.25 and len(self.context) < 14:
            key, self.begun = str(self.begun), self.begun + 1
            self.context[key], self.left[key] = 0, rng.choice((20, 60, 150))
            self.park(key, ROLLOUT)
        elif what < 0.75 and self.running:
            self.finish(rng.choice(list(self.running)))
        elif what < 0.8:
            self.join(rng.choice(list(WORKERS)))
        elif what < 0.81:
            self.leave(rng.choice(list(WORKERS)))
        elif what < 0.83 and self.context:
            self.handle(HomeForgotten(rng.choice(list(self.context))))

    def finish(self, key):
        phase = self.running.pop(key).phase
        tokens = 0 if phase is TOOL else min(self.left[key], self.rng.randint(1, 40))
        payload = self.rng.choice((0, 20)) if phase is TOOL else 0
        self.left[key] -= tokens
        self.context[key] = (self.context[key] or 30) + tokens + payload
        self.handle(QuantumFinished(key, phase, tokens, "", ToolStatus.OK, 0.1, payload))
        if self.left[key]:
            self.park(key, TOOL if phase is ROLLOUT and self.rng.random() < 0.5 else ROLLOUT)
        else:
            self.handle(TrajectoryEnded(key, True))
            del self.context[key], self.left[key]


@pytest.mark.parametrize("seed", range(10))
def test_a_dispatch_that_places_nothing_changes_no_later_answer(seed):
    twice, places = Twice(seed), 0
    for _ in range(300):
        twice.happens()
        for phase in Phase:
            if twice.rng.random() < 0.7 and (got := twice.live.dispatch(phase)):
                assert twice.replayed.dispatch(phase) == got
                twice.running |= {place.key: place for place in got}
                places += len(got)
    assert places > 50


def planned_engine(name, tp, token_s, slots=4):
    return WorkerCapacity(name, f"tp{tp}", slots, 0, 100_000, token_s, 2 * token_s, 1e-5)


def begun(dispatcher, key, begins_tp, left=1000):
    dispatcher.handle(TrajectoryParked(key, 0, ROLLOUT, 0))
    answers = CMLFQ().handle(TrajectoryParked(key, 0, ROLLOUT, 0))
    dispatcher.apply([answers[0], Prefer(key, (), "test", left, left, begins_tp)])
    (place,) = dispatcher.dispatch(ROLLOUT)
    return place.worker, place.reason


def slow_and_fast(slow_token_s, slots=4):
    dispatcher = Dispatcher()
    dispatcher.handle(planned_engine("slow", 1, slow_token_s, slots))
    dispatcher.handle(planned_engine("fast", 4, 0.010))
    return dispatcher


def test_a_trajectory_begins_where_the_plan_means_it_to_as_long_as_that_costs_little():
    little, much = 0.010 * (PLANNED_FACTOR - 0.05), 0.010 * (PLANNED_FACTOR + 0.05)
    assert begun(slow_and_fast(little), "t", 0)[0] == "fast"
    assert begun(slow_and_fast(little), "t", 1)[0] == "slow"
    assert begun(slow_and_fast(much), "t", 1)[0] == "fast"
    assert begun(slow_and_fast(little), "t", 2)[0] == "fast"  # the next higher degree that is there
    assert begun(slow_and_fast(0.001), "t", 5)[0] == "slow"  # there is none, and load decides


def test_the_degree_is_in_the_name_of_a_bucket_and_boundaries_come_in_the_order_of_degrees():
    buckets = {"tp4": 4, "tp2-threads1": 2, "vllm-tp8-threads1": 8, "": 1, "httpd9": 1}
    assert {bucket: degree_of(bucket) for bucket in buckets} == buckets
    assert boundaries_of({"tp4": 9.0, "tp1": 3}) == ((1, 3.0), (4, 9.0))


def test_only_an_earlier_iteration_or_a_better_level_takes_a_slot_away():
    dispatcher = Dispatcher()
    dispatcher.handle(joined("a"))
    park(dispatcher, "k0", 0)
    assert [place.key for place in dispatcher.dispatch(ROLLOUT)] == ["k0"]
    assert dispatcher.ahead() is None
    for key, rank in (("k1", Priority(1, 5, 0)), ("k2", Priority(1, 3, 9))):
        park(dispatcher, key, 0)
        dispatcher.apply([SetPriority(key, rank, "test")])
    assert dispatcher.ahead() == Priority(1, 3, 9)
    ranks = [Priority(0, 9, 0), Priority(1, 2, 0), Priority(1, 3, 99), Priority(1, 4, 0), Priority(2, 0, 0)]
    assert [leaves_slot(rank, dispatcher.ahead()) for rank in ranks] == [False, False, False, True, True]
    assert all(leaves_slot(rank, EVERYONE) and not leaves_slot(rank, None) for rank in ranks)
