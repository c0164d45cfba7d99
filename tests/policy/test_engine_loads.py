"""What is believed of engines: sums kept event by event are those of all members, and the longest stands out as far as it does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.facts import QuantumFinished, QuantumStarted, TrajectoryEnded, TrajectoryParked, WorkerCapacity
from libra.policy import joined_of
from libra.policy.engine_capacity import as_its_bucket
from libra.policy.engine_loads import Loads
from libra.policy.engine_table import EXACT_NORM, NOISY_NORM, Demand, EngineTable, peak_tokens
from libra.types import EngineCapacity, Phase, StepSeconds

KEYS = [f"t{k}" for k in range(6)]
WORKERS = ["a", "b"]
STEP = st.one_of(
    st.tuples(st.just("believe"), st.sampled_from(KEYS), st.integers(0, 10**6), st.integers(1, 10**6)),
    st.tuples(st.just("generated"), st.sampled_from(KEYS), st.integers(0, 10**5)),
    st.tuples(st.just("settle"), st.sampled_from(KEYS), st.sampled_from([*WORKERS, None])),
    st.tuples(st.just("end"), st.sampled_from(KEYS)),
)


def engines():
    fleet = EngineTable()
    for worker in WORKERS:
        fleet.handle(WorkerCapacity(worker, "tp2", 8, 0, 100_000, 0.01, 0.03, 1e-5))
    return fleet, Loads(fleet)


class Watched:
    """Loads, and what has been said of each trajectory."""

    def __init__(self):
        self.fleet, self.loads = engines()
        self.forecasts = {}
        self.homes = {}

    def take(self, step):
        match step:
            case ("believe", key, left, final):
                self.forecasts[key] = float(left), float(final)
                self.fleet.forecast(self.fleet.of(key), float(left), float(final))
            case ("generated", key, tokens):
                left, final = self.forecasts.get(key, (0.0, 0.0))
                self.forecasts[key] = max(0.0, left - tokens), final
                self.fleet.of(key)
                self.fleet.handle(QuantumFinished(key, Phase.ROLLOUT, tokens, "", "", 1.0))
            case ("settle", key, worker):
                self.homes[key] = worker
                self.fleet.settle(self.fleet.of(key), worker)
            case ("end", key):
                self.forecasts.pop(key, None)
                self.homes.pop(key, None)
                self.fleet.handle(TrajectoryEnded(key))

    def over_s(self, worker, more):
        """When an engine is over with one more of so many tokens and context at its end."""
        members = [(*more, 0)]
        for key, home in self.homes.items():
            if home == worker:
                members.append((*self.forecasts.get(key, (0.0, 0.0)), self.fleet.of(key).context_tokens))
        peak = sum((left / 1000) ** NOISY_NORM for left, _, _ in members) ** (1 / NOISY_NORM) * 1000
        return 0.01 * peak + 0.02 / 100_000 * sum(left * 0.5 * (context + final) for left, final, context in members)


@given(steps=st.lists(STEP, max_size=60))
def test_sums_are_those_of_all_members_after_any_events(steps):
    watched = Watched()
    new = watched.fleet.of("new")
    watched.fleet.forecast(new, 100.0, 300.0)
    for step in steps:
        watched.take(step)
        for worker in WORKERS:
            expected = watched.over_s(worker, (100.0, 300.0))
            assert watched.loads.finish_s(new, worker) == pytest.approx(expected, rel=1e-3)


def test_an_end_is_seconds_of_steps_of_those_beside_and_of_contexts_and_slots_that_are_too_few_add_steps():
    fleet = EngineTable(EXACT_NORM)
    steps = StepSeconds(0.01, 0.002, 1e-6, 0.0, 100, 0.0)
    fleet.handle(joined_of("a", "tp1", EngineCapacity(8192, 0, 0, 2, 1, steps)))
    loads = Loads(fleet)
    for key in ("x", "y", "z"):
        fleet.handle(TrajectoryParked(key, 0, Phase.ROLLOUT, 0))
        fleet.forecast(fleet.of(key), 100.0, 100.0)
        fleet.settle(fleet.of(key), "a")
    # Three of 100 tokens on two slots: 150 steps, 300 tokens, contexts of 50 on average.
    expected_s = 150 * 0.01 + 300 * 0.002 + 300 * 50 * 1e-6
    assert loads.finish_s(fleet.of("x"), "a") == pytest.approx(expected_s, rel=1e-6)
    assert loads.pace_s_per_token(fleet.of("x"), "a") == pytest.approx(0.01 + 2 * 0.002 + 1e-6 * 3 * 70, rel=1e-6)


def test_no_trajectory_is_better_off_on_an_engine_that_told_nothing_nor_moved_from_one():
    """Seconds per token, compared with seconds until an engine is over, had every engine of unknown capacity seem over at once."""
    told = {"kv_tokens": 10**6, "full_s_per_token": 0.02}
    alone = {"a": 0.01, "b": 0.003}
    for known in (("a", "b"), ("a",), ("b",), ()):
        fleet = EngineTable()
        for name in ("a", "b"):
            speed = told | {"alone_s_per_token": alone[name]} if name in known else {}
            fleet.handle(WorkerCapacity(name, "tp1", rollout_slots=4, **speed))
        loads = Loads(fleet)
        for key in ("long", "longer"):
            fleet.handle(TrajectoryParked(key, 0, Phase.ROLLOUT, 0, "", "", 100))
            fleet.handle(QuantumStarted(key, Phase.ROLLOUT, "a"))
            fleet.forecast(fleet.of(key), 5000.0, 6000.0)
        fleet.forecast(fleet.of("longer"), 9000.0, 10_000.0)
        better = loads.better_home(fleet.of("longer"), {"b": 4})
        assert (better is not None) == (known == ("a", "b"))


@pytest.mark.parametrize(("bucket", "moves"), [("tp1", False), ("tp1-threads2", True)])
def test_between_engines_of_a_bucket_a_small_gain_is_within_the_error_of_forecasts(bucket, moves):
    fleet = EngineTable(EXACT_NORM)
    steps = StepSeconds(0.009, 0.001, 0.0, 1e-6, 100, 0.0)
    for name, its in (("a", "tp1"), ("b", bucket)):
        fleet.handle(joined_of(name, its, EngineCapacity(10**6, 0, 0, 4, 1, steps)))
    loads = Loads(fleet)
    for key, left in (("longer", 10_000.0), ("long", 8_800.0)):
        fleet.handle(TrajectoryParked(key, 0, Phase.ROLLOUT, 0, "", "", 100))
        fleet.handle(QuantumStarted(key, Phase.ROLLOUT, "a"))
        fleet.forecast(fleet.of(key), left, left + 100.0)
    found = loads.better_home(fleet.of("longer"), {"b": 4})  # 8 % sooner
    assert (found is not None) == moves


@pytest.mark.parametrize(
    ("sure", "residents", "beside_s", "goes"),
    [
        (False, 1, 0.0, True),  # a short one goes to the faster engine, whose end it does not change
        (False, 4, 0.0, False),  # whose every slot somebody at home there needs
        (False, 3, 0.02, False),  # where it would hold the others up by more than it wins
        (True, 1, 0.0, False),  # lengths are known: only ends count
    ],
)
def test_a_trajectory_goes_where_it_wins_more_time_than_others_lose(sure, residents, beside_s, goes):
    fleet = EngineTable(EXACT_NORM if sure else NOISY_NORM)
    for name, alone_s in (("slow", 0.03), ("fast", 0.01)):
        steps = StepSeconds(alone_s, beside_s if name == "fast" else 0.0, 0.0, 1e-6, 100, 0.0)
        fleet.handle(joined_of(name, "tp1", EngineCapacity(10**6, 0, 0, 4, 1, steps)))
    loads = Loads(fleet)
    homes = {"short": "slow", "other": "slow", **{f"long{n}": "fast" for n in range(residents)}}
    for key, home in homes.items():
        fleet.handle(TrajectoryParked(key, 0, Phase.ROLLOUT, 0, "", "", 100))
        fleet.handle(QuantumStarted(key, Phase.ROLLOUT, home))
        fleet.forecast(fleet.of(key), {"short": 50.0, "other": 500.0}.get(key, 5000.0), 6000.0)
    free = {"slow": 2, "fast": 1}
    short = fleet.of("short")
    assert loads.better_home(short, free) is None, "it is not the longest at home"
    moved = loads.move(short, free)
    assert (moved is not None) == goes
    if moved is not None:
        assert moved[0] == "fast"


def test_engines_of_a_bucket_are_equally_fast_unless_they_differ_by_more_than_their_errors():
    def capacity(fixed_s, error_frac):
        return EngineCapacity(10_000, 0, 0, 8, 1, StepSeconds(fixed_s, 0.0, 0.0, 0.0, 100, error_frac))

    told = [capacity(0.0011, 0.9), capacity(0.0093, 0.5), capacity(0.0165, 0.4)]
    alike = [each.steps for each in told]
    assert {as_its_bucket(each, alike).steps.fixed_s for each in told} == {0.0093}
    sure = [capacity(0.01, 0.02), capacity(0.01, 0.02), capacity(0.04, 0.02)]
    assert [as_its_bucket(each, [s.steps for s in sure]).steps.fixed_s for each in sure] == [0.01, 0.01, 0.04]
    unknown = EngineCapacity(10_000, 0, 0, 8, 1, None)
    assert as_its_bucket(unknown, alike).steps.fixed_s == 0.0093 and as_its_bucket(unknown, []).steps is None


@given(rows=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 100), st.integers(0, 200)), min_size=1, max_size=8))
def test_the_peak_is_that_of_a_walk_over_all_steps(rows):
    demands = [Demand(left, context, context + growth) for left, context, growth in rows]
    walked = max(
        sum(d.context + (d.final - d.context) * step / d.left for d in demands if step <= d.left) for step in range(31)
    )
    assert peak_tokens(demands) == pytest.approx(walked)


def test_one_that_never_ends_is_held_beside_all_others():
    assert peak_tokens([Demand(1e12, 70.0, 70.0), Demand(10.0, 20.0, 40.0)]) == pytest.approx(110.0)
    assert peak_tokens([]) == 0.0
