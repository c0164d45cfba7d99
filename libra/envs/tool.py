"""A tool: a Python function, and its description for the model."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
        Takes the arguments by keyword. A plain function runs in its own thread; an ``async``
        function shares the event loop and must await, since it cannot be timed out while it blocks.
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
        Outcomes, "error" and "timeout", that fail the trajectory, which is then sampled again
        (``trainer.resample``). The model reads all other outcomes.
    cores : tuple of (int, int)
        Fewest and most cores that a call has alone; (0, 0) shares the remaining cores. With cores,
        memory or a GPU, each call has a process (`libra.envs.action_process`), and its changes in
        memory are lost.
    memory_gib : float
        Memory above which a call is killed and its trajectory ends as class ``tool``; 0 is
        unbounded.
    gpu : int
        GPUs of a call.
    elastic : sequence of float, mapping of int to float, "measure" or None
        Speeds of a call relative to the fewest cores, for every number of cores or for some;
        "measure" learns the speeds from calls. None always uses the fewest cores.
    quota : str
        Limit for the tool's calls, a name of ``environment.quotas``, or empty.
    services : tuple of str
        Services that the tool queries (`libra.ask`), names of ``services.named``.
    revocable : bool
        Whether a call may be stopped and called again later, so that waiting calls can start. Its
        effects outside of its process may then happen twice.
    types : mapping of str to type
        Hints beyond plain JSON, such as an Enum or a dataclass: pydantic converts the call's JSON.
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
        parameters = inspect.signature(self.function).parameters
        # An instance whose __call__ is async counts, too.
        functions = (self.function, getattr(self.function, "__call__", None))  # noqa: B004
        object.__setattr__(self, "is_async", any(map(inspect.iscoroutinefunction, functions)))
        object.__setattr__(self, "takes_action_id", ACTION_ID in parameters)
        object.__setattr__(self, "takes_state", STATE in parameters)
        object.__setattr__(self, "takes_session", SESSION in parameters and SESSION not in self.parameters)
        for wrong, message in self._faults(parameters):
            if wrong:
                raise ConfigError(f"tool {self.name!r}: {message}")

    def _faults(self, parameters: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
        (least, most), own, chars = self.cores, self.own_process, self.max_payload_chars
        cores, beside = f"cores is {self.cores!r}", "its cores, memory or GPU give each call a process of its own"
        yield not self.timeout_s > 0, f"timeout_s is {self.timeout_s!r}; it must be above 0 seconds"
        yield chars < 1, f"max_payload_chars is {chars!r}; it must be at least 1"
        yield not set(self.fatal) <= set(FATAL), f"fatal is {self.fatal!r}; choose from {', '.join(map(repr, FATAL))}"
        yield not 0 <= least <= most or bool(most and not least), f"{cores}; type one number, or e.g. (1, 8)"
        yield self.memory_gib < 0, f"memory_gib is {self.memory_gib!r}; type 0 or more"
        yield self.gpu < 0, f"gpu is {self.gpu!r}; type 0 or more"
        yield (
            self.elastic is None and least != most,
            f"{cores}; type elastic='measure', or the speeds of {least} to {most}",
        )
        yield self.elastic is not None and not most > least, f"elastic, with {cores}; type e.g. cores=(1, 8)"
        yield (
            self.revocable and not own,
            "revocable, but a call in the worker's process cannot be stopped; type cores=1",
        )
        yield self.declares and self.inline, "inline calls run in the engine; leave inline out, or the resources"
        state = bool({STATE, SESSION} & set(parameters))
        yield own and state, f"it takes {STATE} or {SESSION}, but {beside}; leave one of them out"
        yield own and bool(self.services), f"services={self.services!r}, but {beside}; leave one of them out"
        yield own and self.is_async, f"an async tool shares the event loop, but {beside}; leave them out, or async"

    def call(self, /, **arguments: Any) -> Any:
        """Call the function with each argument converted to the type of its hint."""
        return self.function(**{name: self.typed(name, value) for name, value in arguments.items()})

    def typed(self, name: str, value: Any) -> Any:
        """An argument of a call, converted to the type of its hint; ValidationError."""
        return TypeAdapter(self.types[name]).validate_python(value) if name in self.types else value

    @property
    def declares(self) -> bool:
        """Whether calls need more than a slot: a process or a quota."""
        return self.own_process or bool(self.quota)

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
    """The `Tool` of a function with type hints and a Google-style docstring.

    A hint may be any type with a JSON schema in pydantic, such as an Enum, a dataclass, or
    ``Annotated[int, Field(ge=1)]``. ConfigError without hint, JSON schema or description.
    """
    shown = name or str(getattr(function, "__name__", type(function).__name__))
    pair = (cores, cores) if isinstance(cores, int) else cores
    schema, types = _schema(function, shown)
    return Tool(
        shown, function, schema, timeout_s, max_payload_chars, inline, fatal, pair, memory_gib, gpu, elastic, quota,
        (services,) if isinstance(services, str) else tuple(services), revocable, types,
    )  # fmt: skip


def _schema(function: Callable[..., Any], name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schema as transformers' ``get_json_schema`` gives it, and the hints beyond plain JSON."""
    where = f"tool {name!r}"
    try:
        hinted = function if inspect.isroutine(function) else type(function).__call__
        hints = get_type_hints(hinted, include_extras=True)
    except (NameError, TypeError) as error:
        raise ConfigError(f"{where}: its type hints cannot be read ({error}); import their types") from error
    signature = inspect.signature(function).parameters
    shown = {key: each for key, each in signature.items() if key not in (ACTION_ID, STATE, SESSION)}
    for key, parameter in shown.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"{where}: argument {parameter} has no name; tools are called with named arguments")
        if key not in hints:
            raise ConfigError(f"{where}: argument {key!r} has no type hint; type e.g. '{key}: str'")
    about, described = _descriptions(inspect.getdoc(function) or "", shown)
    if not about:
        lines = "".join(f"\\n    {key}: what it is" for key in shown)
        args = f"\\n\\nArgs:{lines}" if shown else ""
        raise ConfigError(f'{where}: no docstring, which the model reads; add e.g. """What it does.{args}"""')
    if missing := [key for key in shown if key not in described]:
        lines = "; ".join(f"'    {key}: what it is'" for key in missing)
        raise ConfigError(f"{where}: its docstring does not describe every argument; add under 'Args:' {lines}")
    types = {key: _type_schema(hints[key], f"{where}: argument {key!r}") for key in shown}
    properties = {key: {**types[key], "description": described[key]} for key in shown}
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required := [key for key, parameter in shown.items() if parameter.default is parameter.empty]:
        parameters["required"] = required
    schema = {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}
    return schema, {key: hints[key] for key in shown if not _is_plain(hints[key])}


_SECTION = re.compile(r"\n\s*(Args|Returns|Raises):[ \t]*(?:\n|\Z)")


def _descriptions(doc: str, names: Collection[str]) -> tuple[str, dict[str, str]]:
    """The docstring's text before its sections, and the descriptions of arguments in Args."""
    about, *rest = _SECTION.split("\n" + doc)
    sections = dict(zip(rest[::2], rest[1::2], strict=True))
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in map(str.strip, sections.get("Args", "").splitlines()):
        name, colon, text = line.partition(":")
        name = name.partition("(")[0].strip()
        if colon and name in names and name not in found:
            lines = found[name] = [text.strip()]
        elif line:
            lines.append(line)
    return about.strip(), {name: " ".join(each).strip() for name, each in found.items()}


def _is_plain(hint: Any) -> bool:
    if get_origin(hint) in (list, tuple, dict, Union, UnionType):
        return all(each is Ellipsis or _is_plain(each) for each in get_args(hint))
    return get_origin(hint) is Literal or hint in (str, int, float, bool, list, tuple, dict, type(None), Any)


def _type_schema(hint: Any, where: str) -> dict[str, Any]:
    try:
        given = TypeAdapter(hint).json_schema()
        return _as_in_templates(given, given.get("$defs", {}))
    except Exception as error:  # boundary: pydantic, and methods of the user's types that it calls
        raise ConfigError(
            f"{where} has the type {getattr(hint, '__name__', hint)}, which has no JSON schema "
            f"({str(error).partition(chr(10))[0].rstrip('.')}); give it one that has, such as str, an Enum or a dataclass"
        ) from error


_VALUES, _LEFT_OUT = ("const", "default", "enum", "examples"), ("$defs", "discriminator", "title")


def _as_in_templates(given: Any, definitions: Mapping[str, Any], inside: frozenset[str] = frozenset()) -> Any:
    """Pydantic's schema as in transformers' chat templates: type first, no references or titles."""
    if isinstance(given, list):
        return [_as_in_templates(each, definitions, inside) for each in given]
    if not isinstance(given, dict):
        return given
    if "$ref" in given:
        name = given["$ref"].rpartition("/")[2]
        if name in inside:
            raise ValueError(f"{name} contains itself")
        more = {key: value for key, value in given.items() if key != "$ref"}
        return _as_in_templates({**definitions[name], **more}, definitions, inside | {name})
    schema = {"type": given["type"]} if "type" in given else {}
    for key, value in given.items():
        if key == "properties":
            schema[key] = {name: _as_in_templates(each, definitions, inside) for name, each in value.items()}
        elif key in _LEFT_OUT or (key in ("minItems", "maxItems") and "prefixItems" in given):
            continue
        elif not (key in ("items", "additionalProperties") and value in ({}, True)):
            schema[key] = value if key in _VALUES else _as_in_templates(value, definitions, inside)
    if "const" in schema:
        schema["enum"] = [schema.pop("const")]
    several = schema.pop("anyOf", [])
    some = [each for each in several if each != {"type": "null"}]
    if len(some) == 1:
        schema = {**some[0], **schema}
    elif some:
        simple = all(each.keys() == {"type"} for each in some)
        schema |= {"type": sorted({each["type"] for each in some})} if simple else {"anyOf": some}
    return schema | ({"nullable": True} if len(some) < len(several) else {})


@dataclass(frozen=True, slots=True)
class SessionKind:
    """Functions for the sessions of an environment. ``async`` functions are awaited; others use a
    thread.

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
        Most sessions of a worker at once; further trajectories wait up to ``timeout_s``.
    idle : int
        Most sessions kept between trajectories.
    timeout_s : float
        Wall seconds of each call, and of the wait for a session.
    lease_s : float
        Seconds without an action after which another trajectory may take the session, if ``most``
        sessions are leased.
    """

    factory: Callable[[], Any]
    reset: Callable[[Any], Any] | None = None
    close: Callable[[Any], Any] | None = None
    alive: Callable[[Any], Any] | None = None
    most: int | None = None
    idle: int = 8
    timeout_s: float = 30.0
    lease_s: float = 900.0

    def __post_init__(self) -> None:
        for name in ("factory", "reset", "close", "alive"):
            value, more = getattr(self, name), "" if name == "factory" else " or None"
            if not callable(value) and not (more and value is None):
                raise ConfigError(f"session: {name} is {value!r:.80}; give a function{more}")
        for name, fits, allowed in (
            ("most", self.most is None or self.most >= 1, "a whole number above 0, or None"),
            ("idle", self.idle >= 0, "at least 0"),
            ("timeout_s", self.timeout_s > 0, "above 0"),
            ("lease_s", self.lease_s > 0, "above 0"),
        ):
            if not fits:
                raise ConfigError(f"session: {name} is {getattr(self, name)!r}; it must be {allowed}")


def session(factory: Callable[[], Any], **options: Any) -> SessionKind:
    """The `SessionKind` of a factory; ``options`` are the other fields."""
    return SessionKind(factory, **options)
