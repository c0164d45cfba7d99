"""The tokens and turns of an agent's trajectory, from its records: its conversations may have branches.

A request is a record of kind "action" with a ``parent``, the turn that it continues (-1: none), and the generation after it is its
answer. Sequences follow each other in the token arrays (`libra.agents.conversation`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.agents.conversation import paths
from libra.config import RunConfig
from libra.types import Trajectory

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
