"""The state of a trajectory: a value in the record of each turn.

Calls of one trajectory may run on several workers, and a lost call runs again. So the record of
each turn has the encoded state, and the worker of the next turn decodes it.

Invariants
----------
1. The environment's code gets a copy, whose changes count only if the call returned. After an
   error, a time-out or a lost worker, the next call starts with the state of the last record.
2. The trajectory fails, as a fault of the environment, if its first state differs after encoding
   and decoding, or if any state exceeds ``max_state_bytes``.
"""

from __future__ import annotations

from functools import cache
from typing import Any, get_type_hints

import msgspec

from libra.envs.environment import Environment, check_tool_types
from libra.envs.tool import MAX_PAYLOAD_CHARS, SessionKind
from libra.envs.tool_calls import called_or_fault, cut
from libra.errors import ConfigError, EnvironmentFault
from libra.types import Prompt
from libra.untrusted import error_text

STATE_FORM = (
    "None, bool, int, float, str, bytes, list and dict, or the type that annotates the return of reset (a dataclass, a "
    "msgspec.Struct, tuples, sets)"
)


def has_state(environment: Environment) -> bool:
    """Whether the environment's trajectories have a state."""
    return type(environment).reset is not Environment.reset


def has_steps(environment: Environment) -> bool:
    """Whether the environment answers turns without calls, as a text game does."""
    return type(environment).step is not Environment.step


def check_state(environment: Environment) -> Environment:
    """``environment``, if its tools, sessions and state agree.

    ConfigError for a tool that is not a `Tool`, a tool with a keyword for a state or session that
    the environment does not have, an unknown kind of session, or an unknown type of state.
    """
    check_tool_types(environment)
    name, kind = environment.name, environment.session
    make_session = "set session = libra.session(FACTORY, reset=..., close=...)"
    for tool in environment.tools:
        where = f"tool {tool.name!r}: it takes"
        if tool.takes_state and not has_state(environment):
            raise ConfigError(
                f"{where} trajectory_state, and {name} has none; define reset(self, prompt), which returns the first state "
                "of a trajectory"
            )
        if tool.takes_session and kind is None:
            raise ConfigError(f"{where} a session, and {name} has none; {make_session}, or give libra.train a session")
        if tool.takes_session and tool.inline:
            raise ConfigError(f"{where} a session, so it runs on workers with TOOL slots; type inline=False")
    if kind is not None and not isinstance(kind, SessionKind):
        raise ConfigError(f"{name}.session is {kind!r:.80}, not a kind of session; {make_session}, or rename it")
    if has_state(environment):
        _decoder(type(environment))
    for field in ("max_state_bytes", "step_timeout_s"):
        if not (value := getattr(environment, field)) > 0:
            raise ConfigError(f"{name}: {field} is {value!r}; it must be above 0")
    return environment


def decode_state(environment: Environment, data: bytes | None) -> Any:
    """A copy of the state in the bytes of a record."""
    return None if data is None else _decoder(type(environment)).decode(data)


class StateCopy:
    """The state while a turn's code runs; ``data`` encodes it after the last call that returned."""

    def __init__(self, environment: Environment, data: bytes | None, where: str) -> None:
        self._environment, self.data, self._where = environment, data, where

    def value(self) -> Any:
        """A copy for one call."""
        return decode_state(self._environment, self.data)

    def keep(self, value: Any) -> None:
        """Make ``value`` the state; EnvironmentFault if it is too large or cannot be encoded."""
        name, where = self._environment.name, self._where
        try:
            data = msgspec.msgpack.encode(value)
        except Exception as error:  # the boundary to a user's values: __getstate__ and the like may raise anything
            raise EnvironmentFault(
                f"{name}: the state of {where} cannot be recorded: {error_text(error)}; allowed are {STATE_FORM}"
            ) from error
        most = self._environment.max_state_bytes
        if len(data) > most:
            raise EnvironmentFault(
                f"{name}: the state of {where} has {len(data):,} bytes, and max_state_bytes is {most:,}; it is written with every "
                "turn, so keep what can be computed or looked up out of it, or raise max_state_bytes of the environment"
            )
        self.data = data


async def begin_state(environment: Environment, prompt: Prompt, where: str) -> bytes | None:
    """The encoded first state of a trajectory; None if the environment has no state.
    EnvironmentFault if ``reset`` or the encoding fails; ToolTimeout after ``step_timeout_s``."""
    if not has_state(environment):
        return None
    state = await _called(environment, "reset", where, prompt)
    copy = StateCopy(environment, None, where)
    copy.keep(state)
    try:
        same = bool(copy.value() == state)
    except Exception as error:  # the boundary to a user's values
        raise EnvironmentFault(
            f"{environment.name}: the state of {where} cannot be read again: {error_text(error)}; allowed are {STATE_FORM}"
        ) from error
    if not same:
        raise EnvironmentFault(
            f"{environment.name}: the state of {where} is {state!r:.200}, and {copy.value()!r:.200} after it was recorded; allowed "
            f"are {STATE_FORM}"
        )
    return copy.data


async def run_step(environment: Environment, text: str, copy: StateCopy, where: str) -> str | None:
    """The user's next turn after ``text``, cut to `MAX_PAYLOAD_CHARS`; None ends the trajectory.
    EnvironmentFault if ``step`` raises or returns another type; ToolTimeout if it hangs."""
    state = copy.value()
    reply = await _called(environment, "step", where, text, state)
    if not (reply is None or isinstance(reply, str)):
        raise EnvironmentFault(
            f"{environment.name}: step returned a {type(reply).__name__} for {where}; it returns the user's next turn as text, or "
            "None to end the trajectory"
        )
    if has_state(environment):
        copy.keep(state)
    return None if reply is None else cut(reply, MAX_PAYLOAD_CHARS)


async def _called(environment: Environment, method: str, where: str, *given: Any) -> Any:
    function, name = getattr(environment, method), f"{environment.name}: {method}"
    return await called_or_fault(name, environment.step_timeout_s, function, *given, where=f" ({where})")


@cache
def _decoder(kind: type[Environment]) -> msgspec.msgpack.Decoder[Any]:
    try:
        annotation = get_type_hints(kind.reset).get("return", Any)
        return msgspec.msgpack.Decoder(annotation)
    except (NameError, TypeError) as error:
        raise ConfigError(
            f"{kind.__name__}.reset: the annotation of its return cannot be used ({error}); define the type in the same module, "
            "as a dataclass or msgspec.Struct, or leave the annotation out"
        ) from error
