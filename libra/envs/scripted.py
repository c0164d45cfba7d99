"""Environments with scripted turns, for measurements that need the same work every time.

The engine generates as many tokens per turn as the script has; their content is ignored.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from libra.types import Prompt, ToolCall, TrajectoryId


class ScriptedTurn(NamedTuple):
    """One turn: tokens to generate, at least 1, and the calls that follow; none: the trajectory ends."""

    new_tokens: int
    calls: tuple[ToolCall, ...]


@runtime_checkable
class Scripted(Protocol):
    """An `Environment` whose turns are scripted. It needs ``rollout.ignore_eos``."""

    def scripted(self, tid: TrajectoryId, prompt: Prompt, turn: int) -> ScriptedTurn:
        """Turn ``turn``, from 0, of a trajectory; called for each in order, until one has no calls."""


def turn_by_script(environment: object, tid: TrajectoryId, prompt: Prompt, turn: int) -> ScriptedTurn | None:
    """A turn of an environment's script; None if the environment has no script."""
    return environment.scripted(tid, prompt, turn) if isinstance(environment, Scripted) else None
