"""Runs agents in their environment, with Python's standard library alone.

It reads lines of JSON from its standard input and writes lines of JSON to its standard output::

    {"start": 7, "env": {...}, "task": {...}}    call the function, or start the command
    {"stop": 7}                                  end that agent and all that it started
    {"ended": 7, "result": ..., "error": null}   the agent has ended with a result or an error

An ``async`` function runs as a task of this process. Any other function runs in a fork of this
process, and a command in a process of its own. The end of the input or of this program ends every
agent.

On Linux, processes that an agent leaves behind become children of the agent's process, and at its
end of this program, which kills them. So nothing outlives its agent, and no agent loses another
one's processes. Processes that tasks start end with this program.

A function takes by name any of ``prompt`` (text of the last user message), ``messages``, ``facts``,
``base_url``, ``api_key`` and the facts' own names. A command reads the task from its standard
input; its result is the last line of its output, as JSON if possible.
"""

import asyncio
import contextlib
import contextvars
import faulthandler
import gc
import importlib
import importlib.util
import inspect
import json
import os
import resource
import select
import shlex
import signal
import sys
import tempfile
import traceback
from pathlib import Path


def of_file(name):
    """A module of Libra by its file: Libra is not installed in the agents' environment."""
    found = importlib.util.spec_from_file_location(Path(name).stem, Path(__file__).parent / name)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


keeper = of_file("../processes/keeper.py")

MAX_RESULT_BYTES = 1 << 20
MAX_ERROR_CHARS = 2000
MAX_LEVELS = 64
CHUNK_BYTES = 1 << 16
LINE_BYTES = 1 << 30
KILL_S = 2.0
"""Seconds in which this program kills all that agents have started, at its end."""
GRACE_S = 3.0
"""Seconds in which this program ends after its input."""
FILES = resource.getrlimit(resource.RLIMIT_NOFILE)
"""Limit of open files for agents; this program raises its own to the machine's."""
VARIABLES: contextvars.ContextVar[dict[str, str]] = contextvars.ContextVar("an agent's own variables", default={})  # noqa: B039 - never changed


class TaskEnvironment(os._Environ):
    """`os.environ` with the variables of the agent whose task runs."""

    def __getitem__(self, name):
        own = VARIABLES.get()
        return own[name] if name in own else super().__getitem__(name)

    def __iter__(self):
        own = VARIABLES.get()
        yield from own
        yield from (name for name in super().__iter__() if name not in own)

    def __len__(self):
        return sum(1 for _ in self)


def load(name):
    module, _, attribute = name.partition(":")
    found = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found


def arguments_of(function, task, env):
    messages = task["messages"]
    users = [message["content"] for message in messages if message["role"] == "user"]
    given = dict(task["facts"])
    given.update(
        prompt=users[-1] if users else "",
        messages=messages,
        facts=task["facts"],
        base_url=env["OPENAI_BASE_URL"],
        api_key=env["OPENAI_API_KEY"],
    )
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
    """The value of a JSON text; other text, or text with too many levels, stays unchanged."""
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
            self.answers.write(json.dumps({"ended": number, "result": result, "error": error}) + "\n")


# ---------------------------------------------------------------- processes


class Child:
    def __init__(self, number, pid, pipe, errors):
        self.number, self.pid, self.pipe, self.errors = number, pid, pipe, errors
        self.pipes = {pipe: MAX_RESULT_BYTES, errors: 4 * MAX_ERROR_CHARS}  # open pipes, and the bytes kept of each
        self.data = {pipe: b"", errors: b""}

    def read(self, pipe):
        """Read one chunk: the agent may write for ever."""
        try:
            data = os.read(pipe, CHUNK_BYTES)
        except BlockingIOError:
            return
        if data:
            self.data[pipe] = (self.data[pipe] + data)[-self.pipes[pipe] :]
        else:
            del self.pipes[pipe]
            os.close(pipe)

    def outcome(self, code, command):
        """The message about its end."""
        for pipe in list(self.pipes):
            for _ in range(
                2 * MAX_RESULT_BYTES // CHUNK_BYTES
            ):  # more than a pipe holds; a process left may hold it open
                if pipe in self.pipes:
                    self.read(pipe)
        for pipe in self.pipes:
            os.close(pipe)
        result = error = None
        text, said = (self.data[each].decode(errors="replace").strip() for each in (self.pipe, self.errors))
        if code:
            error = failure(f"signal {-code}" if code < 0 else f"status {code}", said)
        elif text:
            result = read_result(text.splitlines()[-1] if command else text)
        return {"ended": self.number, "result": result, "error": error}


class Processes:
    """Agents with processes of their own; ``own`` has the children that the function's module has
    started."""

    def __init__(self, function, command, answers):
        self.function, self.command, self.answers = function, command, answers
        self.children: dict[int, Child] = {}  # by their pid
        self.own = set(keeper.own_children())

    def serve(self):
        gc.collect()
        gc.freeze()  # a collection would write to all objects, and so copy their pages in each fork
        wake, rest = keeper.wake_pipe(), b""
        while True:
            poll = select.poll()
            for each in (0, wake, *(pipe for child in self.children.values() for pipe in child.pipes)):
                poll.register(each, select.POLLIN)
            ready = {each for each, _ in poll.poll()}
            for child in self.children.values():
                for pipe in ready & child.pipes.keys():
                    child.read(pipe)
            if wake in ready:
                with contextlib.suppress(BlockingIOError):
                    while os.read(wake, 4096):
                        pass
                self.reap()
            if 0 in ready:
                data = os.read(0, 1 << 16)
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self.obey(json.loads(line))

    def obey(self, message):
        for child in self.children.values():
            if child.number == message.get("stop"):
                keeper.kill(child.pid, group=True)
                keeper.kill(child.pid)
        if "start" in message:
            try:
                self.start(message["start"], message["env"], message["task"])
            except OSError as error:
                failed = {"ended": message["start"], "result": None, "error": f"no process can be started: {error}"}
                self.answers.write(json.dumps(failed) + "\n")

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
                os.setpgid(pid, pid)  # as the fork does: whoever comes first
            for mine, theirs in ((pipe, write), (errors, log)):
                os.close(theirs)
                os.set_blocking(mine, False)
            self.children[pid] = Child(number, pid, pipe, errors)
            return
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            keeper.end_with(runner)
            keeper.adopt()
            os.close(self.answers.fileno())  # the worker reads its end as the end of this program
            for mine in (pipe, errors, *(each for child in self.children.values() for each in child.pipes)):
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
        text = as_json(asyncio.run(awaited(value)) if inspect.isawaitable(value) else value).encode()
        sys.stdout.flush()
        while text:
            text = text[os.write(write, text) :]

    def reap(self):
        """Report the agents that have ended, and kill the processes that they left."""
        with contextlib.suppress(ChildProcessError):
            while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                child = self.children.pop(found.si_pid, None)
                if child is not None:
                    keeper.kill(child.pid, group=True)
                _, status = os.waitpid(found.si_pid, 0)
                self.own.discard(found.si_pid)
                if child is not None:
                    told = child.outcome(os.waitstatus_to_exitcode(status), self.command)
                    self.answers.write(json.dumps(told) + "\n")
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
            function = load(given["function"])
        except BaseException as error:  # noqa: BLE001 - the boundary to the user's module
            answers.write(json.dumps({"ready": False, "error": f"{type(error).__name__}: {error}"}) + "\n")
            return
        finally:
            faulthandler.cancel_dump_traceback_later()
    answers.write(json.dumps({"ready": True}) + "\n")
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES[1], FILES[1]))
    if inspect.iscoroutinefunction(function):
        asyncio.run(Tasks(function, answers).serve())
    try:
        Processes(function, command, answers).serve()
    finally:
        keeper.end_children(KILL_S)


if __name__ == "__main__":
    main()
