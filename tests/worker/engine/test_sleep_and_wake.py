"""An engine that sleeps frees its model and refuses turns; one that wakes has shown what it holds before it serves."""

import asyncio
import gc
import weakref

import pytest

from checked_engines import CONTEXT, always_wrong, held, request, serving
from libra.errors import EngineAsleep, EngineError, ModelError
from libra.rollout import TransformersEngine


@serving()
async def test_sleep_waits_for_turns_and_frees_the_model_and_wake_checks_the_newest_version(trainer, worker):
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
    kv = await engine.export_kv("t")
    assert kv is not None and kv.num_tokens > 20, "its KV is there for other engines"
    serving.forget("t")
    with pytest.raises(EngineAsleep):
        await serving.generate(request())
    trainer.step(1e-3)
    await worker.pull()
    assert [told["version"] for told in worker.of("version_served")] == [0], "one asleep takes nothing"
    await serving.wake()
    assert worker.of("version_served")[-1]["version"] == 1 and worker.of("version_checked")[-1]["method"] == "columns"
    assert set((await serving.generate(request())).weight_versions) == {1}
    assert serving.engine is not engine and serving.engine.loaded == [], "it was started from the version"
    trainer.step(1e-3)
    assert set((await serving.generate(request("t2"))).weight_versions) == {1}
    await worker.pull()
    assert set((await serving.generate(request("t3"))).weight_versions) == {2}


@pytest.mark.live
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


@pytest.mark.live
@serving()
async def test_an_engine_that_cannot_be_woken_as_another_kind_is_woken_as_the_kind_it_was(trainer, worker):
    def missing(directory, version):
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
async def test_an_engine_woken_with_wrong_weights_is_quarantined_and_twice_stays_asleep(trainer, worker):
    trainer.step(1e-3)
    serving = worker.serving
    build = serving.starter.build
    await serving.sleep()
    with pytest.raises(EngineError, match=r"lm_head\.weight"):
        await serving.wake(always_wrong(build))
    assert [told["out"] for told in worker.of("engine_quarantined")] == [False, True]
    with pytest.raises(EngineAsleep):
        await serving.generate(request())
    wrong = iter([always_wrong(build)])
    await serving.wake(lambda directory, version: next(wrong, build)(directory, version))
    assert [told["out"] for told in worker.of("engine_quarantined")] == [False, True, False]
    assert set((await serving.generate(request())).weight_versions) == {1}
    # Another kind of engine has tolerances of its own, measured at the version it was woken with.
    assert serving.engine_check.calibration.measured and serving.engine_check.calibration.probe_nats < 1e-4
