"""Runs one tool call, for any behaviour of the tool.

Invariants
----------
1. `run_action` returns a `ToolReturn` for everything that a call or a tool can do. It raises only
   if its own task is cancelled, and `ToolFault` if the outcome is fatal for the tool or its API
   refuses it for too long. Its text is storable (`libra.untrusted`), and its ``tool`` is one of the
   environment's, or empty for a name that the model made up.
2. It returns within the tool's ``timeout_s`` plus scheduling, unless an ``async`` tool blocks the
   event loop; while an API refuses the call, within `libra.envs.retries.TOTAL_S` more.
3. ``content`` has at most ``max_payload_chars`` characters plus one note with the number of dropped
   ones.
4. A thread that outlives its time-out is logged with its tool's name and counted by `hung_threads`
   until it ends.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, Self

from pydantic import ValidationError

from libra.envs.action_process import ActionProcesses, Bounds, GpusOfCalls, Ran
from libra.envs.environment import Environment
from libra.envs.retries import BackOff, Refused, refused, with_retries
from libra.envs.tool import ACTION_ID, SESSION, STATE, Tool
from libra.envs.tool_call_formats import TOOL_FORMATS
from libra.errors import ToolFault, ToolTimeout
from libra.named_parts import raised_at
from libra.types import Prompt, ToolCall, ToolReturn, ToolStatus
from libra.untrusted import error_text, shown_line, storable

logger = logging.getLogger(__name__)

_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,), "object": (dict,),
    "null": (type(None),),
}  # fmt: skip
SMALL_CHARS = 1 << 18
"""Characters of at most 1 MiB, which stand in their record."""


class StateOfCall(Protocol):
    """The trajectory's state; `libra.envs.state.StateCopy` is one."""

    def value(self) -> Any: ...

    def keep(self, value: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class _Tried:
    """One attempt of a call; ``outcome`` is (value, error), or None after a time-out."""

    arguments: dict[str, Any]
    outcome: tuple[Any, BaseException | None] | None
    latency_s: float
    refused: Refused | None


async def run_action(
    environment: Environment,
    prompt: Prompt,
    call: ToolCall,
    *,
    action_id: str,
    state: StateOfCall | None = None,
    session: Any = None,
    keep: Callable[[str], str] | None = None,
    processes: ActionProcesses | None = None,
    cores: int | None = None,
    back_off: BackOff | None = None,
) -> ToolReturn:
    """The return of ``call`` for the model.

    Parameters
    ----------
    prompt : Prompt
        The question of the call, for the log.
    action_id : str
        Name of the action in its run, e.g. "train-3-0-7/4/0" (trajectory, turn, call). Tools with a
        keyword of that name get it as idempotency key and seed of injected faults.
    state, session : object, optional
        For tools that take the trajectory's state or session. Changes of the state are kept if the
        tool returned.
    keep : callable, optional
        Stores the whole text before it is cut, and returns its reference, or "".
    processes : ActionProcesses, optional
        Runs calls of tools with resources of their own.
    cores : int, optional
        Cores of the call; None stands for the tool's least.
    back_off : BackOff, optional
        Retries while an API refuses the call for now (HTTP 429).

    Raises
    ------
    ToolFault
        The tool raised it, its outcome is ``fatal`` (`ToolTimeout` for a time-out), or its API
        refused it until retries were used up.
    """
    fault = _malformed(environment, call)
    if fault is not None:
        known = call.name if call.error is None and any(tool.name == call.name for tool in environment.tools) else ""
        return ToolReturn(known, ToolStatus.MALFORMED, storable(fault), 0.0, len(fault))
    tool = next(tool for tool in environment.tools if tool.name == call.name)

    async def attempt() -> _Tried:
        return await _tried(tool, _arguments(tool, call, action_id, state, session), processes, cores)

    tried, retries = await with_retries(attempt, lambda each: each.refused, back_off or BackOff(), action_id)
    if tried.refused is not None:
        raise ToolFault(
            f"tool {tool.name}: its API refuses calls for now (HTTP 429), also after {retries} retries ({action_id})"
        )
    if tried.outcome is None:
        return _timed_out(tool, tried, prompt, action_id)
    payload, status = _payload(tool, tried, tried.outcome, state, action_id)
    reference = ""
    if keep is not None:  # a thread writes text that may become a file
        reference = keep(payload) if len(payload) <= SMALL_CHARS else await asyncio.to_thread(keep, payload)
    return replace(_bounded_return(tool, status, payload, tried.latency_s), reference=reference)


def _arguments(tool: Tool, call: ToolCall, action_id: str, state: StateOfCall | None, session: Any) -> dict[str, Any]:
    arguments = dict(call.arguments)
    if tool.takes_action_id:
        arguments[ACTION_ID] = action_id
    if tool.takes_state and state is not None:
        arguments[STATE] = state.value()
    if tool.takes_session:
        arguments[SESSION] = session
    return arguments


async def _tried(tool: Tool, arguments: dict[str, Any], processes: ActionProcesses | None, cores: int | None) -> _Tried:
    if tool.own_process and processes is not None:
        bounds = Bounds(tool.cores[0] if cores is None else cores, round(tool.memory_gib * 2**30), tool.gpu)
        started_s = time.perf_counter()
        ran = await processes.run(tool.name, arguments, tool.timeout_s, bounds)
        if ran is None:
            return _Tried(arguments, None, time.perf_counter() - started_s, None)
        return _Tried(arguments, _as_outcome(ran), ran.ran_s, ran.refused)
    started_s = time.perf_counter()
    outcome = await run_bounded(tool.call, arguments, tool.timeout_s, is_async=tool.is_async, name=f"tool {tool.name}")
    latency_s = time.perf_counter() - started_s
    return _Tried(arguments, outcome, latency_s, refused(outcome[1], time.time()) if outcome is not None else None)


def _timed_out(tool: Tool, tried: _Tried, prompt: Prompt, action_id: str) -> ToolReturn:
    prompt_id = shown_line(prompt.prompt_id)
    logger.info("tool %s timed out after %g s (%s, prompt %s)", tool.name, tool.timeout_s, action_id, prompt_id)
    content = f"timed out after {tool.timeout_s:g} s"
    if ToolStatus.TIMEOUT in tool.fatal:
        raise ToolTimeout(f"tool {tool.name}: {content} ({action_id})")
    return ToolReturn(tool.name, ToolStatus.TIMEOUT, content, tried.latency_s, len(content))


def _payload(
    tool: Tool, tried: _Tried, outcome: tuple[Any, BaseException | None], state: StateOfCall | None, action_id: str
) -> tuple[str, ToolStatus]:
    """Text and status of an outcome; keeps the state if the call returned. `ToolFault` as in
    `run_action`."""
    value, error = outcome
    if isinstance(error, ToolFault) or (error is not None and ToolStatus.ERROR in tool.fatal):
        raise ToolFault(f"tool {tool.name}: {error_text(error)}{raised_at(error)} ({action_id})") from error
    if error is None and tool.takes_state and state is not None:
        state.keep(tried.arguments[STATE])
    try:
        if error is not None:
            return f"{type(error).__name__}: {error}", ToolStatus.ERROR
        return _as_text(value), ToolStatus.OK
    except Exception as fault_of_text:  # noqa: BLE001 boundary: __str__ of a tool's value is the tool's code too
        return f"{type(fault_of_text).__name__} while reading what the tool returned", ToolStatus.ERROR


def processes_for(
    environment: Environment, cores: Sequence[int], gpus: GpusOfCalls | None = None
) -> ActionProcesses | None:
    """Processes for calls of ``environment`` on a worker with these cores and GPUs; None if no tool
    needs one."""
    functions = {tool.name: tool.call for tool in environment.tools if tool.own_process}
    return ActionProcesses(functions, cores, _as_text, gpus) if functions else None


def _as_outcome(ran: Ran) -> tuple[Any, BaseException | None]:
    """The outcome of a call in its own process, in the form of `run_bounded`."""
    if not ran.error:
        return ran.text, None
    return None, ToolFault(ran.text) if ran.fault else type(ran.error, (Exception,), {})(ran.text)


async def run_bounded(
    function: Callable[..., Any], arguments: Mapping[str, Any], timeout_s: float, *, is_async: bool, name: str
) -> tuple[Any, BaseException | None] | None:
    """Call ``function(**arguments)``, in a thread unless it is ``async``.

    Returns (value, None) or (None, exception), which is `NoThread` if the call could not start, or
    None after ``timeout_s``. The event loop awaits an awaitable that a thread's function returned.
    """
    loop = asyncio.get_running_loop()
    until_s = loop.time() + timeout_s
    thread: CallThread | None = None
    waiting: asyncio.Future[tuple[Any, BaseException | None]]
    if is_async:
        waiting = loop.create_task(_guarded(function, arguments))
    else:
        waiting = loop.create_future()
        # Not a pool of fixed size: a hung call must not hold a slot of it, or keep the process from exiting.
        try:
            thread = CallThread.call(lambda: _in_thread(function, arguments, loop, waiting), name)
        except NoThread as error:
            return None, error
    try:
        done, _ = await asyncio.wait({waiting}, timeout=timeout_s)
    except asyncio.CancelledError:
        waiting.cancel()
        raise
    if done:
        outcome = waiting.result()
        value = outcome[0]
        if not inspect.isawaitable(value):
            return outcome
        return await run_bounded(lambda: value, {}, max(0.0, until_s - loop.time()), is_async=True, name=name)
    waiting.cancel()
    if thread is not None:
        thread.abandon()
        logger.warning(
            "%s did not return within %g s; its thread is abandoned (%d so far)", name, timeout_s, hung_threads()
        )
    return None


async def _guarded(function: Callable[..., Any], arguments: Mapping[str, Any]) -> tuple[Any, BaseException | None]:
    try:
        return await function(**arguments), None
    except (Exception, SystemExit) as error:  # noqa: BLE001 boundary: what a tool raises is shown to the model
        return None, error


def _in_thread(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    loop: asyncio.AbstractEventLoop,
    waiting: asyncio.Future[tuple[Any, BaseException | None]],
) -> None:
    outcome: tuple[Any, BaseException | None]
    try:
        outcome = function(**arguments), None
    except BaseException as error:  # noqa: BLE001 boundary: the thread is the tool's own, so even an exit is only data
        outcome = None, error

    def deliver() -> None:
        if not waiting.done():
            waiting.set_result(outcome)

    try:
        loop.call_soon_threadsafe(deliver)
    except RuntimeError:  # the loop closed while the tool ran: no one awaits the result
        logger.debug("%s returned after its event loop had closed", threading.current_thread().name)


def _malformed(environment: Environment, call: ToolCall) -> str | None:
    """The fault of a call and the right form; None for a well-formed call."""
    usage_of = TOOL_FORMATS[environment.tool_format].usage
    usage = " or ".join(usage_of(tool) for tool in environment.tools) or "no tools here"
    if call.error is not None:
        return f"malformed call: {call.error}; expected {usage}"
    tool = next((tool for tool in environment.tools if tool.name == call.name), None)
    if tool is None:
        return f"malformed call: no tool {call.name[:80]!r}; expected {usage}"
    for name in call.arguments:
        if name not in tool.parameters:
            return f"malformed call: {tool.name} has no argument {name[:80]!r}; expected {usage_of(tool)}"
    for name in tool.required:
        if name not in call.arguments:
            return f"malformed call: argument {name!r} is missing; expected {usage_of(tool)}"
    for name, value in call.arguments.items():
        schema = tool.parameters[name]
        if name in tool.types:
            if refusal := _refusal(tool, name, value):
                return f"malformed call: argument {name!r}{refusal}; expected {usage_of(tool)}"
        elif not _fits(value, schema):
            wanted = " or ".join(_types(schema)) + (f", one of {schema['enum']}" if "enum" in schema else "")
            return f"malformed call: argument {name!r} must be {wanted}, got {type(value).__name__}; expected {usage_of(tool)}"
    return None


def _refusal(tool: Tool, name: str, value: object) -> str:
    """The fault of an argument for pydantic or a validator of the user's type; empty without
    one."""
    try:
        tool.typed(name, value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        return "".join(f"[{key!r}]" for key in first["loc"]) + f": {first['msg']}"
    except Exception as error:  # noqa: BLE001 boundary: the type is the user's
        return f": {error_text(error)}"
    return ""


def _types(schema: Mapping[str, Any]) -> tuple[str, ...]:
    kind = schema.get("type")
    names = (kind,) if isinstance(kind, str) else tuple(kind or ())
    return (*names, "null") if schema.get("nullable") else names


def _fits(value: object, schema: Mapping[str, Any]) -> bool:
    """Whether the top level of ``value`` fits ``schema``; the tool checks the inside of lists and
    objects."""
    if "enum" in schema and value not in schema["enum"] and not (value is None and schema.get("nullable")):
        return False
    names = _types(schema)
    if not names or "any" in names:
        return True
    if isinstance(value, bool):
        return "boolean" in names
    return any(isinstance(value, _JSON_TYPES.get(name, (object,))) for name in names)


def _as_text(value: object) -> str:
    """A str unchanged, None as "", anything else as JSON, or ``str()`` if JSON cannot express
    it."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)


def _bounded_return(tool: Tool, status: ToolStatus, payload: str, latency_s: float) -> ToolReturn:
    dropped = len(payload) - tool.max_payload_chars
    kept = storable(payload[: tool.max_payload_chars])
    if dropped <= 0:
        return ToolReturn(tool.name, status, kept, latency_s, len(payload))
    content = f"{kept}\n[{dropped} of {len(payload)} characters dropped]"
    if status is ToolStatus.OK:
        status = ToolStatus.TRUNCATED
    return ToolReturn(tool.name, status, content, latency_s, len(payload))


KEPT_IDLE = 64
"""Most idle threads; starting one costs more than most rewards."""
IDLE = "libra-call-idle"

_idle: list[CallThread] = []
_hung: set[CallThread] = set()
_lock = threading.Lock()


class NoThread(ToolFault):
    """The machine starts no further thread; the call was not begun."""


class CallThread(threading.Thread):
    """A thread that runs one call after another."""

    def __init__(self) -> None:
        super().__init__(name=IDLE, daemon=True)
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], str]] = queue.SimpleQueue()

    @classmethod
    def call(cls, work: Callable[[], None], name: str) -> Self:
        """Run ``work``, which must not raise, in the caller's context on an idle or new thread with
        this ``name``.

        `NoThread` if the machine starts none.
        """
        with _lock:
            thread = _idle.pop() if _idle else None
        if thread is None:
            thread = cls()
            try:
                thread.start()
            except RuntimeError as error:
                raise NoThread(f"{name}: {error}") from error
        thread._calls.put((partial(copy_context().run, work), name))
        assert isinstance(thread, cls)
        return thread

    def run(self) -> None:
        """Run calls until there are enough idle threads without this one."""
        while True:
            work, self.name = self._calls.get()
            work()
            self.name = IDLE
            del work  # frees the arguments of the call
            with _lock:
                _hung.discard(self)
                if len(_idle) >= KEPT_IDLE:
                    return
                _idle.append(self)

    def abandon(self) -> None:
        """Count the current call as hung until it ends."""
        with _lock:
            if self.name != IDLE:
                _hung.add(self)


def hung_threads() -> int:
    """Threads whose call has outlived its time-out and still runs."""
    with _lock:
        return len(_hung)
