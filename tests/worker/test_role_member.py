"""A worker's part in role changes by itself: stages in order, stale ones left out, failures told, a core that goes and comes."""

from __future__ import annotations

import asyncio
import importlib
import queue
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from libra import keys
from libra.config import config_from_dict
from libra.errors import EngineError, TrainError, TransferError
from libra.facts import fields_of, unpack
from libra.policy.role_changes import Assignment, Role
from libra.worker import role_member
from libra.worker.context import WorkerContext
from libra.worker.engine.engine_factory import EngineKind
from libra.worker.role_member import RoleMember

hybrid_module = importlib.import_module("libra.train.hybrid_replica")  # ``libra.train`` is also the name of a function
SHARE = {"cores": "", "devices": ""}


class FakeServing:
    """An engine that sleeps and wakes at once, or fails to wake."""

    def __init__(self):
        self.asleep = False
        self.calls: list[Any] = []
        self.fails = False

    async def sleep(self, *, abort=False):
        self.asleep = True
        self.calls.append("sleep")

    async def wake(self, build=None):
        if self.fails:
            raise EngineError("no memory")
        self.asleep = False
        self.calls.append("wake")


class FakeHybrid:
    """A hybrid replica that serves until it is told how that ends."""

    made: queue.SimpleQueue[FakeHybrid] = queue.SimpleQueue()
    closed: set[tuple[str, int]] = set()
    """Pools at which nobody answers."""

    def __init__(self, replica, address, token, *, name):
        if address in self.closed:
            raise TransferError(f"nobody answers at {address}")
        self.address, self.token = address, token
        self.ends: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.on_state: Any = None
        self.made.put(self)

    def run(self):
        if isinstance(end := self.ends.get(timeout=60), Exception):
            raise end
        return 0

    def leave(self) -> None:
        self.ends.put("left")

    abandon = leave


class Case:
    """A member whose worker and scheduler are a few values; ``told`` is what it has said."""

    def __init__(self, monkeypatch):
        self.said: list[dict[str, Any]] = []
        self.news = asyncio.Event()
        self.serving = FakeServing()
        supply = {"total_resources": {keys.ROLLOUT: 8}, "available_resources": {keys.ROLLOUT: 8}, "tasks": {}}
        worker = SimpleNamespace(
            name="rollout-0", address="tcp://10.0.0.1:1", state=SimpleNamespace(**supply), stream_handlers={},
            batched_send=self._heard, thread_id=threading.get_ident(),
            loop=SimpleNamespace(add_callback=lambda call, *a, **k: None),
        )  # fmt: skip
        config = config_from_dict({"cluster": {"hybrid_workers": 1}})
        spec = SimpleNamespace(run="demo", epoch=0, secret="s", config=config)
        kind = EngineKind("transformers", 8)
        self.worker: Any = worker
        nothing = None
        context = WorkerContext(self.worker, spec, nothing, nothing, nothing, nothing, nothing)
        engine = SimpleNamespace(serving=self.serving, kind=kind)
        self.member = RoleMember(context, engine)
        monkeypatch.setattr(role_member, "make_replica", lambda *arguments: "a replica")
        monkeypatch.setattr(hybrid_module, "HybridReplica", FakeHybrid)
        monkeypatch.setattr(FakeHybrid, "made", queue.SimpleQueue())
        monkeypatch.setattr(FakeHybrid, "closed", set())
        self.announced = False

    async def aclose(self):
        self.member.close()

    def _heard(self, message):
        self.said += [{"name": fact.name, **fields_of(fact)} for fact in unpack(message["packed"])]
        self.news.set()

    def tell(self, stage, generation=1, role="train", pool=None):
        if not self.announced:
            self.member.announce()
            self.announced = True
        fields = {"role": role, "tp": 1, "slots": 8, "shares": [SHARE]}
        self.member.heard({"stage": stage, "generation": generation, "pool": pool, **fields})

    async def hears(self, kind, **fields):
        """Wait until it has said this, and forget all before."""
        while True:
            for index, message in enumerate(self.said):
                if message["name"] == kind and fields.items() <= message.items():
                    del self.said[: index + 1]
                    return message
            self.news.clear()
            await self.news.wait()

    async def stages(self, generation, role):
        """All stages of a change, each told and done."""
        for stage in ("draining", "sleeping", "taking_up"):
            self.tell(stage, generation, role)
            await self.hears("role_stage", stage=stage, generation=generation)

    async def to_train(self):
        self.tell(None, pool=(0, "core", 1))
        await self.stages(1, "train")
        return FakeHybrid.made.get(timeout=60)

    def slots(self):
        state = self.worker.state
        return state.total_resources[keys.ROLLOUT], state.available_resources[keys.ROLLOUT]


@pytest.fixture
def case(monkeypatch):
    """A new member, which announces itself when it is first told something."""
    return Case(monkeypatch)


async def test_it_goes_to_training_and_back(case):
    hybrid = await case.to_train()
    assert hybrid.address == ("core", 1)
    assert case.slots() == (0, 0) and case.serving.asleep
    await case.stages(2, "rollout")
    assert case.serving.calls == ["sleep", "sleep", "wake"] and case.slots() == (8, 8)
    assert case.member.has == Assignment(Role.ROLLOUT)


async def test_stages_of_an_older_change_are_not_begun(case):
    case.tell("draining", 1)
    case.tell("sleeping", 1)
    case.tell("taking_up", 2, "rollout")  # cancelled before the worker had looked
    await case.hears("role_stage", stage="taking_up", generation=2)
    assert case.serving.calls == [] and not case.member.leaving
    case.tell("sleeping", 1)
    case.tell("draining", 3)
    await case.hears("role_stage", stage="draining", generation=3)
    assert case.serving.calls == []


async def test_what_fails_is_told_and_the_next_stage_is_done(case):
    case.tell("sleeping")
    case.tell("taking_up")
    await case.hears("role_stage_failed", generation=1)  # there is no core
    case.serving.fails = True
    case.tell("taking_up", 2, "rollout")
    assert (await case.hears("role_stage_failed", generation=2))["detail"] == "no memory"
    assert case.slots() == (0, 0)
    case.serving.fails = False
    case.tell("taking_up", 3, "rollout")
    await case.hears("role_stage", stage="taking_up", generation=3)
    assert case.slots() == (8, 8)


async def test_a_core_that_is_gone_is_waited_for(case):
    hybrid = await case.to_train()
    FakeHybrid.closed.add(("core", 1))
    hybrid.ends.put("the core is gone")
    case.tell(None, pool=(1, "core", 2))
    await case.hears("role_stage", stage="reconnected", generation=1)
    found = FakeHybrid.made.get(timeout=60)
    assert found.address == ("core", 2) and found.token != hybrid.token
    found.ends.put("only this replica was given up")
    await case.hears("role_stage", stage="reconnected")
    assert FakeHybrid.made.get(timeout=60).address == ("core", 2)


@pytest.mark.parametrize("how", ["refused", "not there"])
async def test_a_core_that_does_not_want_it_is_told(case, how):
    hybrid = await case.to_train()
    if how == "refused":
        hybrid.ends.put(TrainError("the core refuses it"))
    else:
        FakeHybrid.closed |= {("core", 1), ("core", 2)}
        hybrid.ends.put("the core is gone")
        case.tell(None, pool=(1, "core", 2))
    await case.hears("role_stage_failed", generation=1)


async def test_what_breaks_while_it_trains_is_told_whatever_it_is(case):
    hybrid = await case.to_train()
    hybrid.ends.put(RuntimeError("out of memory"))
    assert (await case.hears("role_stage_failed", generation=1))["detail"] == "RuntimeError: out of memory"
    await case.stages(2, "rollout")  # and it goes back
    assert case.slots() == (8, 8)


async def test_it_leaves_while_it_waits_for_a_core(case):
    hybrid = await case.to_train()
    FakeHybrid.closed.add(("core", 1))
    hybrid.ends.put("the core is gone")
    case.tell("draining", 2, "rollout")
    await case.hears("role_stage", stage="draining", generation=2)
    case.tell("sleeping", 2, "rollout")
    await case.hears("role_stage", stage="sleeping", generation=2)
