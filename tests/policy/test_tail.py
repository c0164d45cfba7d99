"""What a live run tells the rule of turning engines: what is open, what is left, what changes cost; and whom it asks."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra import facts
from libra.errors import ConfigError
from libra.facts import Turned
from libra.policy import Admission, CommittedGroup, Tail, TailSettings, Waves, WayChoice, WaySettings
from libra.policy.tail import ASSUMED_LOADS, OpenStep, TurningEngine, TurningRule
from libra.types import Phase

GROUPS, SIZE, SLOTS = 4, 2, 4
COMMITTED = facts.GroupCommitted("train", 0, 0, 0, None, {})
RULE = TurningRule(trajectories_per_gpu=4.0, min_gain_s=10.0, to_training_s=8.0, to_rollout_s=10.0)
DOING = st.sampled_from(list(Turned))


class Run:
    """One iteration of four groups of two, on e0 and e1, which may turn, and e2, which may not."""

    def __init__(self, *, change_s=2.0, hybrids=2, engines=3):
        self.admission = Admission(0, GROUPS, Waves(GROUPS, 1, 1))
        self.tail = Tail(self.admission, TailSettings(core_gpus=1, group_size=SIZE, change_s=change_s))
        for number in range(engines):
            self.tail.handle(facts.WorkerCapacity(f"e{number}", "tp1", rollout_slots=SLOTS))
        for number in range(hybrids):
            self.tail.handle(facts.RoleMemberKnown(f"e{number}", 1))
        self.publish(0)
        for wave in range(GROUPS):
            self.admission.wave_parked(0, wave)
        self.begin(0)

    def publish(self, version):
        self.tail.handle(facts.VersionPublished(version))
        self.admission.version_published(version)

    def begin(self, iteration):
        for group in range(GROUPS):
            for sample in range(SIZE):
                key = f"t-{iteration}-{group}-{sample}"
                self.tail.handle(facts.TrajectoryParked(key, iteration, Phase.ROLLOUT, 0, f"train-{iteration}-{group}"))
                self.tail.handle(facts.QuantumStarted(key, Phase.ROLLOUT, "e2"))

    def end(self, group, tokens=100):
        for sample in range(SIZE):
            key = f"t-0-{group}-{sample}"
            self.tail.handle(facts.QuantumFinished(key, Phase.ROLLOUT, tokens, "", "", 1.0))
            self.tail.handle(facts.TrajectoryEnded(key))
        self.tail.handle(COMMITTED)
        self.admission.group_committed(CommittedGroup(0, group, 0))

    def train(self, wave, seconds, hybrids=0):
        self.tail.handle(facts.WaveTrained(0, wave, 1, 0, seconds, hybrids))
        self.admission.wave_trained(0, wave)

    def turn(self, worker, role, took_s):
        self.tail.handle(facts.RoleChangeStarted(1, {worker: {"role": role, "tp": 1}}, "", None))
        if took_s is None:
            self.tail.handle(facts.RoleRestored(worker, 1, role, 1, {}, 1.0))
        else:
            stages_s = {"sleeping": took_s, "draining": 9.0}
            self.tail.handle(facts.RoleChanged(worker, 1, "", role, 1, 1, stages_s, took_s))


def test_it_counts_what_is_open_and_what_is_left_in_gpu_seconds():
    run = Run()
    assert run.tail.num_open == GROUPS * SIZE
    assert run.tail.step() is None, "nothing is known of the price of a gradient"
    run.end(0)
    run.end(1, tokens=300)
    assert run.tail.num_open == 4
    run.train(0, 3.0)  # 200 tokens
    assert run.tail.step() == OpenStep(pytest.approx(9.0), 1, False, True)
    run.train(1, 3.0, hybrids=1)  # 600 tokens, twice the GPUs: 8.4 of 760 GPU-seconds and tokens, the older wave fades
    run.end(2)
    assert run.tail.step() == OpenStep(pytest.approx(200 * (3.0 * 0.8 + 6.0) / (200 * 0.8 + 600)), 1, False, True)
    run.end(3)
    assert run.tail.step() is not None and run.tail.step().is_full
    run.train(2, 1.0)
    run.train(3, 1.0)
    assert run.tail.step() is None, "its weights are being published"


def test_the_thinnest_turns_once_and_returns_for_the_next_rollout():
    run = Run(hybrids=1)
    run.end(0)
    run.train(0, 5.0)
    assert run.tail.look() == (), "6 open trajectories fit on two engines of 4, and no gradient is left"
    run.end(1)
    (turn,) = run.tail.look()
    assert (turn.worker, turn.to) == ("e0", Turned.TRAINING)
    assert "4 open trajectories fit on 2 other GPUs" in turn.reason
    run.tail.handle(COMMITTED)
    assert run.tail.look() == (), "it was asked"
    run.turn("e0", "train", 0.5)
    assert run.tail.rule().to_training_s == 0.5
    run.tail.handle(facts.WorkerWithdrawn("e0"))
    run.end(2)
    run.end(3)
    for wave in (1, 2, 3):
        run.train(wave, 1.0)
    run.tail.look()
    run.publish(1)
    assert run.tail.look() == (), "nothing is open yet"
    run.begin(1)
    assert run.tail.look() == (), "eight fit on two engines of four"
    run.tail.handle(facts.WorkerWithdrawn("e1"))
    (back,) = run.tail.look()
    assert (back.worker, back.to) == ("e0", Turned.ROLLOUT)


def test_where_the_run_takes_its_steps_without_turning_no_engine_turns():
    turns = []
    for way in ("streaming", "turning"):
        run = Run(hybrids=1)
        run.admission.ways = WayChoice(WaySettings(("split", "streaming", "turning"), way, "planned", 1), 0, GROUPS)
        run.end(0)
        run.train(0, 5.0)
        run.end(1)
        turns.append([turn.to for turn in run.tail.look()])
    assert turns == [[], [Turned.TRAINING]]


def test_before_the_first_change_it_costs_some_loads_of_a_version_on_these_engines_and_never_more_than_was_set():
    run = Run(change_s=18.8)
    prices = run.tail.rule()
    assert prices.to_training_s + prices.to_rollout_s == pytest.approx(18.8)
    for load_s in (0.2, 0.3):
        run.tail.handle(facts.VersionServed(0, "e0", load_s))
    assert run.tail.rule().to_training_s == run.tail.rule().to_rollout_s == pytest.approx(ASSUMED_LOADS * 0.2)
    run = Run(change_s=0.0)
    run.tail.handle(facts.VersionServed(0, "e0", 0.2))
    assert run.tail.rule().to_training_s == 0.0


def test_whoever_was_refused_or_failed_rests_until_the_next_version():
    run = Run(hybrids=1)
    run.end(0)
    run.train(0, 5.0)
    run.end(1)
    assert [turn.worker for turn in run.tail.look()] == ["e0"]
    run.tail.handle(facts.TurnRefused("e0"))
    assert run.tail.look() == ()
    run.publish(1)
    assert run.tail.engines()[0].may_turn
    run.turn("e0", "train", None)  # asked for by somebody else
    assert [engine.name for engine in run.tail.engines()] == ["e1", "e2"], "it stays where it was put"
    assert run.tail.step() is not None and run.tail.step().core_gpus == 2


def test_one_engine_keeps_generating_though_nothing_is_open():
    run = Run(change_s=0.0, hybrids=2, engines=2)
    for group in range(GROUPS):
        run.end(group)
    run.train(0, 50.0)
    assert len(run.tail.look()) == 1


def test_engines_should_have_as_many_as_slow_each_by_half():
    run = Run()
    assert run.tail.trajectories_per_gpu() == SLOTS, "without a speed, its slots"
    fast = {"kv_tokens": 1000, "alone_s_per_token": 0.01, "beside_s_per_token": 0.001}
    run.tail.handle(facts.WorkerCapacity("e0", "tp2", rollout_slots=64, full_s_per_token=0.073, **fast))
    assert run.tail.trajectories_per_gpu() == pytest.approx((1 + 0.005 / 0.001) / 2)


@given(st.integers(0, 10**6))
def test_a_snapshot_changes_no_later_answer(seed):
    rng, run, wave, committed = random.Random(seed), Run(change_s=0.1), 0, list(range(GROUPS))
    for _ in range(20):
        move = rng.choice(["end", "train", "role", "left", "joined", "refused"])
        worker = rng.choice(["e0", "e1"])
        if move == "end" and committed:
            run.end(committed.pop(rng.randrange(len(committed))), rng.randrange(1, 500))
        elif move == "train" and wave < len(run.admission.waves.opened.get(0, [])):
            run.train(wave, rng.random() * 9, rng.randrange(3))
            wave += 1
        elif move == "role":
            run.turn(worker, rng.choice(["train", "rollout", "lent"]), rng.choice([None, 0.2]))
        elif move == "left":
            run.tail.handle(facts.WorkerWithdrawn(worker))
        elif move == "joined":
            run.tail.handle(facts.WorkerCapacity(worker, "tp1", rollout_slots=SLOTS))
        elif move == "refused":
            run.tail.handle(facts.TurnRefused(worker))
        again = Tail(run.admission)
        again.restore(json.loads(json.dumps(run.tail.snapshot())))
        assert again.snapshot() == run.tail.snapshot()
        assert again.look() == run.tail.look()
        assert [e for e in run.tail.engines() if e.doing in (Turned.ROLLOUT, Turned.TO_ROLLOUT)], "e2 never turns"


def engines(*residents, gpus=2):
    return [TurningEngine(f"e{i}", gpus, Turned.ROLLOUT, count) for i, count in enumerate(residents)]


def step(backlog_gpu_s=1e4, core_gpus=2, is_full=False, waits=True):
    return OpenStep(backlog_gpu_s, core_gpus, is_full, waits)


def test_the_thinnest_engines_turn_while_the_others_hold_what_is_open():
    turns = RULE.turns(engines(5, 1, 2, 6), 14, step())
    assert [(turn.worker, turn.to) for turn in turns] == [("e1", Turned.TRAINING), ("e2", Turned.TRAINING)]
    assert RULE.turns(engines(5, 1, 2, 6), 25, step()) == ()


def test_an_engine_turns_only_for_a_backlog_that_is_worth_it():
    assert [turn.worker for turn in RULE.turns(engines(0, 1, 0, 0), 1, step(backlog_gpu_s=50.0))] == ["e0"]
    assert RULE.turns(engines(1, 1), 2, step(backlog_gpu_s=39.0)) == ()
    assert RULE.turns(engines(1, 1), 2, None) == ()


def test_engines_return_when_more_is_open_than_the_others_should_have():
    turned = [TurningEngine("e0", 2, Turned.TRAINING, 0), TurningEngine("e1", 2, Turned.TRAINING, 0), *engines(8)]
    assert [turn.worker for turn in RULE.turns(turned, 9, step())] == ["e0"]
    assert [turn.to for turn in RULE.turns(turned, 30, None)] == [Turned.ROLLOUT] * 2
    assert RULE.turns(turned, 8, None) == ()


def test_all_train_at_the_end_if_that_is_over_sooner_changes_included():
    rolling = engines(0, 0)
    assert len(RULE.turns(rolling, 0, step(100.0, is_full=True))) == 2  # 50 s alone, 8 + 84 / 6 + 10 s together
    assert RULE.turns(rolling, 0, step(40.0, is_full=True)) == ()  # 20 s alone, 8 + 24 / 6 + 10 s together
    assert len(RULE.turns(rolling, 0, step(40.0, is_full=True, waits=False))) == 2
    assert RULE.turns(rolling, 0, step(1e4)) == ()  # more groups come
    assert len(RULE.turns(rolling, 0, step(1.0, core_gpus=0, is_full=True))) == 2  # nobody else trains


@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 4, 8]), DOING, st.integers(0, 20)), min_size=1, max_size=12),
    st.integers(0, 300), st.floats(0, 1e5), st.integers(0, 16), st.booleans(), st.booleans(),
)  # fmt: skip
def test_something_that_is_open_is_never_left_without_an_engine_and_nothing_turns_back_at_once(
    kinds, num_open, backlog, core, is_full, waits
):
    states = [TurningEngine(f"e{i}", *kind) for i, kind in enumerate(kinds)]
    turns = {turn.worker: turn.to for turn in RULE.turns(states, num_open, step(backlog, core, is_full, waits))}
    between = {Turned.TRAINING: Turned.TO_TRAINING, Turned.ROLLOUT: Turned.TO_ROLLOUT}
    after = [state._replace(doing=between[turns[state.name]]) if state.name in turns else state for state in states]
    for state in states:
        if state.name in turns:
            assert state.doing is (Turned.ROLLOUT if turns[state.name] is Turned.TRAINING else Turned.TRAINING)
    generates = (Turned.ROLLOUT, Turned.TO_ROLLOUT)
    if num_open and any(state.doing in generates for state in states):
        assert any(state.doing in generates for state in after)
    settled = [state._replace(doing=Turned.TRAINING) if state.doing is Turned.TO_TRAINING else state for state in after]
    if num_open and Turned.TRAINING in turns.values():
        assert RULE.turns(settled, num_open, None) == ()


def test_a_rule_that_means_nothing_is_refused():
    for field, value in (("trajectories_per_gpu", 0.0), ("min_gain_s", -1.0)):
        with pytest.raises(ConfigError, match=field):
            TurningRule(**{field: value})
