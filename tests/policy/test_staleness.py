"""`judge`, the section's rules under any schedule of `Admission`, and its gates against AReaL's rule and its own answers.

``LIBRA_SCHEDULES=10000`` in the environment: so many random schedules instead of a few hundred.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.policy import (
    Admission,
    CommittedGroup,
    OpenBatch,
    OpenGate,
    StalenessPolicy,
    Verdict,
    judge,
    staleness_of,
)

SCHEDULES = int(os.environ.get("LIBRA_SCHEDULES", "400"))
OVER_AGE = (Verdict.WAIT, Verdict.DROP, Verdict.MASK, Verdict.CORRECT)


@dataclass(slots=True)
class Capacity:
    """How many groups may begin now, by counting: ``StalenessManager`` of areal 1.0.4, whose recorded answers it gives.

    A caller may submit without capacity, which then is negative. No run needs it: gates let as many groups begin.

    Attributes
    ----------
    eta : int
        Largest lag in versions.
    groups_per_batch : int
        Groups per optimizer step, B. Here and in ``max_running``, anything below 1 counts as 1 in `available` (AReaL).
    max_running : int
        Groups that may run at once.
    enqueued, running, accepted, rejected : int
        Groups waiting to be submitted, being generated, finished and usable since the first version, finished and not.
    """

    eta: int
    groups_per_batch: int
    max_running: int
    version: int = 0
    enqueued: int = 0
    running: int = 0
    accepted: int = 0
    rejected: int = 0

    @property
    def available(self) -> int:
        """Groups that may begin: the minimum of the rooms that concurrency and staleness leave. May be negative."""
        by_concurrency = max(1, self.max_running) - self.running
        by_staleness = (self.eta + self.version + 1) * self._batch - (self.accepted + self.running)
        return min(by_concurrency, by_staleness)

    @property
    def pending_limit(self) -> int:
        """Groups that may wait to be submitted."""
        return (self.eta + 1) * self.groups_per_batch

    @property
    def _batch(self) -> int:
        return max(1, self.groups_per_batch)

    def version_published(self, version: int) -> None:
        """Version ``version`` is the newest."""
        self.version = version

    def version_recovered(self, version: int) -> None:
        """A run continues at ``version``: the groups that its steps have consumed count as accepted."""
        self.version = version
        self.accepted = version * self._batch

    def group_enqueued(self) -> None:
        """A group waits to be submitted."""
        self.enqueued += 1

    def group_submitted(self) -> None:
        """A group that waited is being generated."""
        self.enqueued -= 1
        self.running += 1

    def group_accepted(self) -> None:
        """A running group is finished and usable."""
        self.running -= 1
        self.accepted += 1

    def group_rejected(self) -> None:
        """A running group is finished and gives its place back."""
        self.running -= 1
        self.rejected += 1


def test_capacity_is_areals_after_every_event(repository) -> None:
    cases = json.loads((repository / "tests" / "golden" / "areal_staleness.json").read_text())["cases"]
    assert len(cases) == 20
    for case in cases:
        capacity = Capacity(case["max_staleness"], case["consumer_batch_size"], case["max_concurrent_rollouts"])
        assert capacity.pending_limit == case["pending_limit"]
        apply = {
            "enq": lambda version, c=capacity: c.group_enqueued(),
            "submit": lambda version, c=capacity: c.group_submitted(),
            "accept": lambda version, c=capacity: c.group_accepted(),
            "reject": lambda version, c=capacity: c.group_rejected(),
            "version": lambda version, c=capacity: c.version_published(version),
            "recover": lambda version, c=capacity: c.version_recovered(version),
        }
        for index, (op, version, *expected) in enumerate(case["events"]):
            apply[op](version)
            got = [capacity.available, capacity.enqueued, capacity.running, capacity.accepted, capacity.rejected]
            assert (capacity.version, got) == (version, expected), f"event {index}, {op}"


def test_gates_admit_as_many_groups_as_the_capacity_rule() -> None:
    for eta in range(4):
        for groups in (1, 3):
            admission, capacity = Admission(eta, groups), Capacity(eta, groups, max_running=10**6)
            commands = [command for iteration in range(20) for command in admission.gate_parked(iteration)]
            for version in range(6):
                commands += admission.version_published(version)
                capacity.version_published(version)
                begun = groups * sum(isinstance(command, OpenGate) for command in commands)
                assert begun == capacity.available


@st.composite
def policies(draw: st.DrawFn) -> StalenessPolicy:
    """Every policy that a configuration allows, with a bound of up to 4."""
    eta, over_age = draw(st.integers(0, 4)), draw(st.sampled_from(OVER_AGE))
    widest = eta + 1 if over_age is Verdict.WAIT else eta + 3
    window = draw(st.none() | st.integers(2, max(2, widest)))
    return StalenessPolicy(eta, over_age, window, draw(st.none() | st.integers(1, eta + 1)))


@given(policies(), st.integers(0, 20), st.integers(0, 20))
def test_a_verdict_is_the_policys_beyond_the_bound_and_acceptance_up_to_it(
    policy: StalenessPolicy, version: int, frontier: int
) -> None:
    assert judge(version, frontier, policy) is (Verdict.ACCEPT if frontier - version <= policy.eta else policy.over_age)


def test_verdicts_of_evolving_prompts_are_for_callers_that_allow_them() -> None:
    for verdict in (Verdict.REBASE, Verdict.DISTIL):
        policy = StalenessPolicy(1, verdict)
        assert judge(3, 4, policy) is Verdict.ACCEPT
        assert judge(3, 5, policy, allowed={verdict}) is verdict
        with pytest.raises(
            ValueError, match=rf"over_age: {verdict}, for version 3 at 5 with eta=1; allowed here: correct, drop"
        ):
            judge(3, 5, policy)


@pytest.mark.parametrize("wrong", [{"eta": -1}, {"window": 1}, {"in_flight": 0}, {"over_age": Verdict.ACCEPT}])
def test_a_policy_that_could_not_work_is_refused(wrong: dict[str, object]) -> None:
    name, value = next(iter(wrong.items()))
    with pytest.raises(ValueError, match=f"{name}={value}"):
        StalenessPolicy(**{"eta": 1} | wrong)  # type: ignore[arg-type]


def test_a_configuration_is_read_as_it_is() -> None:
    from libra.config import config_from_dict

    assert staleness_of(config_from_dict({})) == StalenessPolicy(0)
    given = {"staleness": {"eta": 3, "window": 2, "in_flight": 4, "over_age": "mask"}}
    assert staleness_of(config_from_dict(given)) == StalenessPolicy(3, Verdict.MASK, 2, 4)


@dataclass
class Schedule:
    """One training under a random schedule, with the facts that the rules are compared with."""

    policy: StalenessPolicy
    groups: int
    iterations: int
    seed: int
    version: int = -1
    running: dict[tuple[int, int], int] = field(default_factory=dict)  # the version that each began with
    began: dict[tuple[int, int], int] = field(default_factory=dict)
    waiting: list[tuple[int, int]] = field(default_factory=list)
    training: list[int] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)  # the step whose weights are not published yet
    taken: dict[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    lags: list[int] = field(default_factory=list)
    held_back: int = 0  # times that a batch could have been taken but for the window or a deadline

    def run(self) -> None:
        rng, admission, submitted = random.Random(self.seed), Admission(self.policy, self.groups), 0
        lazy = rng.choice((0.1, 1.0, 8.0))  # how much rarer than its start a group's end is
        self.published(admission)
        while len(self.taken) < self.iterations or self.training or self.trained:
            moves = {
                "start": len(self.waiting),
                "finish": len(self.running) / lazy,
                "train": len(self.training) * (not self.trained),
                "publish": len(self.trained) / lazy,
                "submit": submitted < self.iterations and submitted <= self.version + self.policy.eta + 1,
            }
            assert any(moves.values()), f"dead end at version {self.version} with {sorted(self.taken)} taken"
            match rng.choices(list(moves), [float(weight) for weight in moves.values()])[0]:
                case "submit":
                    self.obeyed(admission.gate_parked(submitted))
                    self.obeyed(admission.batch_parked(submitted))
                    submitted += 1
                case "start":
                    group = self.waiting.pop(rng.randrange(len(self.waiting)))
                    self.running[group] = self.began[group] = self.version
                    admission.generation_started(*group, self.version)
                case "finish":
                    group = rng.choice(list(self.running))
                    self.obeyed(admission.group_committed(CommittedGroup(*group, self.running.pop(group))))
                    done = len(self.began) - len(self.running) - self.groups * len(self.taken)
                    self.held_back += done >= self.groups and len(self.taken) == self.version + len(self.trained)
                case "train":
                    assert self.training[0] == self.version
                    self.trained.append(self.training.pop(0))
                    self.obeyed(admission.step_ended(self.version))
                case "publish":
                    self.trained.pop()
                    self.published(admission)

    def published(self, admission: Admission) -> None:
        self.version += 1
        oldest = min(self.running.values(), default=self.version)
        assert self.version - oldest + 1 <= (self.policy.window or 10**9)
        self.obeyed(admission.version_published(self.version))

    def obeyed(self, commands: tuple[object, ...]) -> None:
        policy = self.policy
        for command in commands:
            if isinstance(command, OpenGate):
                assert command.iteration - policy.eta <= self.version
                assert command.iteration < len(self.taken) + (policy.in_flight or policy.eta + 1)
                self.waiting += [(command.iteration, group) for group in range(self.groups)]
            elif isinstance(command, OpenBatch):
                assert command.batch == len(self.taken) == self.version + len(self.trained)
                assert len(command.members) == self.groups
                assert not set(command.members) & set(self.running)
                self.taken[command.batch] = command.members
                self.training.append(command.batch)
                self.lags += [command.batch - self.began[member] for member in command.members]


@settings(max_examples=SCHEDULES)
@given(policies(), st.integers(1, 4), st.integers(1, 8), st.integers(0, 2**32))
def test_any_schedule_keeps_every_rule_of_its_policy(
    policy: StalenessPolicy, groups: int, iterations: int, seed: int
) -> None:
    schedule = Schedule(policy, groups, iterations, seed)
    schedule.run()
    consumed = [member for members in schedule.taken.values() for member in members]
    assert len(consumed) == len(set(consumed)) == groups * iterations
    assert sorted(schedule.taken) == list(range(iterations))
    assert all(lag >= 0 for lag in schedule.lags)
    if policy.over_age is Verdict.WAIT:
        assert all(lag <= policy.eta for lag in schedule.lags)


def test_the_schedules_have_the_power_to_break_the_rules() -> None:
    """Lags beyond the bound come up where nothing waits, the bound itself is reached where all wait, and windows hold back."""
    late, reached, held = set(), set(), dict.fromkeys((None, 2, 3), 0)
    for seed in range(60):
        for over_age in OVER_AGE:
            schedule = Schedule(StalenessPolicy(2, over_age), 2, 8, seed)
            schedule.run()
            (reached if over_age is Verdict.WAIT else late).update(schedule.lags)
        for window in held:
            schedule = Schedule(StalenessPolicy(2, Verdict.CORRECT, window), 2, 8, seed)
            schedule.run()
            held[window] += schedule.held_back
    assert reached == {0, 1, 2}
    assert max(late) > 2
    assert held[None] == 0 < held[3] < held[2]


def test_with_one_batch_in_flight_the_next_begins_when_it_is_taken() -> None:
    admission = Admission(StalenessPolicy(2, in_flight=1), 1)
    commands = [*admission.version_published(0)]
    for iteration in range(3):
        commands += [*admission.gate_parked(iteration), *admission.batch_parked(iteration)]
    assert [command.iteration for command in commands if isinstance(command, OpenGate)] == [0]
    batch, gate = admission.group_committed(CommittedGroup(0, 0, 0))
    assert isinstance(batch, OpenBatch)
    assert gate == OpenGate(1, "version 0 >= 1 - eta 2, batch 1 is next and 1 may be in flight")


def test_a_batch_says_who_came_too_late() -> None:
    for over_age in OVER_AGE:
        admission = Admission(StalenessPolicy(1, over_age), 1)
        admission.generation_started(0, 0, 0)
        for batch in range(2):  # those of iterations 1 and 2 overtake the group of iteration 0
            admission.version_published(batch)
            opened = [*admission.batch_parked(batch), *admission.group_committed(CommittedGroup(batch + 1, 0, batch))]
            if over_age is Verdict.WAIT and batch:
                assert not opened, "batch 1 would leave the group of version 0 too old"
                (opened,) = admission.group_committed(CommittedGroup(0, 0, 0))
                assert opened.members == ((0, 0),)
                break
            assert [command.members for command in opened] == [((batch + 1, 0),)]
        else:
            admission.version_published(2)
            admission.batch_parked(2)
            (opened,) = admission.group_committed(CommittedGroup(0, 0, 0))
            assert opened.members == ((0, 0),)
            assert opened.reason == f"1 groups committed, 0 carried over, 1 over age: {over_age}"


def test_a_snapshot_keeps_the_policy_and_one_without_it_has_the_bound_alone() -> None:
    admission, restored = Admission(StalenessPolicy(2, Verdict.MASK, 3, 1), 4), Admission(0, 1)
    restored.restore(json.loads(json.dumps(admission.snapshot())))
    assert restored.staleness == admission.staleness
    older = {name: value for name, value in admission.snapshot().items() if name != "staleness"}
    restored.restore(older)
    assert restored.staleness == StalenessPolicy(2)
