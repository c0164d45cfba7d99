import asyncio
from dataclasses import replace

import numpy as np
import pytest
from contract_part import only

from libra.rollout.vllm_engine import VLLMEngine
from libra.rollout.vllm_settings import is_installed
from libra.testing.engines import EngineContract
from libra.testing.models import VOCAB, Models
from libra.types import TurnRequest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not is_installed(), reason="vllm is not installed here: make setup-vllm"),
    pytest.mark.timeout(600),
]
PART = 9
"""Tokens of a request that continues a turn."""


class OfOneGroup(VLLMEngine):
    """An engine whose requests are all of one group."""

    async def generate(self, request):
        """As one of the group."""
        return await super().generate(replace(request, group="all"))


@only("recorded_logprobs", "aborts_its_request", "loaded_in_flight", "later_turn", "declares", "a_killed_engine")
class TestSpeculatingVLLMEngine(EngineContract):
    """One process that drafts: updates, aborts, deaths, turns in parts and capacity are as without drafts."""

    def make_engine(self, model_dir, **options):
        return OfOneGroup(model_dir, threads=1, speculate=True, **options)


def trajectories(group):
    """Samples of a group, two of each seed, whose second turn goes on in parts: (requests of a sample, in order)."""
    rng = np.random.default_rng(group)
    context = rng.integers(0, VOCAB, int(rng.integers(2, 40))).astype(np.int32)
    size, new = (16, 8, 5, 4, 2, 3)[group % 6], int(rng.integers(20, 60))
    fields = {"temperature": (1.0, 1.0, 0.3, 0.0)[group % 4], "top_p": (1.0, 0.8)[group % 2]}
    return [
        [TurnRequest(f"{group}-{n}", 0, context, new, seed=n // 2, group=str(group), stop_ids=(7,), **fields)] * 2
        for n in range(size)
    ]


async def serve(engine, groups):
    """Two turns of each sample of each group, the second one in parts."""

    async def sample(first, second):
        found = [await engine.generate(first)]
        begin = np.concatenate([first.context_ids, found[0].token_ids, np.array([1, 2, 3], np.int32)])
        context, made = begin, 0
        while made < second.max_new_tokens:
            part = min(PART, second.max_new_tokens - made)
            request = replace(second, turn=1, context_ids=context, max_new_tokens=part, generated=made)
            found.append(await engine.generate(request))
            made += len(found[-1].token_ids)
            context = np.concatenate([context, found[-1].token_ids])
            if found[-1].token_ids[-1] in second.stop_ids:
                break
        return found

    outputs = {}
    for group in range(groups):
        samples = trajectories(group)
        for pair, found in zip(samples, await asyncio.gather(*(sample(*pair) for pair in samples)), strict=True):
            outputs[pair[0].trajectory_id] = found
    return outputs


def test_tokens_and_logprobs_are_those_of_an_engine_without_drafts(tmp_path, vllm_engine):
    sides, stats = [], []

    async def served(engine, _):
        before = engine.stats()
        sides.append(await serve(engine, 12))
        after = engine.stats()
        changed = {name: getattr(after, name) - getattr(before, name) for name in ("generated_tokens", "steps")}
        stats.append(replace(after, **changed))

    async def drafting_engine():
        model = Models(tmp_path).first
        engine = VLLMEngine(model, threads=1, slots=16, max_context_tokens=256, speculate=True)
        await engine.start()
        try:
            await served(engine, None)
        finally:
            await engine.close()

    vllm_engine(served)
    asyncio.run(drafting_engine())
    plain, drafting = sides
    assert plain.keys() == drafting.keys()
    for name, outputs in plain.items():
        assert len(outputs) == len(drafting[name])
        for one, other in zip(outputs, drafting[name], strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist() and one.stop_reason == other.stop_reason
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    before, after = stats
    assert 0 < after.accepted_tokens < after.drafted_tokens and after.generated_tokens == before.generated_tokens
    assert after.steps < before.steps and before.drafted_tokens == 0 and before.drafted_by_rows == {}
    assert set(after.drafted_by_rows) <= {1, 2, 4, 8} and any(each.gain for each in after.drafted_by_rows.values())
    assert sum(each.accepted for each in after.drafted_by_rows.values()) == after.accepted_tokens
