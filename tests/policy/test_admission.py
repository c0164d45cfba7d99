"""Gates, batches and waves under any schedule and after any kill: lag <= eta, every group once, never a dead end."""

import json
import random
from collections import Counter, defaultdict
from itertools import chain, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.facts import OpenBatch, OpenGate, OpenWave
from libra.policy import Admission, CommittedGroup, StalenessPolicy, Verdict, Waves
from libra.policy.admission import KEPT_BATCHES
from libra.policy.waves import first_come

WAVES = st.none() | st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(0, 3))
NUMBERS = st.integers(0, 5)
CALLS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["gate_parked", "batch_parked", "version_published", "step_ended"]), NUMBERS),
        st.tuples(st.just("generation_started"), NUMBERS, st.integers(0, 2), NUMBERS),
        st.tuples(st.just("group_committed"), st.builds(CommittedGroup, NUMBERS, st.integers(0, 2), st.integers(-1, 5))),
    ),
    max_size=40,
)  # fmt: skip
POLICIES = st.builds(
    StalenessPolicy, st.integers(0, 2), st.sampled_from([Verdict.WAIT, Verdict.MASK]), st.sampled_from([None, 3]),
    st.sampled_from([None, 1]),
)  # fmt: skip


class Run:
    """A run under a random schedule, what its trainer was given, and what a kill leaves of it.

    ``waves`` are the numbers of a streamed run, None for whole batches; ``beside``: versions are published beside steps.
    """

    def __init__(self, eta, groups, waves, *, first_come=False, beside=True):
        self.eta, self.groups, self.numbers, self.first_come, self.beside = eta, groups, waves, first_come, beside
        self.admission = Admission(eta, groups, self.fresh_waves(), first_come=first_come)
        self.version = -1
        self.ended = 0  # steps that the trainer has taken; the version after the last may be on its way
        self.submitted = 0
        self.waiting = []
        self.begun = {}  # with the version of the oldest token
        self.running = []
        self.committed = []
        self.unreported = []
        self.waves = defaultdict(list)
        self.batches = {}
        self.untrained = []
        self.again = set()

    def fresh_waves(self):
        return None if self.numbers is None else Waves(*self.numbers)

    def given(self, batch, members):
        assert batch == self.ended <= self.version + self.beside, "step batch - 1 has ended"
        assert all(group in self.committed and 0 <= batch - self.begun[group] <= self.eta for group in members)
        if self.numbers and not self.first_come:
            assert all(iteration == batch for iteration, _ in members)

    def told(self, commands):
        for command in commands:
            match command:
                case OpenGate(iteration=iteration):
                    assert iteration - self.eta <= self.version
                    known = {*self.begun, *self.waiting}
                    self.waiting += [(iteration, g) for g in range(self.groups) if (iteration, g) not in known]
                case OpenWave(batch=batch, wave=wave, members=members):
                    if wave < len(self.waves[batch]):
                        assert self.waves[batch][wave] == members, "a committed wave keeps its groups"
                        self.again.add((batch, wave))
                        continue
                    assert wave == len(self.waves[batch])
                    self.given(batch, members)
                    self.waves[batch].append(members)
                    if members:
                        assert not self.untrained, "the trainer is busy"
                        self.untrained.append((batch, wave))
                case OpenBatch(batch=batch, members=members):
                    if self.numbers:
                        assert members == tuple(group for wave in self.waves[batch] for group in wave)
                    else:
                        self.given(batch, members)
                    assert len(members) == self.groups
                    self.batches[batch] = members

    def submit(self):
        k, self.submitted = self.submitted, self.submitted + 1
        self.told(self.admission.gate_parked(k))
        for wave in range(self.numbers[0] if self.numbers else 0):
            self.told(self.admission.wave_parked(k, wave))
        if not self.numbers:
            self.told(self.admission.batch_parked(k))

    def publish(self):
        self.version += 1
        self.told(self.admission.version_published(self.version))

    def report(self, group):
        self.told(self.admission.group_committed(CommittedGroup(*group, self.begun[group])))

    def moves(self, steps):
        k = self.ended
        moves = ["start"] * bool(self.waiting) + ["commit"] * bool(self.running) + ["train"] * bool(self.untrained)
        moves += ["report"] * bool(self.unreported)
        if self.submitted < steps and self.submitted <= self.version + self.eta + 1:
            moves.append("submit")
        if not self.untrained and sum(map(len, self.waves[k])) == self.groups and k not in self.batches:
            moves.append("close")
        if self.version < k:
            moves.append("publish")
        elif k in self.batches:
            moves.append("end")
        return moves

    def move(self, what, rng):
        match what:
            case "submit":
                self.submit()
            case "start":
                group = self.waiting.pop(rng.randrange(len(self.waiting)))
                self.begun.setdefault(group, self.version)
                self.running.append(group)
                self.admission.generation_started(*group, self.version)
            case "commit":
                group = self.running.pop(rng.randrange(len(self.running)))
                self.committed.append(group)
                self.report(group)
            case "report":
                self.report(self.unreported.pop())
            case "train":
                self.told(self.admission.wave_trained(*self.untrained.pop(0)))
            case "close":
                self.told(self.admission.batch_parked(self.ended))
                assert self.ended in self.batches
            case "end":
                self.ended += 1
                if self.beside:
                    self.told(self.admission.step_ended(self.ended - 1))
            case "publish":
                self.publish()

    def killed(self, rng):
        """Everything but the disk is gone: committed batches, waves and groups, and which groups have begun."""
        consumed = {group for members in self.batches.values() for group in members}
        opened = {k: [w for w in waves if w] for k, waves in self.waves.items() if k not in self.batches}
        taken = self.fresh_waves()
        if taken is not None:
            taken.take_over({k: waves for k, waves in opened.items() if waves})
        left = [group for group in self.committed if group not in consumed]
        rng.shuffle(left)
        at_once = 0 if self.numbers else rng.randint(0, len(left))  # the others are reported again
        self.admission = Admission.resumed(
            self.eta, self.groups, version=-1, opened=self.batches, waves=taken, first_come=self.first_come,
            committed=[CommittedGroup(*group, self.begun[group]) for group in left[:at_once]],
            started={group: oldest for group, oldest in self.begun.items() if group not in {*consumed, *left[:at_once]}},
        )  # fmt: skip
        self.waiting, self.running = self.running + self.waiting, []
        last, self.submitted = self.submitted, len(self.batches)
        self.waves = defaultdict(list, {k: [w for w in waves if w] for k, waves in self.waves.items()})
        self.version = self.ended = len(self.batches)  # their steps are repeated, and what is missing is published
        self.untrained = [(k, j) for k in opened for j in range(len(self.waves[k]))]
        self.unreported, self.again = left[at_once:], set()
        self.told(self.admission.version_published(self.version))
        while self.submitted < last:
            self.submit()
        assert self.again >= set(self.untrained), "waves that were open are open again"

    def play(self, steps, kills, rng):
        self.publish()
        while len(self.batches) < steps:
            moves = self.moves(steps)
            assert moves, f"dead end at version {self.version}"
            if kills and rng.random() < 0.05:
                kills -= 1
                self.killed(rng)
                continue
            self.move(rng.choice(moves), rng)
            if rng.random() < 0.7:
                continue
            snapshot = json.loads(json.dumps(self.admission.snapshot()))
            self.admission = Admission(9, 9)
            self.admission.restore(snapshot)
            assert json.loads(json.dumps(self.admission.snapshot())) == snapshot


@given(st.integers(0, 3), st.integers(1, 5), WAVES, st.booleans(), st.booleans(), st.integers(0, 10**6))
def test_every_group_is_consumed_once_and_in_time_whatever_is_killed(eta, groups, waves, first_come, beside, seed):
    for number in range(4):
        run = Run(eta, groups, waves, first_come=bool(waves and eta and first_come), beside=beside)
        run.play(6, 3, random.Random(seed + number))
        taken = Counter(group for members in run.batches.values() for group in members)
        assert set(taken.values()) == {1} and len(taken) == 6 * groups
        assert all(each == sorted(each, key=lambda wave: not wave) for each in run.waves.values()), "the rest is last"


@given(policy=POLICIES, groups=st.integers(1, 3), before=CALLS, after=CALLS)
def test_it_goes_on_from_its_snapshot(policy, groups, before, after):
    original, restored = Admission(policy, groups), Admission(9, 9)
    for name, *arguments in before:
        getattr(original, name)(*arguments)
    restored.restore(json.loads(json.dumps(original.snapshot(), allow_nan=False)))
    for name, *arguments in after:
        assert getattr(restored, name)(*arguments) == getattr(original, name)(*arguments)
    assert restored.snapshot() == original.snapshot() and restored.opened == original.opened
    assert restored.staleness == policy
    with pytest.raises(KeyError):
        restored.restore({"eta": 0, "groups_per_batch": 1})


def test_gates_admit_as_many_groups_as_areals_capacity_rule():
    """arXiv:2505.24298: at version v, (eta + v + 1) * B groups may have begun."""
    for eta in range(4):
        admission = Admission(eta, 3)
        commands = [command for iteration in range(20) for command in admission.gate_parked(iteration)]
        for version in range(6):
            commands += admission.version_published(version)
            assert sum(isinstance(command, OpenGate) for command in commands) == eta + version + 1


def test_a_group_told_twice_is_counted_once_and_a_batch_asked_twice_gets_the_same_members():
    admission = Admission(0, 2)
    admission.version_published(0)
    admission.batch_parked(0)
    admission.group_committed(CommittedGroup(0, 0, 0))
    assert admission.group_committed(CommittedGroup(0, 0, 0)) == ()
    (opened,) = admission.group_committed(CommittedGroup(0, 1, -1))  # without any token
    assert admission.group_committed(CommittedGroup(0, 1, 0)) == ()
    (again,) = admission.batch_parked(0)
    assert isinstance(again, OpenBatch) and again.members == opened.members


def train(admission, iterations):
    for k in iterations:
        admission.version_published(k)
        admission.gate_parked(k)
        admission.batch_parked(k)
        for g in range(3):
            admission.generation_started(k, g, k)
            admission.group_committed(CommittedGroup(k, g, k))


def test_its_size_does_not_grow_with_the_run_and_what_it_forgot_is_still_consumed():
    short, long = Admission(1, 3), Admission(1, 3)
    train(short, range(KEPT_BATCHES + 50))
    train(long, range(KEPT_BATCHES + 2000))
    assert len(long.opened) == len(short.opened) == KEPT_BATCHES + 1
    assert len(json.dumps(long.snapshot())) < 1.3 * len(json.dumps(short.snapshot()))
    opened = {batch: tuple((batch, group) for group in range(3)) for batch in range(500)}
    for admission in (long, Admission.resumed(1, 3, version=-1, opened=opened, committed=(), started={})):
        before = admission.snapshot()
        assert admission.batch_parked(7) == (OpenBatch(7, (), "opened long before; its members are in its file"),)
        admission.generation_started(7, 0, 7)
        assert admission.group_committed(CommittedGroup(7, 0, 7)) == ()
        assert admission.snapshot() == before


def test_with_one_batch_in_flight_the_next_begins_when_it_is_taken():
    admission = Admission(StalenessPolicy(2, in_flight=1), 1)
    commands = [*admission.version_published(0)]
    for iteration in range(3):
        commands += [*admission.gate_parked(iteration), *admission.batch_parked(iteration)]
    assert [command.iteration for command in commands if isinstance(command, OpenGate)] == [0]
    batch, gate = admission.group_committed(CommittedGroup(0, 0, 0))
    assert isinstance(batch, OpenBatch) and isinstance(gate, OpenGate) and gate.iteration == 1


@pytest.mark.parametrize("over_age", [Verdict.WAIT, Verdict.DROP])
def test_a_batch_waits_for_a_late_group_only_where_the_policy_does_and_says_who_came_too_late(over_age):
    admission = Admission(StalenessPolicy(1, over_age), 1)
    admission.generation_started(0, 0, 0)
    opened = []
    for batch in range(2):  # those of iterations 1 and 2 overtake the group of iteration 0
        admission.version_published(batch)
        opened += [*admission.batch_parked(batch), *admission.group_committed(CommittedGroup(batch + 1, 0, batch))]
    assert len(opened) == (1 if over_age is Verdict.WAIT else 2)
    admission.version_published(2)
    admission.batch_parked(2)
    late = admission.group_committed(CommittedGroup(0, 0, 0))[0]
    assert isinstance(late, OpenBatch) and late.members == ((0, 0),)
    assert ("1 over age: drop" in late.reason) == (over_age is Verdict.DROP)


def test_a_wave_takes_all_that_is_complete_and_the_last_is_small():
    """Eight groups in four waves at most: two of them, then what came meanwhile, then one by one."""
    waves, wave = Waves(4), 0
    for number in range(4):
        assert waves.parked(0, number) is None
    sizes = []
    for complete in ((0,), (0, 1), (2, 3, 4, 5), (6,), (7,)):
        opened = waves.next(0, 8, [(0, g) for g in complete])
        sizes.append(0 if opened is None else len(opened.members))
        if opened is not None:
            assert waves.next(0, 8, [(0, 7)]) is None, "the trainer is busy"
            waves.trained(0, wave)
            wave += 1
    assert sizes == [0, 2, 4, 1, 1]


def test_where_engines_turn_a_wave_takes_only_some_of_what_is_complete():
    ready = [(0, g) for g in range(16)]
    for most, taken in ((8, 3), (2, 8)):  # two waves must be enough
        waves = Waves(most, 1, 3)
        waves.parked(0, 0)
        opened = waves.next(0, 16, ready)
        assert isinstance(opened, OpenWave) and opened.members == tuple(ready[:taken])


def meets(batch, places, groups, left):
    """Whether groups with these deadlines fit into ``places`` of this batch and all later ones, by trying the nearest first."""
    for deadline in sorted(left):
        if not places:
            batch, places = batch + 1, groups
        if deadline < batch:
            return False
        places -= 1
    return True


@given(
    st.integers(1, 3), st.integers(1, 4), st.lists(st.integers(0, 3), max_size=7), st.lists(st.integers(0, 3), max_size=4)
)  # fmt: skip
def test_what_is_taken_first_come_leaves_others_their_places_and_no_choice_takes_more(eta, groups, complete, in_flight):
    """Against every choice, where the deadlines can be met at all."""
    batch, places = 5, groups
    deadlines = {(4, number): batch + min(later, eta) for number, later in enumerate(complete)}
    flying = [batch + min(later, eta) for later in in_flight]
    if not meets(batch, places, groups, [*deadlines.values(), *flying]):
        return
    found = first_come(batch, places, groups, eta, deadlines, flying)

    def fits(choice):
        left = [deadline for group, deadline in deadlines.items() if group not in choice]
        return meets(batch, places - len(choice), groups, [*left, *flying])

    assert len(set(found)) == len(found) <= places and fits(tuple(found))
    assert [deadlines[group] for group in found] == sorted(deadlines.values())[: len(found)]
    choices = chain.from_iterable(combinations(deadlines, number) for number in range(places + 1))
    assert len(found) == max(len(choice) for choice in choices if fits(choice))
