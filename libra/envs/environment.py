"""`Environment`, the interface of a task: prompts, tools, the parser of calls, and the grader."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Protocol, runtime_checkable

from libra.envs.services import ServiceUse
from libra.envs.tool import SessionKind, Tool
from libra.envs.tool_call_formats import TOOL_FORMATS
from libra.errors import ConfigError
from libra.types import Episode, Prompt, ToolCall, TrajectoryId

BIN = "bin"
"""Fact of a prompt that names its bin: evaluations give the mean reward of each bin beside that of all questions."""
HELD_OUT_SHARE = 8
"""Number of classes of questions, by a hash of their text; one class is held out for evaluation."""


def question_class(text: str) -> int:
    """Class of a question, 0 to `HELD_OUT_SHARE` - 1, whatever the seed; class 0 is evaluation, in every run."""
    return hashlib.sha256(text.encode()).digest()[0] % HELD_OUT_SHARE


class Environment(ABC):
    """A task family. Instances are stateless between calls: every worker makes its own from (name, args, seed).

    Subclasses define `prompt` and `grade`, and ``tools`` if there are any.
    """

    tools: tuple[Tool, ...] = ()
    tool_format: str = "hermes"
    """How the model writes calls: a name of `TOOL_FORMATS`. ``rollout.tool_format`` overrides it."""

    isolation: str = ""
    """What confines programs that the model writes, as in `libra.envs.sandbox`. Empty: it runs none."""

    max_state_bytes: int = 65_536
    """Largest state of a trajectory, encoded; see `reset`."""
    step_timeout_s: float = 10.0
    """Wall seconds of a `reset` or a `step`."""
    inline_steps: bool = False
    """Whether `step` runs inside the generation quantum; for cheap ones. Otherwise it takes a TOOL slot, on any worker with one."""

    services: tuple[ServiceUse | str, ...] = ()
    """Services of section ``services`` that its grader asks (`libra.ask`), to be checked before anything runs; tools declare theirs
    themselves."""

    session: SessionKind | None = None
    """Kind of live object, such as a browser or a shell, that a trajectory has from its first action to its end: `libra.session`.
    Tools with a keyword ``session`` get it."""

    @abstractmethod
    def prompt(self, split: str, index: int) -> Prompt:
        """Question ``index`` (>= 0, without limit) of ``split``, "train" or "eval".

        Deterministic in (seed, split, index); no question is in both splits. A fact "bin" (text or a number) names the bin in
        which an evaluation counts it.
        """

    @abstractmethod
    def grade(self, episode: Episode) -> float:
        """Reward of a finished trajectory: one finite number. May be ``async def``; otherwise it has a thread, and may block."""

    def reset(self, prompt: Prompt) -> Any:
        """State with which a trajectory begins; define it for environments whose trajectories have one. May be ``async def``.

        A *value*, never a live object: it is encoded into the record of each turn, because calls of one trajectory may run on
        several workers, and a lost call runs again from the last record. None, bool, int, float, str, bytes, list and dict, or
        the type that the return is annotated with: a dataclass, a msgspec.Struct, tuples, sets; at most ``max_state_bytes``
        encoded. The same for the same prompt, so that the samples of a group begin alike.

        Tools with a keyword ``trajectory_state`` get a copy, and so does `step`. What they change in it stays if they return,
        and is dropped if they raise. The grader reads the last one as ``episode.state``.
        """
        return None

    def step(self, text: str, state: Any) -> str | None:
        """The user's next turn after the generated ``text``, which has no calls; None: the trajectory ends. May be ``async def``.

        Define it for environments that talk back, such as text games. ``state`` is a copy to change in place; None without a
        `reset`. An error is a failure of the environment, after which a fresh draw begins.
        """
        return None

    def prompt_id(self, split: str, index: int) -> str:
        """``prompt_id`` of question ``index`` where the same question comes again at another index, without making the prompt.

        Empty (the default): no question comes again. Lengths seen in one pass over the questions improve forecasts in the next.
        """
        return ""

    def num_prompts(self, split: str) -> int | None:
        """Different questions of ``split``, which are asked again after the last one; None (the default): without limit."""
        return None

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        """The calls in a generated turn, in order; none: the turn is the answer. The default parser is that of ``tool_format``."""
        return TOOL_FORMATS[self.tool_format].parse(text, self.tools)

    def check_split(self, split: str) -> None:
        """ConfigError unless ``split`` is "train" or "eval"."""
        if split not in ("train", "eval"):
            raise ConfigError(f"split {split!r}: {self.name} has the splits 'train' and 'eval'")

    def session_limit_s(self, tool: str) -> float:
        """Wall seconds within which an action that uses a session has ended."""
        limits = [each.timeout_s for each in self.tools if each.name == tool]
        return sum(limits) + (2 * self.session.timeout_s if self.session is not None else 0.0)

    async def setup(self) -> None:  # noqa: B027 optional hook
        """Called once per worker, before the first action."""

    async def close(self) -> None:  # noqa: B027 optional hook
        """Called once per worker, after the last action."""

    @property
    def asked_services(self) -> tuple[ServiceUse, ...]:
        """Services that its grader and its tools ask."""
        graded = (ServiceUse(use, "grade") if isinstance(use, str) else use for use in self.services)
        of_tools = (ServiceUse(name, f"tool {tool.name!r}") for tool in self.tools for name in tool.services)
        return (*graded, *of_tools)

    @property
    def name(self) -> str:
        """Name of this environment in messages and logs."""
        return type(self).__name__

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """OpenAI-style JSON schemas, for the chat template's ``tools``."""
        return [dict(tool.schema) for tool in self.tools]


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
