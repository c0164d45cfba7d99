"""A trainer that publishes versions, and workers that serve them with engines into which faults are injected."""

import asyncio
from collections.abc import Callable

import numpy as np
import torch

from libra.facts import fields_of
from libra.rollout import TransformersEngine
from libra.train import Replica, TrainSettings
from libra.types import TurnRequest
from libra.weights import WeightStore
from libra.worker.engine.verified_engine import Serving
from libra.worker.training.publications import publish_checked

CONTEXT = 96


class Counted(TransformersEngine):
    """Notes the versions that it was given after it had started."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.loaded: list[int] = []

    def _load(self, version, directory):
        self.loaded.append(version)
        super()._load(version, directory)


class Faulty(Counted):
    """Loads as it should, then does what ``fault(batch, before, directory)`` says; ``before`` has the weights until then."""

    fault: Callable[..., None]

    def _load(self, version, directory):
        before = {name: tensor.clone() for name, tensor in self._batch.model.state_dict().items()}
        super()._load(version, directory)
        self.fault(self._batch, before, directory)


class Trainer:
    """A replica whose steps are random changes of a given size, and the versions it publishes."""

    def __init__(self, model_dir, root, dtype):
        self.replica = Replica(model_dir, TrainSettings(), dtype=dtype, threads=1)
        self.store = WeightStore(root)
        self.publish()

    def publish(self):
        return publish_checked(self.store, self.replica, self.replica.steps_done, CONTEXT)

    def step(self, size: float):
        """Every weight up or down by ``size``, as AdamW's first steps do, in the type of the weights."""
        generator = torch.Generator().manual_seed(self.replica.steps_done)
        with torch.no_grad():
            for parameter in self.replica.model.parameters():
                parameter.add_(torch.empty(parameter.shape).normal_(generator=generator).sign() * size)
        self.replica.steps_done += 1
        return self.publish()


class Worker:
    """A Serving, and what it reported."""

    def __init__(self, trainer, model_dir, build):
        self.reports: list[tuple[str, dict]] = []
        self.trainer = trainer
        self.serving = Serving(model_dir, build=build, newest=self.newest, report=self.report, store=trainer.store)

    def report(self, fact):
        self.reports.append((fact.name, fields_of(fact)))

    async def newest(self):
        return self.trainer.store.latest()

    def of(self, kind):
        return [fields for told, fields in self.reports if told == kind]

    async def pull(self):
        self.serving.announced = self.trainer.replica.steps_done
        await self.serving.pull()


def use(worker, body):
    async def run():
        await worker.serving.start()
        try:
            await asyncio.wait_for(body(), 300)
        finally:
            await worker.serving.close()

    asyncio.run(run())


def serving(*faults, behind=0):
    """Run a coroutine ``test(trainer, worker)`` on a worker that serves version ``behind`` already, in float32."""

    def wrap(body):
        def test(trainer, worker):
            one = trainer("float32")
            for _ in range(behind):
                one.step(1e-3)
            of_it = worker(one, *faults)

            async def pulled():
                await of_it.pull()
                await body(one, of_it)

            use(of_it, pulled)

        test.__doc__ = body.__doc__
        return test

    return wrap


def request(name="t", new=4, seed=0):
    return TurnRequest(name, 0, np.arange(3, 12, dtype=np.int32), new, seed=seed)


def stale_head(batch, before, directory):
    """The output head, tied to the embedding, keeps the old weights: what a server that packs its matrices may do."""
    head = torch.nn.Linear(*reversed(before["lm_head.weight"].shape), bias=False, dtype=batch.kv.dtype)
    head.weight.data = before["lm_head.weight"].clone()
    batch.forward.head = head.requires_grad_(False)


def layer_left_out(name):
    def fault(batch, before, directory):
        batch.model.get_parameter(name).copy_(before[name])

    return fault


def version_skipped(batch, before, directory):
    """The file of the version before is loaded, and called by the new number."""
    batch.load(batch.version, directory.parent / f"{batch.version - 1:08d}")


def always_wrong(build):
    """Engines whose head is wrong from the start, not only after a load."""

    def wrong(directory, version):
        engine = build(directory, version)
        run = engine.start

        async def start():
            await run()
            batch = engine._batch
            stale_head(batch, {"lm_head.weight": batch.model.lm_head.weight + 1e-3}, directory)

        engine.start = start
        return engine

    return wrong


def held(engine, loop, at=3):
    """Have the engine pause itself before its ``at``-th step from now; the event is set once it has."""
    reached, step, count = asyncio.Event(), engine._batch.step, iter(range(10**6))

    def stepping():
        if next(count) == at:
            engine._batch.step = step
            engine._set_paused(True)
            loop.call_soon_threadsafe(reached.set)
        return step()

    engine._batch.step = stepping
    return reached
