"""The whole system in virtual time: nothing lost, nothing twice, bounds kept, same bytes for a seed."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic_workload import synthetic

from benchmarks.orderings import KnownLengths, Oracle
from libra.facts import HomeChanged, QuantumFinished, SetPriority, TrajectoryParked
from libra.hardware import Residuals
from libra.hardware.engine_tables import HostPool
from libra.policy import CMLFQ, LEARNS_EVERY, ORDERINGS, Fifo
from libra.policy.engine_capacity import PRIOR_BYTES_PER_S
from libra.sim.simulation_options import SimulationOptions
from libra.sim.simulator import Simulator
from libra.types import Phase

TURNS = st.lists(st.tuples(st.integers(1, 300), st.sampled_from([0.0, 0.1, 3.0])), min_size=1, max_size=5)


def test_two_turns_with_a_tool_in_between_take_what_they_take(engines, workload):
    outcome = Simulator(workload([(100, 5.0), (50, 0.0)]), engines(1), Fifo()).run()
    expected = 0.1 + 100 * 0.01015 + 5.0 + 0.010 + 50 * 0.010235
    assert outcome.makespan_s == pytest.approx(expected, rel=0.01)
    assert (outcome.turns, outcome.generated_tokens, outcome.prefilled_tokens) == (2, 150, 110)
    assert [d.quantum for d in outcome.dispatched] == [0, 2]


@pytest.mark.parametrize("publish_s", [1.0, 30.0])
@pytest.mark.parametrize("eta", [0, 1, 2])
def test_a_version_is_published_beside_the_next_step_where_steps_overlap(engines, workload, eta, publish_s):
    work = workload([(10, 0.0)], iterations=6)
    options = SimulationOptions(eta=eta, train_s=8.0, publish_s=publish_s)
    simulator = Simulator(work, engines(1), Fifo(), options=options)
    simulator.run()
    published_s = [simulator.record.iteration_s[step] for step in range(6)]
    last_s = published_s[-1] - published_s[-2]
    if eta:
        assert last_s == pytest.approx(max(8.0, publish_s))
        gates_s = [simulator.record.gate_s[step] for step in range(6)]
        assert all(gates_s[k] >= published_s[k - eta - 1] for k in range(eta + 1, 6))
    else:  # engines wait for the version: it is all of the step
        assert last_s > 8.0 + publish_s


def test_a_step_waits_for_the_teacher_which_scores_one_group_after_the_other(engines, workload):
    work, fleet = workload([(100, 0.0)], [(100, 0.0)], [(400, 0.0)]), engines(1, slots=3)

    def step_s(token_s):
        options = SimulationOptions(train_s=1.0, teacher_token_s=token_s)
        return Simulator(work, fleet, Fifo(), options=options).run().iteration_s[0]

    assert step_s(0.001) == pytest.approx(step_s(0.0) + 500 * 0.001)  # others were scored while the last was generated
    short_s = 0.3 + 100 * 0.0103
    assert step_s(0.1) == pytest.approx(short_s + (200 + 200 + 500) * 0.1 + 1.0, rel=0.01)  # it is never idle


def test_a_quantum_is_at_most_a_chunk_and_nothing_is_computed_twice(engines, workload):
    work, fleet = workload([(100, 5.0), (50, 0.0)]), engines(1)
    whole = Simulator(work, fleet, Fifo()).run()
    parts = Simulator(work, fleet, Fifo(), options=SimulationOptions(chunk_tokens=30)).run()
    assert (parts.turns, parts.generated_tokens, parts.prefilled_tokens) == (2, 150, 110)
    assert parts.makespan_s == pytest.approx(whole.makespan_s, rel=1e-6)
    finished = []

    class Seen(Fifo):
        def handle(self, event):
            if isinstance(event, QuantumFinished):
                finished.append(event)
            return super().handle(event)

    Simulator(work, fleet, Seen(), options=SimulationOptions(chunk_tokens=30)).run()
    assert [(each.phase, each.tokens) for each in finished] == [
        *[(Phase.ROLLOUT, tokens) for tokens in (30, 30, 30, 10)], (Phase.TOOL, 0),
        *[(Phase.ROLLOUT, tokens) for tokens in (30, 20)], (Phase.TOOL, 0),
    ]  # fmt: skip
    assert all(each.status == "" for each in finished if each.phase is Phase.ROLLOUT)


def test_a_simulated_fetch_is_a_measured_transfer_for_the_price_of_moves(engines, workload):
    """Short trajectories end first, and some of the long ones move to where they ran: with their KV."""
    told = []

    class Seen(Fifo):
        def handle(self, event):
            if isinstance(event, HomeChanged):
                told.append(event)
            return super().handle(event)

    uneven = [[(long, 0.2), (30, 0.2), (long // 3, 0.0)] for long in (60, 300) * 4]
    work, fleet = workload(*uneven), engines(2, slots=2, kv=10_000)
    plain = Simulator(work, fleet, Seen()).run()
    assert (told, plain.fetched_tokens) == ([], 0)
    pooled = Simulator(work, fleet, Seen(), options=SimulationOptions(host=HostPool(10**6, 0.01, 1e-5))).run()
    assert pooled.moves > 0 and pooled.fetched_tokens > 0
    token_bytes = 1e-5 * PRIOR_BYTES_PER_S
    assert sum(each.num_bytes for each in told) == pytest.approx(pooled.fetched_tokens * token_bytes)
    assert all(each.took_s == pytest.approx(0.01 + each.num_bytes / PRIOR_BYTES_PER_S) for each in told)


def test_a_later_iteration_waits_for_its_gate(engines, workload):
    two = workload([(100, 0.0)], [(200, 0.0)], iterations=2)
    sync = Simulator(two, engines(1), Fifo(), options=SimulationOptions(train_s=7.0)).run()
    overlapped = Simulator(two, engines(1, slots=4), Fifo(), options=SimulationOptions(eta=1, train_s=7.0)).run()
    second = [d.at_s for d in sync.dispatched if d.key.startswith("trajectory-train-1")]
    assert min(second) == pytest.approx(sync.iteration_s[0])
    assert sync.iteration_s[0] == pytest.approx(7.0 + max(d.at_s for d in sync.dispatched[:2]) + 2.3, rel=0.05)
    assert [d.at_s for d in overlapped.dispatched if d.key.startswith("trajectory-train-1")] == [0.0, 0.0]


@pytest.mark.parametrize("name", ORDERINGS)
def test_the_same_seed_gives_the_same_bytes(name, engines):
    work = synthetic(24, turns=6, seed=3, group_size=4)
    around = SimulationOptions(residuals=Residuals((-0.1, 0.2), (-0.1, 0.1)), tool_slots=3)

    def digest(seed):
        fleet = engines(2, slots=3, kv=200_000)
        return Simulator(work, fleet, ORDERINGS[name](), seed=seed, options=around).run().digest()

    assert digest(0) == digest(0) != digest(1)


class Watched:
    """An ordering whose answers are kept, and checked against what the simulator dispatches."""

    def __init__(self, inner):
        self.inner, self.name = inner, inner.name
        self.places = {}
        self.parked = Counter()
        self.generated = Counter()
        self.quanta = []

    def handle(self, event):
        answers = self.inner.handle(event)
        if isinstance(event, TrajectoryParked):
            assert isinstance(answers[0], SetPriority) and answers[0].key == event.key
            self.parked[event.key] += 1
        if isinstance(event, QuantumFinished):
            self.generated[event.key] += event.tokens
            self.quanta.append(event.tokens)
        for answer in answers:
            if isinstance(answer, SetPriority):
                self.places[answer.key] = answer.priority
        return answers

    def snapshot(self):
        return self.inner.snapshot()

    def restore(self, snapshot):
        self.inner.restore(snapshot)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(sorted(ORDERINGS)), trajectories=st.lists(TURNS, min_size=1, max_size=12),
    slots=st.integers(1, 3), count=st.integers(1, 3), tool_slots=st.sampled_from([None, 1, 3]),
    chunk=st.sampled_from([None, 9, 70, 1000]),
)  # fmt: skip
def test_every_turn_runs_once_within_slots(engines, workload, name, trajectories, slots, count, tool_slots, chunk):
    work = workload(*trajectories, iterations=2)
    ordering = Watched(ORDERINGS[name]())
    around = SimulationOptions(tool_slots=tool_slots, train_s=1.0, load_s=0.5, chunk_tokens=chunk)
    simulator = Simulator(work, engines(count, slots, 3000), ordering, options=around)
    outcome = simulator.run()
    again = Counter((d.key, d.quantum) for d in outcome.dispatched)
    rollouts = sum(d.phase is Phase.ROLLOUT for d in outcome.dispatched)
    if chunk not in (9, 70):
        assert rollouts == work.num_turns and set(again.values()) == {1}
    assert max(ordering.quanta) <= (chunk or 300)
    assert ordering.generated == work.totals()
    assert set(simulator.record.ended_s) == set(work.totals())
    assert max(outcome.peak_kv_tokens.values()) <= 3000
    assert sum(ordering.parked.values()) >= len(outcome.dispatched)
    assert len(ordering.quanta) >= work.num_turns


class Counting(KnownLengths):
    """A forecaster that counts how often it is asked to learn."""

    learned = 0

    def learn(self):
        self.learned += 1


def test_a_forecaster_is_asked_to_learn_while_trajectories_end(engines, workload):
    forecaster = Counting()
    Simulator(workload(*[[(10, 0.0)]] * 40), engines(2), CMLFQ(forecaster)).run()
    assert forecaster.learned == 40 // LEARNS_EVERY


def test_contexts_that_outgrow_every_forecast_do_not_push_each_other_out(engines, workload):
    """Every trajectory holds a slot's share of memory twice, which no forecast of generated tokens knows."""
    work = workload(*([(10, 0.05)] * (4 + 7 * k % 16) + [(10, 0.0)] for k in range(120)))
    plans = [  # their tools add nine times what they generate
        plan._replace(turns=tuple(turn._replace(payload_tokens=9 * turn.payload_tokens) for turn in plan.turns))
        for plan in work.trajectories
    ]
    work = work._replace(trajectories=tuple(plans))
    fifo, oracle = (
        Simulator(work, engines(2, slots=24, kv=15_000), ordering).run() for ordering in (Fifo(), Oracle(work.totals()))
    )
    assert oracle.makespan_s <= 1.1 * fifo.makespan_s
    assert oracle.recomputed_tokens <= 2 * sum(plan.final_tokens for plan in work.trajectories)
