"""What a generation means to an agent: the calls in it, and where the client's stop text ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from libra.agents.messages import split_reasoning
from libra.envs.tool_call_formats import TOOL_FORMATS
from libra.types import StopReason, ToolCall, TurnOutput
from libra.untrusted import storable_calls
from libra.worker.context import WorkerContext


def agent_calls(context: WorkerContext, text: str) -> tuple[ToolCall, ...]:
    """The calls in what the model wrote outside its reasoning, by ``rollout.tool_format``."""
    environment = context.environment
    rest = split_reasoning(text)[1]
    return storable_calls(TOOL_FORMATS[environment.tool_format].parse(rest, environment.tools))


def cut_at_stop(
    output: TurnOutput, before: Sequence[Any], stops: Sequence[str], decode: Callable[[Any], str]
) -> tuple[TurnOutput, str | None]:
    """A generation up to the token with which the first of the client's stop texts is complete, and that text.

    What was sampled after it is dropped: the tokens kept are those of an engine that stops there. ``before``: ids of earlier parts
    of the turn.
    """
    if not stops:
        return output, None
    ids = output.token_ids

    def found(count: int) -> str | None:
        text = decode(np.concatenate([*before, ids[:count]]))
        at = [(text.index(stop), stop) for stop in stops if stop in text]
        return min(at)[1] if at else None

    if found(len(ids)) is None:
        return output, None
    low, high = 1, len(ids)  # the text of more tokens has all that that of fewer has
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if found(middle) else (middle + 1, high)
    columns = {
        name: getattr(output, name)[:low] for name in ("token_ids", "logprobs", "weight_versions", "kv_versions")
    }
    return replace(output, **columns, stop_reason=StopReason.STOP), found(low)
