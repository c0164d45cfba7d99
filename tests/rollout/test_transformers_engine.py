"""What `libra.testing.engines` does not ask of an engine: retained KV, faults in the loop, the thread's end.

Where a test must act while a request runs, it lets the batch's own step call it: the step is the only clock.
"""

import asyncio

import pytest

from libra.errors import EngineError


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
        return failures, await engine.generate(make_request("f1", new=20, seed=3)), engine.stats()

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
