"""The tokens and turns of an agent's trajectory, from its records: its conversations may have branches.

A request is a record of kind "action" with a ``parent``, the turn that it continues (-1: none), and the generation after it is its
answer. Sequences follow each other in the token arrays (`libra.agents.history`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.agents.history import paths
from libra.agents.requests import split_reasoning
from libra.config import RunConfig
from libra.envs.tool_call_formats import TOOL_FORMATS
from libra.types import StopReason, ToolCall, Trajectory, TurnOutput
from libra.untrusted import storable_calls
from libra.worker.context import WorkerContext

Record = Mapping[str, Any]
Part = tuple[NDArray[np.int32], Record | None]
"""Token ids, and the record that generated them where they are trained."""


@dataclass(slots=True)
class AgentTurns:
    """The answered requests of one draw, by turn.

    Attributes
    ----------
    parents : list of int
    asked : list of int32 arrays
        Tokens of each request after those of its parent.
    generated : list of lists of records
        A turn with `rollout.chunk_tokens` has several.
    """

    parents: list[int] = field(default_factory=list)
    asked: list[NDArray[np.int32]] = field(default_factory=list)
    generated: list[list[Record]] = field(default_factory=list)

    @classmethod
    def of(cls, records: Iterable[Record]) -> AgentTurns:
        """Of the records of one draw; a request without an answer, the last, is left out."""
        turns = cls()
        for record in records:
            if record["kind"] == "action" and "parent" in record:
                turns.parents.append(record["parent"])
                turns.asked.append(record["observation_ids"])
                turns.generated.append([])
            elif record["kind"] == "generation":
                turns.generated[-1].append(record)
        if turns.generated and not turns.generated[-1]:
            for column in (turns.parents, turns.asked, turns.generated):
                column.pop()
        return turns

    def parts(self) -> tuple[list[Part], list[tuple[int, int]]]:
        """The parts of all sequences, one after the other, and for each turn the first token of the sequence that trains it with
        the tokens of context before its generation."""
        parts: list[Part] = []
        places = [(0, 0)] * len(self.parents)
        total = 0
        for path in paths(self.parents):
            start = total
            for step in path:
                parts.append((self.asked[step.turn], None))
                total += len(self.asked[step.turn])
                if step.trained:
                    places[step.turn] = (start, total - start)
                for record in self.generated[step.turn]:
                    parts.append((record["token_ids"], record if step.trained else None))
                    total += len(record["token_ids"])
        return parts, places


def agent_numbers(config: RunConfig, trajectories: Iterable[Trajectory]) -> dict[str, int]:
    """Metrics of a batch whose trajectories an agent runs: ``agent_sequences``, all that they have; none without an agent.

    As many as trajectories: no conversation was edited, compacted or branched, and there were no sub-agents.
    """
    if not config.agent.given:
        return {}
    return {"agent_sequences": sum(1 + len(each.starts) for each in trajectories if each.turns)}


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
