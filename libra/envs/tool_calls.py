"""Execution of one tool call under every behaviour of the tool.

Invariants
----------
1. `run_action` returns a `ToolReturn` for every call and every behaviour of a tool. It raises only
   if its own task is cancelled, and `ToolFault` if the outcome is fatal for the tool or its API
   refuses the call in every retry. The text of a return is storable (`libra.untrusted`); its
   ``tool`` is a tool of the environment, or "" for a name that the model made up.
2. `run_action` returns within the tool's ``timeout_s`` plus scheduling, unless an ``async`` tool
   blocks the event loop; retries add at most `libra.envs.retries.TOTAL_S`.
3. ``content`` has at most ``max_payload_chars`` characters, plus a note that counts the dropped
   characters.
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
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any, NamedTuple, Protocol, Self

from pydantic import ValidationError

from libra.envs.action_process import ActionProcesses, Bounds, GpusOfCalls
from libra.envs.environment import Environment
from libra.envs.retries import BackOff, Refused, refused, with_retries
from libra.envs.tool import ACTION_ID, SESSION, STATE, Tool
from libra.envs.tool_call_formats import TOOL_FORMATS
from libra.errors import EnvironmentFault, ToolFault, ToolTimeout
from libra.named_parts import raised_at
from libra.types import Prompt, ToolCall, ToolReturn, ToolStatus
from libra.untrusted import error_text, shown_line, storable

logger = logging.getLogger(__name__)

_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,), "object": (dict,),
    "null": (type(None),),
}  # fmt: skip
SMALL_CHARS = 1 << 18
"""Characters of a text that is stored in its record: at most 1 MiB."""

Outcome = tuple[Any, BaseException | None] | None
"""Value and error of a call of the user's code; None after a time-out."""


class StateOfCall(Protocol):
    """The trajectory's state; `libra.envs.state.StateCopy` implements it."""

    def value(self) -> Any: ...

    def keep(self, value: Any) -> None: ...


class _Tried(NamedTuple):
    arguments: dict[str, Any]
    outcome: Outcome
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
        keyword ``action_id`` get it as idempotency key and seed of injected faults.
    state, session : object, optional
        For tools that take them. Changes of the state are kept if the tool returned.
    keep : callable, optional
        Stores the whole text before it is cut, and returns its reference, or "".
    processes : ActionProcesses, optional
        Runs calls with resources of their own, on ``cores``, or else on the tool's fewest cores.
    back_off : BackOff, optional
        Retries while an API refuses the call for now (HTTP 429).

    Raises
    ------
    ToolFault
        The tool raised it, its outcome is ``fatal`` (`ToolTimeout` for a time-out), or its API
        refused the call in every retry.
    """
    tool = next((tool for tool in environment.tools if tool.name == call.name), None) if call.error is None else None
    if fault := _malformed(environment, call, tool):
        return ToolReturn("" if tool is None else tool.name, ToolStatus.MALFORMED, storable(fault), 0.0, len(fault))
    assert tool is not None

    async def attempt() -> _Tried:
        hidden = {ACTION_ID: action_id} if tool.takes_action_id else {}
        hidden |= {STATE: state.value()} if tool.takes_state and state is not None else {}
        hidden |= {SESSION: session} if tool.takes_session else {}
        return await _tried(tool, {**call.arguments, **hidden}, processes, cores)

    tried, retries = await with_retries(attempt, lambda each: each.refused, back_off or BackOff(), action_id)
    if tried.refused is not None:
        raise ToolFault(f"tool {tool.name}: its API refuses calls (HTTP 429), after {retries} retries ({action_id})")
    payload, status = _payload(tool, tried, state, f"{action_id}, prompt {shown_line(prompt.prompt_id)}")
    reference = ""
    if keep is not None and status is not ToolStatus.TIMEOUT:  # a thread writes text that may become a file
        reference = keep(payload) if len(payload) <= SMALL_CHARS else await asyncio.to_thread(keep, payload)
    content = cut(payload, tool.max_payload_chars)
    if status is ToolStatus.OK and len(payload) > tool.max_payload_chars:
        status = ToolStatus.TRUNCATED
    return ToolReturn(tool.name, status, content, tried.latency_s, len(payload), reference=reference)


async def _tried(tool: Tool, arguments: dict[str, Any], processes: ActionProcesses | None, cores: int | None) -> _Tried:
    started_s = time.perf_counter()
    if tool.own_process and processes is not None:
        bounds = Bounds(tool.cores[0] if cores is None else cores, round(tool.memory_gib * 2**30), tool.gpu)
        ran = await processes.run(tool.name, arguments, tool.timeout_s, bounds)
        if ran is None:
            return _Tried(arguments, None, time.perf_counter() - started_s, None)
        error: Exception | None = None
        if ran.error:
            error = ToolFault(ran.text) if ran.fault else type(ran.error, (Exception,), {})(ran.text)
        return _Tried(arguments, (ran.text, error), ran.ran_s, ran.refused)
    outcome = await run_bounded(tool.call, arguments, tool.timeout_s, is_async=tool.is_async, name=f"tool {tool.name}")
    latency_s = time.perf_counter() - started_s
    return _Tried(arguments, outcome, latency_s, refused(outcome[1], time.time()) if outcome is not None else None)


def _payload(tool: Tool, tried: _Tried, state: StateOfCall | None, where: str) -> tuple[str, ToolStatus]:
    if tried.outcome is None:
        logger.info("tool %s timed out after %g s (%s)", tool.name, tool.timeout_s, where)
        content = f"timed out after {tool.timeout_s:g} s"
        if ToolStatus.TIMEOUT in tool.fatal:
            raise ToolTimeout(f"tool {tool.name}: {content} ({where})")
        return content, ToolStatus.TIMEOUT
    value, error = tried.outcome
    if isinstance(error, ToolFault) or (error is not None and ToolStatus.ERROR in tool.fatal):
        raise ToolFault(f"tool {tool.name}: {error_text(error)}{raised_at(error)} ({where})") from error
    if error is None and tool.takes_state and state is not None:
        state.keep(tried.arguments[STATE])
    try:
        if error is not None:
            return f"{type(error).__name__}: {error}", ToolStatus.ERROR
        return _as_text(value), ToolStatus.OK
    except Exception as fault_of_text:  # noqa: BLE001 boundary: __str__ of a tool's value is the tool's code too
        return f"{type(fault_of_text).__name__} while reading what the tool returned", ToolStatus.ERROR


def cut(text: str, most: int) -> str:
    """Storable text of at most ``most`` characters, and a note that counts the rest."""
    kept, dropped = storable(text[:most]), len(text) - most
    return kept if dropped <= 0 else f"{kept}\n[{dropped} of {len(text)} characters dropped]"


def processes_for(
    environment: Environment, cores: Sequence[int], gpus: GpusOfCalls | None = None
) -> ActionProcesses | None:
    """Processes for calls on a worker with these cores and GPUs; None if no tool needs any."""
    functions = {tool.name: tool.call for tool in environment.tools if tool.own_process}
    return ActionProcesses(functions, cores, _as_text, gpus) if functions else None


async def run_bounded(
    function: Callable[..., Any], arguments: Mapping[str, Any], timeout_s: float, *, is_async: bool, name: str
) -> Outcome:
    """Call ``function(**arguments)``, in a thread unless ``async``; returns (value, exception).

    The exception is None for a return, and `NoThread` if the call could not start. The whole result
    is None after ``timeout_s``. The event loop awaits an awaitable return of a thread's function.
    """
    loop = asyncio.get_running_loop()
    until_s = loop.time() + timeout_s
    thread: CallThread | None = None
    waiting: asyncio.Future[Any]
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
    finally:
        waiting.cancel()  # it has no effect once the call is done
    if done:
        value, fault = waiting.result()
        if not inspect.isawaitable(value):
            return value, fault
        return await run_bounded(lambda: value, {}, max(0.0, until_s - loop.time()), is_async=True, name=name)
    if thread is not None:
        thread.abandon()
        logger.warning(
            "%s did not return within %g s; its thread is abandoned (%d now)", name, timeout_s, hung_threads()
        )
    return None


async def called_or_fault(name: str, timeout_s: float, function: Callable[..., Any], *given: Any, where: str) -> Any:
    """The value of ``function(*given)``; EnvironmentFault if it raised, ToolTimeout if it hangs."""
    is_async = inspect.iscoroutinefunction(function)
    outcome = await run_bounded(lambda: function(*given), {}, timeout_s, is_async=is_async, name=name)
    if outcome is None:
        raise ToolTimeout(f"{name} did not return within {timeout_s:g} s{where}")
    value, error = outcome
    if error is not None:
        raise EnvironmentFault(f"{name} raised {error_text(error)}{raised_at(error)}{where}") from error
    return value


async def _guarded(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Outcome:
    try:
        return await function(**arguments), None
    except (Exception, SystemExit) as error:  # noqa: BLE001 boundary: what a tool raises is shown to the model
        return None, error


def _in_thread(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    loop: asyncio.AbstractEventLoop,
    waiting: asyncio.Future[Any],
) -> None:
    outcome: Outcome
    try:
        outcome = function(**arguments), None
    except BaseException as error:  # noqa: BLE001 boundary: the thread is the tool's own, so even an exit is only data
        outcome = None, error

    def deliver() -> None:
        if not waiting.done():
            waiting.set_result(outcome)

    with suppress(RuntimeError):  # the loop closed while the tool ran: no one awaits the result
        loop.call_soon_threadsafe(deliver)


def _malformed(environment: Environment, call: ToolCall, tool: Tool | None) -> str:
    """The fault of a call and the right form; empty for a well-formed call."""
    usage_of = TOOL_FORMATS[environment.tool_format].usage
    if tool is None:
        usage = " or ".join(usage_of(each) for each in environment.tools) or "no tools here"
        return f"malformed call: {call.error or f'no tool {call.name[:80]!r}'}; expected {usage}"
    faults = (
        *(f"{tool.name} has no argument {name[:80]!r}" for name in call.arguments if name not in tool.parameters),
        *(f"argument {name!r} is missing" for name in tool.required if name not in call.arguments),
    )
    fault = next(iter(faults), "") or next(filter(None, (_wrong(tool, *each) for each in call.arguments.items())), "")
    return fault and f"malformed call: {fault}; expected {usage_of(tool)}"


def _wrong(tool: Tool, name: str, value: object) -> str:
    """The fault of an argument by its schema, pydantic or the user's type; empty if valid."""
    schema = tool.parameters[name]
    if name not in tool.types:
        if _fits(value, schema):
            return ""
        wanted = " or ".join(_types(schema)) + (f", one of {schema['enum']}" if "enum" in schema else "")
        return f"argument {name!r} must be {wanted}, got {type(value).__name__}"
    try:
        tool.typed(name, value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        return f"argument {name!r}{''.join(f'[{key!r}]' for key in first['loc'])}: {first['msg']}"
    except Exception as error:  # noqa: BLE001 boundary: the type is the user's
        return f"argument {name!r}: {error_text(error)}"
    return ""


def _types(schema: Mapping[str, Any]) -> tuple[str, ...]:
    kind = schema.get("type")
    names = (kind,) if isinstance(kind, str) else tuple(kind or ())
    return (*names, "null") if schema.get("nullable") else names


def _fits(value: object, schema: Mapping[str, Any]) -> bool:
    if "enum" in schema and value not in schema["enum"] and not (value is None and schema.get("nullable")):
        return False
    names = _types(schema)
    if not names or "any" in names:
        return True
    if isinstance(value, bool):
        return "boolean" in names
    return any(isinstance(value, _JSON_TYPES.get(name, (object,))) for name in names)


def _as_text(value: object) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)


KEPT_IDLE = 64
"""Most idle threads; starting a thread costs more than most rewards."""
IDLE = "libra-call-idle"

_idle: list[CallThread] = []
_hung: set[CallThread] = set()
_lock = threading.Lock()


class NoThread(ToolFault):
    """The machine cannot start another thread, so the call did not start."""


class CallThread(threading.Thread):
    """A thread that runs one call after another."""

    def __init__(self) -> None:
        super().__init__(name=IDLE, daemon=True)
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], str]] = queue.SimpleQueue()

    @classmethod
    def call(cls, work: Callable[[], None], name: str) -> Self:
        """Run ``work``, which must not raise, in the caller's context on an idle or new thread
        ``name``. `NoThread` if the machine cannot start a thread."""
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
        """Run calls until enough other threads are idle."""
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
    """Number of threads whose call still runs after its time-out."""
    with _lock:
        return len(_hung)
