"""Runs agents in their environment, with Python's standard library alone.

Standard input and output have lines of JSON::

    {"start": 7, "env": {...}, "task": {...}}    call the function, or start the command
    {"stop": 7}                                  end that agent and all that it started
    {"ended": 7, "result": ..., "error": null}   the agent has ended with a result or an error

An ``async`` function runs as a task of this process, any other function in a fork of this process,
and a command in its own process. Every agent ends with the input, and with this program. On Linux,
the agent's process adopts processes that an agent leaves behind, then this program does, which
kills them; processes that tasks start end with this program.

A function takes by name any of ``prompt`` (text of the last user message), ``messages``, ``facts``,
``base_url``, ``api_key`` and the facts' own names. A command reads the task from its standard
input; its result is the last line of its output, as JSON if possible.
"""

import asyncio
import contextlib
import contextvars
import faulthandler
import gc
import importlib.util
import inspect
import json
import os
import pkgutil
import resource
import shlex
import signal
import sys
import tempfile
import traceback
from pathlib import Path

_found = importlib.util.spec_from_file_location("keeper", Path(__file__).parents[1] / "processes" / "keeper.py")
assert _found is not None and _found.loader is not None
keeper = importlib.util.module_from_spec(_found)
_found.loader.exec_module(keeper)  # by its file: Libra is not installed in the agents' environment

MAX_RESULT_BYTES = 1 << 20
MAX_ERROR_CHARS = 2000
MAX_LEVELS = 64
CHUNK_BYTES = 1 << 16
LINE_BYTES = 1 << 30
KILL_S = 2.0
"""Seconds in which this program, at its end, kills all processes that agents have started."""
GRACE_S = 3.0
"""Seconds in which this program ends after its input."""
FILES = resource.getrlimit(resource.RLIMIT_NOFILE)
"""Limit of open files for agents; this program raises its own to the machine's."""
VARIABLES: contextvars.ContextVar[dict[str, str]] = contextvars.ContextVar("an agent's own variables", default={})  # noqa: B039 - never changed


class TaskEnvironment(os._Environ):
    """`os.environ` plus the variables of the agent whose task runs."""

    def __getitem__(self, name):
        own = VARIABLES.get()
        return own[name] if name in own else super().__getitem__(name)

    def __iter__(self):
        own = VARIABLES.get()
        yield from own
        yield from (name for name in super().__iter__() if name not in own)

    def __len__(self):
        return sum(1 for _ in self)


def arguments_of(function, task, env):
    messages = task["messages"]
    users = [message["content"] for message in messages if message["role"] == "user"]
    given = task["facts"] | {
        "prompt": users[-1] if users else "",
        "messages": messages,
        "facts": task["facts"],
        "base_url": env["OPENAI_BASE_URL"],
        "api_key": env["OPENAI_API_KEY"],
    }
    parameters = inspect.signature(function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return given
    return {name: given[name] for name in parameters if name in given}


async def awaited(value):
    return await value


def as_json(value):
    try:
        return json.dumps(value, default=lambda each: each.item() if hasattr(each, "item") else float(each))
    except (TypeError, ValueError, RuntimeError):  # the last is torch's, of several numbers
        return json.dumps(str(value))


def read_result(text):
    """The value of a JSON text; text that is not JSON, or has too many levels, stays unchanged."""
    try:
        result = json.loads(text)
    except (ValueError, RecursionError):
        return text
    level, depth = [result], 0
    while level and depth <= MAX_LEVELS:
        inner = [each for each in level if isinstance(each, (dict, list))]
        level = [child for each in inner for child in (each.values() if isinstance(each, dict) else each)]
        depth += bool(inner)
    return text if depth > MAX_LEVELS else result


def failure(how, said):
    said = said.strip()[-MAX_ERROR_CHARS:]  # its last line, an exception's, comes first
    last = said.rpartition("\n")[2]
    return f"it ended with {how}{': ' if said else ''}{last}{chr(10) + said if last != said else ''}"


def tell(answers, **fields):
    answers.write(json.dumps(fields) + "\n")


# ---------------------------------------------------------------- tasks


class Tasks:
    def __init__(self, function, answers):
        self.function, self.answers = function, answers
        self.running = {}

    async def serve(self):
        os.environ.__class__ = TaskEnvironment
        lines = asyncio.StreamReader(limit=LINE_BYTES)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        while line := await lines.readline():
            message = json.loads(line)
            if "start" in message:
                self.running[message["start"]] = asyncio.create_task(self.run(message["start"], message))
            elif (task := self.running.pop(message["stop"], None)) is not None:
                task.cancel()
        for task in self.running.values():
            task.cancel()
        if self.running:
            await asyncio.wait(self.running.values(), timeout=KILL_S)
        keeper.end_children(KILL_S)
        os._exit(0)  # threads of agents may hang

    async def run(self, number, message):
        VARIABLES.set(message["env"])
        result = error = None
        try:
            text = as_json(await self.function(**arguments_of(self.function, message["task"], message["env"])))
            result = read_result(text[-MAX_RESULT_BYTES:])
        except SystemExit as end:
            error = failure(f"status {end.code}", "") if end.code else None
        except BaseException:  # noqa: BLE001 - the boundary to the user's function, which may raise anything
            error = failure("status 1", traceback.format_exc())
        if self.running.pop(number, None) is not None:  # else it was stopped
            tell(self.answers, ended=number, result=result, error=error)


# ---------------------------------------------------------------- processes


class Child:
    """A process, and the data from the ends of its two pipes."""

    def __init__(self, number, pipe, errors):
        self.number, self.pipe, self.errors = number, pipe, errors
        self.kept = {pipe: MAX_RESULT_BYTES, errors: 4 * MAX_ERROR_CHARS}  # bytes
        self.data = {pipe: b"", errors: b""}
        self.open = set()
        for each in (pipe, errors):
            os.set_blocking(each, False)
            asyncio.get_running_loop().add_reader(each, self.read, each)
            self.open.add(each)

    def read(self, pipe):
        """Read one chunk, since an agent may write for ever; returns whether there was a chunk."""
        try:
            data = os.read(pipe, CHUNK_BYTES)
        except BlockingIOError:
            return False
        self.data[pipe] = (self.data[pipe] + data)[-self.kept[pipe] :]
        if not data:
            self.close(pipe)
        return bool(data)

    def close(self, pipe):
        asyncio.get_running_loop().remove_reader(pipe)
        self.open.discard(pipe)
        os.close(pipe)

    def outcome(self, code, command):
        """The agent's result and error."""
        for pipe in list(self.open):
            for _ in range(2 * MAX_RESULT_BYTES // CHUNK_BYTES):  # more than a pipe holds; others may hold it open
                if not self.read(pipe):
                    break
        for pipe in list(self.open):
            self.close(pipe)
        text, said = (self.data[each].decode(errors="replace").strip() for each in (self.pipe, self.errors))
        if code:
            return None, failure(f"signal {-code}" if code < 0 else f"status {code}", said)
        return read_result(text.splitlines()[-1] if command else text) if text else None, None


class Processes:
    """Agents with their own processes; ``own`` has the processes that the user's module started."""

    def __init__(self, function, command, answers):
        self.function, self.command, self.answers = function, command, answers
        self.children: dict[int, Child] = {}  # by their pid
        self.own = set(keeper.own_children())

    async def serve(self):
        gc.collect()
        gc.freeze()  # a collection would write to all objects, and so copy their pages in each fork
        loop, rest = asyncio.get_running_loop(), b""
        input_ends = loop.create_future()

        def read():  # a callback: in a fork, no task of this loop may be the current one
            nonlocal rest
            if data := os.read(0, CHUNK_BYTES):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self.obey(json.loads(line))
            else:
                loop.remove_reader(0)
                input_ends.set_result(None)

        loop.add_signal_handler(signal.SIGCHLD, self.reap)
        loop.add_reader(0, read)
        await input_ends

    def obey(self, message):
        if "start" in message:
            try:
                self.start(message["start"], message["env"], message["task"])
            except OSError as error:
                failed = f"no process can be started: {error}"
                tell(self.answers, ended=message["start"], result=None, error=failed)
            return
        for pid, child in self.children.items():
            if child.number == message["stop"]:
                keeper.kill(pid, group=True)
                keeper.kill(pid)

    def start(self, number, env, task):
        with contextlib.ExitStack() as opened:
            ends = [end for _ in range(2) for end in os.pipe()]
            for end in ends:
                opened.callback(os.close, end)
            runner, pid = os.getpid(), os.fork()
            opened.pop_all()
        pipe, write, errors, log = ends
        if pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.setpgid(pid, pid)  # the fork does the same, because either may run first
            os.close(write)
            os.close(log)
            self.children[pid] = Child(number, pipe, errors)
            return
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            keeper.end_with(runner)
            keeper.adopt()
            os.close(self.answers.fileno())  # the worker reads its end as the end of this program
            for mine in (pipe, errors, *(each for child in self.children.values() for each in child.open)):
                os.close(mine)
            os.setpgid(0, 0)
            os.dup2(log, 2)
            resource.setrlimit(resource.RLIMIT_NOFILE, FILES)
            self.become(write, env, task)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1 if end.code else 0
        except BaseException:  # noqa: BLE001 - the boundary to the user's function
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stderr.flush()
            os._exit(code)

    def become(self, write, env, task):
        """In the fork, call the function and write its value, or become the command."""
        os.environ.update(env)
        if self.command:
            given = tempfile.TemporaryFile()  # noqa: SIM115 - the command's standard input
            given.write(json.dumps(task).encode())
            given.seek(0)
            os.dup2(given.fileno(), 0)
            os.dup2(write, 1)
            os.execvp(self.command[0], self.command)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        value = self.function(**arguments_of(self.function, task, env))
        text = as_json(asyncio.run(awaited(value)) if inspect.isawaitable(value) else value)
        sys.stdout.flush()
        with os.fdopen(write, "w", encoding="utf-8") as file:
            file.write(text)

    def reap(self):
        """Report the agents that have ended, and kill the processes that they left behind."""
        with contextlib.suppress(ChildProcessError):
            while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                child = self.children.pop(found.si_pid, None)
                if child is not None:
                    keeper.kill(found.si_pid, group=True)
                _, status = os.waitpid(found.si_pid, 0)
                self.own.discard(found.si_pid)
                if child is not None:
                    result, error = child.outcome(os.waitstatus_to_exitcode(status), self.command)
                    tell(self.answers, ended=child.number, result=result, error=error)
        for pid in set(keeper.own_children()) - self.children.keys() - self.own:
            keeper.kill(pid)  # its end wakes this program again, which then has its children


def main():
    given = json.loads(sys.stdin.readline())
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - as the interpreter puts it there
    sys.path[:] = [*given["path"], *(entry for entry in sys.path if entry != here)]  # not Libra's `messages`
    command = shlex.split(given["command"]) if given.get("command") else None
    function = None
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    keeper.adopt()
    if command is None:
        faulthandler.dump_traceback_later(given["import_s"], file=answers)
        try:
            function = pkgutil.resolve_name(given["function"])
        except BaseException as error:  # noqa: BLE001 - the boundary to the user's module
            tell(answers, ready=False, error=f"{type(error).__name__}: {error}")
            return
        finally:
            faulthandler.cancel_dump_traceback_later()
    tell(answers, ready=True)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES[1], FILES[1]))
    if inspect.iscoroutinefunction(function):
        asyncio.run(Tasks(function, answers).serve())
    try:
        asyncio.run(Processes(function, command, answers).serve())
    finally:
        keeper.end_children(KILL_S)


if __name__ == "__main__":
    main()
