"""The role plugin against a scheduler that is a few dicts: supplies, messages, and what is written down."""

import asyncio
from types import SimpleNamespace

import pytest

from libra import facts, keys
from libra.policy import Admission, Tail
from libra.scheduler.worker_roles import WorkerRoles
from libra.scheduler.worker_supply import Concurrency

NAMES = ("a", "b", "plain")
BROKEN = "tcp://10.0.0.1:777"


class Stage:
    """A scheduler with workers ``a`` and ``b`` that can change roles and one that cannot, and the plugin on it."""

    def __init__(self, tp=0):
        self.tp = tp
        self.workers = {}
        self.resources = {}
        self.running = []
        self.sent = []
        self.events = []
        self.later = []
        self.handlers = {}
        log = SimpleNamespace(emit=self.emit)
        self.state = SimpleNamespace(run="demo", epoch=0, log=log, tail=Tail(Admission(0, 1)))
        applier = SimpleNamespace(tell=lambda state, fact: state.log.emit(fact))
        trajectories = SimpleNamespace(workers_changed=lambda: None, applier=applier)
        self.concurrency = Concurrency(self, trajectories.workers_changed)
        self.loop = SimpleNamespace(add_callback=lambda call, *args: self.later.append((call, args)))
        self.plugin = WorkerRoles(self, {"demo": self.state}, trajectories, self.concurrency)
        assert self.plugin.register_roles("demo", 0) == {}
        for name in NAMES:
            self.join(name)

    def emit(self, fact):
        self.events.append((fact.name, facts.fields_of(fact)))

    @staticmethod
    def address(name):
        return f"tcp://10.0.0.1:{ord(name[0])}"

    def join(self, name):
        address = self.address(name)
        resources = {keys.ROLLOUT: 8} | ({keys.TP: self.tp} if self.tp else {})
        self.workers[address] = SimpleNamespace(name=name, resources=resources, used_resources={})
        self.running.append(self.workers[address])
        for resource, count in resources.items():
            self.resources.setdefault(resource, {})[address] = count
        self.plugin.add_worker(address)
        self.supplied_when_it_came = self.slots(name)
        if name != "plain":
            self.say(facts.RoleMemberJoined(name, self.tp or 1, 8, {"cores": name}), name)

    def leave(self, name):
        address = self.address(name)
        self.running.remove(self.workers.pop(address))
        for supply in self.resources.values():
            supply.pop(address, None)
        self.plugin.remove_worker(address)

    def say(self, fact, name="a"):
        self.plugin.handlers()[type(fact)](self.state, fact, self.address(name))

    def breaks(self, name):
        self.plugin.setup_failed(self.state, facts.SetupFailed(name, "OSError: no space left"), BROKEN)

    def worker_send(self, address, message):
        self.sent.append((address, message))

    def slots(self, name):
        address = self.address(name)
        assert self.workers[address].resources[keys.ROLLOUT] == self.resources[keys.ROLLOUT][address]
        return self.resources[keys.ROLLOUT][address]

    def told(self, name):
        return next(message for address, message in reversed(self.sent) if address == self.address(name))

    def done(self, *names, stages=1):
        for name in names * stages:
            told = self.told(name)
            self.say(facts.RoleStage(name, told["generation"], told["stage"], 0.5))

    def names(self):
        return [name for name, _ in self.events]


def change(stage, **assignments):
    answer = stage.plugin.set_roles("demo", 0, assignments)
    assert "error" not in answer, answer
    return int(answer["generation"])


def test_slots_are_zeroed_before_the_drain_and_come_back_with_the_role():
    stage = Stage()
    generation = change(stage, a={"role": "train"})
    assert stage.slots("a") == 0 and keys.ROLLOUT in stage.workers[stage.address("a")].resources
    assert (stage.told("a")["stage"], stage.told("a")["generation"]) == ("draining", generation)
    stage.done("a", stages=3)
    assert stage.slots("a") == 0  # it trains
    back = change(stage, a={"role": "rollout"})
    for _ in range(3):
        assert stage.slots("a") == 0
        stage.done("a")
    assert stage.slots("a") == 8
    there, here = (fields for name, fields in stage.events if name == "role_changed")
    assert (there["generation"], here["generation"]) == (generation, back)
    assert (here["from_role"], here["to_role"]) == ("train", "rollout")
    assert here["stage_s"] == {"draining": 0.5, "sleeping": 0.5, "taking_up": 0.5}


@pytest.mark.parametrize("tp", [0, 1])
def test_a_leader_supplies_the_slots_of_all_whose_gpus_it_has(tp):
    stage = Stage(tp)
    change(stage, a={"role": "rollout", "tp": 2}, b={"role": "lent"})
    for _ in range(3):
        assert stage.slots("a") == stage.slots("b") == 0
        stage.done("a", "b")
    assert (stage.slots("a"), stage.slots("b")) == (16, 0)
    assert stage.told("a")["slots"] == 16
    assert stage.told("a")["shares"] == [{"cores": "a"}, {"cores": "b"}]
    assert stage.workers[stage.address("a")].resources[keys.TP] == 2
    change(stage, a={"role": "rollout"}, b={"role": "rollout"})
    stage.done("a", "b", stages=3)
    assert (stage.slots("a"), stage.slots("b")) == (8, 8)
    assert stage.workers[stage.address("a")].resources[keys.TP] == tp


def test_a_worker_that_comes_back_supplies_nothing_until_its_role_is_settled():
    stage = Stage()
    change(stage, a={"role": "train"})
    stage.done("a", stages=3)
    assert stage.plugin.role_known("demo", 0, "a") and not stage.plugin.role_known("demo", 0, "plain")
    stage.leave("a")
    assert stage.plugin.roles("demo", 0)[0]["stage"] == "lost"
    stage.join("a")
    assert stage.supplied_when_it_came == 0 == stage.slots("a")
    assert (stage.told("a")["stage"], stage.told("a")["role"]) == ("taking_up", "train")
    stage.done("a")
    assert stage.events[-1][0] == "role_restored"
    assert stage.plugin.roles("demo", 0)[0]["role"] == "train"


def test_cancelling_is_written_down_and_waited_for():
    stage = Stage()
    generation = change(stage, a={"role": "train"})
    stage.done("a")

    async def waits():
        waiting = asyncio.ensure_future(stage.plugin.wait_roles("demo", 0, generation))
        await asyncio.sleep(0)
        assert stage.plugin.cancel_roles("demo", 0, generation) == {"generation": generation + 1}
        for _ in range(2):
            await asyncio.sleep(0)
            assert not waiting.done()
            stage.done("a")
        return await waiting

    assert asyncio.run(waits()) == {"changed": False}
    assert stage.slots("a") == 8
    assert [name for name in stage.names() if name != "role_stage"] == [
        "role_change_started", "role_change_cancelled", "role_change_started", "role_restored",
    ]  # fmt: skip
    assert "error" in stage.plugin.cancel_roles("demo", 0, generation)
    assert "error" in asyncio.run(stage.plugin.wait_roles("demo", 0, 99))


def test_the_pool_of_the_core_is_told_to_members_old_and_new_and_forgotten_with_its_worker():
    stage = Stage()
    stage.say(facts.HybridPoolOpened(3, "h", 7), "plain")
    assert stage.told("a")["pool"] == (3, "h", 7) and stage.told("a")["stage"] is None
    stage.leave("b")
    stage.join("b")
    assert (3, "h", 7) in [message["pool"] for address, message in stage.sent[-2:] if address == stage.address("b")]
    stage.leave("plain")
    assert stage.plugin._run.pool is None


def test_workers_supply_what_they_were_started_with_when_the_run_ends():
    stage = Stage()
    change(stage, a={"role": "rollout", "tp": 2}, b={"role": "lent"})
    stage.done("a", "b", stages=3)
    as_started = stage.plugin.as_started("demo")  # which a run that starts next counts on
    assert as_started == {stage.address(name): {keys.ROLLOUT: 8} for name in "ab"}
    assert stage.plugin.as_started("other") == stage.plugin.as_started(None) == {}
    stage.plugin.end_roles("demo")
    assert (stage.slots("a"), stage.slots("b")) == (8, 8)
    assert stage.workers[stage.address("a")].resources[keys.TP] == 0
    assert stage.plugin.register_roles("other", 0) == {}


def row(stage, name):
    (found,) = (row for row in stage.plugin.roles("demo", 0) if row["worker"] == name)
    return found


def test_who_is_there_and_can_do_nothing_is_failed_until_it_is_gone_or_back():
    stage = Stage()
    stage.leave("a")
    assert row(stage, "a")["stage"] == "lost"
    stage.breaks("a")
    assert (row(stage, "a")["stage"], row(stage, "a")["reason"]) == ("failed", "OSError: no space left")
    stage.plugin.remove_worker(BROKEN)
    assert row(stage, "a")["stage"] == "lost"
    stage.breaks("a")
    stage.join("a")
    assert row(stage, "a")["stage"] == "taking_up"
    stage.breaks("plain")  # cannot change roles: not in this table
    assert [row["worker"] for row in stage.plugin.roles("demo", 0)] == ["a", "b"]


def test_who_cannot_go_back_is_restarted_and_then_failed():
    stage = Stage()
    generation = change(stage, a={"role": "train"})
    stage.plugin.cancel_roles("demo", 0, generation)
    stage.say(facts.RoleStageFailed("a", generation + 1, "no memory"))
    ((_, arguments),) = stage.later
    assert arguments[1] == stage.address("a")
    assert stage.events[-1] == ("role_member_failed", {"worker": "a", "detail": "no memory", "restarts": True})
    stage.leave("a")
    stage.join("a")
    stage.say(facts.RoleStageFailed("a", stage.told("a")["generation"], "still no memory"))
    assert ("role_member_failed", {"worker": "a", "detail": "still no memory", "restarts": False}) in stage.events
    assert (row(stage, "a")["stage"], row(stage, "a")["reason"]) == ("failed", "still no memory")
    assert stage.slots("a") == 0


def test_assignments_that_make_no_sense_and_stale_messages_change_nothing():
    stage = Stage()
    for assignments in (
        {"a": {"role": "rolout"}}, {"a": {"role": "train", "gpus": 1}}, {"plain": {"role": "train"}},
        {"a": {"role": "train", "tp": 2}},
    ):  # fmt: skip
        assert stage.plugin.set_roles("demo", 0, assignments)["error"]
    assert not stage.sent[2:] and stage.slots("a") == 8
    assert "error" in stage.plugin.set_roles("demo", 1, {"a": {"role": "train"}})
    assert stage.plugin.roles("demo", 1) == []
    assert "only one run at a time" in stage.plugin.register_roles("other", 0)["error"]
    change(stage, a={"role": "train"}, b={"role": "train"})  # the worker that cannot change is left
    stage = Stage()
    stage.leave("plain")
    change(stage, a={"role": "train"})
    assert "no worker would be left" in stage.plugin.set_roles("demo", 0, {"b": {"role": "train"}})["error"]
    assert row(stage, "b")["role"] == "rollout"


def test_an_engine_of_two_workers_has_a_limit_of_its_own_that_may_be_set_before_it_is_there():
    stage = Stage(tp=1)
    state = SimpleNamespace(run="demo", workers=SimpleNamespace(engines={}), log=stage.state.log)
    for name in ("a", "b"):
        stage.concurrency.joined("demo", name, facts.EngineKindFields("vllm", "vllm-tp1-threads1", 1, 8))
    assert stage.concurrency.set(state, {"a": {"tp": 2, "slots": 5}}, "a plan") == {}
    change(stage, a={"role": "rollout", "tp": 2}, b={"role": "lent"})
    stage.done("a", "b", stages=3)
    assert (stage.slots("a"), stage.slots("b")) == (5, 0)
    change(stage, a={"role": "rollout", "tp": 1}, b={"role": "rollout"})
    stage.done("a", "b", stages=3)
    assert (stage.slots("a"), stage.slots("b")) == (8, 8), "the limit was of the engine of two"
