"""The gang plugin against a scheduler that is two dicts and a list: whole gangs or none, losses named, nothing stale heard."""

from types import SimpleNamespace

import pytest

from libra import keys
from libra.facts import GangOpen, GangRankFailed, GangRankJoined, TrainerJoined, fields_of
from libra.scheduler.gangs import Gangs


class Stage:
    """A scheduler with workers ``a``, ``b``, ... that does what is asked at once, and the plugin on it."""

    def __init__(self, *workers):
        self.tasks = {}
        self.workers = {self.address(name) for name in workers}
        self.sent = []
        self.later = []
        self.events = []
        self.state = SimpleNamespace(run="demo", epoch=0, log=SimpleNamespace(emit=self.emit))
        self.handlers = {}
        self.loop = SimpleNamespace(
            add_callback=lambda call, *args: call(*args),
            call_later=lambda _, call, *args: self.later.append((call, args)),
        )
        self.plugin = Gangs(self, {"demo": self.state})
        self.plugin.register_gang("demo", 0, 2)
        for name in workers:
            self.join(name)

    def emit(self, fact):
        self.events.append((fact.name, fields_of(fact)))

    @staticmethod
    def address(name):
        return f"tcp://{name}:1"

    def join(self, name):
        self.workers.add(self.address(name))
        self.say(TrainerJoined(name), name)

    def say(self, fact, name="a", epoch=0):
        state = SimpleNamespace(run="demo", epoch=epoch, log=self.state.log)
        self.plugin.handlers()[type(fact)](state, fact, self.address(name))

    def worker_send(self, address, message):
        self.sent.append((address, message))

    def transitions(self, recommendations, stimulus_id):
        for key, state in recommendations.items():
            self.move(key, state)

    def move(self, key, state):
        before, self.tasks[key].state = self.tasks[key].state, state
        self.plugin.transition(key, before, state)

    def park(self, node, *indices):
        key = keys.make(node, indices, epoch=0, run="demo")
        needs = {keys.GANG: 1}
        self.tasks[key] = SimpleNamespace(state="waiting", resource_restrictions=needs, worker_restrictions=None)
        self.move(key, "no-worker")
        return key

    def form(self, number):
        self.say(GangOpen(number, "h", 1))
        for rank in range(2):
            self.say(GangRankJoined(number, rank, number))

    def lose(self, name):
        address = self.address(name)
        self.workers.discard(address)
        for key, task in self.tasks.items():
            if task.state == "processing" and task.worker_restrictions == {address}:
                self.move(key, "released")
                self.move(key, "no-worker")
        self.plugin.remove_worker(address)

    def running(self):
        return {key: task.worker_restrictions for key, task in self.tasks.items() if task.state == "processing"}


def test_a_gang_is_placed_when_the_group_is_ready_and_every_rank_is_here():
    stage = Stage("b", "a")
    first = stage.park("step", 0, 0)
    assert not stage.running()
    stage.form(0)
    assert stage.events[0][0] == "gang_formed"
    assert not stage.running()  # one rank alone would wait in its collective for ever
    second = stage.park("step", 0, 1)
    ranks = [stage.address(name) for name in stage.events[0][1]["members"]]
    assert stage.running() == {first: {ranks[0]}, second: {ranks[1]}}
    assert stage.tasks[first].resource_restrictions == {keys.TRAIN: 1}


def test_two_gangs_never_run_at_once_and_a_checkpoint_is_rank_0s_alone():
    stage = Stage("a", "b")
    stage.form(0)
    steps = [stage.park("step", 0, rank) for rank in range(2)]
    publishes = [stage.park("publish", 0, rank) for rank in range(2)]
    saved = stage.park("checkpoint", 0)
    assert set(stage.running()) == {*steps, saved}
    assert stage.tasks[saved].resource_restrictions == {keys.TRAIN: 0}
    assert stage.tasks[saved].worker_restrictions == {stage.address("a")}
    stage.move(steps[0], "memory")
    assert not set(publishes) & set(stage.running())
    stage.move(steps[1], "memory")
    assert set(stage.running()) == {*publishes, saved}
    # Back under the resource: a result lost with its worker is not tied to it.
    assert all(stage.tasks[key].resource_restrictions == {keys.GANG: 1} for key in steps)
    assert all(stage.tasks[key].worker_restrictions is None for key in steps)


@pytest.mark.parametrize("spare", [True, False])
def test_a_member_that_leaves_is_named_and_its_gang_placed_again_on_the_next_group(spare):
    stage = Stage("a", "b", *(["c"] if spare else []))
    stage.form(0)
    stage.park("step", 0, 0), stage.park("step", 0, 1)
    stage.lose("b")
    told = {"gang": 0, "worker": "b", "detail": "worker b at tcp://b:1 left the cluster"}
    assert stage.events[-1] == ("gang_lost", told)
    survivor = next(key for key, where in stage.running().items() if where == {stage.address("a")})
    stage.move(survivor, "released")
    stage.move(survivor, "no-worker")
    assert not stage.running()
    if not spare:
        stage.join("b")
    assert stage.sent[-1][1]["do"] == "open" and stage.sent[-1][1]["gang"] == 1
    stage.say(GangRankFailed(0, 0, "late: group 0 is over"))  # of the group before
    stage.form(1)
    members = ("a", "c" if spare else "b")
    assert stage.events[-1] == ("gang_formed", {"gang": 1, "members": members, "steps": 1})
    assert list(stage.running().values()) == [{stage.address(name)} for name in members]


def test_a_rank_done_before_is_not_waited_for():
    stage = Stage("a", "b")
    stage.form(0)
    first, second = (stage.park("step", 0, rank) for rank in range(2))
    stage.move(first, "memory")
    stage.lose("b")
    stage.join("b")
    stage.form(1)
    assert stage.running() == {second: {stage.address("b")}}


def test_a_group_that_cannot_form_is_tried_again():
    stage = Stage("a", "b")
    stage.say(GangRankFailed(0, 1, "nobody answers"))
    assert not stage.events
    ((call, args),) = stage.later
    call(*args)
    assert stage.events[-1] == ("gang_lost", {"gang": 0, "worker": "b", "detail": "nobody answers"})
    assert stage.sent[-1][1]["gang"] == 1
    stage.form(0)  # stale
    assert not any(name == "gang_formed" for name, _ in stage.events)


def test_who_cannot_reach_the_others_is_not_blamed_when_one_of_them_left():
    stage = Stage("a", "b", "c")
    stage.form(0)
    stage.say(GangRankFailed(0, 1, "connection closed"))
    stage.park("step", 0, 0), stage.park("step", 0, 1)
    assert not stage.running()  # the group may be broken
    stage.lose("a")
    assert (stage.events[-1][0], stage.events[-1][1]["worker"]) == ("gang_lost", "a")
    for call, args in stage.later:
        call(*args)
    assert [name for name, _ in stage.events] == ["gang_formed", "gang_lost"]
    stage.form(1)
    assert set(map(str, stage.running().values())) == {"{'tcp://c:1'}", "{'tcp://b:1'}"}
