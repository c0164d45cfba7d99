"""Group speculation: equal tokens, accepted tokens per step, and seconds per token with and without.

The quick start's model answers its own questions in groups of 16 samples: four turns each, with a calculator's return between
them (a number that is drawn, the same for both sides), at temperature 1. An engine of 1, 4 or 16 slots serves one group after
another, with speculation and without, in turns: A B A B. Groups are new in each pair; before the first one the sides choose their
lengths of drafts on other groups.

* ``differing_tokens``: tokens that differ between the sides, over all trajectories of all batch sizes (``--trajectories`` each).
* ``accepted_per_step_batch1``, ...: tokens accepted per step and sequence beside the one that every step gives, of steps with
  drafts, by running sequences (a power of two: 8 are five to eight).
* ``time_ratio_batch1``, ``..._batch4``, ``..._batch16``: seconds per token with over without, median of pairs;
  ``seconds_per_token_batch1`` and ``seconds_per_token_batch1_without``, ...: both.

``python -m benchmarks.speculation [--pairs 7] [--trajectories 336] [--max-new-tokens 24] --json``
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.report import QUICKSTART, Figure, alternate, command_parser, emit
from libra.config import load_config, resolve_model
from libra.envs.registry import make_environment
from libra.rollout.chat_format import ChatFormat, load_chat_format
from libra.rollout.speculation import Drafted
from libra.rollout.transformers_engine import TransformersEngine
from libra.types import TurnRequest

GROUP_SIZE, TURNS = 16, 4
BATCHES = (1, 4, 16)
WARM_UP_GROUPS = 6
"""Groups before the first pair, in which each side tries its lengths of drafts."""


class Side:
    """An engine with one batch size, with speculation or without."""

    def __init__(self, slots: int, speculate: bool, max_new_tokens: int) -> None:
        config = load_config(str(QUICKSTART))
        self.environment: Any = make_environment(config.environment.name, config.environment.args, 0)
        self.max_new_tokens, self.tokens = max_new_tokens, dict[str, list[int]]()
        model_dir = resolve_model(config.model.path)
        tools = [tool.schema for tool in self.environment.tools]
        self.chat: ChatFormat = load_chat_format(model_dir, tools)
        self.engine = TransformersEngine(
            model_dir, slots=slots, max_context_tokens=config.rollout.max_context_tokens, threads=1, speculate=speculate
        )
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self.engine.start())
        self.groups = 0

    def seconds_per_token(self, groups: int) -> float:
        """Serve the next groups, one after another; wall seconds per generated token."""
        began_s, before = time.perf_counter(), self.engine.stats().generated_tokens
        for _ in range(groups):
            self.loop.run_until_complete(self._group(self.groups))
            self.groups += 1
        return (time.perf_counter() - began_s) / (self.engine.stats().generated_tokens - before)

    async def _group(self, group: int) -> None:
        prompt = self.chat.prompt_ids(list(self.environment.prompt("train", group).messages))
        await asyncio.gather(*(self._trajectory(prompt, group, sample) for sample in range(GROUP_SIZE)))

    async def _trajectory(self, context: np.ndarray, group: int, sample: int) -> None:
        name = f"{group}-{sample}"
        returns = np.random.default_rng([group, sample]).integers(0, 100, TURNS)
        found: list[int] = []
        for turn in range(TURNS):
            request = TurnRequest(
                name, turn, context, self.max_new_tokens, stop_ids=self.chat.stop_ids,
                seed=1000 * group + 10 * sample + turn, group=str(group),
            )  # fmt: skip
            output = await self.engine.generate(request)
            found += output.token_ids.tolist()
            observation = self.chat.observation_ids([str(returns[turn])], ended=True)
            context = np.concatenate([context, output.token_ids, observation])
        self.engine.forget(name)
        self.tokens[name] = found

    def close(self) -> None:
        """Free the engine."""
        self.loop.run_until_complete(self.engine.close())
        self.loop.close()


def differing(one: dict[str, list[int]], other: dict[str, list[int]]) -> int:
    """Tokens at which trajectories of the same name differ, missing ones included."""
    found = 0
    for name in one.keys() & other.keys():
        a, b = one[name], other[name]
        found += sum(x != y for x, y in zip(a, b, strict=False)) + abs(len(a) - len(b))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it."""
    parser = command_parser("speculation", __doc__, pairs=7)
    parser.add_argument("--trajectories", type=int, default=336, help="per batch size and side, at least")
    parser.add_argument("--max-new-tokens", type=int, default=24, help="of a turn")
    options = parser.parse_args(arguments)
    groups = max(1, -(-options.trajectories // GROUP_SIZE // options.pairs))
    figures: dict[str, Figure] = {}
    by_rows: dict[int, list[Drafted]] = {}
    different = trajectories = 0
    for slots in BATCHES:
        drafting, plain = (Side(slots, drafts, options.max_new_tokens) for drafts in (True, False))
        for side in (drafting, plain):
            side.seconds_per_token(WARM_UP_GROUPS)
        pairs = alternate(
            lambda side=drafting: side.seconds_per_token(groups), lambda side=plain: side.seconds_per_token(groups),
            pairs=options.pairs,
        )  # fmt: skip
        different += differing(drafting.tokens, plain.tokens)
        trajectories += len(drafting.tokens.keys() & plain.tokens.keys())
        stats = drafting.engine.stats()
        print(
            f"batch {slots:2d}: {1e6 * pairs.medians[0]:.0f} us per token with, {1e6 * pairs.medians[1]:.0f} without, ratio "
            f"{pairs.ratio:.3f} (with over without); drafted {stats.drafted_tokens}, accepted {stats.accepted_tokens} of "
            f"{stats.generated_tokens} tokens; by running sequences "
            + ", ".join(
                f"{rows}: {each.accepted}/{each.drafted}" + (f" gain {each.gain:.2f}" if each.gain else "")
                for rows, each in sorted(stats.drafted_by_rows.items())
            ),
            flush=True,
        )
        figures[f"time_ratio_batch{slots}"] = Figure(pairs.ratio, "ratio", "lower", 1.0)
        figures[f"seconds_per_token_batch{slots}"] = Figure(pairs.medians[0], "s", "lower")
        figures[f"seconds_per_token_batch{slots}_without"] = Figure(pairs.medians[1], "s", "lower")
        for rows, each in stats.drafted_by_rows.items():
            by_rows.setdefault(rows, []).append(each)
        for side in (drafting, plain):
            side.close()
    for rows, found in sorted(by_rows.items()):
        accepted = sum(each.accepted for each in found)
        sequences = sum(each.generated - each.accepted for each in found)  # each gets one token per step besides
        if sequences:
            figures[f"accepted_per_step_batch{rows}"] = Figure(accepted / sequences, "tokens", "higher")
    figures["differing_tokens"] = Figure(different, "tokens", "lower", 0)
    print(f"{different} differing tokens in {trajectories} trajectories")
    emit("speculation", figures, arguments=arguments, as_json=options.json)


if __name__ == "__main__":
    main()
