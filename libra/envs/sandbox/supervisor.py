"""The process inside a sandbox, which forks for each program.

Python runs this file with ``-I -S``, so it imports only the standard library. Its command line is
one JSON object. Requests on standard input and answers on standard output are 4 bytes of length,
then JSON.

Invariants
----------
1. A program has neither descriptor of the supervisor, and no privilege to trace or read it.
2. After an answer every process of its program is dead.
3. Every request ends: output and result beyond their limits are dropped, and a program is killed at
   its deadline.
4. Each program has its own limits: its CPU seconds do not count for the supervisor or the next
   program.
"""

# ruff: noqa: PTH123, SIM105, SIM115, BLE001, ANN
# Starts in milliseconds and works under system limits: os and open instead of pathlib; a program may raise anything.
# mypy: disallow_untyped_defs=False, disallow_untyped_calls=False, check_untyped_defs=False
from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import struct
import sys
import time

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38

libc = ctypes.CDLL(None, use_errno=True)


def prctl(option, value=0, *more):
    """prctl(2); OSError if the kernel refuses."""
    words = [ctypes.c_ulong(word) for word in (value, *more, 0, 0, 0)[:4]]
    if libc.prctl(option, *words) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")


# ---------------------------------------------------------------- one program


def run_forked(request, alone, limits):
    """Run the program of ``request`` in a fork and kill all its processes; returns the status."""
    output, output_end = os.pipe()
    result, result_end = os.pipe()
    try:
        child = os.fork()
    except OSError as error:  # the machine has no room, since nothing of a program is left
        for end in (output, output_end, result, result_end):
            os.close(end)
        return {"fault": f"no process can be started: {error}"}
    if child == 0:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.setpgid(0, 0)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output_end, 1)
            os.dup2(output_end, 2)
            os.dup2(result_end, 3)
            os.closerange(4, 2**20)
            for name, value in limits.items():
                resource.setrlimit(getattr(resource, name), (value, value))
            _become_program(request)
        finally:
            os._exit(120)
    os.close(output_end)
    os.close(result_end)
    deadline = time.monotonic() + request["timeout_s"]
    held = {output: bytearray(), result: bytearray()}
    most = {output: request["output_bytes"], result: request["result_bytes"]}

    def keep(end):
        got = os.read(end, 65536)
        held[end] += got[: max(0, most[end] - len(held[end]))]
        return got

    status, over, waiting = None, False, {output, result}
    ended = os.pidfd_open(child)  # readable once the program has ended
    while status is None and not over:
        left = deadline - time.monotonic()
        ready = set(select.select([ended, *waiting], [], [], max(0.0, left))[0])
        waiting -= {end for end in ready - {ended} if not keep(end)}
        over = left <= 0
        if ended in ready:
            status = os.waitpid(child, 0)[1]
    os.close(ended)
    killed = kill_all(child, alone)
    for end in (output, result):
        os.set_blocking(end, False)
        try:
            while end in waiting and keep(end):  # no process is left that could write more
                pass
        except BlockingIOError:
            pass
        os.close(end)
    status = killed.get(child) if status is None else status
    code = None if over or status is None else os.waitstatus_to_exitcode(status)
    return {"exit_code": code, "output": held[output].decode("latin-1"), "result": held[result].decode("latin-1")}


def kill_all(child, alone):
    """Kill the processes of ``child``; returns their exit statuses by process id."""
    ended = {}
    for _ in range(200):
        if alone:
            try:
                os.kill(-1, signal.SIGKILL)  # this process namespace has only the supervisor and programs
            except ProcessLookupError:
                pass
        else:  # orphans come to this process, their subreaper
            for process in {child, *children()} - ended.keys():
                for kill in (os.killpg, os.kill):
                    try:
                        kill(process, signal.SIGKILL)
                    except (ProcessLookupError, PermissionError):
                        pass
        try:
            while True:
                process, status = os.waitpid(-1, os.WNOHANG)
                if process == 0:
                    break
                ended[process] = status
        except ChildProcessError:
            return ended
        time.sleep(0.001)
    return ended


def children():
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def _become_program(request):
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    sys.stdin = open(0, encoding="utf-8", closefd=False)
    sys.argv = ["program.py"]
    result, call = 3, request.get("call")
    if call is None:
        os.close(result)
    module = type(sys)("__main__")
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    dumps, loads, write = json.dumps, json.loads, os.write
    source, arguments = request["source"], None if call is None else loads(call["arguments"])
    request.clear()
    code = 0
    try:
        exec(compile(source, "program.py", "exec"), module.__dict__)
        if call is not None:
            value = dumps(module.__dict__[call["function"]](*arguments))
            write(result, value.encode())
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        import traceback

        code = 1  # first: where memory has run out, printing fails too
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:  # the program may have closed or replaced its own streams; only its exit code counts
            pass
        os._exit(code & 255)


# ---------------------------------------------------------------- the supervisor


def exactly(descriptor, count):
    parts = bytearray()
    while len(parts) < count:
        got = os.read(descriptor, count - len(parts))
        if not got:
            raise EOFError
        parts += got
    return bytes(parts)


def send(descriptor, answer):
    data = json.dumps(answer).encode()
    data = struct.pack("!I", len(data)) + data
    while data:
        data = data[os.write(descriptor, data) :]


def main():
    orders = json.loads(sys.argv[1])
    requests, answers, nothing = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    uid = orders["uid"]
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of the user id clears it
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_DUMPABLE, 0)
    if not orders["alone"]:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # process 1 gets no signal that it does not handle
    os.umask(0o077)
    import traceback  # noqa: F401  # loaded once, not in every fork

    send(answers, {"ready": True})
    while True:
        try:
            request = json.loads(exactly(requests, struct.unpack("!I", exactly(requests, 4))[0]))
        except EOFError:
            return
        send(answers, run_forked(request, orders["alone"], orders["limits"]))


if __name__ == "__main__":
    main()
