"""An engine serves only what it has shown to hold: each fault is injected into a real engine, and the run goes on."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from libra.errors import EngineAsleep, EngineError, ModelError, WeightsError
from libra.rollout import TransformersEngine
from libra.train import Replica, TrainSettings
from libra.types import TurnRequest
from libra.weights import WeightStore
from libra.worker.verified_engine import Serving
from libra.worker.weight_publishing import publish_checked

CONTEXT = 96


class Counted(TransformersEngine):
    """Notes the versions that it was given after it had started."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.loaded: list[int] = []

    def _load(self, version: int, directory: Path) -> None:
        self.loaded.append(version)
        super()._load(version, directory)


class Faulty(Counted):
    """Loads as it should, then does what ``fault(batch, before, directory)`` says; ``before`` has the weights until then."""

    fault: Callable[..., None]

    def _load(self, version: int, directory: Path) -> None:
        before = {name: tensor.clone() for name, tensor in self._batch.model.state_dict().items()}
        super()._load(version, directory)
        self.fault(self._batch, before, directory)


class Trainer:
    """A replica whose steps are random changes of a given size, and the versions it publishes."""

    def __init__(self, model_dir: Path, root: Path, dtype: str) -> None:
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

    def __init__(self, trainer: Trainer, model_dir: Path, build) -> None:
        self.reports: list[tuple[str, dict]] = []
        self.trainer = trainer
        self.serving = Serving(
            model_dir,
            build=build,
            newest=self.newest,
            report=lambda report: self.reports.append((report.__struct_config__.tag, msgspec.to_builtins(report))),
            store=trainer.store,
        )

    async def newest(self):
        return self.trainer.store.latest()

    def of(self, kind: str) -> list[dict]:
        return [fields for told, fields in self.reports if told == kind]

    async def pull(self) -> None:
        self.serving.announced = self.trainer.replica.steps_done
        await self.serving.pull()


@pytest.fixture
def trainer(random_model, tmp_path) -> Callable[[str], Trainer]:
    return lambda dtype: Trainer(random_model, tmp_path / "weights", dtype)


@pytest.fixture
def worker(random_model) -> Callable[..., Worker]:
    """``worker(trainer, *faults)``: its n-th engine has the n-th fault, None or no entry: it has none."""

    def make(trainer: Trainer, *faults: Callable[..., None] | None) -> Worker:
        built = iter([*faults])

        def build(directory: Path, version: int) -> TransformersEngine:
            fault = next(built, None)
            dtype = str(trainer.replica.dtype).removeprefix("torch.")
            kind = Counted if fault is None else Faulty
            engine = kind(directory, slots=4, max_context_tokens=CONTEXT, dtype=dtype, threads=1, version=version)
            if fault is not None:
                engine.fault = fault
            return engine

        return Worker(trainer, random_model, build)

    return make


def use(worker: Worker, body) -> None:
    async def run() -> None:
        await worker.serving.start()
        try:
            await asyncio.wait_for(body(), 300)
        finally:
            await worker.serving.close()

    asyncio.run(run())


def serving(*faults: Callable[..., None], behind: int = 0):
    """Run a coroutine ``test(trainer, worker)`` on a worker that serves version ``behind`` already, in float32."""

    def wrap(body: Callable[[Trainer, Worker], Awaitable[None]]) -> Callable[..., None]:
        def test(trainer: Callable[[str], Trainer], worker: Callable[..., Worker]) -> None:
            one = trainer("float32")
            for _ in range(behind):
                one.step(1e-3)
            of_it = worker(one, *faults)

            async def pulled() -> None:
                await of_it.pull()
                await body(one, of_it)

            use(of_it, pulled)

        test.__doc__ = body.__doc__
        return test

    return wrap


def request(name: str = "t", new: int = 4, seed: int = 0) -> TurnRequest:
    return TurnRequest(name, 0, np.arange(3, 12, dtype=np.int32), new, seed=seed)


def stale_head(batch, before, directory) -> None:
    """The output head, tied to the embedding, keeps the old weights: what a server that packs its matrices may do."""
    head = torch.nn.Linear(*reversed(before["lm_head.weight"].shape), bias=False, dtype=batch.kv.dtype)
    head.weight.data = before["lm_head.weight"].clone()
    batch.forward.head = head.requires_grad_(False)


def layer_left_out(name: str) -> Callable[..., None]:
    def fault(batch, before, directory) -> None:
        batch.model.get_parameter(name).copy_(before[name])

    return fault


def version_skipped(batch, before, directory) -> None:
    """The file of the version before is loaded, and called by the new number."""
    batch.load(batch.version, directory.parent / f"{batch.version - 1:08d}")


def changed(store: WeightStore, number: int) -> set[str]:
    """Matrices of which a bit differs from the version before."""
    now, then = store.read(number), store.read(number - 1)
    return {name for name in now if now[name].ndim == 2 and not torch.equal(now[name], then[name])}


@pytest.mark.parametrize(
    ("fault", "size", "layer"),
    [
        (stale_head, 1e-3, "lm_head.weight"),
        (stale_head, 1e-6, "lm_head.weight"),
        (layer_left_out("model.layers.1.mlp.down_proj.weight"), 1e-6, "model.layers.1.mlp.down_proj.weight"),
        (layer_left_out("model.layers.0.self_attn.k_proj.weight"), 1e-6, "model.layers.0.self_attn.k_proj.weight"),
        (layer_left_out("model.layers.1.input_layernorm.weight"), 1e-2, "model.layers.1.input_layernorm.weight"),
        (version_skipped, 1e-6, ""),
    ],
    ids=["stale head", "stale head 1e-6", "down_proj 1e-6", "k_proj 1e-6", "norm", "skipped version"],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_fault_is_named_quarantined_and_mended(trainer, worker, dtype, fault, size, layer):
    trainer = trainer(dtype)
    worker = worker(trainer, fault)

    async def body():
        await worker.pull()
        assert worker.of("served")[-1]["version"] == 0 and not worker.of("quarantined")
        trainer.step(size)
        assert layer == "" or "norm" in layer or layer in changed(trainer.store, 1), (
            "a layer that is the same is not left out"
        )
        await worker.pull()
        (told,) = worker.of("quarantined")
        assert (told["version"], told["out"]) == (1, False)
        assert told["layer"] == layer or layer == ""
        assert worker.of("served")[-1]["version"] == 1
        assert worker.reports[-1][0] == "served", "served only after the quarantine"
        trainer.step(size)
        await worker.pull()  # the engine that was started again goes on with the next version in flight
        output = await worker.serving.generate(request())
        assert set(output.weight_versions) == {2}
        assert len(worker.of("quarantined")) == 1

    use(worker, body)


@serving(stale_head, stale_head)
async def test_an_engine_that_fails_twice_stays_out_with_the_layers_name(trainer, worker):
    trainer.step(1e-3)
    worker.serving.starter.build = _always_wrong(worker.serving.starter.build)
    with pytest.raises(EngineError, match=r"lm_head\.weight.*stays out"):
        await worker.pull()
    assert [told["out"] for told in worker.of("quarantined")] == [False, True]
    with pytest.raises(EngineError, match=r"lm_head\.weight"):
        await worker.serving.generate(request())
    assert [told["version"] for told in worker.of("served")] == [0]


def _always_wrong(build):
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


@serving(stale_head)
async def test_a_turn_under_way_never_returns_tokens_of_an_engine_that_disagrees(trainer, worker):
    seen = []
    engine = worker.serving.engine
    step, count, post = engine._batch.step, iter(range(10**6)), engine._post
    loop, asked = asyncio.get_running_loop(), threading.Event()

    def stepping():
        if next(count) == 3:  # in the middle of the turn a version is published, and its load requested
            trainer.step(1e-2)
            seen.append(asyncio.run_coroutine_threadsafe(worker.pull(), loop))
            assert asked.wait(60)
        return step()

    def posting(action, arguments, reply):
        post(action, arguments, reply)
        if action == engine._load:
            asked.set()

    engine._batch.step, engine._post = stepping, posting
    output = await worker.serving.generate(request(new=40))
    await asyncio.wrap_future(seen[0])
    assert worker.serving.engine is not engine
    assert len(worker.of("quarantined")) == 1
    expected = await worker.serving.engine.generate(request("again", new=40))
    assert set(output.weight_versions) == {1}
    assert output.token_ids.tolist() == expected.token_ids.tolist()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_without_a_fault_fifty_versions_pass_and_say_what_they_could_have_seen(trainer, worker, dtype):
    trainer = trainer(dtype)
    worker = worker(trainer)

    async def body():
        await worker.pull()
        for number in range(1, 51):
            trainer.step([1e-6, 1e-4, 3e-3][number % 3])
            if number % 5 != 4:  # a version that is passed over is no fault
                await worker.pull()
        assert not worker.of("quarantined")
        last = worker.of("served")[-1]
        assert last["version"] == 50
        check = last["check"]
        assert check["measured"] and check["method"] == "columns" and check["smallest_change"] == 0
        assert check["changed_layers"] > 0 and check["layers"] == 2 * 7 + 2

    use(worker, body)


@serving(behind=2)
async def test_a_worker_that_joins_late_measures_its_tolerance_at_version_0(trainer, worker):
    served = worker.of("served")
    assert [told["version"] for told in served] == [2]
    assert served[0]["check"]["measured"]
    assert worker.serving.engine_check.calibration.probe_nats < 1e-4


@serving()
async def test_an_engine_whose_process_was_replaced_is_asked_again(trainer, worker):
    engine = worker.serving.engine
    await worker.serving.generate(request())
    assert len(worker.of("served")) == 1
    engine.restarts = 1  # and came back with something else
    engine._batch.model.lm_head.weight.data.mul_(1.01)
    output = await worker.serving.generate(request())
    assert len(worker.of("quarantined")) == 1 and worker.serving.engine is not engine
    assert set(output.weight_versions) == {0}
    assert [told["version"] for told in worker.of("served")] == [0, 0]


@serving()
async def test_a_file_that_was_altered_is_refused_and_the_engine_keeps_what_it_had(trainer, worker):
    published = trainer.step(1e-3)
    data = bytearray(published.path.read_bytes())
    data[-1] ^= 1
    published.path.write_bytes(bytes(data))
    with pytest.raises(WeightsError, match="digest"):
        await worker.pull()
    assert worker.serving.engine.version == 0 and worker.serving.verified == 0


@serving(layer_left_out("model.layers.0.mlp.up_proj.weight"))
async def test_a_version_published_without_a_check_is_compared_with_its_file(trainer, worker):
    tensors = {name: tensor + 1e-6 for name, tensor in load_file(trainer.store.get(0).path).items()}
    trainer.store.publish(1, tensors)
    trainer.replica.steps_done = 1
    await worker.pull()
    assert worker.of("quarantined")[0]["layer"] == "model.layers.0.mlp.up_proj.weight"


def held(engine, loop, at: int = 3) -> asyncio.Event:
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


@serving()
async def test_sleep_waits_for_the_turns_under_way_and_frees_the_model_and_wake_checks_the_newest_version(
    trainer, worker
):
    serving, engine = worker.serving, worker.serving.engine
    model = weakref.ref(engine._batch.model)
    gc.freeze()  # as a worker's host does once it is set up
    reached = held(engine, asyncio.get_running_loop())
    turn = asyncio.ensure_future(serving.generate(request(new=20)))
    await reached.wait()
    sleeping = asyncio.ensure_future(serving.sleep())
    await asyncio.sleep(0)
    with pytest.raises(EngineAsleep):
        await serving.generate(request("late"))
    assert not sleeping.done()
    await engine.resume()
    assert len((await turn).token_ids) == 20
    await sleeping
    assert model() is None, "nothing of the model is left"
    serving.forget("t")
    with pytest.raises(EngineAsleep):
        await serving.generate(request())
    trainer.step(1e-3)
    await worker.pull()
    assert [told["version"] for told in worker.of("served")] == [0], "one asleep takes nothing"
    await serving.wake()
    assert worker.of("served")[-1]["version"] == 1 and worker.of("served")[-1]["check"]["method"] == "columns"
    assert set((await serving.generate(request())).weight_versions) == {1}
    assert serving.engine is not engine and serving.engine.loaded == [], "it was started from the version"
    trainer.step(1e-3)
    assert set((await serving.generate(request("t2"))).weight_versions) == {1}
    await worker.pull()
    assert set((await serving.generate(request("t3"))).weight_versions) == {2}


@serving()
async def test_sleep_may_abort_the_turns_under_way(trainer, worker):
    serving = worker.serving
    reached = held(serving.engine, asyncio.get_running_loop())
    turns = [asyncio.ensure_future(serving.generate(request(f"t{n}", new=60))) for n in range(6)]  # of four slots
    await reached.wait()  # and paused: no turn could end by itself
    await serving.sleep(abort=True)
    for ended in await asyncio.gather(*turns, return_exceptions=True):
        assert isinstance(ended, EngineAsleep)
    await serving.wake()
    assert len((await serving.generate(request("t0", new=60))).token_ids) == 60


@serving()
async def test_a_sleep_that_is_cancelled_while_it_waits_leaves_the_engine_serving(trainer, worker):
    serving, engine = worker.serving, worker.serving.engine
    reached = held(engine, asyncio.get_running_loop())
    turn = asyncio.ensure_future(serving.generate(request(new=20)))
    await reached.wait()
    sleeping = asyncio.ensure_future(serving.sleep())
    await asyncio.sleep(0)
    sleeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sleeping
    await engine.resume()
    assert len((await turn).token_ids) == 20
    assert len((await serving.generate(request("next"))).token_ids) == 4 and serving.engine is engine
    assert len(worker.of("served")) == 1


@serving()
async def test_an_engine_that_cannot_be_woken_as_another_kind_is_woken_as_the_kind_it_was(trainer, worker):
    def missing(directory: Path, version: int) -> TransformersEngine:
        return TransformersEngine(directory / "nowhere", slots=4, max_context_tokens=CONTEXT, version=version)

    serving = worker.serving
    measured, build = serving.engine_check.calibration, serving.starter.build
    await serving.sleep()
    with pytest.raises(ModelError):
        await serving.wake(missing)
    with pytest.raises(EngineAsleep):
        await serving.generate(request())
    assert serving.starter.build is build
    waking = asyncio.ensure_future(serving.wake())
    await asyncio.sleep(0)
    waking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waking
    assert serving.asleep
    await serving.wake()
    assert serving.engine_check.calibration is measured
    with pytest.raises(EngineError, match="awake"):
        await serving.wake()
    assert set((await serving.generate(request())).weight_versions) == {0}


@serving()
async def test_an_engine_woken_with_wrong_weights_is_quarantined_and_one_that_is_wrong_twice_stays_asleep(
    trainer, worker
):
    trainer.step(1e-3)
    serving = worker.serving
    build = serving.starter.build
    await serving.sleep()
    with pytest.raises(EngineError, match=r"lm_head\.weight.*stays out"):
        await serving.wake(_always_wrong(build))
    assert [told["out"] for told in worker.of("quarantined")] == [False, True]
    with pytest.raises(EngineAsleep):
        await serving.generate(request())
    wrong = iter([_always_wrong(build)])
    await serving.wake(lambda directory, version: next(wrong, build)(directory, version))
    assert [told["out"] for told in worker.of("quarantined")] == [False, True, False]
    assert set((await serving.generate(request())).weight_versions) == {1}
    # Another kind of engine has tolerances of its own, measured at the version it was woken with.
    assert serving.engine_check.calibration.measured and serving.engine_check.calibration.probe_nats < 1e-4


@serving()
async def test_a_woken_engine_has_its_file_after_the_store_has_dropped_it(trainer, worker):
    await worker.serving.sleep()
    trainer.step(1e-3)
    await worker.serving.wake()
    files = worker.serving.engine.settings.model_dir
    for _ in range(3):
        trainer.step(1e-3)
    trainer.store.drop(1)
    assert 1 not in trainer.store.numbers()
    assert load_file(files / "model.safetensors")
    await worker.serving.sleep()
    assert not files.exists()


def test_an_engine_closed_under_a_load_is_neither_quarantined_nor_started_again(trainer, worker):
    """A run that ends closes its engines while they load its last version."""
    loading, proceed = threading.Event(), threading.Event()

    def wait(batch, before, directory) -> None:
        loading.set()
        assert proceed.wait(60)

    source = trainer("float32")
    here = worker(source, wait)
    source.step(1e-3)

    async def close_under_a_load() -> None:
        await here.serving.start()
        engine, pull = here.serving.engine, asyncio.ensure_future(here.pull())
        assert await asyncio.to_thread(loading.wait, 60)
        close = asyncio.ensure_future(here.serving.close())
        await asyncio.sleep(0)
        proceed.set()
        await close
        for under_way in (pull, here.pull()):
            with pytest.raises(EngineError, match="closed"):
                await under_way
        assert here.serving.engine is engine

    asyncio.run(asyncio.wait_for(close_under_a_load(), 120))
    assert here.reports == []
