"""Environments without a task, which exercise the machinery; no model learns from them."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

from libra.envs import Environment, tool
from libra.envs.environment import ScriptedTurn
from libra.sim.workload import draw, load_traces
from libra.types import NO_TOOL, Episode, Prompt, ToolCall, ToolStatus, TrajectoryId


class FixedTurns(Environment):
    """A tool answers every turn, so that each trajectory has ``rollout.max_turns`` turns.

    The reward is a hash of the last turn's text in [0, 1): it varies within a group, and has no meaning.

    Parameters
    ----------
    prompt_chars, payload_chars : int
        Length of each question and of each observation.
    inline : bool
        Whether the tool runs within the generation quantum.
    """

    def __init__(self, *, prompt_chars: int = 16, payload_chars: int = 8, inline: bool = False, seed: int = 0) -> None:
        self.prompt_chars, self.payload_chars, self.seed = prompt_chars, payload_chars, seed
        self.tools = (tool(self.echo, inline=inline),)

    def prompt(self, split: str, index: int) -> Prompt:
        text = f"{split} {self.seed} {index} ".ljust(self.prompt_chars, "x")[: max(self.prompt_chars, 1)]
        return Prompt(f"{split}-{index}", ({"role": "user", "content": text},))

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        return (ToolCall("echo", {"text": "y" * self.payload_chars}),)

    def grade(self, episode: Episode) -> float:
        return hashlib.blake2b(episode.answer.encode(errors="surrogatepass"), digest_size=1).digest()[0] / 256

    async def echo(self, text: str) -> str:
        """Return the text.

        Args:
            text: The text.
        """
        return text


class DriftingPrompts(FixedTurns):
    """`FixedTurns` with long questions in every second stretch: there training takes longer than rollout.

    A long question should almost fill ``rollout.max_context_tokens``, so that little is generated after it.

    Parameters
    ----------
    stretch : int
        Consecutive questions of one length.
    long_chars : int
        Length of the long ones.
    """

    def __init__(self, *, stretch: int = 64, long_chars: int = 900, **same: Any) -> None:
        super().__init__(**same)
        self.stretch, self.long_chars = stretch, long_chars

    def prompt(self, split: str, index: int) -> Prompt:
        found = super().prompt(split, index)
        if index // self.stretch % 2 == 0:
            return found
        ((message),) = found.messages
        return Prompt(found.prompt_id, ({**message, "content": message["content"].ljust(self.long_chars, "x")},))


class GrowingPrompts(FixedTurns):
    """`FixedTurns` with questions, and so contexts, that grow from stretch to stretch.

    Parameters
    ----------
    stretch : int
        Consecutive questions of one length; with those of one batch, contexts grow from iteration to iteration.
    first_chars, more_chars : int
        Length in the first stretch, and growth per stretch.
    most_chars : int
        Maximum length.
    """

    def __init__(
        self, *, stretch: int, first_chars: int = 60, more_chars: int = 40, most_chars: int = 10_000, **same: Any
    ) -> None:
        super().__init__(**same)
        self.stretch, self.first_chars, self.more_chars, self.most_chars = stretch, first_chars, more_chars, most_chars

    def prompt(self, split: str, index: int) -> Prompt:
        found = super().prompt(split, index)
        ((message),) = found.messages
        length = min(self.first_chars + index // self.stretch * self.more_chars, self.most_chars)
        return Prompt(found.prompt_id, ({**message, "content": message["content"].ljust(length, "x")},))


class TraceTurns(Environment):
    """Trajectories of recorded agents, replayed turn by turn: tokens, tool seconds and observations, all scaled. Tools that failed
    fail with the status ``error``.

    Needs ``rollout.ignore_eos``. Question ``index`` is group ``index``, modulo ``groups``, of those drawn from the file.
    Rewards have no meaning.

    Parameters
    ----------
    path : str
        A file of agent turns (`libra.planner.agent_turns`).
    groups, group_size, seed : int
        Groups that are drawn, trajectories in each, and the seed.
    tokens_frac, payload_frac, tool_frac : float
        Factors of generated tokens, characters of observations, and tool seconds.
    """

    def __init__(
        self,
        *,
        path: str,
        groups: int,
        group_size: int,
        seed: int = 0,
        tokens_frac: float = 1.0,
        payload_frac: float = 1.0,
        tool_frac: float = 1.0,
    ) -> None:
        self.groups = groups
        self._frac = tokens_frac, payload_frac, tool_frac
        drawn = draw(load_traces(Path(path)), num_groups=groups, group_size=group_size, seed=seed)
        self._plans = {(plan.group, plan.sample): plan for plan in drawn.trajectories}
        self.tools = (tool(self.replay),)

    def prompt(self, split: str, index: int) -> Prompt:
        group = index % self.groups
        return Prompt(f"{split}-{group}", ({"role": "user", "content": f"{split} {group}"},), {"group": group})

    def prompt_id(self, split: str, index: int) -> str:
        return f"{split}-{index % self.groups}"

    def scripted(self, tid: TrajectoryId, prompt: Prompt, turn: int) -> ScriptedTurn:
        """The recorded turn, scaled."""
        tokens_frac, payload_frac, tool_frac = self._frac
        turns = self._plans[prompt.facts["group"], tid.sample].turns
        plan = turns[turn]
        seconds, failed = round(tool_frac * plan.tool_s, 6), plan.status not in (NO_TOOL, ToolStatus.OK)
        call = ToolCall(
            "replay", {"chars": round(payload_frac * plan.payload_tokens), "seconds": seconds, "fails": failed}
        )
        return ScriptedTurn(max(1, round(tokens_frac * plan.new_tokens)), (call,) if turn + 1 < len(turns) else ())

    def grade(self, episode: Episode) -> float:
        return hashlib.blake2b(episode.answer.encode(errors="surrogatepass"), digest_size=1).digest()[0] / 256

    async def replay(self, chars: int, seconds: float, fails: bool = False) -> str:
        """Take as long as the recorded tool, and return as much, or fail as it did.

        Args:
            chars: Length of the observation.
            seconds: Duration.
            fails: Whether to fail with the observation as the message.
        """
        await asyncio.sleep(seconds)
        if fails:
            raise RuntimeError("y" * chars)
        return "y" * chars
