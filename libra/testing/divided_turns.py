"""The part of `libra.testing.engines.EngineContract` for engines that declare
``continues_turns``."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from libra.rollout.engine import RolloutEngine
from libra.testing.models import Models, ask
from libra.types import StopReason, TurnOutput, TurnRequest


class DividedTurns:
    """Turns in several requests."""

    def close_to(self, got: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
        """Log-probabilities agree within the tolerance."""
        raise NotImplementedError

    def test_a_turn_in_parts_is_the_turn_in_one_piece(self, run: Any, models: Models) -> None:
        """Greedy and sampled, alone and among others, with a stop id; only for engines that declare
        ``continues_turns``."""

        async def in_parts(engine: RolloutEngine, whole: TurnRequest, part: int) -> list[TurnOutput]:
            outputs: list[TurnOutput] = []
            context = whole.context_ids
            while True:
                done = len(context) - len(whole.context_ids)
                left = whole.max_new_tokens - done
                outputs.append(
                    await engine.generate(
                        replace(whole, context_ids=context, max_new_tokens=min(part, left), generated=done)
                    )
                )
                context = np.concatenate([context, outputs[-1].token_ids])
                if outputs[-1].stop_reason is StopReason.STOP or left <= part:
                    return outputs

        async def body(engine: RolloutEngine) -> list[tuple[int, TurnOutput, list[TurnOutput]]]:
            if not getattr(engine, "continues_turns", False):
                pytest.skip("this engine does not declare continues_turns")
            await engine.load_version(engine.version + 1, models.first)
            fields: tuple[dict[str, float], ...] = ({"temperature": 0.0}, {}, {"temperature": 0.7}, {"top_p": 0.6})
            requests = [ask(f"c{n}", length=30 + n, new=40, seed=n, **each) for n, each in enumerate(fields)]
            whole = [await engine.generate(request) for request in requests]
            stop = int(whole[1].token_ids[24])
            requests.append(ask("stopped", context=requests[1].context_ids, new=40, seed=1, stop_ids=(stop,)))
            whole.append(await engine.generate(requests[-1]))
            found: list[tuple[int, TurnOutput, list[TurnOutput]]] = []
            for size in (7, 1, 39):
                parts = await asyncio.gather(*(in_parts(engine, request, size) for request in requests))
                found += [(size, *pair) for pair in zip(whole, parts, strict=True)]
            return found

        for size, whole, parts in run(body):
            assert np.concatenate([part.token_ids for part in parts]).tolist() == whole.token_ids.tolist()
            self.close_to(np.concatenate([part.logprobs for part in parts]), whole.logprobs)
            assert parts[-1].stop_reason is whole.stop_reason
            assert all(part.stop_reason is StopReason.LENGTH for part in parts[:-1])
            assert len(parts) == -(-len(whole.token_ids) // size)
