import asyncio
import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.errors import KVRefused
from libra.rollout.kv_objects import HostKV, KVObject

POOL = {"host_kv_gib": 0.25}
ACTS = st.sampled_from(["put", "get", "drop", "load"])


def use(engines, body):
    async def run():
        try:
            for engine in engines:
                await engine.start()
            return await asyncio.wait_for(body(*engines), 120)
        finally:
            for engine in engines:
                await engine.close()

    return asyncio.run(run())


def next_turn(make_request, request, output, observation=(7, 11, 3, 19)):
    context = np.concatenate([request.context_ids, output.token_ids, np.array(observation, np.int32)])
    return make_request(request.trajectory_id, turn=1, context=context, new=14, seed=request.seed + 1)


def received(kv, data=None, **changed):
    """The object as it arrives at another engine, with what a test changes on the way."""
    return KVObject.received(kv.header() | changed, kv.data.copy() if data is None else data)


def test_a_batch_continues_from_exported_kv_as_if_it_had_stayed(make_engine, make_request):
    first = [make_request(f"t{n}", length=10 + 9 * n, new=6 + n, seed=n) for n in range(3)]

    async def first_turns(engine):
        return await asyncio.gather(*(engine.generate(request) for request in first))

    async def at_once(engine, requests):
        await engine.pause()  # so that all of them are in one batch
        tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
        await engine.abort("nobody")
        await engine.resume()
        return await asyncio.gather(*tasks)

    async def body(home, other, empty):
        outputs = await first_turns(home)
        second = [next_turn(make_request, request, output) for request, output in zip(first, outputs, strict=True)]
        for request in first:
            kv = await home.export_kv(request.trajectory_id)
            assert kv.num_tokens == len(request.context_ids) + request.max_new_tokens - 1
            assert await other.import_kv(received(kv))
        return await at_once(home, second), await at_once(other, second), await at_once(empty, second)

    stayed, moved, anew = use([make_engine(**POOL) for _ in range(3)], body)
    for one, two, three in zip(stayed, moved, anew, strict=True):
        assert one.token_ids.tolist() == two.token_ids.tolist() == three.token_ids.tolist()
        assert one.logprobs.tobytes() == two.logprobs.tobytes()
        assert one.cached_tokens == two.cached_tokens > three.cached_tokens == 0
        np.testing.assert_allclose(two.logprobs, three.logprobs, atol=1e-4)


def test_an_evicted_context_comes_back_from_host_memory(make_engine, make_request):
    first = [make_request(f"e{n}", length=12, new=6, seed=n) for n in range(3)]

    async def body(engine):
        outputs = [await engine.generate(request) for request in first]  # one slot: each evicts the one before
        second = [next_turn(make_request, request, output) for request, output in zip(first, outputs, strict=True)]
        return [await engine.generate(request) for request in second], engine.stats()

    kept, stats = use([make_engine(slots=1, **POOL)], body)
    lost, without = use([make_engine(slots=1)], body)  # which has no memory for them
    assert [output.cached_tokens for output in kept] == [17, 17, 17]
    assert [output.cached_tokens for output in lost] == [0, 0, 0]
    assert stats.prefilled_tokens == without.prefilled_tokens - 3 * 17
    assert [output.token_ids.tolist() for output in kept] == [output.token_ids.tolist() for output in lost]


def test_kv_of_other_weights_or_engines_is_computed_again(make_engine, make_request, make_model):
    first = make_request("a", length=20, new=6)

    async def body(home, other):
        second = next_turn(make_request, first, await home.generate(first))
        kv = await home.export_kv("a")
        for changed in ({"version": 1}, {"digest": "0" * 32}, {"layout": "slots-1x2x2x16-float32"}):
            assert await other.import_kv(received(kv, **changed))
            output = await other.generate(second)
            assert output.cached_tokens == 0, changed
            other.forget("a")
        assert await other.import_kv(received(kv))
        right = await other.generate(second)
        await other.load_version(1, make_model("qwen3", 1))
        assert await other.export_kv("a") is None
        await other.import_kv(kv)  # it was under way while the weights changed
        return right, output, await other.generate(second)

    right, anew, later = use([make_engine(**POOL) for _ in range(2)], body)
    assert (later.cached_tokens, set(later.kv_versions.tolist())) == (0, {1})
    assert right.cached_tokens == 25
    assert right.token_ids.tolist() == anew.token_ids.tolist()


def test_a_damaged_object_is_refused():
    data = np.arange(100, dtype=np.uint8)
    kv = KVObject.of("a", 3, np.arange(5), "layout", data)
    assert received(kv).header() == kv.header()
    flipped = data.copy()
    flipped[40] ^= 1
    with pytest.raises(KVRefused, match="checksum"):
        received(kv, flipped)
    with pytest.raises(KVRefused):
        received(kv, data[:60])
    with pytest.raises(KVRefused):
        KVObject.received({"trajectory_id": "a"}, data)
    with pytest.raises(KVRefused):
        kv.check(3, "layout", np.arange(3))


@given(st.integers(0, 60), st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 40), st.integers(0, 3), ACTS)))
def test_the_pool_never_exceeds_its_bound_and_keeps_the_last_object(limit, steps):
    pool, last = HostKV(limit), {}
    for name, size, version, step in steps:
        match step:
            case "put":
                kv = KVObject(name, version, 1, "", "", 0, np.zeros(size, np.uint8))
                assert pool.put(kv) == (size <= limit)
                last[name] = kv
                assert (pool.get(name) is kv) == (size <= limit)
            case "get":
                assert pool.get(name) in (None, last.get(name))
            case "drop":
                pool.drop(name)
                assert pool.get(name) is None
            case "load":
                pool.drop_before(version)
                assert all(kv is None or kv.version >= version for kv in map(pool.get, "abcdef"))
        kept = [kv for kv in map(pool.get, "abcdef") if kv is not None]
        assert pool.used_bytes == sum(kv.num_bytes for kv in kept) <= limit
        assert len(pool) == len(kept)


def test_the_least_valuable_object_is_evicted_first():
    pool = HostKV(40)
    kv = KVObject("old", 1, 1, "", "", 0, np.zeros(10, np.uint8))
    new = {name: dataclasses.replace(kv, trajectory_id=name, version=2) for name in ("waits", "first", "last", "more")}
    for each in (new["waits"], new["first"], kv, new["last"]):
        pool.put(each)
    gone = []
    for name in ("x", "y", "z"):
        before = {each for each in ("old", "waits", "first", "last") if pool.get(each)}
        for each in ("first", "last"):
            pool.get(each)
        pool.put(dataclasses.replace(new["more"], trajectory_id=name, version=3), waiting={"waits"})
        gone += [each for each in before if not pool.get(each)]
    assert gone == ["old", "first", "last"]
