"""The turns of an agent's trajectory: tokens and sequences from its records, and the meaning of a
generation to the agent.

The conversations of an agent may have branches. A `RequestRecord` names the turn that it continues,
and the generation after it is its answer. Sequences follow each other in the token arrays
(`libra.agents.conversation`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.agents.conversation import paths
from libra.agents.messages import split_reasoning
from libra.envs import Environment
from libra.envs.tool_call_formats import TOOL_FORMATS
from libra.store.quantum_records import GenerationRecord, QuantumRecord, RequestRecord
from libra.types import StopReason, ToolCall, TurnOutput
from libra.untrusted import storable_calls

Part = tuple[NDArray[np.int32], GenerationRecord | None]
"""Token ids, and the record that generated them where they are trained."""


@dataclass(slots=True)
class AgentTurns:
    """The answered requests of one draw, by turn, with the records of each answer: several with
    `rollout.chunk_tokens`."""

    requests: list[RequestRecord] = field(default_factory=list)
    generated: list[list[GenerationRecord]] = field(default_factory=list)

    @classmethod
    def of(cls, records: Iterable[QuantumRecord]) -> AgentTurns:
        """The turns in the records of one draw, without a last request that has no answer."""
        turns = cls()
        for record in records:
            if isinstance(record, RequestRecord):
                turns.requests.append(record)
                turns.generated.append([])
            elif isinstance(record, GenerationRecord):
                turns.generated[-1].append(record)
        if turns.generated and not turns.generated[-1]:
            turns.requests.pop()
            turns.generated.pop()
        return turns

    def parts(self) -> tuple[list[Part], list[tuple[int, int]]]:
        """The parts of all sequences, one after the other.

        Also for each turn the first token of the sequence that trains it, with the tokens of context before
        its generation.
        """
        parts: list[Part] = []
        places = [(0, 0)] * len(self.requests)
        total = 0
        for path in paths([request.parent for request in self.requests]):
            start = total
            for step in path:
                asked = self.requests[step.turn].observation_ids
                parts.append((asked, None))
                total += len(asked)
                if step.trained:
                    places[step.turn] = (start, total - start)
                for record in self.generated[step.turn]:
                    parts.append((record.token_ids, record if step.trained else None))
                    total += len(record.token_ids)
        return parts, places


def agent_calls(environment: Environment, text: str) -> tuple[ToolCall, ...]:
    """The calls in the model's text outside its reasoning, by ``rollout.tool_format``."""
    rest = split_reasoning(text)[1]
    return storable_calls(TOOL_FORMATS[environment.tool_format].parse(rest, environment.tools))


def cut_at_stop(
    output: TurnOutput, before: Sequence[Any], stops: Sequence[str], decode: Callable[[Any], str]
) -> tuple[TurnOutput, str | None]:
    """A generation up to the token with which the first of the client's stop texts is complete, and that
    text.

    Tokens sampled after it are dropped, as if the engine had stopped there. ``before``: ids of earlier
    parts of the turn.
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
    low, high = 1, len(ids)  # more tokens have at least the text of fewer
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if found(middle) else (middle + 1, high)
    columns = {
        name: getattr(output, name)[:low] for name in ("token_ids", "logprobs", "weight_versions", "kv_versions")
    }
    return replace(output, **columns, stop_reason=StopReason.STOP), found(low)
