"""A tool: a Python function, and its description for the model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter

from libra.errors import ConfigError
from libra.types import ToolStatus

ACTION_ID = "action_id"
STATE = "trajectory_state"
SESSION = "session"
"""Keywords, hidden from the model, of tools that take the action's id, the trajectory's state,
which they may change in place, or its session (`libra.envs.sessions`)."""

TIMEOUT_S = 10.0
MAX_PAYLOAD_CHARS = 8000
FATAL = (str(ToolStatus.ERROR), str(ToolStatus.TIMEOUT))


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool of an environment.

    Attributes
    ----------
    function : callable
        Takes the arguments by keyword. A plain function runs in a thread of its own; an ``async``
        one shares the event loop and must await, since it cannot be timed out while it blocks.
    schema : mapping
        ``{"type": "function", "function": {"name", "description", "parameters"}}``, as chat
        templates take it.
    timeout_s : float
        Wall seconds of a call.
    max_payload_chars : int
        Characters of a return that the model sees; a note replaces the rest.
    inline : bool
        Whether cheap calls run inside the generation quantum.
    fatal : tuple of str
        Outcomes, "error" and "timeout", that end the trajectory with a failure which the model did
        not cause, to be sampled again (``trainer.resample``). The model reads all other outcomes. A
        tool raises `libra.errors.ToolFault` for single cases.
    cores : tuple of (int, int)
        Least and most cores that a call has alone; with (0, 0) it shares the others. With cores,
        memory or a GPU each call has a process (`libra.envs.action_process`), and its changes in
        memory are lost.
    memory_gib : float
        Memory above which a call is killed and its trajectory ends as class ``tool``; 0 is
        unbounded.
    gpu : int
        GPUs of a call.
    elastic : sequence of float, mapping of int to float, "measure" or None
        Speeds of a call by cores, relative to the least, for every number of cores or for some;
        "measure" learns them from calls. None gives a call its least.
    quota : str
        Limit for its calls, a name of ``environment.quotas``, or empty.
    revocable : bool
        Whether a call may be stopped and called again later, so that waiting calls can start. Its
        effects outside of its process may then happen twice.
    types : mapping of str to type
        Hints beyond plain JSON, such as an Enum or a dataclass: pydantic converts the call's JSON.
    services : tuple of str
        Services that it asks (`libra.ask`), names of ``services.named``, checked before a run
        starts.
    """

    name: str
    function: Callable[..., Any]
    schema: Mapping[str, Any]
    timeout_s: float = TIMEOUT_S
    max_payload_chars: int = MAX_PAYLOAD_CHARS
    inline: bool = False
    fatal: tuple[str, ...] = ()
    cores: tuple[int, int] = (0, 0)
    memory_gib: float = 0.0
    gpu: int = 0
    elastic: Sequence[float] | Mapping[int, float] | str | None = None
    quota: str = ""
    services: tuple[str, ...] = ()
    revocable: bool = False
    types: Mapping[str, Any] = field(default_factory=dict)
    is_async: bool = field(init=False)
    takes_action_id: bool = field(init=False)
    takes_state: bool = field(init=False)
    takes_session: bool = field(init=False)

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise ConfigError(f"tool {self.name!r}: timeout_s is {self.timeout_s!r}; it must be above 0 seconds")
        if self.max_payload_chars < 1:
            raise ConfigError(
                f"tool {self.name!r}: max_payload_chars is {self.max_payload_chars!r}; it must be at least 1"
            )
        if not set(self.fatal) <= set(FATAL):
            raise ConfigError(f"tool {self.name!r}: fatal is {self.fatal!r}; allowed are {', '.join(map(repr, FATAL))}")
        self._check_resources()
        is_async = inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(
            getattr(self.function, "__call__", None)  # noqa: B004  an instance whose __call__ is async
        )
        object.__setattr__(self, "is_async", is_async)
        given = {STATE, SESSION} & set(inspect.signature(self.function).parameters)
        if given and self.own_process:
            raise ConfigError(
                f"tool {self.name!r}: it takes {min(given)}, and cores, memory or a GPU, so it would run beside it in a process of "
                "its own; leave one of them out"
            )
        if self.services and self.own_process:
            raise ConfigError(
                f"tool {self.name!r}: services={self.services!r}, and cores, memory or a GPU, so it would run in a process of its "
                "own, from which no service can be asked; leave one of them out"
            )
        if is_async and self.own_process:
            raise ConfigError(
                f"tool {self.name!r}: an async tool shares the worker's event loop, so it cannot have cores or memory of its own; "
                "leave them out, or make it a plain function"
            )
        parameters = inspect.signature(self.function).parameters
        object.__setattr__(self, "takes_action_id", ACTION_ID in parameters)
        object.__setattr__(self, "takes_state", STATE in parameters)
        object.__setattr__(self, "takes_session", SESSION in parameters and SESSION not in self.parameters)

    def call(self, /, **arguments: Any) -> Any:
        """Call the function with each argument in the type of its hint."""
        return self.function(**{name: self.typed(name, value) for name, value in arguments.items()})

    def typed(self, name: str, value: Any) -> Any:
        """An argument of a call in the type of its hint; ValidationError."""
        return TypeAdapter(self.types[name]).validate_python(value) if name in self.types else value

    def _check_resources(self) -> None:
        where, (least, most) = f"tool {self.name!r}", self.cores
        if not 0 <= least <= most or (most and not least):
            raise ConfigError(
                f"{where}: cores is {self.cores!r}; type the least and the most, e.g. (1, 8), or one number"
            )
        if self.memory_gib < 0 or self.gpu < 0:
            raise ConfigError(f"{where}: memory_gib is {self.memory_gib!r} and gpu {self.gpu!r}; type 0 or more")
        if self.elastic is None and least != most:
            raise ConfigError(
                f"{where}: cores is {self.cores!r}, and nothing says how much more cores help; type elastic='measure', or the "
                f"speeds of {least} to {most} cores"
            )
        if self.elastic is not None and not most > least:
            raise ConfigError(
                f"{where}: elastic, with cores {self.cores!r}; type a least and a larger most, e.g. cores=(1, 8)"
            )
        if self.revocable and not self.own_process:
            raise ConfigError(
                f"{where}: revocable, and a call without cores, memory or a GPU of its own shares the worker's process, where it "
                "cannot be stopped; type cores=1, or leave revocable out"
            )
        if self.declares and self.inline:
            raise ConfigError(
                f"{where}: inline calls run in the slot of a generation; leave inline out, or its resources"
            )

    @property
    def declares(self) -> bool:
        """Whether calls need more than a slot."""
        return bool(self.cores[1] or self.memory_gib or self.gpu or self.quota)

    @property
    def own_process(self) -> bool:
        """Whether a call runs in a process of its own."""
        return bool(self.cores[1] or self.memory_gib or self.gpu)

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON schemas of the arguments by name."""
        return self.schema["function"]["parameters"].get("properties", {})

    @property
    def required(self) -> tuple[str, ...]:
        """Arguments without a default."""
        return tuple(self.schema["function"]["parameters"].get("required", ()))

    @property
    def usage(self) -> str:
        """The shape of a valid call, e.g. ``{"name": "calculator", "arguments": {"expression":
        ...}}``."""
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
    cores: int | tuple[int, int] = (0, 0),
    memory_gib: float = 0.0,
    gpu: int = 0,
    elastic: Sequence[float] | Mapping[int, float] | str | None = None,
    quota: str = "",
    services: str | tuple[str, ...] = (),
    revocable: bool = False,
) -> Tool:
    """The `Tool` of a function with type hints and a Google-style docstring, which
    ``get_json_schema`` reads.

    A hint may be any type with a JSON schema in pydantic: an Enum, a dataclass, ``Annotated[int,
    Field(ge=1)]``, ... ConfigError if a hint or a description is missing, or a hint has no JSON
    schema.
    """
    shown = name or str(getattr(function, "__name__", type(function).__name__))
    pair = (cores, cores) if isinstance(cores, int) else cores
    schema, types = _schema(function, shown)
    return Tool(
        shown, function, schema, timeout_s, max_payload_chars, inline, fatal, pair, memory_gib, gpu, elastic, quota,
        (services,) if isinstance(services, str) else tuple(services), revocable, types,
    )  # fmt: skip


def _schema(function: Callable[..., Any], name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schema of a tool, and its hints beyond plain JSON."""
    from transformers.utils import get_json_schema

    where = f"tool {name!r}"
    signature = inspect.signature(function)
    hinted = function if inspect.isroutine(function) else type(function).__call__
    try:
        hints = get_type_hints(hinted, include_extras=True)
    except (NameError, TypeError) as error:
        raise ConfigError(
            f"{where}: its type hints cannot be read ({error}); use hints that the module imports"
        ) from error
    shown = {key: value for key, value in signature.parameters.items() if key not in (ACTION_ID, STATE, SESSION)}
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
            f'{where}: no docstring, so the model cannot know its purpose; add e.g. """What it does.\\n\\n'
            + ("Args:\\n    " + "\\n    ".join(f"{key}: what it is" for key in shown) if shown else "")
            + '"""'
        )

    def stub() -> None: ...

    # A substitute hides action_id, trajectory_state and session from the model.
    stub.__name__, stub.__doc__ = name, doc
    types = {key: hint for key, hint in hints.items() if key in shown and not _is_plain(hint)}
    stub.__annotations__ = {key: dict if key in types else hint for key, hint in hints.items() if key in shown}
    stub.__signature__ = signature.replace(parameters=list(shown.values()))  # type: ignore[attr-defined]
    own = {key: _type_schema(hint, f"{where}: argument {key!r}") for key, hint in types.items()}
    try:
        schema = get_json_schema(stub)
    except Exception as error:  # boundary: transformers has its own error class for each fault of a docstring
        missing = [key for key in shown if f"{key}:" not in doc and f"{key} (" not in doc]
        lines = "; ".join(f"'    {key}: what it is'" for key in missing or shown)
        raise ConfigError(
            f"{where}: its docstring does not describe every argument; add under 'Args:' {lines}"
        ) from error

    properties = schema["function"]["parameters"]["properties"]
    properties.update({key: {**each, "description": properties[key]["description"]} for key, each in own.items()})
    return schema, types


def _is_plain(hint: Any) -> bool:
    """Whether a hint has only JSON's own types, whose schema transformers writes as models have
    seen it."""
    origin = get_origin(hint)
    if origin in (list, tuple, dict, Union, UnionType):
        return all(each is Ellipsis or _is_plain(each) for each in get_args(hint))
    return origin is Literal or hint in (str, int, float, bool, list, tuple, dict, type(None), Any)


def _type_schema(hint: Any, where: str) -> dict[str, Any]:
    """Pydantic's JSON schema of a hint, without titles and references."""
    try:
        given = TypeAdapter(hint).json_schema()
        schema: dict[str, Any] = _inlined(given, given.get("$defs", {}))
    except Exception as error:  # boundary: pydantic, and methods of the user's types that it calls
        raise ConfigError(
            f"{where} has the type {getattr(hint, '__name__', hint)}, which has no JSON schema "
            f"({str(error).partition(chr(10))[0].rstrip('.')}); give it one that has, such as str, an Enum or a dataclass"
        ) from error
    several = schema.get("anyOf", [])
    if len(several) == 2 and {"type": "null"} in several:  # as transformers writes an optional one
        schema.update(next(each for each in several if each != {"type": "null"}), nullable=True)
        del schema["anyOf"]
    return schema


def _inlined(given: Any, definitions: Mapping[str, Any], inside: tuple[str, ...] = ()) -> Any:
    if isinstance(given, list):
        return [_inlined(each, definitions, inside) for each in given]
    if not isinstance(given, dict):
        return given
    if isinstance(given.get("$ref"), str):
        name = given["$ref"].rpartition("/")[2]
        if name in inside:
            raise ValueError(f"{name} contains itself")
        more = {key: value for key, value in given.items() if key != "$ref"}
        return _inlined({**definitions[name], **more}, definitions, (*inside, name))
    left_out = {"$defs", "discriminator"} | ({"title"} if isinstance(given.get("title"), str) else set())
    return {key: _inlined(value, definitions, inside) for key, value in given.items() if key not in left_out}


SESSION_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class SessionKind:
    """Functions for the sessions of an environment. Each may be ``async``; others run in a thread.

    Attributes
    ----------
    factory : callable
        ``factory()`` makes a session.
    reset : callable, optional
        ``reset(session)`` runs after each trajectory. Without it a session serves one trajectory
        and is closed.
    close : callable, optional
        ``close(session)``.
    alive : callable, optional
        ``alive(session)`` runs before each action, and is false for a dead session.
    most : int or None
        Most sessions of a worker at once; further trajectories wait up to ``timeout_s`` for one.
    idle : int
        Most sessions kept between trajectories.
    timeout_s : float
        Wall seconds of each call, and of the wait for a session.
    lease_s : float
        Seconds without an action after which another trajectory may take the session, where
        ``most`` are leased.
    """

    factory: Callable[[], Any]
    reset: Callable[[Any], Any] | None = None
    close: Callable[[Any], Any] | None = None
    alive: Callable[[Any], Any] | None = None
    most: int | None = None
    idle: int = 8
    timeout_s: float = SESSION_TIMEOUT_S
    lease_s: float = 900.0

    def __post_init__(self) -> None:
        for name in ("factory", "reset", "close", "alive"):
            value = getattr(self, name)
            if not callable(value) and (name == "factory" or value is not None):
                raise ConfigError(
                    f"session: {name} is {value!r:.80}; it is a function{'' if name == 'factory' else ' or None'}"
                )
        if self.most is not None and self.most < 1:
            raise ConfigError(f"session: most is {self.most!r}; it is a whole number above 0, or None")
        if self.idle < 0 or not self.timeout_s > 0 or not self.lease_s > 0:
            raise ConfigError(
                f"session: idle is {self.idle!r}, timeout_s {self.timeout_s!r} and lease_s {self.lease_s!r}; idle is at least 0, "
                "the others are above 0"
            )


def session(factory: Callable[[], Any], **options: Any) -> SessionKind:
    """The `SessionKind` of a factory; options are its other fields."""
    return SessionKind(factory, **options)
