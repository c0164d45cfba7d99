"""Services of one device and of several: batches, bounded waits, order, and who is evicted."""

import heapq
from collections import defaultdict
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.errors import ConfigError
from libra.policy.service_schedule import Fire, ServiceFacts, ServiceSchedule

GIB = 2**30
gaps = st.lists(st.sampled_from([0.0, 0.0, 0.01, 0.1, 0.5, 2.0]), min_size=1, max_size=60)
lengths = st.lists(st.sampled_from([0.0, 0.05, 0.2, 1.0]), min_size=1, max_size=8)


class Begun(NamedTuple):
    at_s: float
    end_s: float
    fire: Fire


def driven(schedule, arrivals, batch_s, restore_s=0.0):
    """Every batch of these arrivals; the n-th takes the n-th of ``batch_s``, again from the first when they are used up."""
    agenda = [(at_s, number, service, None) for number, (at_s, service) in enumerate(arrivals)]
    heapq.heapify(agenda)
    begun = []
    serial = len(arrivals)
    while agenda:
        at_s = agenda[0][0]
        while agenda and agenda[0][0] == at_s:
            _, number, service, fire = heapq.heappop(agenda)
            if fire is not None:
                schedule.ended(fire, at_s, restore_s=restore_s if fire.restores else 0.0)
            elif service:
                schedule.asked(service, number, at_s)
        for fire in schedule.fire(at_s):
            took_s = batch_s[len(begun) % len(batch_s)] + (restore_s if fire.restores else 0.0)
            begun.append(Begun(at_s, at_s + took_s, fire))
            serial += 1
            heapq.heappush(agenda, (at_s + took_s, serial, "", fire))
        next_s = schedule.next_s(at_s)
        if next_s is not None:
            serial += 1
            heapq.heappush(agenda, (next_s, serial, "", None))
    return begun


def at_times(waits):
    at_s, found = 0.0, []
    for wait_s in waits:
        at_s += wait_s
        found.append(round(at_s, 6))
    return found


@given(gaps, lengths, st.integers(1, 5), st.sampled_from([0.0, 0.05, 0.3]))
def test_alone_on_its_device_a_request_waits_for_others_and_one_batch(waits, batch_s, max_batch, max_wait_s):
    schedule = ServiceSchedule({"gpu": 4 * GIB})
    schedule.declare(ServiceFacts("judge", max_batch, max_wait_s, GIB))
    arrivals = [(at_s, "judge") for at_s in at_times(waits)]
    begun = driven(schedule, arrivals, batch_s)
    started = {number: each.at_s for each in begun for number in each.fire.requests}
    assert [number for each in begun for number in each.fire.requests] == list(range(len(arrivals)))  # once, in order
    for number, (came_s, _) in enumerate(arrivals):
        before = sum(started[other] > came_s for other in range(number))  # those that wait when it comes
        allowed_s = max_wait_s + (1 + before // max_batch) * max(batch_s)
        assert started[number] - came_s <= allowed_s + 1e-9
    assert all(len(each.fire.requests) <= max_batch for each in begun)


@given(gaps, lengths, st.data())
def test_on_one_device_services_run_in_the_order_in_which_they_were_ripe(waits, batch_s, data):
    schedule = ServiceSchedule({"gpu": 2 * GIB})
    for name in "abc":
        schedule.declare(ServiceFacts(name, data.draw(st.integers(1, 3)), data.draw(st.sampled_from([0.0, 0.2])), GIB))
    arrivals = [(at_s, data.draw(st.sampled_from("abc"))) for at_s in at_times(waits)]
    begun = driven(schedule, arrivals, batch_s, restore_s=0.1)
    assert sorted(number for each in begun for number in each.fire.requests) == list(range(len(arrivals)))
    ripe_s = [each.fire.ripe_s for each in begun]
    assert ripe_s == sorted(ripe_s)
    resident = dict[str, float]()
    for each in begun:  # two fit: the one used longest ago goes, and nobody without need
        fire = each.fire
        assert fire.restores == (fire.service not in resident)
        assert len(fire.evicted) == (fire.restores and len(resident) == 2)
        for gone in fire.evicted:
            assert resident.pop(gone) <= min(resident.values())
        resident[fire.service] = each.end_s


@given(gaps, lengths)
def test_a_device_runs_one_batch_at_a_time(waits, batch_s):
    schedule = ServiceSchedule({"a": GIB, "b": GIB})
    for name in ("x", "y", "z"):
        schedule.declare(ServiceFacts(name, 2, 0.1, GIB, restore_s=0.3))
    schedule.declare(ServiceFacts("plain", 2, 0.1))
    arrivals = [(at_s, ("x", "y", "z", "plain")[number % 4]) for number, at_s in enumerate(at_times(waits))]
    begun = driven(schedule, arrivals, batch_s, restore_s=0.3)
    assert sorted(number for each in begun for number in each.fire.requests) == list(range(len(arrivals)))
    ends = defaultdict(float)
    for count, each in enumerate(begun):
        assert each.at_s >= ends[each.fire.lane] - 1e-9
        took_s = batch_s[count % len(batch_s)] + (0.3 if each.fire.restores else 0.0)
        ends[each.fire.lane] = each.at_s + took_s
        assert bool(each.fire.device) == (each.fire.service != "plain")


def test_a_service_waits_for_its_weights_where_restoring_them_elsewhere_takes_longer():
    for restore_s, second in ((5.0, None), (0.1, "b")):
        schedule = ServiceSchedule({"a": GIB, "b": GIB})
        schedule.declare(ServiceFacts("judge", 1, 0.0, GIB, restore_s))
        schedule.asked("judge", 0, 0.0)
        (first,) = schedule.fire(0.0)
        schedule.ended(first, restore_s + 1.0, restore_s=restore_s)  # a batch takes a second
        schedule.asked("judge", 1, 10.0)
        (again,) = schedule.fire(10.0)
        assert (again.device, again.restores) == ("a", False)
        schedule.asked("judge", 2, 10.0)
        fires = schedule.fire(10.0)
        assert [fire.device for fire in fires] == ([] if second is None else [second])
        schedule.ended(again, 11.0)
        assert [fire.device for fire in schedule.fire(11.0)] == (["a"] if second is None else [])


def test_weights_that_could_not_be_restored_are_not_on_the_device():
    schedule = ServiceSchedule({"gpu": GIB})
    schedule.declare(ServiceFacts("judge", 1, 0.0, GIB))
    schedule.asked("judge", 0, 0.0)
    (fire,) = schedule.fire(0.0)
    schedule.ended(fire, 1.0, failed=True)
    assert schedule.resident("gpu") == ()
    schedule.asked("judge", 1, 2.0)
    assert schedule.fire(2.0)[0].restores


def test_a_service_that_fits_no_device_is_refused_with_what_to_type():
    schedule = ServiceSchedule({"gpu": GIB})
    with pytest.raises(ConfigError, match="device_gib"):
        schedule.declare(ServiceFacts("judge", 1, 0.0, 2 * GIB))
    schedule.declare(ServiceFacts("small", 1, 0.0, GIB))
    schedule.asked("small", 7, 0.0)
    assert schedule.withdraw("small") == (7,)
    assert schedule.fire(1.0) == () and schedule.next_s(1.0) is None
