"""An engine serves only what it has shown to hold: each fault is injected into a real engine, and the run goes on."""

import asyncio
import threading

import pytest
import torch
from safetensors.torch import load_file

from checked_engines import always_wrong, layer_left_out, request, serving, stale_head, use, version_skipped
from libra.errors import EngineError


def changed(store, number):
    """Matrices of which a bit differs from the version before."""
    now, then = store.read(number), store.read(number - 1)
    return {name for name in now if now[name].ndim == 2 and not torch.equal(now[name], then[name])}


DOWN, KEYS, NORM = (f"model.layers.{x}.weight" for x in ("1.mlp.down_proj", "0.self_attn.k_proj", "1.input_layernorm"))


@pytest.mark.parametrize(
    ("dtype", "fault", "size", "layer"),
    [
        ("bfloat16", stale_head, 1e-3, "lm_head.weight"),
        ("float32", stale_head, 1e-6, "lm_head.weight"),
        ("bfloat16", layer_left_out(DOWN), 1e-6, DOWN),
        ("float32", layer_left_out(KEYS), 1e-6, KEYS),
        ("bfloat16", layer_left_out(NORM), 1e-2, NORM),
        ("float32", version_skipped, 1e-6, ""),
    ],
    ids=["stale head", "stale head 1e-6", "down_proj 1e-6", "k_proj 1e-6", "norm", "skipped version"],
)
def test_a_fault_is_named_quarantined_and_mended(trainer, worker, dtype, fault, size, layer):
    trainer = trainer(dtype)
    worker = worker(trainer, fault)

    async def body():
        await worker.pull()
        assert worker.of("version_served")[-1]["version"] == 0 and not worker.of("engine_quarantined")
        trainer.step(size)
        assert layer in changed(trainer.store, 1) | {"", NORM}, "a layer that is the same is not left out"
        await worker.pull()
        (told,) = worker.of("engine_quarantined")
        assert (told["version"], told["out"]) == (1, False)
        assert told["layer"] == layer or layer == ""
        assert worker.of("version_served")[-1]["version"] == 1
        assert worker.reports[-1][0] == "version_checked", "served only after the quarantine"
        trainer.step(size)
        await worker.pull()  # the engine that was started again goes on with the next version in flight
        output = await worker.serving.generate(request())
        assert set(output.weight_versions) == {2}
        assert len(worker.of("engine_quarantined")) == 1

    use(worker, body)


@serving(stale_head, stale_head)
async def test_an_engine_that_fails_twice_stays_out_with_the_layers_name(trainer, worker):
    trainer.step(1e-3)
    worker.serving.starter.build = always_wrong(worker.serving.starter.build)
    with pytest.raises(EngineError, match=r"lm_head\.weight"):
        await worker.pull()
    assert [told["out"] for told in worker.of("engine_quarantined")] == [False, True]
    with pytest.raises(EngineError, match=r"lm_head\.weight"):
        await worker.serving.generate(request())
    assert [told["version"] for told in worker.of("version_served")] == [0]


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
    assert len(worker.of("engine_quarantined")) == 1
    expected = await worker.serving.engine.generate(request("again", new=40))
    assert set(output.weight_versions) == {1}
    assert output.token_ids.tolist() == expected.token_ids.tolist()


@pytest.mark.live
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_without_a_fault_twenty_versions_pass_and_say_what_they_could_have_seen(trainer, worker, dtype):
    trainer = trainer(dtype)
    worker = worker(trainer)

    async def body():
        await worker.pull()
        for number in range(1, 21):
            trainer.step([1e-6, 1e-4, 3e-3][number % 3])
            if number % 5 != 4:  # a version that is passed over is no fault
                await worker.pull()
        assert not worker.of("engine_quarantined")
        last = worker.of("version_served")[-1]
        assert last["version"] == 20
        check = worker.of("version_checked")[-1]
        assert check["measured"] and check["method"] == "columns" and check["smallest_change"] == 0
        assert check["changed_layers"] > 0 and check["layers"] == 2 * 7 + 2

    use(worker, body)


@serving(behind=2)
async def test_a_worker_that_joins_late_measures_its_tolerance_at_version_0(trainer, worker):
    served = worker.of("version_served")
    assert [told["version"] for told in served] == [2]
    assert worker.of("version_checked")[0]["measured"]
    assert worker.serving.engine_check.calibration.probe_nats < 1e-4


@serving()
async def test_an_engine_whose_process_was_replaced_is_asked_again(trainer, worker):
    engine = worker.serving.engine
    await worker.serving.generate(request())
    assert len(worker.of("version_served")) == 1
    engine.restarts = 1  # and came back with something else
    engine._batch.model.lm_head.weight.data.mul_(1.01)
    output = await worker.serving.generate(request())
    assert len(worker.of("engine_quarantined")) == 1 and worker.serving.engine is not engine
    assert set(output.weight_versions) == {0}
    assert [told["version"] for told in worker.of("version_served")] == [0, 0]


@serving(layer_left_out("model.layers.0.mlp.up_proj.weight"))
async def test_a_version_published_without_a_check_is_compared_with_its_file(trainer, worker):
    tensors = {name: tensor + 1e-6 for name, tensor in load_file(trainer.store.get(0).path).items()}
    trainer.store.publish(1, tensors)
    trainer.replica.steps_done = 1
    await worker.pull()
    assert worker.of("engine_quarantined")[0]["layer"] == "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize("recheck", [True, False])
def test_a_layer_that_changes_after_the_check_is_named_before_the_version_is_left(trainer, worker, recheck):
    trainer = trainer("float32")
    worker = worker(trainer)
    worker.serving._recheck = recheck
    layer = "model.layers.1.mlp.down_proj.weight"

    async def body():
        await worker.pull()
        trainer.step(1e-3)
        await worker.pull()
        batch = worker.serving.engine._batch
        with torch.no_grad():
            batch.model.get_parameter(layer)[0, 0] += 0.5
        batch.forward.weights_changed()
        trainer.step(1e-3)
        await worker.pull()
        found = [(each["version"], each["passed"], each["layer"]) for each in worker.of("version_rechecked")]
        assert found == ([(0, True, ""), (1, False, layer)] if recheck else [])
        assert not worker.of("engine_quarantined") and worker.of("version_served")[-1]["version"] == 2

    use(worker, body)
