"""A tool: a plain Python function, and what the model is told about it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from libra.errors import ConfigError
from libra.types import ToolStatus

ACTION_ID = "action_id"
"""A tool with a keyword of this name is given the action's id, and the model is not told of it."""

TIMEOUT_S = 10.0
MAX_PAYLOAD_CHARS = 8000
FATAL = (str(ToolStatus.ERROR), str(ToolStatus.TIMEOUT))
"""What a tool may call fatal."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool of an environment.

    Attributes
    ----------
    name : str
        What the model calls it.
    function : callable
        Takes the arguments by keyword; may be ``async``. A function that is not runs in a thread of its own. An
        ``async`` one shares the event loop: it must await, since one that blocks cannot be cut off.
    schema : mapping
        ``{"type": "function", "function": {"name", "description", "parameters"}}``, as chat templates take it.
    timeout_s : float
        Wall seconds after which a call is cut off.
    max_payload_chars : int
        Characters of a return that the model is shown; the rest is dropped, and the model told so.
    inline : bool
        Whether it is cheap enough to run inside the generation quantum.
    fatal : tuple of str
        Of "error" and "timeout", those that are no observation: the trajectory ends there as a failure that is not the
        model's, and is sampled again (``trainer.resample``). Without them the model is shown what happened and goes on. For
        single cases a tool raises `libra.errors.ToolFault`.
    """

    name: str
    function: Callable[..., Any]
    schema: Mapping[str, Any]
    timeout_s: float = TIMEOUT_S
    max_payload_chars: int = MAX_PAYLOAD_CHARS
    inline: bool = False
    fatal: tuple[str, ...] = ()
    is_async: bool = field(init=False)
    takes_action_id: bool = field(init=False)

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise ConfigError(f"tool {self.name!r}: timeout_s is {self.timeout_s!r}; it must be above 0 seconds")
        if self.max_payload_chars < 1:
            raise ConfigError(
                f"tool {self.name!r}: max_payload_chars is {self.max_payload_chars!r}; it must be at least 1"
            )
        if not set(self.fatal) <= set(FATAL):
            raise ConfigError(f"tool {self.name!r}: fatal is {self.fatal!r}; allowed are {', '.join(map(repr, FATAL))}")
        is_async = inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(
            getattr(self.function, "__call__", None)  # noqa: B004  an instance whose __call__ is async
        )
        object.__setattr__(self, "is_async", is_async)
        object.__setattr__(self, "takes_action_id", ACTION_ID in inspect.signature(self.function).parameters)

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON schema of each argument by name."""
        return self.schema["function"]["parameters"].get("properties", {})

    @property
    def required(self) -> tuple[str, ...]:
        """Arguments that a call must give."""
        return tuple(self.schema["function"]["parameters"].get("required", ()))

    @property
    def usage(self) -> str:
        """The shape of a right call, e.g. ``{"name": "calculator", "arguments": {"expression": ...}}``."""
        arguments = ", ".join(f'"{name}": ...' for name in self.parameters)
        return f'{{"name": "{self.name}", "arguments": {{{arguments}}}}}'


def tool(
    function: Callable[..., Any],
    *,
    name: str | None = None,
    timeout_s: float = TIMEOUT_S,
    max_payload_chars: int = MAX_PAYLOAD_CHARS,
    inline: bool = False,
    fatal: tuple[str, ...] = (),
) -> Tool:
    """The `Tool` of a plain function with type hints and a Google-style docstring (what ``get_json_schema`` reads).

    Raises
    ------
    ConfigError
        Where a hint or a description is missing; the message says which line to add.
    """
    shown = name or str(getattr(function, "__name__", type(function).__name__))
    return Tool(shown, function, _schema(function, shown), timeout_s, max_payload_chars, inline, fatal)


def _schema(function: Callable[..., Any], name: str) -> dict[str, Any]:
    from transformers.utils import get_json_schema

    where = f"tool {name!r}"
    signature = inspect.signature(function)
    hinted = function if inspect.isroutine(function) else type(function).__call__
    try:
        hints = get_type_hints(hinted)
    except (NameError, TypeError) as error:
        raise ConfigError(
            f"{where}: its type hints cannot be read ({error}); use hints that the module imports"
        ) from error
    shown = {key: value for key, value in signature.parameters.items() if key != ACTION_ID}
    for key, parameter in shown.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(
                f"{where}: argument {parameter} has no name of its own; tools are called with named arguments"
            )
        if key not in hints:
            raise ConfigError(f"{where}: argument {key!r} has no type hint; type e.g. '{key}: str'")
    doc = inspect.getdoc(function)
    if not doc:
        raise ConfigError(
            f'{where}: no docstring, so the model cannot know what it does; add e.g. """What it does.\\n\\n'
            + ("Args:\\n    " + "\\n    ".join(f"{key}: what it is" for key in shown) if shown else "")
            + '"""'
        )

    def stub() -> None: ...

    # The model must not see action_id, so the schema is read from a stand-in without it.
    stub.__name__, stub.__doc__ = name, doc
    stub.__annotations__ = {key: hint for key, hint in hints.items() if key in shown}
    stub.__signature__ = signature.replace(parameters=list(shown.values()))  # type: ignore[attr-defined]
    try:
        return get_json_schema(stub)
    except (
        Exception
    ) as error:  # boundary: transformers has error classes of its own for each way a docstring can be wrong
        missing = [key for key in shown if f"{key}:" not in doc and f"{key} (" not in doc]
        lines = "; ".join(f"'    {key}: what it is'" for key in missing or shown)
        raise ConfigError(
            f"{where}: its docstring does not describe every argument; add under 'Args:' {lines}"
        ) from error
