"""`Environment`, the interface of a task: prompts, tools, the parser of calls, and the grader.

`make_environment` makes an environment that ships with Libra, or any ``package.module:attribute``.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from libra.config.yaml_text import one_line_yaml
from libra.envs.asked_services import ServiceUse
from libra.envs.tool import SessionKind, Tool
from libra.envs.tool_call_formats import TOOL_FORMATS
from libra.errors import ConfigError, LibraError, nearest
from libra.named_parts import is_named, named_part, raised_at
from libra.types import Episode, Prompt, ToolCall, TrajectoryId
from libra.untrusted import error_text, repr_text

BIN = "bin"
"""Fact of a prompt that names its bin. Evaluations report the mean reward of each bin."""
HELD_OUT_SHARE = 8
"""Number of classes of questions; one class is held out for evaluation."""


def question_class(text: str) -> int:
    """Class of a question, 0 to `HELD_OUT_SHARE` - 1, by its text; class 0 is always evaluation."""
    return hashlib.sha256(text.encode()).digest()[0] % HELD_OUT_SHARE


class Environment(ABC):
    """A task family. Every worker makes an instance from (name, args, seed), stateless between
    calls. Subclasses define `prompt` and `grade`, and ``tools`` if there are any."""

    tools: tuple[Tool, ...] = ()
    tool_format: str = "hermes"
    """Format of the model's calls, a name of `TOOL_FORMATS`. ``rollout.tool_format`` overrides
    it."""
    isolation: str = ""
    """The confinement of programs that the model writes (`libra.envs.sandbox`); empty if it runs
    none."""
    max_state_bytes: int = 65_536
    """Largest encoded state of a trajectory; see `reset`."""
    step_timeout_s: float = 10.0
    """Wall seconds of a `reset` or a `step`."""
    inline_steps: bool = False
    """Whether a cheap `step` runs inside the generation quantum; otherwise it takes a TOOL slot on
    any worker."""
    services: tuple[ServiceUse | str, ...] = ()
    """Services of section ``services`` that the grader asks (`libra.ask`), checked before a run
    starts. Tools declare their own."""
    session: SessionKind | None = None
    """Live object of a trajectory from its first action to its end, such as a browser or a shell
    (`libra.session`). Tools with a keyword ``session`` get it."""

    @abstractmethod
    def prompt(self, split: str, index: int) -> Prompt:
        """Question ``index`` (>= 0, without limit) of ``split``, "train" or "eval".

        Deterministic in (seed, split, index); no question is in both splits. A fact "bin" (text or
        a number) is the bin of the question in an evaluation.
        """

    @abstractmethod
    def grade(self, episode: Episode) -> float:
        """Reward of a finished trajectory: one finite number. May be ``async def``, or block."""

    def reset(self, prompt: Prompt) -> Any:
        """First state of a trajectory, if the environment has states. May be ``async def``.

        The state is a value, never a live object, because calls of one trajectory may run on
        several workers, and a lost call runs again from the state in the last record. It consists
        of None, bool, int, float, str, bytes, list and dict, or has the annotated return type: a
        dataclass, a msgspec.Struct, tuples, sets. Equal prompts give equal states, so that the
        samples of a group start alike.

        Tools with a keyword ``trajectory_state`` and `step` get a copy. Its changes count if the
        call returns, and are dropped if the call raises. The grader reads the last state as
        ``episode.state``.
        """
        return None

    def step(self, text: str, state: Any) -> str | None:
        """The user's next turn after a ``text`` without calls; None ends the trajectory.

        Define it for environments that talk back, such as text games. May be ``async def``.
        ``state`` is a copy to change in place, or None without a `reset`. An error is a failure of
        the environment, and the trajectory is sampled again.
        """
        return None

    def prompt_id(self, split: str, index: int) -> str:
        """``prompt_id`` of question ``index``, without making the prompt; "" if no question
        repeats. Lengths seen in one pass over the questions improve the forecasts of the next
        pass."""
        return ""

    def num_prompts(self, split: str) -> int | None:
        """Number of questions of ``split``, which then repeat; None (the default) without a
        limit."""
        return None

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        """The calls in a generated turn, in order. A turn without calls is the answer."""
        return TOOL_FORMATS[self.tool_format].parse(text, self.tools)

    def check_split(self, split: str) -> None:
        """ConfigError unless ``split`` is "train" or "eval"."""
        if split not in ("train", "eval"):
            raise ConfigError(f"split {split!r}: {self.name} has the splits 'train' and 'eval'")

    def session_limit_s(self, tool: str) -> float:
        """Longest wall seconds of an action that uses a session."""
        limits = [each.timeout_s for each in self.tools if each.name == tool]
        return sum(limits) + (2 * self.session.timeout_s if self.session is not None else 0.0)

    async def setup(self) -> None:  # noqa: B027 optional hook
        """Called once per worker, before the first action."""

    async def close(self) -> None:  # noqa: B027 optional hook
        """Called once per worker, after the last action."""

    @property
    def asked_services(self) -> tuple[ServiceUse, ...]:
        """Services that the grader and the tools query."""
        graded = (ServiceUse(use, "grade") if isinstance(use, str) else use for use in self.services)
        of_tools = (ServiceUse(name, f"tool {tool.name!r}") for tool in self.tools for name in tool.services)
        return (*graded, *of_tools)

    @property
    def name(self) -> str:
        """The environment's name in messages and logs."""
        return type(self).__name__

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """OpenAI-style JSON schemas, for the chat template's ``tools``."""
        return [dict(tool.schema) for tool in self.tools]


class ScriptedTurn(NamedTuple):
    """One turn: at least 1 token to generate, then the calls; without calls the trajectory ends."""

    new_tokens: int
    calls: tuple[ToolCall, ...]


@runtime_checkable
class Scripted(Protocol):
    """An `Environment` whose turns are scripted; needs ``rollout.ignore_eos``."""

    def scripted(self, tid: TrajectoryId, prompt: Prompt, turn: int) -> ScriptedTurn:
        """Turn ``turn``, from 0; turns are requested in order until a turn has no calls."""


# ---------------------------------------------------------------- environments by name

ENVIRONMENTS: dict[str, str] = {
    "tool_arithmetic": "libra.envs.tool_arithmetic:ToolArithmetic",
    "jsonl": "libra.envs.function_environment:JsonLines",
    "python_tests": "libra.envs.python_tests:PythonTests",
}
_METHODS = {"prompt": "def prompt(self, split, index)", "grade": "def grade(self, episode)"}


def make_environment(name: str, args: Mapping[str, Any], seed: int) -> Environment:
    """The environment ``name``, made with ``args``, and ``seed`` if its constructor takes a seed.

    ConfigError if the name or an argument is unknown, an argument is missing, or the factory
    returns something else than an `Environment`.
    """
    factory, arguments = _with_arguments(name, args, seed)
    try:
        environment = factory(**arguments)
    except LibraError:
        raise
    except (Exception, SystemExit) as error:  # the boundary to the user's constructor
        typed = "".join(f" environment.args.{key}={one_line_yaml(value)}" for key, value in args.items())
        raise ConfigError(
            f"environment.name: {name!r} could not be made{' with' if typed else ''}{typed} ({error_text(error)}{raised_at(error)}"
            "); correct it, or type other environment.args"
        ) from error
    if not isinstance(environment, Environment):
        made = type(environment).__name__
        raise ConfigError(
            f"environment.name: {name!r} made a {made}, not a libra.envs.Environment; write class {made}(libra.envs.Environment)"
        )
    check_tool_types(environment)
    return environment


def check_named(name: str, args: Mapping[str, Any]) -> None:
    """ConfigError if `make_environment` would refuse the name, the arguments or the files. Nothing
    is made. A module is imported only for the message that it cannot be found."""
    top = name.partition(":")[0].partition(".")[0]
    if is_named(name) and (top in sys.modules or importlib.util.find_spec(top) is not None):
        return
    factory, arguments = _with_arguments(name, args, 0)
    getattr(factory, "check_files", lambda **_: None)(**arguments)


def _with_arguments(name: str, args: Mapping[str, Any], seed: int) -> tuple[Callable[..., Any], dict[str, Any]]:
    path = ENVIRONMENTS.get(name, name)
    if not is_named(path):
        raise ConfigError(
            f"environment.name: no environment {name!r}{nearest(name, ENVIRONMENTS)}; "
            f"registered: {', '.join(sorted(ENVIRONMENTS))}; or type package.module:attribute"
        )
    factory = named_part("environment.name", path)
    if not callable(factory):
        raise ConfigError(f"environment.name: {name!r} is a {type(factory).__name__}; give a class or a function")
    parameters = inspect.signature(factory).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    arguments = {"seed": seed, **args} if "seed" in parameters or takes_any else dict(args)
    for given in arguments:
        if given not in parameters and not takes_any:
            known = [each for each in parameters if each != "seed"]
            raise ConfigError(
                f"environment.args.{given}: {name!r} takes no such argument{nearest(given, known)}; "
                f"it takes {', '.join(known) or 'none'}"
            )
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        key = str(error).rpartition("argument: ")[2].strip("'")
        raise ConfigError(
            f"environment.args: {name!r} cannot be made with {sorted(arguments)}: {error}; type environment.args.{key}=VALUE"
        ) from error
    if abstract := sorted(getattr(factory, "__abstractmethods__", ())):
        lines = " and ".join(_METHODS.get(each, f"def {each}(self, ...)") for each in abstract)
        raise ConfigError(f"environment.name: {name!r} does not define {' and '.join(abstract)}; write {lines}")
    return factory, arguments


def check_tool_types(environment: Environment) -> None:
    """ConfigError if any of the environment's tools is not a `Tool`."""
    for each in environment.tools:
        if not isinstance(each, Tool):
            called = getattr(each, "__name__", "f")
            raise ConfigError(
                f"environment: {environment.name} has {repr_text(each)} among its tools; type libra.tool({called}) in its place"
            )
