"""Environments with no task in them. Declared emulations: they exercise the machinery, and no model learns from them."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

from libra.envs import Environment, tool
from libra.envs.scripted import ScriptedTurn
from libra.sim.recorded_agents import load_traces
from libra.sim.workload import draw
from libra.types import NO_TOOL, Episode, Prompt, ToolCall, ToolStatus, TrajectoryId


class FixedTurns(Environment):
    """Every turn is answered by a tool, so that each trajectory has ``rollout.max_turns`` turns.

    Reward is a number in [0, 1) drawn by the text of the last turn: it varies within a group, and means nothing.

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
        """Give back the text.

        Args:
            text: What to give back.
        """
        return text


class DriftingPrompts(FixedTurns):
    """As `FixedTurns`, with questions that are long for every second stretch of questions: training outweighs rollout then.

    A long question should fill ``rollout.max_context_tokens`` nearly, so that little is generated after it.

    Parameters
    ----------
    stretch : int
        Questions in a row that are alike.
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
    """As `FixedTurns`, with questions that are longer from stretch to stretch: contexts grow as a run goes on.

    Parameters
    ----------
    stretch : int
        Questions in a row that are alike; those of one batch, for contexts that grow from iteration to iteration.
    first_chars, more_chars : int
        Length of the first ones, and by how much each stretch is longer than the one before.
    most_chars : int
        Length at which they stop growing.
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
    """Recorded agents' trajectories, replayed turn by turn: as many tokens, tools as slow, observations as long, all scaled, and
    tools that fail where they did (whatever their failure was, as the status ``error``).

    Needs ``rollout.ignore_eos``. Question ``index`` is group ``index`` of those drawn from the file, again from the first after the
    last, under its old name. Rewards mean nothing.

    Parameters
    ----------
    path : str
        A file of agent turns (`libra.traces.agent_turns`).
    groups, group_size, seed : int
        How many groups are drawn, of how many trajectories each, and with which seed.
    tokens_frac, payload_frac, tool_frac : float
        What generated tokens, characters of observations and tool seconds are multiplied by.
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
        """The turn as it was recorded, scaled."""
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
        """Take as long as the recorded tool, and give back as much, or fail as it did.

        Args:
            chars: Length of the observation.
            seconds: Time to take.
            fails: Whether to fail with the observation as the message.
        """
        await asyncio.sleep(seconds)
        if fails:
            raise RuntimeError("y" * chars)
        return "y" * chars
