"""Batches of what is complete first: every group once, lag <= eta, never a dead end, under any schedule and after any kill."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from itertools import chain, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.policy import Admission, CommittedGroup, OpenBatch, OpenGate, OpenWave, Waves
from libra.policy.first_come import first_come

Group = tuple[int, int]


def meets(batch: int, places: int, groups: int, left: list[int]) -> bool:
    """Whether groups with these deadlines fit into ``places`` of this batch and all later ones, by trying the nearest first."""
    for deadline in sorted(left):
        if not places:
            batch, places = batch + 1, groups
        if deadline < batch:
            return False
        places -= 1
    return True


@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.lists(st.integers(0, 3), max_size=7),
    st.lists(st.integers(0, 3), max_size=4),
)
def test_what_is_taken_leaves_the_others_their_places_and_no_choice_takes_more(
    eta: int, groups: int, complete: list[int], in_flight: list[int]
) -> None:
    """Against every choice, where the deadlines can be met at all."""
    batch, places = 5, groups
    deadlines = {(4, number): batch + min(later, eta) for number, later in enumerate(complete)}
    flying = [batch + min(later, eta) for later in in_flight]
    if not meets(batch, places, groups, [*deadlines.values(), *flying]):
        return
    found = first_come(batch, places, groups, eta, deadlines, flying)
    left = [deadline for group, deadline in deadlines.items() if group not in found]
    assert len(set(found)) == len(found) <= places
    assert meets(batch, places - len(found), groups, [*left, *flying])
    assert [deadlines[group] for group in found] == sorted(deadlines.values())[: len(found)]
    choices = chain.from_iterable(combinations(deadlines, number) for number in range(places + 1))
    fitting = (
        choice
        for choice in choices
        if meets(batch, places - len(choice), groups, [*(d for g, d in deadlines.items() if g not in choice), *flying])
    )
    assert len(found) == max(map(len, fitting))


class Run:
    """A streamed run with a bound above 0 under a random schedule, what its trainer was given, and what a kill leaves of it."""

    def __init__(self, eta: int, groups: int, waves: tuple[int, int, int]) -> None:
        self.eta, self.groups, self._waves = eta, groups, waves
        self.admission = Admission(eta, groups, Waves(*waves), first_come=True)
        self.version = -1
        self.ended = 0  # steps that the trainer has taken; the version after the last may be on its way
        self.waiting: list[Group] = []
        self.begun: dict[Group, int] = {}  # with the version of the oldest token
        self.running: list[Group] = []
        self.committed: list[Group] = []
        self.waves: dict[int, list[tuple[Group, ...]]] = defaultdict(list)
        self.batches: dict[int, tuple[Group, ...]] = {}
        self.untrained: list[tuple[int, int]] = []
        self.unreported: list[Group] = []
        self.submitted = 0

    def told(self, commands: tuple[object, ...]) -> None:
        for command in commands:
            match command:
                case OpenGate(iteration=iteration):
                    known = {*self.begun, *self.waiting}
                    self.waiting += [(iteration, g) for g in range(self.groups) if (iteration, g) not in known]
                case OpenWave(batch=batch, wave=wave, members=members):
                    assert batch == self.ended <= self.version + 1 and all(group in self.committed for group in members)
                    if wave < len(self.waves[batch]):
                        assert self.waves[batch][wave] == members, "a committed wave keeps its groups"
                        continue
                    assert wave == len(self.waves[batch])
                    assert all(0 <= batch - self.begun[group] <= self.eta for group in members)
                    self.waves[batch].append(members)
                    if members:
                        assert not self.untrained, "the trainer is busy"
                        self.untrained.append((batch, wave))
                case OpenBatch(batch=batch, members=members):
                    assert members == tuple(group for wave in self.waves[batch] for group in wave)
                    self.batches[batch] = members

    def submit(self) -> None:
        k, self.submitted = self.submitted, self.submitted + 1
        for wave in range(self._waves[0]):
            self.told(self.admission.wave_parked(k, wave))
        self.told(self.admission.gate_parked(k))

    def commit(self, group: Group) -> None:
        self.running.remove(group)
        self.committed.append(group)
        self.report(group)

    def publish(self) -> None:
        self.version += 1
        self.told(self.admission.version_published(self.version))

    def moves(self, steps: int) -> list[str]:
        """What may happen next."""
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

    def end(self) -> None:
        self.ended += 1
        self.told(self.admission.step_ended(self.ended - 1))

    def killed(self, rng: random.Random) -> None:
        """Everything but the disk is gone: committed batches, waves and groups, and which groups have begun."""
        consumed = {group for members in self.batches.values() for group in members}
        opened = {k: [w for w in waves if w] for k, waves in self.waves.items() if k not in self.batches}
        taken = Waves(*self._waves)
        taken.take_over({k: waves for k, waves in opened.items() if waves})
        self.admission = Admission.resumed(
            self.eta, self.groups, version=-1, opened=self.batches, committed=(), waves=taken, first_come=True,
            started={group: oldest for group, oldest in self.begun.items() if group not in consumed},
        )  # fmt: skip
        again, self.running = self.running, []
        self.waiting = again + self.waiting
        self.untrained, last, self.submitted = [], self.submitted, len(self.batches)
        self.waves = defaultdict(list, {k: [w for w in waves if w] for k, waves in self.waves.items()})
        self.version = self.ended = len(self.batches)  # their steps are repeated, and what is missing is published
        self.told(self.admission.version_published(self.version))
        self.untrained = [(k, j) for k, waves in self.waves.items() if k not in self.batches for j in range(len(waves))]
        while self.submitted < last:
            self.submit()
        self.unreported = [group for group in self.committed if group not in consumed]
        rng.shuffle(self.unreported)

    def report(self, group: Group) -> None:
        """The record of a group is written, or was written before the kill."""
        self.told(self.admission.group_committed(CommittedGroup(*group, self.begun[group])))


@given(
    st.integers(1, 3),
    st.integers(1, 5),
    st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(0, 3)),
    st.integers(0, 10**6),
)
def test_every_group_is_in_one_wave_in_time_whatever_is_killed(
    eta: int, groups: int, waves: tuple[int, int, int], seed: int
) -> None:
    rng, steps, kills = random.Random(seed), 6, 3
    run = Run(eta, groups, waves)
    run.publish()
    while len(run.batches) < steps:
        k = run.ended
        moves = run.moves(steps)
        assert moves, f"dead end at version {k}"
        if kills and rng.random() < 0.05:
            kills -= 1
            run.killed(rng)
            continue
        match rng.choice(moves):
            case "submit":
                run.submit()
            case "start":
                group = run.waiting.pop(rng.randrange(len(run.waiting)))
                run.begun.setdefault(group, run.version)
                run.running.append(group)
                run.admission.generation_started(*group, run.version)
            case "commit":
                run.commit(rng.choice(run.running))
            case "report":
                run.report(run.unreported.pop())
            case "train":
                run.told(run.admission.wave_trained(*run.untrained.pop(0)))
            case "close":
                run.told(run.admission.batch_parked(k))
                assert len(run.batches[k]) == groups
            case "end":
                run.end()
            case "publish":
                run.publish()
        snapshot = json.loads(json.dumps(run.admission.snapshot()))
        run.admission = Admission(9, 9)
        run.admission.restore(snapshot)
        assert json.loads(json.dumps(run.admission.snapshot())) == snapshot
    taken = Counter(group for members in run.batches.values() for group in members)
    assert set(taken.values()) == {1} and len(taken) == steps * groups


def test_a_wave_takes_what_is_complete_first_and_keeps_a_place_for_one_at_its_deadline() -> None:
    admission = Admission(1, 2, Waves(2), first_come=True)
    admission.version_published(0)
    for k in (0, 1):
        admission.gate_parked(k)
        for wave in range(2):
            admission.wave_parked(k, wave)
        for group in range(2):
            admission.generation_started(k, group, 0)
    (opened,) = admission.group_committed(CommittedGroup(1, 0, 0))
    assert isinstance(opened, OpenWave) and (opened.batch, opened.wave, opened.members) == (0, 0, ((1, 0),))
    assert opened.reason.endswith("; 1 of 1 are of other iterations")
    admission.wave_trained(0, 0)
    (opened,) = admission.group_committed(CommittedGroup(1, 1, 0))
    assert isinstance(opened, OpenWave) and opened.members == ((1, 1),)
    assert isinstance(admission.batch_parked(0)[0], OpenBatch)
    assert admission.version_published(1) == ()
    admission.generation_started(2, 0, 1)
    assert (
        admission.group_committed(CommittedGroup(2, 0, 1)) == ()
    )  # both places are for iteration 0: its deadline is now
    (opened,) = admission.group_committed(CommittedGroup(0, 1, 0))
    assert isinstance(opened, OpenWave) and opened.members == ((0, 1),) and "iterations" in opened.reason


@pytest.mark.parametrize("first", [False, True])
def test_own_batches_are_as_before(first: bool) -> None:
    admission = Admission(1, 1, Waves(1), first_come=first)
    admission.version_published(0)
    admission.wave_parked(0, 0)
    for k in (0, 1):
        admission.generation_started(k, 0, 0)
    opened = admission.group_committed(CommittedGroup(1, 0, 0))
    assert bool(opened) is first
