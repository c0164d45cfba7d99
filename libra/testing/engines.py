"""Contract tests of rollout engines. Libra's own engines pass; test yours with a file like this:

    class TestMyEngine(EngineContract):
        def make_engine(self, model_dir, **options):
            return MyEngine(model_dir, **options)

Each class starts one engine, which its last test closes; each test begins with new weights. No test
sleeps: tests that act during a request poll the engine's counters. Comments name the invariants of
`libra.rollout.engine`.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from libra.errors import ContextOverflow, EngineError, WeightsError
from libra.projections import project_tensors
from libra.rollout.engine import RolloutEngine
from libra.testing.parts import VOCAB, Models, ask
from libra.types import StopReason, TurnOutput, TurnRequest

SLOTS = 4
MAX_CONTEXT_TOKENS = 512
LONG = 400
"""Tokens of a request that a test interrupts."""
TOLERANCE = 1e-3
"""Largest gap of log-probabilities between an engine and transformers, both in float32."""
LIMIT_S = 300.0


async def until(condition: Callable[[], bool]) -> None:
    """Poll until ``condition`` holds."""
    while not condition():  # noqa: ASYNC110  engines do not announce changes of their counters
        await asyncio.sleep(0.001)


async def tokens_made(engine: RolloutEngine, count: int, since: int) -> None:
    """Return when the engine has generated ``count`` tokens since ``since``."""
    await until(lambda: engine.stats().generated_tokens >= since + count)


async def answers(engine: RolloutEngine, requests: Sequence[TurnRequest]) -> list[TurnOutput]:
    """The answers to requests that are sent at once."""
    return await asyncio.gather(*map(engine.generate, requests))


async def all_asked(engine: RolloutEngine) -> None:
    """Return when the engine has the requests of all tasks created before."""
    await asyncio.sleep(0)  # each task runs up to its request
    await engine.abort("nobody")  # engines handle requests in order


def served(test: Callable[[Any, RolloutEngine, Models], Awaitable[None]]) -> Callable[..., None]:
    """A test in the event loop of its class's engine, which serves the first model as a version."""

    def runs(self: Any, run: Any, models: Models) -> None:
        async def body(engine: RolloutEngine) -> None:
            await engine.load_version(engine.version + 1, models.first)
            await test(self, engine, models)

        run(body)

    runs.__name__, runs.__doc__ = test.__name__, test.__doc__
    return runs


class EngineContract:
    """The tests. A subclass defines `make_engine`, and may change `tolerance`."""

    tolerance = TOLERANCE
    keeps_kv = False
    """Whether the engine keeps KV over an in-flight update."""
    tp_degrees: tuple[int, ...] = (1,)
    """Tensor-parallel degrees of the tests; above 1 `make_engine` gets ``tp``."""

    def make_engine(self, model_dir: Path, *, slots: int, max_context_tokens: int) -> RolloutEngine:
        """An engine, not started: float32, version 0, with q, k, v and a tied head."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def models(cls, tmp_path_factory: pytest.TempPathFactory) -> Models:
        """The models of all tests."""
        return Models(tmp_path_factory.mktemp("engines"))

    @pytest.fixture(scope="class")
    @classmethod
    def run(cls, models: Models) -> Iterator[Callable[[Callable[[RolloutEngine], Awaitable[Any]]], Any]]:
        """``run(body)``: await ``body(engine)`` with the engine of this class."""
        engine = cls().make_engine(models.first, slots=SLOTS, max_context_tokens=MAX_CONTEXT_TOKENS)

        async def begin() -> None:
            with pytest.raises(EngineError, match="not started"):
                await engine.generate(ask("early"))
            await engine.start()

        with asyncio.Runner() as runner:
            runner.run(asyncio.wait_for(begin(), LIMIT_S))
            try:
                yield lambda body: runner.run(asyncio.wait_for(body(engine), LIMIT_S))
            finally:
                runner.run(engine.close())

    # -- declared capacity (invariant 7) -----------------------------------------------------------------------------

    @served
    async def test_it_declares_its_kv_and_its_pass_times(self, engine: RolloutEngine, models: Models) -> None:
        """KV for at least a whole context, bytes that match its tokens, measured pass times."""
        before, begun = engine.capacity(), engine.stats()
        for width in (1, SLOTS, 2):  # batches of different sizes, which the fit needs
            await answers(engine, [ask(f"d{width}-{n}", length=20 + 60 * n, new=100, seed=n) for n in range(width)])
        after, ended = engine.capacity(), engine.stats()
        pass_s = (ended.busy_s - begun.busy_s) / (ended.steps - begun.steps)
        assert (after.kv_tokens, after.kv_token_bytes, after.slots, after.tp) == (
            before.kv_tokens, before.kv_token_bytes, SLOTS, before.tp,
        )  # fmt: skip
        assert after.kv_tokens >= MAX_CONTEXT_TOKENS
        assert after.kv_bytes == after.kv_tokens * after.kv_token_bytes > 0
        steps = after.steps
        assert steps is not None, "after 300 passes"
        assert min(steps.fixed_s, steps.sequence_s, steps.context_token_s, steps.prefill_token_s) >= 0.0
        assert steps.num_steps >= 32
        # The declared seconds of a medium batch are near the measured ones.
        assert 0.2 * pass_s < steps.step_s(2, 2 * 150) < 5.0 * pass_s

    # -- tokens and log-probabilities (invariants 1 and 2) -----------------------------------------------------------

    @served
    async def test_greedy_tokens_equal_transformers(self, engine: RolloutEngine, models: Models) -> None:
        requests = [ask(f"g{n}", length=1 + 17 * n, new=20, temperature=0.0) for n in range(6)]
        for request, output in zip(requests, await answers(engine, requests), strict=True):
            logits = models.logits(models.first, request.context_ids, output.token_ids).numpy()
            assert len(output.token_ids) == 20
            # Tokens within rounding of the best are ties.
            chosen = logits[np.arange(20), output.token_ids]
            assert (logits.max(1) - chosen <= self.tolerance).all()
            self.close_to(output.logprobs, models.logprobs(models.first, request.context_ids, output.token_ids))

    @served
    async def test_recorded_logprobs_equal_transformers(self, engine: RolloutEngine, models: Models) -> None:
        requests = [ask(f"l{n}", new=30, seed=n, temperature=(1.0, 0.7)[n % 2]) for n in range(8)]
        for request, output in zip(requests, await answers(engine, requests), strict=True):
            expected = models.logprobs(models.first, request.context_ids, output.token_ids, request.temperature)
            self.close_to(output.logprobs, expected)

    @served
    async def test_nucleus_sampling_renormalises(self, engine: RolloutEngine, models: Models) -> None:
        request = ask("nucleus", new=40, seed=3, top_p=0.5)
        output = await engine.generate(request)
        logits = models.logits(models.first, request.context_ids, output.token_ids).numpy()
        probabilities = np.exp(logits - logits.max(1, keepdims=True))
        probabilities /= probabilities.sum(1, keepdims=True)
        for row, token, logprob in zip(probabilities, output.token_ids, output.logprobs, strict=True):
            order = np.argsort(-row, kind="stable")
            kept = order[: int(np.searchsorted(np.cumsum(row[order]), 0.5)) + 1]
            assert token in kept
            assert abs(np.log(row[token] / row[kept].sum()) - logprob) <= 10 * self.tolerance

    @served
    async def test_the_seed_decides_the_tokens(self, engine: RolloutEngine, models: Models) -> None:
        requests = [ask(f"s{n}", new=16, seed=100 + n) for n in range(SLOTS)]
        together = [output.token_ids.tolist() for output in await answers(engine, requests)]
        assert together == [(await engine.generate(request)).token_ids.tolist() for request in requests]
        assert len(set(map(tuple, together))) == SLOTS

    @served
    async def test_a_stop_id_ends_the_turn_and_is_kept(self, engine: RolloutEngine, models: Models) -> None:
        free = await engine.generate(ask("stop", new=24, seed=5))
        tokens, stops = free.token_ids.tolist(), (int(free.token_ids[6]), VOCAB - 1)
        stopped = await engine.generate(ask("stop", new=24, seed=5, stop_ids=stops))
        first = min(tokens.index(token) for token in stops if token in tokens)
        assert stopped.token_ids.tolist() == tokens[: first + 1]
        assert (free.stop_reason, stopped.stop_reason) == (StopReason.LENGTH, StopReason.STOP)
        assert len(tokens) == 24

    @served
    async def test_a_turn_in_parts_is_the_whole_turn(self, engine: RolloutEngine, models: Models) -> None:
        """Greedy and sampled, alone and among others, with a stop id, if ``continues_turns``."""
        if not getattr(engine, "continues_turns", False):
            pytest.skip("this engine does not declare continues_turns")

        async def in_parts(request: TurnRequest, part: int) -> list[TurnOutput]:
            outputs: list[TurnOutput] = []
            context, done = request.context_ids, 0
            while True:
                new = min(part, request.max_new_tokens - done)
                asked = replace(request, context_ids=context, max_new_tokens=new, generated=done)
                outputs.append(await engine.generate(asked))
                context, done = np.concatenate([context, outputs[-1].token_ids]), done + new
                if outputs[-1].stop_reason is StopReason.STOP or done == request.max_new_tokens:
                    return outputs

        fields: tuple[dict[str, float], ...] = ({"temperature": 0.0}, {}, {"temperature": 0.7}, {"top_p": 0.6})
        requests = [ask(f"c{n}", length=30 + n, new=40, seed=n, **each) for n, each in enumerate(fields)]
        stop = int((await engine.generate(requests[1])).token_ids[24])
        requests.append(ask("stopped", context=requests[1].context_ids, new=40, seed=1, stop_ids=(stop,)))
        wholes = [await engine.generate(request) for request in requests]
        for size in (7, 1, 39):
            divided = await asyncio.gather(*(in_parts(request, size) for request in requests))
            for whole, parts in zip(wholes, divided, strict=True):
                assert np.concatenate([part.token_ids for part in parts]).tolist() == whole.token_ids.tolist()
                self.close_to(np.concatenate([part.logprobs for part in parts]), whole.logprobs)
                assert parts[-1].stop_reason is whole.stop_reason
                assert all(part.stop_reason is StopReason.LENGTH for part in parts[:-1])
                assert len(parts) == -(-len(whole.token_ids) // size)

    # -- slots and order (invariants 5 and 6) ------------------------------------------------------------------------

    @served
    async def test_more_requests_than_slots_are_answered(self, engine: RolloutEngine, models: Models) -> None:
        before = engine.stats()
        requests = [ask(f"m{n}", length=3 + n % 9, new=2 + n % 5, seed=n) for n in range(5 * SLOTS)]
        outputs, after = await answers(engine, requests), engine.stats()
        assert [len(o.token_ids) for o in outputs] == [r.max_new_tokens for r in requests]
        assert all(o.queued_s >= 0 and o.busy_s > 0 for o in outputs)
        assert (after.running, after.waiting, after.slots) == (0, 0, SLOTS)
        assert after.generated_tokens - before.generated_tokens == sum(r.max_new_tokens for r in requests)
        used = after.prefilled_tokens - before.prefilled_tokens + after.cached_tokens - before.cached_tokens
        assert used == sum(len(r.context_ids) for r in requests)

    @served
    async def test_the_most_urgent_start_first(self, engine: RolloutEngine, models: Models) -> None:
        ended: list[str] = []

        async def one(name: str, priority: tuple[int, ...], new: int) -> None:
            await engine.generate(ask(name, new=new, priority=priority))
            ended.append(name)

        await engine.pause()
        holders = [asyncio.create_task(one(f"holder{n}", (0,), LONG)) for n in range(SLOTS - 1)]
        names = {"c": (2,), "a": (0, 1), "b": (1,), "a2": (0, 1), "b3": (1, 0, 5)}
        tasks = [asyncio.create_task(one(name, priority, 2)) for name, priority in names.items()]
        await all_asked(engine)
        assert engine.stats().running + engine.stats().waiting == SLOTS - 1 + len(tasks)
        await engine.resume()
        await asyncio.gather(*tasks)
        assert not any(task.done() for task in holders)
        for n in range(SLOTS - 1):
            await engine.abort(f"holder{n}")
        await asyncio.gather(*holders)
        assert ended[: len(names)] == ["a", "a2", "b", "b3", "c"]

    @served
    async def test_abort_ends_a_running_request(self, engine: RolloutEngine, models: Models) -> None:
        begun = engine.stats().generated_tokens
        task = asyncio.create_task(engine.generate(ask("gone", new=LONG)))
        await tokens_made(engine, 5, begun)
        await engine.abort("gone")
        output, stats = await task, engine.stats()
        assert output.stop_reason is StopReason.ABORT
        assert 1 <= len(output.token_ids) == len(output.logprobs) == len(output.weight_versions) < LONG
        assert (stats.running, stats.retained, stats.waiting) == (0, 0, 0)
        filled = await answers(engine, [ask(f"f{n}", new=3) for n in range(SLOTS)])
        assert [len(o.token_ids) for o in filled] == [3] * SLOTS

    @served
    async def test_abort_ends_a_waiting_request(self, engine: RolloutEngine, models: Models) -> None:
        await engine.pause()
        task = asyncio.create_task(engine.generate(ask("waiting")))
        await all_asked(engine)
        await engine.abort("waiting")
        output = await task
        await engine.resume()
        assert output.stop_reason is StopReason.ABORT
        assert len(output.token_ids) == 0

    @served
    async def test_cancelling_a_caller_aborts_its_request(self, engine: RolloutEngine, models: Models) -> None:
        begun = engine.stats().generated_tokens
        task = asyncio.create_task(engine.generate(ask("again", new=LONG)))
        await tokens_made(engine, 1, begun)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: engine.stats().running == 0)
        assert len((await engine.generate(ask("again", new=3))).token_ids) == 3

    @served
    async def test_impossible_requests_are_refused(self, engine: RolloutEngine, models: Models) -> None:
        with pytest.raises(ContextOverflow, match=f"{MAX_CONTEXT_TOKENS}"):
            await engine.generate(ask("long", length=MAX_CONTEXT_TOKENS - 9, new=10))
        with pytest.raises(EngineError, match="the model knows"):
            await engine.generate(ask("ids", context=[1, VOCAB]))
        await engine.pause()
        first = asyncio.create_task(engine.generate(ask("twice", new=2)))
        await all_asked(engine)
        with pytest.raises(EngineError, match="already has a request"):
            await engine.generate(ask("twice", new=2))
        await engine.resume()
        full = await engine.generate(ask("full", length=MAX_CONTEXT_TOKENS - 10, new=10))
        assert (len((await first).token_ids), len(full.token_ids)) == (2, 10)

    @served
    async def test_a_paused_engine_takes_no_step(self, engine: RolloutEngine, models: Models) -> None:
        straight = await engine.generate(ask("p", new=LONG, seed=4))
        begun = engine.stats().generated_tokens
        task = asyncio.create_task(engine.generate(ask("p", new=LONG, seed=4)))
        await tokens_made(engine, 4, begun)
        await engine.pause()
        before = engine.stats()
        for _ in range(20):
            await engine.abort("nobody")
        after = engine.stats()
        assert (after.generated_tokens, after.steps, after.running) == (before.generated_tokens, before.steps, 1)
        await engine.resume()
        assert (await task).token_ids.tolist() == straight.token_ids.tolist()

    # -- weights (invariants 3 and 4) --------------------------------------------------------------------------------

    @served
    async def test_weights_are_loaded_in_flight(self, engine: RolloutEngine, models: Models) -> None:
        old, begun = engine.version, engine.stats().generated_tokens
        requests = [ask(f"v{n}", new=LONG, seed=n) for n in range(2)]
        tasks = [asyncio.create_task(engine.generate(r)) for r in requests]
        await tokens_made(engine, 12, begun)
        await engine.load_version(old + 1, models.second)
        assert engine.version == engine.stats().version == old + 1
        for request, output in zip(requests, await asyncio.gather(*tasks), strict=True):
            changed = int((output.weight_versions == old).sum())
            assert 0 < changed < LONG
            assert output.weight_versions.tolist() == [old] * changed + [old + 1] * (LONG - changed)
            before = models.logprobs(models.first, request.context_ids, output.token_ids)
            self.close_to(output.logprobs[:changed], before[:changed])
            assert (output.kv_versions[:changed] == old).all()
            if self.keeps_kv:
                assert (output.kv_versions == old).all()
                continue
            after = models.logprobs(models.second, request.context_ids, output.token_ids)
            assert np.abs(after - before).max() >= 0.05  # else the next line would test nothing
            self.close_to(output.logprobs[changed:], after[changed:])
            assert (output.kv_versions == output.weight_versions).all()

    @served
    async def test_a_later_turn_reuses_its_prefix(self, engine: RolloutEngine, models: Models) -> None:
        old = engine.version
        first = await engine.generate(ask("turns", length=100, new=30, seed=1))
        context = np.concatenate([ask("turns", length=100).context_ids, first.token_ids, np.arange(5)])
        second = ask("turns", turn=1, new=10, seed=2, context=context)
        same = await engine.generate(second)
        await engine.load_version(old + 1, models.second)
        other = await engine.generate(second)
        assert 0 < same.cached_tokens < len(second.context_ids)
        assert other.cached_tokens == 0
        self.close_to(same.logprobs, models.logprobs(models.first, second.context_ids, same.token_ids))
        self.close_to(other.logprobs, models.logprobs(models.second, second.context_ids, other.token_ids))
        assert other.kv_versions.tolist() == other.weight_versions.tolist() == [old + 1] * 10

    @served
    async def test_wrong_weights_leave_the_old_version(self, engine: RolloutEngine, models: Models) -> None:
        old, before = engine.version, await engine.generate(ask("keep", seed=1))
        with pytest.raises(WeightsError, match="shape"):
            await engine.load_version(old + 1, models.other)
        with pytest.raises(WeightsError, match="cannot be read"):
            await engine.load_version(old + 2, models.directory)
        after = await engine.generate(ask("keep", seed=1))
        assert engine.version == old
        assert after.token_ids.tolist() == before.token_ids.tolist()
        assert after.weight_versions.tolist() == [old] * 8

    @served
    async def test_probes_tell_the_weights_served(self, engine: RolloutEngine, models: Models) -> None:
        begun = engine.stats().generated_tokens
        task = asyncio.create_task(engine.generate(ask("held", new=LONG, seed=6)))
        await tokens_made(engine, 3, begun)
        await engine.pause()
        await engine.load_version(engine.version + 1, models.second)
        before = engine.stats().generated_tokens
        ids = ask("probe", length=60).context_ids
        scored, projected = await engine.score(ids), await engine.project(11)
        assert engine.stats().generated_tokens == before
        await engine.resume()
        assert len((await task).token_ids) == LONG
        self.close_to(scored, models.logprobs(models.second, ids[:1], ids[1:]))
        reference, stale = _projections(models.second, 11), _projections(models.first, 11)
        assert set(projected) == set(reference)
        for name, numbers in reference.items():
            assert np.abs(np.subtract(projected[name], numbers)).max() < 1e-4, name
            assert np.abs(np.subtract(projected[name], stale[name])).max() > 1e-2, name

    # -- lifecycle ---------------------------------------------------------------------------------------------------

    @served
    async def test_callers_have_their_own_event_loops(self, engine: RolloutEngine, models: Models) -> None:
        others = [ask(f"o{n}", new=4) for n in range(5)]
        there = asyncio.to_thread(lambda: asyncio.run(answers(engine, others)))
        outputs, mine = await asyncio.gather(there, engine.generate(ask("mine", new=4)))
        assert [len(output.token_ids) for output in (*outputs, mine)] == [4] * 6

    @served
    async def test_a_killed_engine_process_is_replaced(self, engine: RolloutEngine, models: Models) -> None:
        pids = list(getattr(engine, "process_ids", []))
        if not pids:
            pytest.skip("this engine has no process of its own")
        await engine.load_version(engine.version + 1, models.second)
        begun = engine.stats().generated_tokens
        tasks = [asyncio.create_task(engine.generate(ask(f"k{n}", new=LONG))) for n in range(2 * SLOTS)]
        await tokens_made(engine, 5, begun)
        os.kill(pids[0], signal.SIGKILL)
        failures = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(failure) for failure in failures if not isinstance(failure, EngineError)] == []
        request = ask("k0", new=12, seed=9)
        output = await engine.generate(request)
        assert not set(pids) & set(engine.process_ids)  # type: ignore[attr-defined]
        assert output.weight_versions.tolist() == [engine.version] * 12
        self.close_to(output.logprobs, models.logprobs(models.second, request.context_ids, output.token_ids))
        assert (engine.stats().running, engine.stats().waiting) == (0, 0)

    def test_close_fails_what_is_pending_and_may_be_called_twice(self, run: Any, models: Models) -> None:
        async def body(engine: RolloutEngine) -> None:
            await engine.pause()
            task = asyncio.create_task(engine.generate(ask("pending")))
            await all_asked(engine)
            await asyncio.gather(engine.close(), engine.close())
            for asked in (task, engine.generate(ask("late"))):
                with pytest.raises(EngineError, match="closed"):
                    await asked

        run(body)

    def test_a_degree_changes_what_is_declared_and_no_probability(self, models: Models) -> None:
        async def body(tp: int) -> None:
            options: dict[str, Any] = {"slots": SLOTS, "max_context_tokens": MAX_CONTEXT_TOKENS, "tp": tp}
            engine = self.make_engine(models.first, **options)
            await engine.start()
            try:
                assert engine.capacity().tp == tp
                request = ask("parallel")
                output = await engine.generate(request)
                self.close_to(output.logprobs, models.logprobs(models.first, request.context_ids, output.token_ids))
            finally:
                await engine.close()

        for tp in (degree for degree in self.tp_degrees if degree > 1):
            asyncio.run(body(tp))

    def close_to(self, got: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
        """Log-probabilities agree within the tolerance."""
        assert len(got) == len(expected)
        if len(got):
            gap = float(np.abs(got - expected).max())
            assert gap <= self.tolerance, f"largest gap {gap:.2e}, tolerance {self.tolerance:.2e}"


def _projections(directory: Path, seed: int) -> dict[str, tuple[float, ...]]:
    """Expected projections of a model with a tied head."""
    from safetensors.torch import load_file

    tensors = load_file(directory / "model.safetensors")
    return project_tensors(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, seed)
