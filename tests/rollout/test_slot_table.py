import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.errors import ContextOverflow, EngineError
from libra.policy.trajectory_table import OVERDUE
from libra.rollout.engine import check_request, packed_priority
from libra.rollout.slot_table import QueuedJob, RequestQueue
from libra.types import TurnRequest

PARTS = (st.integers(-1, 2**20 - 3), st.integers(-1, 2**10 - 3), st.integers(-1, 2**30 - 3))
PRIORITIES = st.tuples(*PARTS).flatmap(lambda whole: st.integers(0, 3).map(lambda size: whole[:size]))


def request(name="a", priority=(0,), **fields):
    return TurnRequest(name, 0, np.arange(4, dtype=np.int32), fields.pop("new", 2), priority=priority, **fields)


@given(PRIORITIES, PRIORITIES)
def test_one_number_orders_priorities_as_the_tuples_do(one, other):
    assert (packed_priority(one) < packed_priority(other)) == (one < other)
    assert 0 <= packed_priority(one) < 2**60
    assert packed_priority((3, OVERDUE, 7)) < packed_priority((3, 0, 0)) < packed_priority((4, OVERDUE, 0))


@pytest.mark.parametrize("priority", [(1, 2, 3, 4), (-2,), (0, 2**10), (2**20,), (0, 0, 2**30)])
def test_a_priority_that_one_number_cannot_hold_is_refused(priority):
    with pytest.raises(EngineError):
        packed_priority(priority)


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=40), st.randoms())
def test_the_queue_is_a_sorted_list_with_places(slots, jobs, random):
    queue, expected, running = RequestQueue(slots), [], set()
    for ticket, (priority, ends) in enumerate(jobs):
        job = QueuedJob(ticket, request(f"t{ticket}", (priority,)), 0.0)
        queue.push(job)
        expected.append((priority, ticket))
        if ends == 1 and running:  # one that runs ends
            queue.end(queue.running[running.pop()])
        elif ends == 2:  # one that waits is taken back
            gone = random.choice(sorted(expected))
            expected.remove(gone)
            queue.end(queue.waiting[f"t{gone[1]}"])
        started = [each.ticket for each in queue.start()]
        due = sorted(expected)[: slots - len(running)]
        assert started == [number for _, number in due]
        expected = [entry for entry in expected if entry not in due]
        running |= {f"t{number}" for number in started}
        assert len(queue.running) == len(running) <= slots
        assert set(queue.running) == running
    assert {each.name for each in queue.jobs()} == running | {f"t{number}" for _, number in expected}


def test_a_trajectory_has_one_job():
    queue = RequestQueue(1)
    first = QueuedJob(0, request("a"), 0.0)
    queue.push(first)
    with pytest.raises(EngineError):
        queue.push(QueuedJob(1, request("a"), 0.0))
    assert list(queue.start()) == [first]
    with pytest.raises(EngineError):
        queue.push(QueuedJob(2, request("a"), 0.0))
    queue.end(first)
    assert queue.find("a") is None
    queue.push(QueuedJob(3, request("a"), 0.0))


@pytest.mark.parametrize("fields", [{"new": 0}, {"new": 13}, {"temperature": -1.0}, {"top_p": 0.0}, {"seed": -1}])
def test_what_no_engine_serves_is_refused(fields):
    with pytest.raises(ContextOverflow if fields == {"new": 13} else EngineError):
        check_request(request(**fields), max_context_tokens=16, vocab_size=10)
    check_request(request(new=12), max_context_tokens=16, vocab_size=10)
    with pytest.raises(EngineError):
        check_request(request(), max_context_tokens=16, vocab_size=3)
