"""The price of a change of home: the lesser of computing again and sending, by what was measured."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.facts import HomeChanged, Priority, SetPriority, TrajectoryParked, WorkerCapacity, WorkerWithdrawn
from libra.policy import Dispatcher, Move
from libra.policy.engine_capacity import MEASURED_EVERY, PRIOR_BYTES_PER_S, PRIOR_LATENCY_S, TransferPace, priced
from libra.types import Phase

HOME = WorkerCapacity("a", "tp1", 4, 0, 10_000, 0.01, 0.02, 1e-4, kv_token_bytes=1000)
TARGET = msgspec.structs.replace(HOME, worker="b", prefill_s_per_token=2e-4)
SIZES, SECONDS = st.integers(1, 10**10), st.floats(1e-5, 100.0)


def test_before_the_first_transfer_it_is_the_stated_prior():
    pace = TransferPace()
    assert pace.fitted() == pytest.approx((PRIOR_LATENCY_S, 1 / PRIOR_BYTES_PER_S))
    move = priced(1000, HOME, TARGET, pace)
    assert move == Move("a", 1000, pytest.approx(0.2), pytest.approx(0.006), True)
    assert move.seconds == move.transfer_s


@pytest.mark.parametrize("changed", [{"worker": "b", "kv_token_bytes": 0}, {"worker": "b"}])
def test_engines_that_exchange_no_kv_compute_it_again(changed):
    home = msgspec.structs.replace(HOME, kv_token_bytes=0) if "kv_token_bytes" not in changed else HOME
    move = priced(1000, home, msgspec.structs.replace(TARGET, **changed), TransferPace())
    assert (move.transfer_s, move.sends, move.seconds) == (None, False, pytest.approx(0.2))


def test_measured_transfers_replace_the_prior():
    pace = TransferPace()
    for megabytes in (1, 5, 20, 80) * 8:
        pace.add(megabytes * 1e6, 0.02 + megabytes * 1e6 / 2e8)
    latency_s, byte_s = pace.fitted()
    assert (latency_s, 1 / byte_s) == (pytest.approx(0.02, rel=0.1), pytest.approx(2e8, rel=0.1))
    for _ in range(64):
        pace.add(1e7, 0.4)  # the network became slower
    assert pace.seconds(1e7) == pytest.approx(0.4, rel=0.1)


def test_after_a_burst_of_slow_transfers_kv_is_sent_now_and_then_and_found_to_be_quick_again():
    pace = TransferPace()
    for _ in range(10):
        pace.add(1e6, 0.5)
    sent = []
    for number in range(3 * MEASURED_EVERY):
        if pace.chosen(priced(1000, HOME, TARGET, pace)).sends:
            sent.append(number)
            pace.add(1e6, 0.006)
    assert sent[0] == MEASURED_EVERY - 1
    for _ in range(40):  # the network is quick again
        pace.add(1e6, 0.006)
    assert pace.chosen(priced(1000, HOME, TARGET, pace)).sends


@given(st.lists(st.tuples(SIZES, SECONDS), max_size=40), SIZES, SIZES)
def test_no_price_is_negative_and_more_bytes_never_cost_less(measured, one, other):
    pace = TransferPace()
    for num_bytes, seconds in measured:
        pace.add(num_bytes, seconds)
    latency_s, byte_s = pace.fitted()
    assert latency_s >= 0.0 and byte_s >= 0.0
    assert pace.seconds(min(one, other)) <= pace.seconds(max(one, other))


@given(
    st.integers(0, 10**6), st.floats(0.0, 1e-2), st.integers(0, 10**6), st.lists(st.tuples(SIZES, SECONDS), max_size=5)
)
def test_a_move_costs_the_lesser_of_the_two(tokens, prefill_s, token_bytes, measured):
    pace = TransferPace()
    for num_bytes, seconds in measured:
        pace.add(num_bytes, seconds)
    home = msgspec.structs.replace(HOME, kv_token_bytes=token_bytes)
    move = priced(tokens, home, msgspec.structs.replace(TARGET, prefill_s_per_token=prefill_s), pace)
    assert move.seconds == min(tokens * prefill_s, float("inf") if move.transfer_s is None else move.transfer_s)


def test_the_dispatcher_prices_a_move_by_the_transfers_it_was_told_of():
    def moved(*transfers):
        dispatcher = Dispatcher()
        for events in ((HOME,), (WorkerWithdrawn("a"), *transfers, TARGET)):
            for event in (*events, TrajectoryParked("x", 0, Phase.ROLLOUT, 0, context_tokens=2000)):
                dispatcher.handle(event)
            dispatcher.apply([SetPriority("x", Priority(0, 0, 0), "")])
            (place,) = dispatcher.dispatch(Phase.ROLLOUT)
        assert place.worker == "b"
        return place.move

    before, after = moved(), moved(*[HomeChanged("y", "a", "b", 9, 0.0, 0.0, True, 3.0, 2_000_000, "")] * 20)
    assert before is not None and before.sends and before.transfer_s == pytest.approx(0.007)
    assert after is None or not after.sends
