import asyncio

import numpy as np
import pytest

from libra.rollout import VLLMEngine
from libra.rollout.kv_object import KVObject
from libra.rollout.vllm_settings import is_installed

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not is_installed(), reason="vllm is not installed here: make setup-vllm"),
    pytest.mark.timeout(600),
]
TOLERANCE_NATS = 1e-5


@pytest.fixture(scope="module")
def model(repository):
    """Two KV heads: one for each rank of TP 2."""
    return repository / "libra" / "assets" / "tiny_arithmetic"


def test_a_turn_continues_on_another_degree_from_exported_kv(model, make_request):
    def engine(tp):
        return VLLMEngine(model, slots=2, max_context_tokens=256, threads=1, tp=tp, host_kv_gib=0.05)

    def following(first, output):
        context = np.concatenate([first.context_ids, output.token_ids, np.array([7, 11, 3], np.int32)])
        return make_request(first.trajectory_id, turn=1, context=context, new=12, seed=2)

    def arrived(kv):
        assert kv is not None
        return KVObject.received(kv.header(), kv.data.copy())

    async def moved(home, other, name):
        first = make_request(name, length=75, new=9, seed=1)
        second = following(first, await home.generate(first))
        kv = arrived(await home.export_kv(name))
        assert kv.num_tokens == 84
        anew = await other.generate(second)
        await other._ask(other._core.llm.reset_prefix_cache())
        assert await other.import_kv(kv)
        output, stayed = await other.generate(second), await home.generate(second)
        assert (anew.cached_tokens, output.cached_tokens) == (0, 84)
        for each in (anew, stayed):
            assert output.token_ids.tolist() == each.token_ids.tolist()
            np.testing.assert_allclose(output.logprobs, each.logprobs, atol=TOLERANCE_NATS)

    async def stale(home, other):
        first = make_request("stale", length=75, new=9, seed=1)
        second = following(first, await home.generate(first))
        kv = arrived(await home.export_kv("stale"))
        assert await other.import_kv(kv)
        await other.load_version(1, model)
        assert await other.export_kv("stale") is None
        assert await other.import_kv(kv)  # it was under way while the weights changed
        assert (await other.generate(second)).cached_tokens == 0

    async def run():
        engines = [engine(2), engine(1)]
        try:
            for each in engines:
                await each.start()
                assert each.capacity().exchanges_kv
            await moved(*engines, "from two ranks to one")
            await moved(*reversed(engines), "and back")
            assert await engines[0].export_kv("nobody") is None
            await stale(*engines)
        finally:
            for each in engines:
                await each.close()

    asyncio.run(run())
