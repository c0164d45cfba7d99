"""Runs agents, each in a process of its own. It needs Python's standard library only: it runs in the agents' environment.

It reads lines of JSON from its standard input and writes lines of JSON to its standard output::

    {"start": 7, "env": {...}, "task": {...}}    fork; the child calls the function, or becomes the command
    {"stop": 7}                                  kill that child and all its children
    {"ended": 7, "result": ..., "error": null}   the child has ended: what it returned, or why it failed

The end of the input ends every child, and so does the end of this program. A function is imported once, before the first fork,
so an agent begins within milliseconds. Between this program and each agent stands a process of that agent alone, its *keeper*: what
the agent starts and leaves behind, in whatever session, comes to the keeper (Linux), which kills it at the agent's end. A keeper
that was killed or stopped leaves them to this program. So nothing outlives its agent, and no agent loses what another one started.

A function is called with those of ``prompt`` (text of the last user message), ``messages``,
``facts``, ``base_url``, ``api_key`` and the facts' own names that it takes, and may be async. A command reads the task from its
standard input; its result is the last line that it prints, as JSON if it is any.
"""

import contextlib
import faulthandler
import importlib
import importlib.util
import inspect
import json
import os
import resource
import select
import shlex
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
from pathlib import Path


def of_file(name):
    """A module of Libra that needs the standard library only, by its file: Libra is not installed in the agents' environment."""
    found = importlib.util.spec_from_file_location(Path(name).stem, Path(__file__).parent / name)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


descendants, preloading = of_file("../descendants.py"), of_file("preloading.py")

MAX_RESULT_BYTES = 1 << 20
MAX_ERROR_CHARS = 2000
MAX_LEVELS = 64
CHUNK_BYTES = 1 << 16
KILL_S = 2.0
"""Seconds that a keeper may take to kill all of its agent's processes."""
GRACE_S = 3.0
"""Seconds after which a keeper that was told to end is killed, because it was stopped for example."""
FILES = resource.getrlimit(resource.RLIMIT_NOFILE)
"""Files that agents may have open; this program, which has three for each agent, may have as many as the machine allows."""
PR_SET_PDEATHSIG = 1
ENDED = struct.Struct("=i?")
"""What a keeper tells of its agent: its wait status, and whether none of its processes is left."""


def load(name):
    """The function ``package.module:attribute``."""
    module, _, attribute = name.partition(":")
    found = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found


def arguments_of(function, task, env):
    """What a function is called with."""
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


def call(function, task, env):
    """The result of a function, as JSON text."""
    result = function(**arguments_of(function, task, env))
    if inspect.isawaitable(result):
        import asyncio

        async def wait():
            return await result

        result = asyncio.run(wait())
    try:
        return json.dumps(result, default=lambda value: value.item() if hasattr(value, "item") else float(value))
    except (TypeError, ValueError, RuntimeError):  # the last is torch's, of several numbers
        return json.dumps(str(result))


class Child:
    """An agent, as this program sees it: ``pid`` is its keeper's, and ``line`` leads to that."""

    def __init__(self, number, pid, line, pipe, errors):
        self.number, self.pid, self.line = number, pid, line
        self.imported: list[str] | None = None  # what it has told of its modules, where that is `learned`
        self.learned = False
        self.pipes = {
            pipe: MAX_RESULT_BYTES,
            errors: 4 * MAX_ERROR_CHARS,
        }  # those that have not ended; how much is kept of each
        self.pipe, self.errors = pipe, errors
        self.data = {pipe: b"", errors: b""}
        self.kill_s: float | None = None  # when its keeper is killed, once it was told to end


def end_with(parent):
    """Have this process killed when its parent ends, however that does (Linux); elsewhere it ends by itself."""
    descendants.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def start(number, begin, answers, children):
    """Fork a keeper, whose child calls ``begin`` with the pipe of its result; in these this does not return."""
    with contextlib.ExitStack() as opened:
        pipe, write = opened_pipe(opened)
        errors, log = opened_pipe(opened)
        line, end = socket.socketpair()
        pid = os.fork()
        opened.pop_all()
    if pid:
        for mine, theirs in ((pipe, write), (errors, log)):
            os.close(theirs)
            os.set_blocking(mine, False)
        end.close()
        line.setblocking(False)
        return Child(number, pid, line, pipe, errors)
    try:
        os.close(answers.fileno())  # whose end tells the worker that this program has ended
        line.close()
        for child in children.values():  # whose keepers are told by the end of their line
            child.line.close()
        for mine in (pipe, errors, *(each for child in children.values() for each in child.pipes)):
            os.close(mine)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        keep(end, (write, log), begin)
    except BaseException:  # noqa: BLE001 - nothing of this process may go on in the caller
        traceback.print_exc()
    finally:
        os._exit(1)


def opened_pipe(stack):
    """A pipe, whose ends ``stack`` closes."""
    pipe = os.pipe()
    for end in pipe:
        stack.callback(os.close, end)
    return pipe


def keep(end, pipes, begin):
    """The keeper: start the agent, and kill all that it started once it has ended, or this program wants it or is gone."""
    descendants.adopt()
    wake = wake_pipe()
    keeper = os.getpid()
    agent = os.fork()
    if agent == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        end.close()
        os.setsid()
        end_with(keeper)
        resource.setrlimit(resource.RLIMIT_NOFILE, FILES)
        become(begin, pipes[0])
    for each in pipes:
        os.close(each)
    while not descendants.has_ended(agent) and end.fileno() not in waiting((end.fileno(), wake)):
        drain(wake)
    kill_group(agent)
    status, clean = descendants.end_children(KILL_S, agent)
    with contextlib.suppress(OSError):
        end.send(ENDED.pack(status, clean))
    os._exit(0)


def become(begin, write):
    """The agent: do what ``begin`` does, and write what it returns."""
    code = 1
    try:
        text = begin(write).encode()
        sys.stdout.flush()
        while text:
            text = text[os.write(write, text) :]
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1 if end.code else 0
    except BaseException:  # noqa: BLE001 - the boundary to the user's function
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


def beginning(function, command, env, task, learned):
    """What an agent does, given the pipe of its result: call the function, or become the command. ``learned``: a function's result
    has a second line, with the modules that it has imported."""

    def begin(write):
        os.environ.update(env)
        if command:
            given = tempfile.TemporaryFile()  # noqa: SIM115 - the command's standard input
            given.write(json.dumps(task).encode())
            given.seek(0)
            os.dup2(given.fileno(), 0)
            os.dup2(write, 1)
            os.execvp(command[0], command)
        os.dup2(2, 1)
        before = set(sys.modules)
        text = call(function, task, env)
        return f"{text}\n{json.dumps(preloading.beyond(before))}" if learned else text

    return begin


def wake_pipe():
    """A pipe in which a byte comes whenever a child of this process ends."""
    wake, write = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return wake


def drain(wake):
    """Take what is in a pipe."""
    with contextlib.suppress(BlockingIOError):
        while os.read(wake, 4096):
            pass


def read(child, pipe):
    """Take what a child has written, at most a chunk: it may write for ever."""
    try:
        data = os.read(pipe, CHUNK_BYTES)
    except BlockingIOError:
        return
    if data:
        child.data[pipe] = (child.data[pipe] + data)[-child.pipes[pipe] :]
    else:  # its process tells that it has ended, not its pipe
        del child.pipes[pipe]
        os.close(pipe)


def levels(value):
    """Levels of lists and objects, counted up to one more than are allowed."""
    level, depth = [value], 0
    while level and depth <= MAX_LEVELS:
        inner = [each for each in level if isinstance(each, (dict, list))]
        level = [child for each in inner for child in (each.values() if isinstance(each, dict) else each)]
        depth += bool(inner)
    return depth


def ended(child, keepers, command):
    """The message about a child, whose keeper has ended with the status ``keepers``; and whether none of its processes is left."""
    for pipe in list(child.pipes):
        for _ in range(2 * MAX_RESULT_BYTES // CHUNK_BYTES):  # more than a pipe holds; what is left may hold it open
            if pipe in child.pipes:
                read(child, pipe)
    for pipe in child.pipes:
        os.close(pipe)
    try:
        told = child.line.recv(ENDED.size)
    except OSError:
        told = b""
    child.line.close()
    status, clean = ENDED.unpack(told) if len(told) == ENDED.size else (keepers, False)
    return {"ended": child.number, **outcome(child, os.waitstatus_to_exitcode(status), command)}, clean


def outcome(child, code, command):
    """What a child returned, or why it failed."""
    text = child.data[child.pipe].decode(errors="replace").strip()
    result, error = None, None
    if code:
        said = child.data[child.errors].decode(errors="replace").strip()[-MAX_ERROR_CHARS:]
        last = said.rpartition("\n")[2]
        said = f"{last}\n{said}" if last != said else said  # an exception is the last line of its traceback
        error = f"it ended with {f'signal {-code}' if code < 0 else f'status {code}'}{': ' if said else ''}{said}"
    elif text:
        if child.learned:
            text, _, told = text.rpartition("\n")
            child.imported = json.loads(told)
        last = text.splitlines()[-1] if command else text
        try:
            result = json.loads(last)
            if levels(result) > MAX_LEVELS:
                result = last
        except (ValueError, RecursionError):
            result = last
    return {"result": result, "error": error}


def main():
    given = json.loads(sys.stdin.readline())
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - as the interpreter puts it there
    sys.path[:] = [
        *given["path"],
        *(entry for entry in sys.path if entry != here),
    ]  # whose `requests` is none of theirs
    command = shlex.split(given["command"]) if given.get("command") else None
    function = None
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    descendants.adopt()
    if command is None:
        faulthandler.dump_traceback_later(given["import_s"], file=answers)  # from a thread: a module may hang in C
        try:
            with preloading.eager():
                function = load(given["function"])
        except BaseException as error:  # noqa: BLE001 - the boundary to the user's module
            answers.write(json.dumps({"ready": False, "error": f"{type(error).__name__}: {error}"}) + "\n")
            return
        finally:
            faulthandler.cancel_dump_traceback_later()
    preloading.share()
    answers.write(json.dumps({"ready": True}) + "\n")
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES[1], FILES[1]))
    runner = Runner(function, command, answers)
    try:
        runner.serve()
    finally:
        runner.close()


class Runner:
    """Starts and ends agents. ``own``: what the function's module has started, which is no agent's."""

    def __init__(self, function, command, answers):
        self.function, self.command, self.answers = function, command, answers
        self.children: dict[int, Child] = {}  # by the pid of their keeper
        self.own = set(descendants.own_children())
        self.unclean = False  # processes of an agent may have come to this one
        self.learns = function is not None  # until an agent has told what it imported
        self.trial, self.names = 0, []  # the process that imports it first, and what

    def serve(self):
        """Until the input ends."""
        wake, rest = wake_pipe(), b""
        while True:
            pipes = [pipe for child in self.children.values() for pipe in child.pipes]
            ready = waiting((0, wake, *pipes), self.until_s())
            for child in self.children.values():
                for pipe in ready & child.pipes.keys():
                    read(child, pipe)
            if wake in ready:
                drain(wake)
                self.reap()
            self.end_late()
            if 0 in ready:
                data = os.read(0, 1 << 16)
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self.obey(json.loads(line))

    def until_s(self):
        """Seconds until a keeper is to be killed; None: there is none."""
        times = [child.kill_s for child in self.children.values() if child.kill_s is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def obey(self, message):
        """Start a child, or kill one."""
        if "start" not in message:
            for child in self.children.values():
                if child.number == message["stop"]:
                    stop(child)
            return
        begin = beginning(self.function, self.command, message["env"], message["task"], self.learns)
        try:
            child = start(message["start"], begin, self.answers, self.children)
        except OSError as error:  # others go on
            failed = {"ended": message["start"], "result": None, "error": f"no process can be started: {error}"}
            self.answers.write(json.dumps(failed) + "\n")
            return
        child.learned = self.learns
        self.children[child.pid] = child

    def reap(self):
        """Tell of every child that has ended."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                self.own.discard(pid)
                if pid == self.trial and not status:
                    preloading.import_all(self.names)
                child = self.children.pop(pid, None)
                if child is not None:
                    message, clean = ended(child, status, self.command)
                    self.unclean |= not clean
                    self.learn(child.imported)
                    self.answers.write(json.dumps(message) + "\n")
        if self.unclean:  # every other one's keeper lives, and has what is theirs
            strangers = set(descendants.own_children()) - self.children.keys() - self.own
            for pid in strangers:
                descendants.kill(pid)
            self.unclean = bool(strangers)  # their end wakes this program, when their own children have come to it

    def learn(self, imported):
        """Have a process try what the first agent imported; if that goes well, it is imported here."""
        if not self.learns or imported is None:
            return
        self.learns, self.names = False, imported
        if not imported:
            return
        runner = os.getpid()
        try:
            self.trial = os.fork()
        except OSError:  # agents import it themselves
            return
        if self.trial == 0:
            end_with(runner)
            preloading.try_all(imported)
        self.own.add(self.trial)

    def end_late(self):
        """Kill the keepers that have not ended in time."""
        now_s = time.monotonic()
        for child in self.children.values():
            if child.kill_s is not None and child.kill_s <= now_s:
                descendants.kill(child.pid)
                child.kill_s = None

    def close(self):
        """End every child."""
        for child in self.children.values():
            stop(child)
        until_s = time.monotonic() + GRACE_S
        with contextlib.suppress(ChildProcessError):
            while self.children and time.monotonic() < until_s:
                self.children.pop(os.waitpid(-1, os.WNOHANG)[0], None)
                time.sleep(0.001)
        descendants.end_children(KILL_S)


def waiting(descriptors, timeout_s=None):
    """Those of which something can be read, once there are any, or none after the timeout; of any number, which select cannot."""
    poll = select.poll()
    for each in descriptors:
        poll.register(each, select.POLLIN)
    return {each for each, _ in poll.poll(None if timeout_s is None else 1000 * timeout_s + 1)}


def stop(child):
    """Have a child and all that it started killed by its keeper."""
    with contextlib.suppress(OSError):
        child.line.shutdown(socket.SHUT_WR)
    child.kill_s = time.monotonic() + GRACE_S


def kill_group(pid):
    """Kill the group of a child of this process, which has not been reaped."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
