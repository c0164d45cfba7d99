"""The parked queue against a sorted list, and slots against a count."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from libra.policy import Priority
from libra.scheduler.queue import ParkedQueue
from libra.scheduler.slots import Slots, choose
from libra.types import Phase

PRIORITIES = st.builds(Priority, st.integers(0, 2), st.integers(0, 2), st.integers(0, 5))
KEYS = st.sampled_from([f"key-{i}" for i in range(6)])
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("push"), KEYS, PRIORITIES),
        st.tuples(st.just("drop"), KEYS, st.none()),
        st.tuples(st.just("pop"), st.none(), st.none()),
    ),
    max_size=80,
)


@settings(max_examples=300, deadline=None)
@given(MOVES)
def test_the_queue_is_a_sorted_list_even_when_places_change(moves: list) -> None:
    queue, model, serial = ParkedQueue(), {}, 0
    for move, key, priority in moves:
        match move:
            case "push":
                serial += 1
                queue.push(key, priority)
                model[key] = (priority, serial)
            case "drop":
                queue.drop(key)
                model.pop(key, None)
            case "pop":
                expected = min(model, key=lambda k: model[k]) if model else None
                assert queue.pop() == expected
                model.pop(expected, None)
        assert len(queue) == len(model)
        assert all(k in queue for k in model)


def test_a_demotion_is_not_lost_to_its_old_place() -> None:
    queue = ParkedQueue()
    queue.push("demoted", Priority(0, 0, 0))
    queue.push("other", Priority(0, 1, 0))
    queue.push("demoted", Priority(0, 2, 0))
    assert [queue.pop(), queue.pop(), queue.pop()] == ["other", "demoted", None]


def test_levels_count_one_run_only() -> None:
    queue = ParkedQueue()
    queue.push("a", Priority(0, 0, 0))
    queue.push("b", Priority(3, 1, 0))
    queue.push("c", Priority(0, 1, 1))
    assert queue.levels({"a": "x", "b": "x", "c": "y"}, "x") == {0: 1, 1: 1}


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "back"]), st.sampled_from("ab"), KEYS), max_size=60))
def test_slots_are_conserved(moves: list) -> None:
    slots, held = Slots(), {"a": set(), "b": set()}
    supply = {"a": 2, "b": 3}
    for move, address, key in moves:
        if move == "take":
            if address not in slots.free(Phase.TOOL, supply) or key in held["a"] | held["b"]:
                continue
            slots.take(Phase.TOOL, address, key)
            held[address].add(key)
        else:
            slots.give_back(Phase.TOOL, address, key)
            held[address].discard(key)
        free = slots.free(Phase.TOOL, supply)
        assert {a: free.get(a, 0) + len(held[a]) for a in supply} == supply
        assert slots.used(Phase.TOOL) == len(held["a"] | held["b"])
        assert slots.used(Phase.ROLLOUT) == 0


def test_a_lost_worker_loses_its_slots_and_home_is_preferred() -> None:
    slots = Slots()
    slots.take(Phase.ROLLOUT, "a", "k")
    slots.lose("a")
    assert slots.used(Phase.ROLLOUT) == 0
    assert choose({"a": 1, "b": 5}, "a") == "a"
    assert choose({"a": 1, "b": 5}, "gone") == "b"
