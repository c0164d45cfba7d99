"""C-MLFQ and the orderings like it: their promises, one by one."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.orderings import CompletedCalls, Forecaster, KnownLengths, Oracle, Paper
from libra import facts
from libra.config.task_sections import PolicySection
from libra.policy import CMLFQ, ORDERINGS, Mlfq
from libra.policy.posterior.forecaster import CalibrationLog, Forecast
from libra.policy.trajectory_table import PATIENCE as DEFAULT
from libra.policy.trajectory_table import StarvationGuard
from libra.types import Phase

ROLLOUT = Phase.ROLLOUT
KINDS = ORDERINGS | {kind.name: kind for kind in (CompletedCalls, Oracle, Paper)}  # and those to compare with
KEYS = st.sampled_from([f"trajectory-train-{i}-0-{s}-e0-demo" for i in range(3) for s in range(3)])
WORKERS, PHASES = st.sampled_from(["a", "b"]), st.sampled_from(Phase)
PARKED = st.builds(
    facts.TrajectoryParked, KEYS, st.integers(0, 3), PHASES, st.integers(0, 9), st.sampled_from(["", "g", "h"]),
    st.sampled_from(["", "f"]), st.integers(0, 500),
)  # fmt: skip
FINISHED = st.builds(
    facts.QuantumFinished, KEYS, PHASES, st.integers(0, 99), st.just("t"), st.just("ok"), st.floats(0, 9),
    st.integers(0, 9), st.floats(0, 9),
)  # fmt: skip
EVENTS = st.lists(
    st.one_of(
        PARKED, FINISHED, st.builds(facts.TrajectoryEnded, KEYS), st.builds(facts.VersionPublished, st.integers(0, 3)),
        st.builds(facts.PromptsNamed, st.just((("g", "p"), ("h", "q")))), st.builds(facts.WorkerWithdrawn, WORKERS),
        st.builds(facts.WorkerCapacity, WORKERS, st.sampled_from(["tp1", "tp4"]), st.integers(0, 2), st.integers(0, 2)),
        st.builds(facts.QuantumStarted, KEYS, PHASES, WORKERS),
    ),
    max_size=40,
)  # fmt: skip
PATIENCE = 32
LENGTHS = {f"long-{i}": 10_000 * (i + 1) for i in range(40)} | {"short": 10}
BOUNDED = {
    "oracle": lambda: Oracle(LENGTHS, patience=PATIENCE), "mlfq": lambda: Mlfq(patience=PATIENCE),
    "completed_calls": lambda: CompletedCalls(patience=PATIENCE), "cmlfq": lambda: CMLFQ(patience=PATIENCE),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@given(before=EVENTS, after=EVENTS)
def test_it_goes_on_from_its_snapshot(kind, before, after):
    original, restored = kind(), kind()
    for event in before:
        original.handle(event)
    restored.handle(facts.TrajectoryParked("something else", 0, ROLLOUT, 0))  # forgotten by restore
    restored.restore(json.loads(json.dumps(original.snapshot(), allow_nan=False)))
    for event in after:
        answers = original.handle(event)
        assert restored.handle(event) == answers
        if isinstance(event, facts.TrajectoryParked):
            assert isinstance(answers[0], facts.SetPriority) and answers[0].key == event.key
    assert restored.snapshot() == original.snapshot()
    with pytest.raises(KeyError):
        restored.restore({})


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@given(events=st.lists(st.one_of(PARKED, FINISHED), max_size=40))
def test_an_earlier_iteration_goes_before_a_later_one(kind, events):
    ordering, places = kind(), dict[str, tuple[int, facts.Priority]]()
    for event in events:
        for a in ordering.handle(event):
            if isinstance(a, facts.SetPriority) and isinstance(event, facts.TrajectoryParked) and a.key == event.key:
                places[event.key] = event.iteration, a.priority
    for iteration, priority in places.values():
        assert all(priority < other for later, other in places.values() if later > iteration)


class Queue:
    """One phase, one slot: whoever is first in order is dispatched, runs, and parks again."""

    def __init__(self, ordering):
        self.ordering = ordering
        self.waiting = {}
        self.passed = {}
        self.bound = {}
        self.most_over = 0

    def park(self, key):
        self.bound[key] = 2 * len(self.waiting) + PATIENCE
        self.passed[key] = 0
        self.waiting[key] = facts.Priority(9, 9, 9)
        for command in self.ordering.handle(facts.TrajectoryParked(key, 0, ROLLOUT, 0)):
            if isinstance(command, facts.SetPriority) and command.key in self.waiting:
                self.waiting[command.key] = command.priority

    def dispatch(self):
        key = min(self.waiting, key=lambda k: (self.waiting[k], k))
        del self.waiting[key]
        for other in self.waiting:
            self.passed[other] += 1
            self.most_over = max(self.most_over, self.passed[other] - self.bound[other])
        self.ordering.handle(facts.QuantumStarted(key, ROLLOUT, "w"))
        self.ordering.handle(facts.QuantumFinished(key, ROLLOUT, 100, "", "", 1.0))
        self.ordering.handle(facts.QuantumFinished(key, Phase.TOOL, 0, "bash", "ok", 1.0))
        return key


@pytest.mark.parametrize("name", BOUNDED)
@given(num=st.integers(2, 40), order=st.randoms(use_true_random=False))
def test_nobody_is_passed_over_more_often_than_the_bound(name, num, order):
    queue = Queue(BOUNDED[name]())
    keys = ["short", *(f"long-{i}" for i in range(num))]
    order.shuffle(keys)
    for key in keys:
        queue.park(key)
    for _ in range(100):
        queue.park(queue.dispatch())
    assert queue.most_over <= 0


def test_without_patience_the_short_one_would_starve():
    for patience, runs in ((PATIENCE, True), (10**9, False)):
        queue = Queue(Oracle(LENGTHS, patience=patience))
        for key in LENGTHS:
            queue.park(key)
        ran = set()
        for _ in range(200):
            ran.add(key := queue.dispatch())
            queue.park(key)
        assert ("short" in ran) is runs


def test_phases_are_counted_apart():
    patience = StarvationGuard(5)
    assert patience.parked("a", ROLLOUT) == []
    for i in range(20):
        assert "a" not in [key for key, _ in patience.parked(f"t{i}", Phase.TOOL)]
    assert [told for i in range(5) for told in patience.parked(f"r{i}", ROLLOUT)] == [("a", 1)]


def test_by_default_nobody_is_overdue_within_one_large_iteration():
    patience = StarvationGuard(DEFAULT)
    patience.parked("unbegun", ROLLOUT)
    for turn in range(3_000 * 42):
        assert not patience.parked(f"k{turn % 3_000}", ROLLOUT)
    assert PolicySection().patience == DEFAULT


def engine(token_bytes=1000):
    return facts.WorkerCapacity(
        "e0", "tp1", 64, kv_tokens=10_000, alone_s_per_token=0.01, full_s_per_token=0.02, prefill_s_per_token=1e-4,
        kv_token_bytes=token_bytes,
    )  # fmt: skip


def priority_of(ordering, key, tokens):
    answers = ordering.handle(facts.TrajectoryParked(key, 0, ROLLOUT, 0))
    if tokens:
        ordering.handle(facts.QuantumFinished(key, ROLLOUT, tokens, "", "", 1.0))
        answers = ordering.handle(facts.TrajectoryParked(key, 0, ROLLOUT, 1))
    return answers[0].priority


@pytest.mark.parametrize("token_bytes", [0, 1000])
def test_who_has_begun_goes_first_only_where_a_pause_costs_its_context(token_bytes):
    ordering = CMLFQ()  # without data: no skill
    ordering.handle(engine(token_bytes))
    begun, new = priority_of(ordering, "begun", 500), priority_of(ordering, "new", 0)
    assert (new < begun) == (token_bytes > 0)


@pytest.mark.parametrize("ordering", [Mlfq(), CMLFQ(KnownLengths({"k": 9000}))], ids=["mlfq", "cmlfq"])
@pytest.mark.parametrize("token_bytes", [0, 1000])
def test_a_trajectory_that_keeps_its_slot_has_the_level_that_it_would_get_if_it_parked(ordering, token_bytes):
    ordering.handle(engine(token_bytes))
    rank = priority_of(ordering, "k", 0)
    for quantum in range(1, 20):
        ordering.handle(facts.QuantumFinished("k", ROLLOUT, 400, "", "", 1.0))
        for answer in ordering.handle(facts.QuantumContinued("k", ROLLOUT, "e0", quantum)):
            assert answer.key == "k" and answer.priority.level != rank.level
            rank = answer.priority
        assert rank.level == priority_of(ordering, "k", 0).level


def test_of_those_that_have_not_begun_the_longest_goes_first():
    ordering = CMLFQ(KnownLengths({"long": 9000, "short": 400}))
    begun, short, long = (priority_of(ordering, key, tokens) for key, tokens in (("x", 5), ("short", 0), ("long", 0)))
    assert begun < long < short


def test_where_engines_exchange_kv_those_with_most_left_go_first_and_within_an_octave_those_with_fewest_tokens():
    ordering = CMLFQ(KnownLengths({"long": 9000, "half": 9100, "short": 400}))
    ordering.handle(engine())
    long, half, short = (priority_of(ordering, k, n) for k, n in (("long", 500), ("half", 600), ("short", 0)))
    assert long < half < short and long.level == half.level
    again = CMLFQ(KnownLengths())
    again.restore(json.loads(json.dumps(ordering.snapshot())))
    parked = facts.TrajectoryParked("long", 0, ROLLOUT, 2)
    assert again.handle(parked) == ordering.handle(parked)


def test_whoever_waits_is_looked_at_anew_when_boundaries_are_set_and_it_survives_a_snapshot():
    policy, plain = CMLFQ(), CMLFQ()
    keys = [f"trajectory-train-0-0-{k}-e0-demo" for k in range(3)]
    for key in keys:
        policy.handle(facts.TrajectoryParked(key, 0, ROLLOUT, 0, "g"))
    policy.handle(facts.QuantumStarted(keys[0], ROLLOUT, "a"))
    policy.handle(facts.QuantumFinished(keys[0], ROLLOUT, 100, "", "", 1.0))
    policy.handle(facts.TrajectoryEnded(keys[0]))
    answers = policy.handle(facts.BoundariesSet(((1, 5.0), (2, 50_000.0))))
    assert [(a.key, a.begins_tp) for a in answers if isinstance(a, facts.Prefer)] == [(key, 2) for key in keys[1:]]
    assert policy.handle(facts.BoundariesSet(((1, 5.0), (2, 50_000.0)))) == ()
    other = CMLFQ()
    other.restore(json.loads(json.dumps(policy.snapshot())))
    late = facts.TrajectoryParked("trajectory-train-0-1-0-e0-demo", 0, ROLLOUT, 0, "h")
    assert other.handle(late) == policy.handle(late)
    assert not any(isinstance(a, facts.Prefer) for a in other.handle(facts.BoundariesSet(((1, 5.0),))))  # still TP 2
    policy.forget_live()
    assert policy.snapshot()["boundaries"] == []
    plain.handle(facts.BoundariesSet(((1, 10.0),)))
    assert plain.handle(late)[0] == CMLFQ().handle(late)[0], "the order of service does not heed them"


def test_half_way_is_the_last_belief_before_half_of_the_tokens():
    seen = CalibrationLog()
    for generated, total in ((0, 700.0), (100, 650.0), (250, 600.0), (300, 520.0), (450, 505.0)):
        seen.forecast("a", generated, total)
    seen.ended("a", 500, completed=True)
    assert [tuple(row) for row in seen.outcomes] == [(700.0, 600.0, 500)]


class Given(Forecaster):
    """A forecaster whose forecasts the test sets."""

    tokens = 100.0

    def remaining(self, key):
        return Forecast(self.tokens, self.tokens, 1.0)


@pytest.mark.parametrize(("tokens", "goes"), [(10.0, "later"), (1000.0, "sooner")])
def test_one_that_waits_to_begin_changes_its_level_with_its_forecast_up_and_down(tokens, goes):
    forecaster = Given()
    ordering = CMLFQ(forecaster)
    (begun, *_), _ = (ordering.handle(facts.TrajectoryParked(key, 0, ROLLOUT, 0, "g")) for key in ("waits", "ends"))
    forecaster.tokens = tokens
    (moved, *_) = ordering.handle(facts.TrajectoryEnded("ends"))
    assert isinstance(begun, facts.SetPriority) and isinstance(moved, facts.SetPriority) and moved.key == "waits"
    assert moved.priority > begun.priority if goes == "later" else moved.priority < begun.priority
