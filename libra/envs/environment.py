"""The seam between Libra and a task: prompts, tools, how calls are read, how a finished trajectory is graded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from libra.envs.tool import Tool
from libra.envs.tool_calls import TOOL_FORMATS
from libra.types import Episode, Prompt, ToolCall


class Environment(ABC):
    """A task family. Instances are stateless between calls: every worker makes its own from (name, args, seed).

    Subclasses give `prompt` and `grade`, and ``tools`` where there are any.
    """

    tools: tuple[Tool, ...] = ()
    tool_format: str = "hermes"
    """How the model writes calls: a name of `TOOL_FORMATS`. A run sets it where ``rollout.tool_format`` is given."""

    @abstractmethod
    def prompt(self, split: str, index: int) -> Prompt:
        """Question ``index`` (>= 0, no upper end) of ``split``, "train" or "eval".

        Deterministic in (seed, split, index); no question is in both splits.
        """

    @abstractmethod
    def grade(self, episode: Episode) -> float:
        """Reward of a finished trajectory: one finite number. May be ``async def``; blocking is fine, it has a
        thread.
        """

    def prompt_id(self, split: str, index: int) -> str:
        """``prompt_id`` of question ``index``, told without making it, where the same question comes again at another index.

        Empty (here): none ever does. What is known of a question's length from one pass is used in the next.
        """
        return ""

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        """The calls in a generated turn, in order; none means that the turn is the answer. Here: as ``tool_format`` says."""
        return TOOL_FORMATS[self.tool_format].parse(text, self.tools)

    async def setup(self) -> None:  # noqa: B027 optional hook
        """Opened once per worker before the first action."""

    async def close(self) -> None:  # noqa: B027 optional hook
        """Closed once per worker after the last action."""

    @property
    def name(self) -> str:
        """What messages and logs call this environment."""
        return type(self).__name__

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """OpenAI-style JSON schemas, for the chat template's ``tools``."""
        return [dict(tool.schema) for tool in self.tools]
