"""The engine as its callers see it: coroutines, futures, one thread. No test waits on a clock.

Where a test must act while a request runs, it lets the batch's own step call it: the step is the only clock.
"""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from libra.errors import ContextOverflow, EngineError, ModelError, WeightsError
from libra.rollout import RolloutEngine
from libra.types import StopReason


def use(engine, body):
    """Run ``await body(engine)`` in a fresh event loop with the engine started and, whatever happens, closed."""

    async def run():
        await engine.start()
        try:
            return await asyncio.wait_for(body(engine), 120)
        finally:
            await engine.close()

    return asyncio.run(run())


def at_step(engine, number, action):
    """Have the engine's thread call ``action`` right before its step of that number (0-based, from now on)."""
    step, count = engine._batch.step, iter(range(1_000_000))

    def wrapped():
        if next(count) == number:
            action()
        return step()

    engine._batch.step = wrapped


def test_it_is_a_rollout_engine(make_engine):
    assert isinstance(make_engine(), RolloutEngine)


def test_more_requests_than_slots_all_finish_with_their_own_answers(make_engine, make_request):
    requests = [make_request(f"r{n}", length=3 + n % 9, new=4 + n % 5, seed=n) for n in range(20)]

    async def all_at_once(engine):
        outputs = await asyncio.gather(*(engine.generate(request) for request in requests))
        return outputs, engine.stats()

    async def one_by_one(engine):
        return [await engine.generate(request) for request in requests]

    outputs, stats = use(make_engine(slots=3), all_at_once)
    single = use(make_engine(slots=1), one_by_one)
    assert [o.token_ids.tolist() for o in outputs] == [o.token_ids.tolist() for o in single]
    assert all(o.queued_s >= 0 and o.busy_s > 0 for o in outputs)
    assert stats.generated_tokens == sum(request.max_new_tokens for request in requests)
    assert stats.prefilled_tokens == sum(len(request.context_ids) for request in requests)
    assert (stats.running, stats.waiting, stats.slots, stats.retained) == (0, 0, 3, 3)


def test_requests_that_wait_start_in_order_of_priority(make_engine, make_request):
    async def body(engine):
        ended = []

        async def ask(name, priority):
            await engine.generate(make_request(name, new=3, priority=priority))
            ended.append(name)

        await engine.pause()
        tasks = [asyncio.create_task(ask(n, p)) for n, p in (("c", (2,)), ("a", (0, 1)), ("b", (1,)), ("a2", (0, 1)))]
        await asyncio.gather(
            *(engine.abort(name) for name in ("none1", "none2"))
        )  # everything above is in the batch now
        assert engine.stats().waiting == 4
        await engine.resume()
        await asyncio.gather(*tasks)
        return ended

    assert use(make_engine(slots=1), body) == ["a", "a2", "b", "c"]


def test_abort_ends_a_running_request_with_what_it_has_and_frees_its_slot(make_engine, make_request):
    async def body(engine):
        loop, called = asyncio.get_running_loop(), asyncio.Event()
        at_step(engine, 5, lambda: loop.call_soon_threadsafe(called.set))
        task = asyncio.create_task(engine.generate(make_request("a", length=5, new=120)))
        await called.wait()
        await engine.abort("a")
        return await task, engine.stats()

    output, stats = use(make_engine(), body)
    assert output.stop_reason is StopReason.ABORT
    assert 5 <= len(output.token_ids) == len(output.logprobs) <= 120
    assert (stats.running, stats.retained, stats.waiting) == (0, 0, 0)


def test_abort_of_a_waiting_request_gives_no_tokens(make_engine, make_request):
    async def body(engine):
        await engine.pause()
        task = asyncio.create_task(engine.generate(make_request("w")))
        await engine.abort("nobody")  # one turn of the loop, so that the request is in
        await engine.abort("w")
        return await task

    output = use(make_engine(), body)
    assert output.stop_reason is StopReason.ABORT
    assert len(output.token_ids) == 0


def test_cancelling_the_caller_aborts_its_request_and_no_later_one(make_engine, make_request):
    async def body(engine):
        await engine.pause()
        task = asyncio.create_task(engine.generate(make_request("a")))
        await engine.abort("nobody")  # the request is in the mailbox now,
        await engine.abort("nobody")  # and taken from it
        assert engine.stats().waiting == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        again = asyncio.create_task(engine.generate(make_request("a", new=3)))
        await engine.resume()
        return len((await again).token_ids)

    assert use(make_engine(), body) == 3


def test_forget_frees_retained_kv_and_that_of_a_running_request_when_it_ends(make_engine, make_request):
    async def body(engine):
        await engine.generate(make_request("a", new=2))
        assert engine.stats().retained == 1
        engine.forget("a")
        at_step(engine, 2, lambda: engine.forget("b"))
        output = await engine.generate(make_request("b", new=9))
        engine.forget("unknown")
        await engine.pause()  # behind everything above in the mailbox
        return len(output.token_ids), engine.stats().retained

    assert use(make_engine(), body) == (9, 0)


def test_a_paused_engine_takes_no_step_and_goes_on_where_it_was(make_engine, make_request):
    async def body(engine):
        loop, reached = asyncio.get_running_loop(), asyncio.Event()
        request = make_request("p", new=60, seed=4)
        at_step(engine, 4, lambda: loop.call_soon_threadsafe(reached.set))
        task = asyncio.create_task(engine.generate(request))
        await reached.wait()
        await engine.pause()
        before = engine.stats()
        for _ in range(20):
            await engine.abort("nobody")  # round trips through the engine's thread
        assert engine.stats() == before
        assert before.running == 1
        await engine.resume()
        return (await task).token_ids.tolist(), (await engine.generate(make_request("q", new=1))).token_ids.tolist()

    async def straight(engine):
        return (await engine.generate(make_request("p", new=60, seed=4))).token_ids.tolist()

    assert use(make_engine(), body)[0] == use(make_engine(), straight)


def test_weights_loaded_in_flight_serve_the_tokens_after_them(
    make_engine, make_request, make_model, reference_logprobs
):
    async def body(engine):
        loop = asyncio.get_running_loop()
        loaded = loop.create_future()

        def begin():
            loop.call_soon_threadsafe(
                lambda: asyncio.ensure_future(engine.load_version(7, make_model("qwen3", seed=1))).add_done_callback(
                    lambda task: loaded.set_result(task.exception())
                )
            )

        at_step(engine, 6, begin)
        request = make_request("v", length=20, new=100)
        output = await engine.generate(request)
        assert await loaded is None
        return request, output, engine.version, await engine.generate(make_request("w", new=4))

    request, output, version, after = use(make_engine(), body)
    changed = int((output.weight_versions == 0).sum())
    assert output.weight_versions.tolist() == [0] * changed + [7] * (100 - changed)
    assert 6 <= changed < 100
    assert output.kv_versions.tolist() == output.weight_versions.tolist()
    old = reference_logprobs(make_model("qwen3", seed=0), request.context_ids, output.token_ids)
    new = reference_logprobs(make_model("qwen3", seed=1), request.context_ids, output.token_ids)
    np.testing.assert_allclose(output.logprobs, np.concatenate([old[:changed], new[changed:]]), atol=1e-4)
    assert version == 7
    assert after.weight_versions.tolist() == [7] * 4


def test_weights_that_do_not_fit_leave_the_old_version_in_service(make_engine, make_request, make_model, tmp_path):
    async def body(engine):
        before = await engine.generate(make_request("a", new=8, seed=1))
        with pytest.raises(WeightsError, match=r"missing.*unknown"):
            await engine.load_version(1, make_model("qwen2"))
        with pytest.raises(WeightsError, match="cannot be read"):
            await engine.load_version(2, tmp_path)
        after = await engine.generate(make_request("a", new=8, seed=1))
        return before, after, engine.version

    before, after, version = use(make_engine(), body)
    assert before.token_ids.tolist() == after.token_ids.tolist()
    assert version == 0


def test_a_fault_in_the_loop_fails_what_is_pending_and_the_engine_goes_on(make_engine, make_request):
    async def body(engine):
        forward = engine._batch.forward
        logits = forward.logits

        def broken(hidden):
            forward.logits = logits
            raise MemoryError("no room for logits")

        at_step(engine, 3, lambda: setattr(forward, "logits", broken))
        asked = [engine.generate(make_request(f"f{n}", new=20)) for n in range(12)]
        failures = await asyncio.gather(*asked, return_exceptions=True)
        good = await engine.generate(make_request("f1", new=20, seed=3))
        return failures, good, engine.stats()

    failures, good, stats = use(make_engine(slots=8), body)
    assert len(failures) == 12
    for failure in failures:
        assert isinstance(failure, EngineError)
        assert "no room for logits" in str(failure)
        assert isinstance(failure.__cause__, MemoryError)
    expected = use(make_engine(), lambda engine: engine.generate(make_request("f1", new=20, seed=3)))
    assert good.token_ids.tolist() == expected.token_ids.tolist()
    assert good.cached_tokens == 0
    assert stats.running == stats.waiting == 0


def test_what_cannot_be_served_is_said_at_once(make_engine, make_request):
    async def body(engine):
        with pytest.raises(ContextOverflow, match=r"100 context tokens \+ 29 new ones = 129.*128"):
            await engine.generate(make_request("o", length=100, new=29))
        await engine.pause()
        first = asyncio.create_task(engine.generate(make_request("twice", new=2)))
        await engine.abort("nobody")
        with pytest.raises(EngineError, match="already has a request"):
            await engine.generate(make_request("twice", new=2))
        await engine.resume()
        return len((await first).token_ids)

    assert use(make_engine(), body) == 2


def test_close_fails_what_is_pending_joins_the_thread_and_may_be_called_twice(make_engine, make_request):
    async def body():
        engine = make_engine()
        with pytest.raises(EngineError, match="not started"):
            await engine.generate(make_request("early"))
        await engine.start()
        thread = engine._thread
        await engine.pause()
        task = asyncio.create_task(engine.generate(make_request("a")))
        await engine.abort("nobody")
        await asyncio.gather(engine.close(), engine.close())
        with pytest.raises(EngineError, match="closed"):
            await task
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(make_request("late"))
        return thread

    assert not asyncio.run(body()).is_alive()


def test_callers_of_several_event_loops_are_each_answered_in_their_own(make_engine, make_request):
    async def body(engine):
        async def ask():
            outputs = await asyncio.gather(*(engine.generate(make_request(f"o{n}", new=4)) for n in range(5)))
            return [len(output.token_ids) for output in outputs], threading.current_thread() is not main

        main = threading.current_thread()
        other = asyncio.to_thread(lambda: asyncio.run(ask()))
        mine = engine.generate(make_request("mine", new=4))
        return await asyncio.gather(other, mine)

    (lengths, elsewhere), mine = use(make_engine(), body)
    assert lengths == [4] * 5
    assert elsewhere
    assert len(mine.token_ids) == 4


def test_a_directory_without_a_model_is_named(make_engine, tmp_path):
    async def body():
        with pytest.raises(ModelError, match=r"no config\.json"):
            await make_engine(tmp_path).start()

    asyncio.run(body())
