"""Runs agents, each in a process of its own. It needs Python's standard library only: it runs in the agents' environment.

It reads lines of JSON from its standard input and writes lines of JSON to its standard output::

    {"start": 7, "env": {...}, "task": {...}}    fork; the child calls the function, or becomes the command
    {"stop": 7}                                  kill that child and all its children
    {"ended": 7, "result": ..., "error": null}   the child has ended: what it returned, or why it failed

The end of the input ends every child, and so does the end of this program. A function is imported once, before the first fork,
so an agent begins within milliseconds. It is called with those of ``prompt`` (text of the last user message), ``messages``,
``facts``, ``base_url``, ``api_key`` and the facts' own names that it takes, and may be async. A command reads the task from its
standard input; its result is the last line that it prints, as JSON if it is any.
"""

import contextlib
import ctypes
import importlib
import inspect
import json
import os
import select
import shlex
import signal
import sys
import tempfile
import traceback

MAX_RESULT_BYTES = 1 << 20
MAX_ERROR_CHARS = 2000
MAX_LEVELS = 64
CHUNK_BYTES = 1 << 16
PR_SET_PDEATHSIG = 1


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
        return json.dumps(result)
    except (TypeError, ValueError):
        return json.dumps(str(result))


class Child:
    def __init__(self, number, pid, pipe, errors):
        self.number, self.pid = number, pid
        self.pipes = {
            pipe: MAX_RESULT_BYTES,
            errors: 4 * MAX_ERROR_CHARS,
        }  # those that have not ended; how much is kept of each
        self.pipe, self.errors = pipe, errors
        self.data = {pipe: b"", errors: b""}


def end_with(parent):
    """Have this process killed when its parent ends, however that does (Linux); elsewhere it ends by itself."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def start(number, function, command, env, task, answers):
    """Fork a child; in the child this does not return."""
    pipe, write = os.pipe()
    errors, log = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        for mine, theirs in ((pipe, write), (errors, log)):
            os.close(theirs)
            os.set_blocking(mine, False)
        return Child(number, pid, pipe, errors)
    code = 1
    try:
        os.setsid()
        end_with(parent)
        os.close(answers.fileno())  # whose end tells the worker that this program has ended
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.update(env)
        os.dup2(log, 2)
        if command:
            given = tempfile.TemporaryFile()  # noqa: SIM115 - the command's standard input
            given.write(json.dumps(task).encode())
            given.seek(0)
            os.dup2(given.fileno(), 0)
            os.dup2(write, 1)
            os.execvp(command[0], command)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(2, 1)
        text = call(function, task, env).encode()
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


def ended(child, status, command):
    """The message about a child that has ended, and its children with it."""
    kill(child)
    for pipe in list(child.pipes):
        for _ in range(2 * MAX_RESULT_BYTES // CHUNK_BYTES):  # more than a pipe holds; a grandchild may hold it open
            if pipe in child.pipes:
                read(child, pipe)
    for pipe in child.pipes:
        os.close(pipe)
    code = os.waitstatus_to_exitcode(status)
    text = child.data[child.pipe].decode(errors="replace").strip()
    result, error = None, None
    if code:
        said = child.data[child.errors].decode(errors="replace").strip()[-MAX_ERROR_CHARS:]
        error = f"it ended with {f'signal {-code}' if code < 0 else f'status {code}'}{': ' if said else ''}{said}"
    elif text:
        last = text.splitlines()[-1] if command else text
        try:
            result = json.loads(last)
            if levels(result) > MAX_LEVELS:
                result = last
        except (ValueError, RecursionError):
            result = last
    return {"ended": child.number, "result": result, "error": error}


def main():
    given = json.loads(sys.stdin.readline())
    sys.path[:0] = given["path"]
    command = shlex.split(given["command"]) if given.get("command") else None
    function = None
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    if command is None:
        try:
            function = load(given["function"])
        except BaseException as error:  # noqa: BLE001 - the boundary to the user's module
            answers.write(json.dumps({"ready": False, "error": f"{type(error).__name__}: {error}"}) + "\n")
            return
    answers.write(json.dumps({"ready": True}) + "\n")
    children = {}  # type: ignore[var-annotated]
    try:
        serve(function, command, answers, children)
    finally:
        for child in children.values():
            kill(child)


def serve(function, command, answers, children):
    """Start and end children until the input ends."""
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    rest = b""
    while True:
        ready = waiting((0, wake_read, *(pipe for child in children.values() for pipe in child.pipes)))
        for child in children.values():
            for pipe in ready & child.pipes.keys():
                read(child, pipe)
        if wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                while os.read(wake_read, 4096):
                    pass
            reap(command, answers, children)
        if 0 in ready:
            data = os.read(0, 1 << 16)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                obey(json.loads(line), function, command, children, answers)


def waiting(descriptors):
    """Those of which something can be read, once there are any; of any number, which select cannot."""
    poll = select.poll()
    for each in descriptors:
        poll.register(each, select.POLLIN)
    return {each for each, _ in poll.poll()}


def reap(command, answers, children):
    """Tell of every child that has ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        child = children.pop(pid, None)
        if child is not None:
            answers.write(json.dumps(ended(child, status, command)) + "\n")


def obey(message, function, command, children, answers):
    """Start a child, or kill one."""
    if "start" in message:
        child = start(message["start"], function, command, message["env"], message["task"], answers)
        children[child.pid] = child
        return
    for child in children.values():
        if child.number == message["stop"]:
            kill(child)


def kill(child):
    """End a child and what it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
