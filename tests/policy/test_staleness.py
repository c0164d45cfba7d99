"""`judge`, and every rule of section ``staleness``, of late rewards and of batches under random schedules in virtual time.

A run here is the pure objects of a live one (`Admission`, `OneVersion`, `judge`, `settle`) and the rows of a batch; engines,
trajectories, deliveries and steps end in any order. What is compared is counted by the test itself.
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra import facts
from libra.config import config_from_dict
from libra.graph.member_rows import member_rows
from libra.policy import Admission, CommittedGroup, OneVersion, StalenessPolicy, Verdict, Waves, judge
from libra.policy.late_rewards import WaitingGroup, settle
from libra.types import EndReason, Phase, Prompt, Trajectory, TrajectoryId
from libra.worker.training.batch_rows import without_stale

IN_A_ROW = 10
"""Schedules of each set of rules: 250 in all, 2,000 in CI."""
ENGINES, SAMPLES, MOST_WAVES, LATE_VERSIONS = ("a", "b"), 2, 2, 2
TRAINER = config_from_dict({}).trainer

Group = tuple[int, int]
Place = tuple[int, int, int]


OVER_AGE = (Verdict.WAIT, Verdict.DROP, Verdict.MASK, Verdict.CORRECT)


@given(st.builds(StalenessPolicy, st.integers(0, 4), st.sampled_from(OVER_AGE)), st.integers(0, 20), st.integers(0, 20))
def test_a_verdict_is_the_policys_beyond_the_bound_and_acceptance_up_to_it(policy, version, frontier):
    assert judge(version, frontier, policy) is (Verdict.ACCEPT if frontier - version <= policy.eta else policy.over_age)


@pytest.mark.parametrize("wrong", [{"eta": -1}, {"window": 1}, {"in_flight": 0}, {"over_age": Verdict.ACCEPT}])
def test_a_policy_that_could_not_work_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        StalenessPolicy(**{"eta": 1} | wrong)


@dataclass(frozen=True)
class Rules:
    """What a configuration says.

    ``engines``: many versions for a trajectory, or one (emptied, rounded); ``batches``: whole, own or first_come; ``late``: off,
    correct, wait or drop.
    """

    policy: StalenessPolicy
    engines: str
    batches: str
    late: str
    groups: int
    iterations: int


@st.composite
def rules(draw):
    eta, batches = draw(st.integers(0, 3)), draw(st.sampled_from(["whole", "whole", "own", "first_come"]))
    whole = batches == "whole"
    over_age = draw(st.sampled_from(OVER_AGE)) if eta and whole else Verdict.WAIT
    window = draw(st.none() | st.integers(2, eta + 2)) if eta and whole else None
    in_flight = draw(st.none() | st.integers(1, eta + 1)) if eta else None
    late = draw(st.sampled_from(["off", "correct", "wait", "drop"])) if whole else "off"
    policy = StalenessPolicy(eta, over_age, window, in_flight)
    return Rules(
        policy, draw(st.sampled_from(["many", "many", "emptied", "rounded"])) if eta else "many", batches, late,
        draw(st.integers(1, 3)), draw(st.integers(1, 5)),
    )  # fmt: skip


@dataclass
class Run:
    """One training under a random schedule, and what the rules are compared with."""

    rules: Rules
    seed: int
    version: int = -1
    parked: dict[Place, int] = field(default_factory=dict)  # quanta that are left
    generating: dict[Place, str] = field(default_factory=dict)
    tokens: dict[Place, list[int]] = field(default_factory=dict)  # the version of each
    graded: list[Group] = field(default_factory=list)  # all samples have ended, rewards may be to come
    missing: set[Place] = field(default_factory=set)
    delivered: set[Place] = field(default_factory=set)
    counted: Counter[Place] = field(default_factory=Counter)
    dropped: Counter[Place] = field(default_factory=Counter)
    provisional: set[Place] = field(default_factory=set)
    waiting: tuple[WaitingGroup, ...] = ()
    waves: dict[int, list[Group]] = field(default_factory=dict)
    taken: dict[int, tuple[Group, ...]] = field(default_factory=dict)
    training: list[tuple[int, int]] = field(default_factory=list)  # batch, and its wave or -1
    trained: list[int] = field(default_factory=list)  # the step whose weights are not published yet
    lags: list[int] = field(default_factory=list)
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    vacated: int = 0
    spread: int = 0  # of versions alive at once

    def __post_init__(self):
        rules = self.rules
        self.rng, self.streamed = random.Random(self.seed), rules.batches != "whole"
        waves = Waves(MOST_WAVES) if self.streamed else None
        self.admission = Admission(rules.policy, rules.groups, waves, first_come=rules.batches == "first_come")
        self.one = None if rules.engines == "many" else OneVersion(rounded=rules.engines == "rounded")
        self.serves = dict.fromkeys(ENGINES, -1)

    def play(self):
        submitted, rng = 0, self.rng
        lazy = rng.choice((0.2, 1.0, 8.0))  # how much rarer than its start a quantum's end is
        for engine in ENGINES if self.one else ():
            self.obeyed(self.one.handle(facts.WorkerCapacity(engine, rollout_slots=4)))
        self.published()
        while len(self.taken) < self.rules.iterations or self.training or self.trained:
            starts = [place for place in self.parked if place not in self.generating and self.may(place)]
            moves = {
                "start": len(starts), "end": len(self.generating) / lazy,
                "train": len(self.training) * (not self.trained or not self.training or self.training[0][1] >= 0),
                "publish": len(self.trained) / lazy, "deliver": len(self.missing) / 4, "give up": len(self.graded) / 8,
                "submit": submitted < self.rules.iterations and submitted <= self.version + self.rules.policy.eta + 1,
            }  # fmt: skip
            assert any(moves.values()), f"dead end at version {self.version} with {sorted(self.taken)} taken"
            match rng.choices(list(moves), [float(weight) for weight in moves.values()])[0]:
                case "submit":
                    self.obeyed(self.admission.gate_parked(submitted))
                    for wave in range(MOST_WAVES if self.streamed else 0):
                        self.obeyed(self.admission.wave_parked(submitted, wave))
                    self.obeyed(self.admission.batch_parked(submitted))
                    submitted += 1
                case "start":
                    self.start(rng.choice(starts))
                case "end":
                    self.end(rng.choice(list(self.generating)))
                case "train":
                    batch, wave = self.training.pop(0)
                    if wave < 0:
                        self.trained.append(batch)
                        self.obeyed(self.admission.step_ended(batch))
                    else:
                        self.obeyed(self.admission.wave_trained(batch, wave))
                case "publish":
                    self.trained.pop()
                    self.published()
                case "deliver":
                    place = rng.choice(sorted(self.missing))
                    self.missing.discard(place)
                    self.delivered.add(place)
                    if place[:2] in self.graded and not self.owed(place[:2]):
                        self.commit(place[:2])
                case "give up":  # the time for which a batch waits is over
                    self.commit(rng.choice(self.graded))

    def may(self, place):
        return any(self.one is None or self.one.may(str(place), engine) for engine in ENGINES)

    def start(self, place):
        able = [engine for engine in ENGINES if self.one is None or self.one.may(str(place), engine)]
        engine = self.rng.choice(able)
        if self.one is None:
            self.serves[engine] = self.version  # pulled before each generation
        else:
            began = self.tokens.get(place)
            assert self.serves[engine] == (began[0] if began else self.version), "one version, the newest to begin with"
            self.obeyed(self.one.handle(facts.QuantumStarted(str(place), Phase.ROLLOUT, engine)))
        self.parked[place] -= 1
        self.generating[place] = engine
        self.tokens.setdefault(place, []).append(self.serves[engine])
        self.admission.generation_started(place[0], place[1], self.serves[engine])

    def end(self, place):
        del self.generating[place]
        if self.parked[place]:
            self.parked_again(place, 1)
            return
        del self.parked[place]
        if self.one is not None:
            self.obeyed(self.one.handle(facts.TrajectoryEnded(str(place))))
        if self.rules.late != "off" and self.rng.random() < 0.4:
            self.missing.add(place)
        group = place[:2]
        if any(each[:2] == group for each in self.parked) or any(each[:2] == group for each in self.generating):
            return
        if len([each for each in self.tokens if each[:2] == group]) == SAMPLES:
            if self.rules.late == "wait" and self.owed(group):
                self.graded.append(group)
            else:
                self.commit(group)

    def parked_again(self, place, quanta):
        if self.one is not None:
            self.obeyed(self.one.handle(facts.TrajectoryParked(str(place), place[0], Phase.ROLLOUT, quanta)))

    def owed(self, group):
        return {place for place in self.missing if place[:2] == group}

    def commit(self, group):
        if group in self.graded:
            self.graded.remove(group)
        oldest = min(min(self.tokens[(*group, sample)]) for sample in range(SAMPLES))
        self.obeyed(self.admission.group_committed(CommittedGroup(*group, oldest)))

    def published(self):
        self.version += 1
        policy = self.rules.policy
        open_tokens = [version for place in {*self.parked, *self.generating} for version in self.tokens.get(place, ())]
        spread = self.version - min(open_tokens, default=self.version)
        assert spread < (policy.window or 10**9)
        self.spread = max(self.spread, spread)
        if self.one is not None:
            self.obeyed(self.one.handle(facts.VersionPublished(self.version)))
        self.obeyed(self.admission.version_published(self.version))

    def obeyed(self, commands):
        rules, policy = self.rules, self.rules.policy
        for command in commands:
            if isinstance(command, facts.OpenGate):
                assert command.iteration - policy.eta <= self.version
                assert command.iteration < len(self.taken) + (policy.in_flight or policy.eta + 1)
                for group in range(rules.groups):
                    for sample in range(SAMPLES):
                        place = command.iteration, group, sample
                        self.parked[place] = self.rng.randint(1, 3)
                        self.parked_again(place, 0)
            elif isinstance(command, facts.OpenWave):
                assert command.batch == self.version + len(self.trained)
                if rules.batches == "own":
                    assert all(iteration == command.batch for iteration, _ in command.members)
                self.waves.setdefault(command.batch, []).extend(command.members)
                self.training.append((command.batch, command.wave))
            elif isinstance(command, facts.OpenBatch):
                assert command.batch == len(self.taken) == self.version + len(self.trained)
                assert not self.streamed or list(command.members) == self.waves[command.batch]
                self.take(command.batch, command.members)
            elif isinstance(command, facts.Vacate):
                assert rules.engines == "rounded" and not {*command.keys} & {str(place) for place in self.generating}
                self.vacated += len(command.keys)
            elif self.one is not None:  # LoadVersion
                at = [place for place, engine in self.generating.items() if engine == command.worker]
                assert not at and command.version == self.version
                self.serves[command.worker] = command.version

    def take(self, batch, members):
        assert len(members) == self.rules.groups, "whole groups, as many as a batch has"
        self.taken[batch] = members
        self.training.append((batch, -1))
        groups = [[self.made((*group, sample)) for sample in range(SAMPLES)] for group in members]
        policy = self.rules.policy
        rows = member_rows(TRAINER, groups, [Path()] * len(groups), batch, policy)
        denominator = expected = 0
        for group, row in zip(groups, rows, strict=True):
            versions = [each.weight_version.tolist() for each in group]
            old = batch - min(map(min, versions)) > policy.eta
            verdict = policy.over_age if old else Verdict.ACCEPT
            self.verdicts[verdict] += 1
            assert row.get("over_age", "accept") == verdict
            self.lags += [batch - version for each in versions for version in each]
            kept = {
                Verdict.DROP: [],
                Verdict.MASK: [version for each in versions for version in each if batch - version <= policy.eta],
            }
            expected += len(kept.get(verdict, [version for each in versions for version in each]))
            trained = zip(group, row["trains"], strict=True)
            denominator += sum(without_stale(each, row).num_action_tokens for each, trains in trained if trains)
        assert denominator == expected
        self.settled(batch, members)

    def made(self, place):
        versions = np.array(self.tokens[place], np.int32)
        return Trajectory(
            TrajectoryId(*place), Prompt("p", ()), versions, np.ones(len(versions), np.bool_), np.zeros(len(versions), np.float32),
            versions, versions, turns=[], end_reason=EndReason.ANSWERED, reward=float(place[2]),
        )  # fmt: skip

    def settled(self, batch, members):
        places = [(*group, sample) for group in members for sample in range(SAMPLES)]
        self.counted.update(place for place in places if place in self.delivered)
        missing = {place for place in places if place in self.missing}
        if self.rules.late != "correct":
            self.provisional |= missing
            return
        found = settle(self.waiting, batch, dict.fromkeys(self.delivered, 1.0), versions=LATE_VERSIONS)
        for arrival in found.arrivals:
            assert 1 <= arrival.delay == batch - arrival.group.batch <= LATE_VERSIONS
            self.counted.update((arrival.group.iteration, arrival.group.group, sample) for sample in arrival.rewards)
        self.dropped.update(found.dropped)
        fresh = [WaitingGroup(*g, batch, tuple(p[2] for p in sorted(missing) if p[:2] == g)) for g in members]
        self.waiting = (*found.waiting, *(group for group in fresh if group.missing))

    def checked(self):
        rules, consumed = self.rules, [group for members in self.taken.values() for group in members]
        assert len(consumed) == len(set(consumed)) == rules.groups * rules.iterations
        assert min(self.lags) >= 0
        if rules.policy.over_age is Verdict.WAIT:
            assert max(self.lags) <= rules.policy.eta and set(self.verdicts) == {Verdict.ACCEPT}
        if rules.engines != "many":
            assert all(len(set(versions)) == 1 for versions in self.tokens.values())
        assert set(self.counted.values()) <= {1} and set(self.dropped.values()) <= {1}
        assert not set(self.counted) & set(self.dropped) and not set(self.counted) & self.missing
        open_still = {place for group in self.waiting for place in group.places()}
        if rules.late == "correct":  # each that was delivered counts, was dropped for its age, or is still waited for
            assert self.delivered <= set(self.counted) | set(self.dropped) | open_still
        else:
            assert self.delivered - set(self.counted) <= self.provisional


@given(rules(), st.integers(0, 2**32))
def test_any_schedule_keeps_every_rule(rules, seed):
    for number in range(IN_A_ROW):
        run = Run(rules, seed + number)
        run.play()
        run.checked()


def test_the_schedules_have_the_power_to_break_the_rules():
    """The bound is reached and passed, verdicts and late rewards of all kinds come up, versions mix and do not."""
    verdicts, lags, counted, dropped, mixed, other, moved, spread = Counter[Verdict](), set[int](), 0, 0, 0, 0, 0, 0
    for seed in range(15):
        for over_age in OVER_AGE:
            run = Run(Rules(StalenessPolicy(1, over_age), "many", "whole", "correct", 2, 5), seed)
            run.play()
            run.checked()
            verdicts += run.verdicts
            lags |= set(run.lags)
            mixed += sum(len(set(versions)) > 1 for versions in run.tokens.values())
            counted, dropped = counted + run.counted.total(), dropped + run.dropped.total()
            spread = max(spread, run.spread)
        run = Run(Rules(StalenessPolicy(2), "rounded", "first_come", "off", 2, 5), seed)
        run.play()
        run.checked()
        for window in (2, 3):
            Run(Rules(StalenessPolicy(2, Verdict.CORRECT, window), "many", "whole", "off", 2, 5), seed).play()
        moved += run.vacated
        other += sum(iteration != batch for batch, members in run.taken.items() for iteration, _ in members)
    assert all(verdicts[each] for each in (Verdict.ACCEPT, Verdict.DROP, Verdict.MASK, Verdict.CORRECT))
    assert lags >= {0, 1, 2} and spread >= 2 and counted and dropped and mixed and other and moved
