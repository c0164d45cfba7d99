"""Role changes: every interleaving ends in the old or the new assignments, and no GPU is ever in two hands."""

import copy
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra import facts
from libra.policy import role_changes as say
from libra.policy.role_changes import Assignment, Role, Roles, Stage

ROLLOUT, TRAIN, LENT = Assignment(Role.ROLLOUT), Assignment(Role.TRAIN), Assignment(Role.LENT)
LEADS_2, LEADS_3 = Assignment(Role.ROLLOUT, 2), Assignment(Role.ROLLOUT, 3)
NODES = {"a": "one", "b": "one", "c": "one", "d": "two"}
KINDS = (
    *("request",) * 3, *("all",) * 4, *("work",) * 3, *("deliver",) * 3, *("again",) * 2, "cancel", "cancel",
    "fail", "fail", "late", "skip", "lose", "back", "back",
)  # fmt: skip
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 10_000)), max_size=60)


@dataclass
class Process:
    """A worker's process as the machine cannot see it: what it holds, was told, and was given."""

    holds: Assignment | None
    supplied: Assignment | None
    told: deque[say.Perform] = field(default_factory=deque)
    alive: bool = True


class World:
    """Workers that do what they are told, late, wrongly or never, and the checks of every command."""

    def __init__(self):
        self.roles = Roles()
        self.processes = {name: Process(ROLLOUT, ROLLOUT) for name in NODES}
        self.mail = deque()
        self.sent = []
        self.restarts = []
        self.begun, self.before = {}, {}
        self.undone = set()
        self.ended = {}
        self.refused = []
        for name in NODES:
            self.announce(name)

    def announce(self, name):
        self.do("announce", name, ROLLOUT, NODES[name])

    def handle(self, event):
        return self.do("handle", event)

    def do(self, what, *arguments):
        self.settled = {name: member.settled for name, member in self.roles.members.items()}
        commands = getattr(self.roles, what)(*arguments)
        for command in commands:
            self.obey(command)
        changing = [name for change in self.roles.changes.values() for name in change.moves]
        assert len(changing) == len(set(changing)), "a worker is in one change at a time"
        return commands

    def obey(self, command):
        process = self.processes.get(getattr(command, "worker", ""))
        match command:
            case say.Withdraw():
                process.supplied = None
            case say.Perform():
                assert process.alive and process.supplied is None
                process.told.append(command)
            case say.Supply(assignment=assignment):
                assert process.alive and process.supplied is None
                assert process.holds == assignment, "it is given work of the role it is in"
                process.supplied = assignment
            case facts.RoleMemberFailed(worker=worker):
                if command.restarts:
                    self.restarts.append(worker)
                assert process.supplied is None
            case facts.RoleChangeStarted(generation=generation):
                assert generation > max(self.begun, default=0)
                self.begun[generation] = command
                settled = {name: self.settled[name] for name in command.assignments}
                self.before[generation] = {name: {"role": str(has.role), "tp": has.tp} for name, has in settled.items()}
            case facts.RoleChangeCancelled(generation=generation) | facts.RoleChangeFailed(generation=generation):
                assert generation in self.begun and generation not in self.ended
                self.undone.add(generation)
            case say.Ended(generation=generation):
                assert generation not in self.undone
                self.ended[generation] = command
            case say.Refuse(reason=reason):
                self.refused.append(reason)

    def work(self, name, *, fails=False, skips=False):
        process = self.processes[name]
        while skips and len(process.told) > 1 and process.told[0].generation < process.told[-1].generation:
            process.told.popleft()
        if not process.alive or not process.told:
            return
        told = process.told.popleft()
        assert process.supplied is None
        if fails:
            self.tell(facts.RoleStageFailed(name, told.generation, "no room"))
            return
        if told.stage is Stage.SLEEPING:
            process.holds = None
        elif told.stage is Stage.TAKING_UP:
            assert process.holds in (None, told.assignment), "it slept first"
            process.holds = told.assignment
            for node in set(NODES.values()):
                held = [
                    other.holds.tp
                    for worker, other in self.processes.items()
                    if NODES[worker] == node and other.holds is not None and other.holds.role is not Role.LENT
                ]
                assert sum(held) <= list(NODES.values()).count(node), "no GPU is in two hands"
        self.tell(facts.RoleStage(name, told.generation, str(told.stage), 0.0))

    def tell(self, event):
        self.mail.append(event)
        self.sent.append(event)

    def deliver(self):
        if self.mail:
            self.handle(self.mail.popleft())

    def say_again(self, index):
        """Something that was said before and is of no change going on, or was heard already, arrives once more."""
        if not self.sent:
            return
        event = self.sent[index % len(self.sent)]
        assert isinstance(event, facts.RoleStage | facts.RoleStageFailed)
        change = self.roles.changes.get(event.generation)
        current = change is not None and event.worker not in change.broken and self.roles.members[event.worker].present
        if isinstance(event, facts.RoleStage):
            current = current and change is not None and event.stage == change.stage and event.worker not in change.done
        elif change is None:
            current = event.generation == self.roles.members[event.worker].generation
        if not current:
            before = copy.deepcopy(self.roles)
            assert not self.handle(event)
            assert vars(before) == vars(self.roles)

    def lose(self, name):
        process = self.processes[name]
        if process.alive:
            process.alive, process.holds, process.supplied = False, None, None
            process.told.clear()
            self.restarts = [worker for worker in self.restarts if worker != name]
            self.do("lose", name)

    def come_back(self, name):
        if not self.processes[name].alive:
            self.processes[name].alive = True
            self.announce(name)

    def step(self, what, number):
        busy = [name for name, process in self.processes.items() if process.told] or list(NODES)
        name = busy[number % len(busy)]
        going = sorted(self.roles.changes) or [number]
        match what:
            case "request":
                self.do("request", targets_of(number))
            case "work" | "skip" | "fail":
                self.work(name, fails=what == "fail", skips=what == "skip")
            case "late":
                change = self.roles.change_of(name)
                if change is not None and self.processes[name].alive and not self.processes[name].told:
                    self.tell(facts.RoleStageFailed(name, change.generation, "no room after all"))
            case "deliver":
                self.deliver()
            case "cancel":
                self.do("cancel", going[number % len(going)])
            case "lose":
                self.lose(name)
            case "back":
                for worker in NODES:
                    self.come_back(worker)
            case "again":
                self.say_again(number)
            case "all":
                everybody(self)

    def settle(self):
        for _ in range(200):
            for name in NODES:
                self.come_back(name)
                self.work(name)
            for name in list(self.restarts):
                self.lose(name)
            while self.mail:
                self.deliver()


def targets_of(number):
    choices = [
        {"a": TRAIN}, {"b": TRAIN}, {"d": TRAIN}, {"a": ROLLOUT}, {"b": ROLLOUT}, {"a": TRAIN, "d": TRAIN},
        {"a": LEADS_2, "b": LENT}, {"b": LEADS_2, "a": LENT}, {"a": LEADS_3, "b": LENT, "c": LENT},
        {"a": ROLLOUT, "b": ROLLOUT}, {"a": ROLLOUT, "b": ROLLOUT, "c": ROLLOUT}, {"a": TRAIN, "b": ROLLOUT},
        dict.fromkeys(NODES, ROLLOUT), {"a": LEADS_2, "d": LENT}, {"a": LENT}, {"x": TRAIN}, {"a": LEADS_2},
    ]  # fmt: skip
    return choices[number % len(choices)]


@given(STEPS)
def test_every_interleaving_ends_in_the_old_or_the_new_assignments(steps):
    world = World()
    for what, number in steps:
        world.step(what, number)
    world.settle()
    roles = world.roles
    assert roles.changes == {}
    assert set(roles.members) == set(NODES)
    assert set(world.begun) == set(world.ended) | world.undone
    for generation in world.undone & {began.undoes for began in world.begun.values()}:
        again = next(began for began in world.begun.values() if began.undoes == generation)
        assert again.assignments == world.before[generation]
    for name, member in roles.members.items():
        process = world.processes[name]
        if member.present:
            assert process.supplied == process.holds == member.settled
        else:  # given up, which takes two failures in a row
            assert member.failures > 1 and process.supplied is None
        partners = [roles.members[other] for other in member.bond]
        assert all(partner.bond == member.bond for partner in partners)
        if member.bond:
            assert sorted(p.settled.role for p in partners) == [Role.LENT] * (len(partners) - 1) + [Role.ROLLOUT]
            (leader,) = (p for p in partners if p.settled.role is Role.ROLLOUT)
            assert leader.settled.tp == len(partners)
        else:
            assert member.settled in (ROLLOUT, TRAIN)


def everybody(world):
    """All workers do what they were told, once; what that was."""
    told = [(name, process.told[0].stage) for name, process in world.processes.items() if process.told]
    for name in NODES:
        world.work(name)
    while world.mail:
        world.deliver()
    return told


def requested(targets):
    world = World()
    return world, world.do("request", targets)


def test_a_change_goes_through_its_stages_and_withdraws_first():
    world, commands = requested({"a": TRAIN})
    assert [type(command) for command in commands] == [facts.RoleChangeStarted, say.Withdraw, say.Perform]
    stages = [everybody(world) for _ in range(3)]
    assert stages == [[("a", Stage.DRAINING)], [("a", Stage.SLEEPING)], [("a", Stage.TAKING_UP)]]
    assert world.processes["a"].supplied == TRAIN


def test_members_of_a_rebucket_wait_for_each_other_at_every_stage():
    world, _ = requested({"a": LEADS_2, "b": LENT})
    for stage in (Stage.DRAINING, Stage.SLEEPING, Stage.TAKING_UP):
        assert {world.processes[name].told[0].stage for name in "ab"} == {stage}
        world.work("a")
        world.deliver()
        assert not world.processes["a"].told
        world.work("b")
        world.deliver()
    assert (world.processes["a"].supplied, world.processes["b"].supplied) == (LEADS_2, LENT)
    world.do("request", {"b": ROLLOUT})
    assert "shares one engine's GPUs with a" in world.refused[-1]
    world.do("request", {"a": ROLLOUT, "b": ROLLOUT})
    for _ in range(3):
        everybody(world)
    assert world.processes["a"].supplied == world.processes["b"].supplied == ROLLOUT


@pytest.mark.parametrize("stage", [Stage.DRAINING, Stage.SLEEPING, Stage.TAKING_UP])
@pytest.mark.parametrize("how", ["cancel", "fail", "lose"])
def test_what_ends_early_takes_everybody_back(stage, how):
    world, _ = requested({"a": LEADS_2, "b": LENT})
    while world.processes["a"].told[0].stage is not stage:
        everybody(world)
    if how == "cancel":
        world.do("cancel", 1)
    elif how == "fail":
        world.work("b", fails=True)
        world.deliver()
    else:
        world.lose("b")
    assert world.undone == {1}
    assert world.begun[2].undoes == 1
    first = [told.stage for told in world.processes["a"].told if told.generation == 2]
    assert first == [Stage.TAKING_UP if stage is Stage.DRAINING else Stage.SLEEPING]
    world.settle()
    assert world.processes["a"].supplied == world.processes["b"].supplied == ROLLOUT
    assert 2 in world.ended


def test_who_fails_on_the_way_back_holds_what_it_has_until_it_is_gone():
    world, _ = requested({"a": LEADS_2, "b": LENT})
    for _ in range(3):
        everybody(world)
    world.do("request", {"a": ROLLOUT, "b": ROLLOUT})
    everybody(world), everybody(world)
    world.do("cancel", 2)  # while both take their own up again
    for process in world.processes.values():
        process.told = deque(told for told in process.told if told.generation == 3)
    world.work("a", fails=True), world.work("b")
    while world.mail:
        world.deliver()
    assert world.restarts == ["a"]
    world.handle(facts.RoleStageFailed("a", 3, "said twice"))
    world.handle(facts.RoleStage("a", 3, str(Stage.SLEEPING), 0.0))
    assert world.restarts == ["a"] and not world.processes["b"].told  # which would take up GPUs that a may hold
    world.lose("a")
    assert world.processes["b"].told[0].stage is Stage.TAKING_UP
    world.come_back("a")
    assert world.processes["a"].told[0].stage is Stage.TAKING_UP
    assert everybody(world) and world.roles.changes == {}
    assert (world.processes["a"].supplied, world.processes["b"].supplied) == (LEADS_2, LENT)


def test_a_role_that_cannot_go_on_is_left_for_what_the_worker_was_started_for():
    world, _ = requested({"a": TRAIN})
    world.settle()
    world.handle(facts.RoleStageFailed("a", 1, "the core refuses it"))
    assert world.processes["a"].supplied is None
    world.settle()
    assert world.processes["a"].supplied == ROLLOUT


def test_who_cannot_go_back_is_restarted_once_and_then_given_up():
    world, _ = requested({"a": TRAIN})
    world.do("cancel", 1)
    for _ in range(2):
        world.processes["a"].told = deque(list(world.processes["a"].told)[-1:])
        world.work("a", fails=True)
        world.deliver()
        if world.restarts:
            world.lose("a")
            world.come_back("a")
    assert not world.roles.members["a"].present
    world.lose("a")
    world.come_back("a")
    world.settle()
    assert world.processes["a"].supplied == ROLLOUT


@pytest.mark.parametrize(("targets", "reason"), [
    ({}, "nothing changes"), ({"a": ROLLOUT}, "nothing changes"), ({"x": TRAIN}, "workers that can: a, b, c, d"),
    ({"a": LEADS_2}, "tp=1"), ({"a": LENT}, "must take the GPUs"), ({"a": LEADS_2, "d": LENT}, "one node"),
    ({"a": LEADS_3, "b": LENT}, "tp=2"),
])  # fmt: skip
def test_what_cannot_be_is_refused_and_nothing_happens(targets, reason):
    world, commands = requested(targets)
    assert len(commands) == 1
    assert reason in world.refused[0] and world.roles.changes == {}


def test_a_change_in_progress_refuses_another_one_of_its_members():
    world, _ = requested({"a": TRAIN})
    world.do("request", {"a": ROLLOUT})
    world.lose("b")
    world.do("request", {"b": TRAIN})
    world.do("cancel", 7)
    assert len(world.refused) == 3 and set(world.roles.changes) == {1}
