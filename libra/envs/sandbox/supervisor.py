"""The process inside a sandbox that runs programs: it restricts itself, then forks once for each program.

Python runs this file with ``-I -S``; it imports the standard library alone and never Libra. Its command line is one JSON object
(`Orders`). It reads requests on descriptor ``requests`` and writes answers on ``answers``: 4 bytes of length, then JSON.

Invariants
----------
1. A program has neither of those descriptors, and no privilege to trace or read the supervisor.
2. After an answer every process that its program started is dead.
3. Output and result beyond their limits are dropped, and a program is killed at its deadline: no request waits for ever.
4. Limits are each program's own: one that uses up its CPU seconds takes none from the supervisor or from the next program.
"""

# ruff: noqa: PTH112, PTH123, SIM105, SIM115, BLE001, ANN
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

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38

libc = ctypes.CDLL(None, use_errno=True)


def prctl(option, value=0, *more):
    """prctl(2); OSError if the kernel refuses."""
    words = [ctypes.c_ulong(word) for word in (value, *more, 0, 0, 0)[:4]]
    if libc.prctl(option, *words) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")


# ---------------------------------------------------------------- system calls that a program may not make

ALLOW, DENY, KILL = 0x7FFF0000, 0x00050001, 0x80000000  # DENY: EPERM
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT, SECOND_ARGUMENT = 0, 4, 16, 24
NEW_NAMESPACES = 0x7E020080  # CLONE_NEW*: user, pid, net, mount, ipc, uts, cgroup, time
MACHINES = {
    "x86_64": (0xC000003E, {
        "ptrace": 101, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "unshare": 272, "setns": 308, "bpf": 321,
        "perf_event_open": 298, "process_vm_readv": 310, "process_vm_writev": 311, "keyctl": 250, "add_key": 248,
        "request_key": 249, "kexec_load": 246, "init_module": 175, "finit_module": 313, "delete_module": 176, "userfaultfd": 323,
        "io_uring_setup": 425, "open_by_handle_at": 304, "sched_setscheduler": 144, "setpriority": 141,
        "reboot": 169, "swapon": 167, "quotactl": 179, "acct": 163, "settimeofday": 164, "clock_settime": 227, "sethostname": 170,
        "move_mount": 429, "open_tree": 428, "fsopen": 430, "pidfd_getfd": 438, "process_madvise": 440, "fsconfig": 431,
        "fsmount": 432, "fspick": 433, "mount_setattr": 442, "kexec_file_load": 320, "shmget": 29, "semget": 64, "msgget": 68,
        "mq_open": 240, "memfd_create": 319, "sched_setattr": 314, "sched_setparam": 142, "sched_setaffinity": 203,
        "ioprio_set": 251, "swapoff": 168, "setdomainname": 171, "syslog": 103, "adjtimex": 159, "clock_adjtime": 305, "iopl": 172,
        "ioperm": 173,
    }, 56, 41, 435, 302),
    "aarch64": (0xC00000B7, {
        "ptrace": 117, "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51, "unshare": 97, "setns": 268, "bpf": 280,
        "perf_event_open": 241, "process_vm_readv": 270, "process_vm_writev": 271, "keyctl": 219, "add_key": 217,
        "request_key": 218, "kexec_load": 104, "init_module": 105, "finit_module": 273, "delete_module": 106, "userfaultfd": 282,
        "io_uring_setup": 425, "open_by_handle_at": 265, "sched_setscheduler": 119, "setpriority": 140,
        "reboot": 142, "swapon": 224, "quotactl": 60, "acct": 89, "settimeofday": 170, "clock_settime": 112, "sethostname": 161,
        "move_mount": 429, "open_tree": 428, "fsopen": 430, "pidfd_getfd": 438, "process_madvise": 440, "fsconfig": 431,
        "fsmount": 432, "fspick": 433, "mount_setattr": 442, "kexec_file_load": 294, "shmget": 194, "semget": 190, "msgget": 186,
        "mq_open": 180, "memfd_create": 279, "sched_setattr": 274, "sched_setparam": 118, "sched_setaffinity": 122,
        "ioprio_set": 30, "swapoff": 225, "setdomainname": 162, "syslog": 116, "adjtimex": 171, "clock_adjtime": 266,
    }, 220, 198, 435, 261),
}  # fmt: skip
"""By machine: its audit number, calls that are refused, and the numbers of clone, socket, clone3 and prlimit64."""


def filter_program():
    """The seccomp filter as bytes; None on a machine whose numbers are not known here."""
    machine = MACHINES.get(os.uname().machine)
    if machine is None:
        return None
    audit, denied, clone, socket, clone3, prlimit = machine
    code = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, audit), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    if os.uname().machine == "x86_64":
        code += [(AT_LEAST, 0, 1, 0x40000000), (RETURN, 0, 0, DENY)]  # the x32 numbers of the same calls
    for number in sorted(denied.values()):
        code += [(EQUAL, 0, 1, number), (RETURN, 0, 0, DENY)]
    code += [
        (EQUAL, 0, 1, clone3),
        (RETURN, 0, 0, 0x00050026),
    ]  # ENOSYS: C libraries fall back to clone, whose flags can be read
    code += [
        (EQUAL, 0, 4, prlimit),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (EQUAL, 1, 0, 0),
        (RETURN, 0, 0, DENY),
        (RETURN, 0, 0, ALLOW),
    ]
    code += [(EQUAL, 0, 3, clone), (LOAD, 0, 0, FIRST_ARGUMENT), (ANY_BIT, 0, 1, NEW_NAMESPACES), (RETURN, 0, 0, DENY)]
    code += [
        (LOAD, 0, 0, NUMBER),
        (EQUAL, 0, 1, socket),
        (RETURN, 0, 0, DENY),
    ]  # not even Unix ones: they lead to daemons
    code += [(RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("HBBI", *line) for line in code)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def refuse_system_calls():
    """Install the filter; whether there is one for this machine."""
    code = filter_program()
    if code is None:
        return False
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    if libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(2), ctypes.byref(program), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    return True


# ---------------------------------------------------------------- files, where there is no mount namespace

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
READ = (1 << 0) | (1 << 2) | (1 << 3)  # execute, read a file, read a directory


def restrict_files(readable, writable):
    """Landlock: read below ``readable``, everything below ``writable``, nothing else; no TCP, no signals out. Needs ABI 1."""
    abi = libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if abi < 1:
        raise OSError(ctypes.get_errno(), "landlock")
    handled = (1 << (13 if abi < 2 else 14 if abi < 3 else 15 if abi < 5 else 16)) - 1
    words = [
        handled,
        *([3] if abi >= 4 else []),
        *([3] if abi >= 6 else []),
    ]  # files; TCP bind, connect; sockets, signals
    attributes = struct.pack(f"{len(words)}Q", *words)
    ruleset = libc.syscall(CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "landlock ruleset")
    for paths, access in ((readable, READ), (writable, handled & ~((1 << 13) | (1 << 15)))):
        for path in paths:
            try:
                place = os.open(path, os.O_PATH)
            except OSError:
                continue
            allowed = access if os.path.isdir(path) else access & ((1 << 0) | (1 << 1) | (1 << 2) | (1 << 14)) & handled
            rule = struct.pack("=Qi", allowed, place)
            if libc.syscall(ADD_RULE, ruleset, 1, rule, 0) != 0:
                raise OSError(ctypes.get_errno(), f"landlock rule for {path}")
            os.close(place)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    if libc.syscall(RESTRICT_SELF, ruleset, 0) != 0:
        raise OSError(ctypes.get_errno(), "landlock restrict")
    os.close(ruleset)


# ---------------------------------------------------------------- one program


def run_forked(request, alone, limits):
    """Fork, run the program of ``request``, and return how it ended; every process that it started is dead
    afterwards."""
    output, output_end = os.pipe()
    result, result_end = os.pipe()
    try:
        child = os.fork()
    except OSError as error:  # nothing of a program is left here: the machine has no room
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
    status, over = None, False
    waiting = {output, result}
    ended = os.pidfd_open(child)  # readable once the program has ended
    while status is None and not over:
        left = deadline - time.monotonic()
        ready = select.select([ended, *waiting], [], [], max(0.0, left))[0]
        for end in set(ready) - {ended}:
            got = os.read(end, 65536)
            if not got:
                waiting.discard(end)
            held[end] += got[: max(0, most[end] - len(held[end]))]
        over = left <= 0
        if ended in ready:
            status = os.waitpid(child, 0)[1]
    os.close(ended)
    killed = kill_all(child, alone)
    for end in list(waiting):  # what it had written before it ended; no process remains that could write more
        os.set_blocking(end, False)
        try:
            while got := os.read(end, 65536):
                held[end] += got[: max(0, most[end] - len(held[end]))]
        except BlockingIOError:
            pass
    os.close(output)
    os.close(result)
    if status is None:
        status = killed.get(child)
    code = None if over or status is None else os.waitstatus_to_exitcode(status)
    return {"exit_code": code, "output": held[output].decode("latin-1"), "result": held[result].decode("latin-1")}


def kill_all(child, alone):
    """Kill the processes that ``child`` started and left behind; returns their exit statuses by process id."""
    ended = {}
    for _ in range(200):
        if alone:
            try:
                os.kill(-1, signal.SIGKILL)  # this process namespace has nothing but the supervisor and programs
            except ProcessLookupError:
                pass
        else:
            for process in [child, *descendants()]:
                for target in (-process, process):
                    try:
                        os.kill(target, signal.SIGKILL) if target > 0 else os.killpg(process, signal.SIGKILL)
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


def descendants():
    """Processes below this one, which orphans come to (it is their subreaper)."""
    found, queue = [], [os.getpid()]
    while queue:
        process = queue.pop()
        try:
            with open(f"/proc/{process}/task/{process}/children", encoding="ascii") as file:
                children = [int(word) for word in file.read().split()]
        except OSError:
            continue
        found += children
        queue += children
    return found


def _become_program(request):
    """In the fork: run the source, then call its function if one is requested."""
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
        except BaseException:
            pass
        os._exit(code & 255)


# ---------------------------------------------------------------- the supervisor


def exactly(descriptor, count):
    """``count`` bytes, or EOFError."""
    parts = bytearray()
    while len(parts) < count:
        got = os.read(descriptor, count - len(parts))
        if not got:
            raise EOFError
        parts += got
    return bytes(parts)


def send(descriptor, answer):
    """One answer."""
    data = json.dumps(answer).encode()
    data = struct.pack("!I", len(data)) + data
    while data:
        data = data[os.write(descriptor, data) :]


def main():
    orders = json.loads(sys.argv[1])
    requests, answers = orders["requests"], orders["answers"]
    for descriptor in (requests, answers):
        os.set_inheritable(descriptor, False)
    uid = orders["uid"]
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    if orders["dies_with_parent"]:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of the user id clears it
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_DUMPABLE, 0)
    if not orders["alone"]:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
    if orders["readable"] is not None:
        restrict_files(orders["readable"], orders["writable"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as process 1 it is sent no signal that it does not handle
    filtered = refuse_system_calls() if orders["filter"] else False
    os.umask(0o077)
    import traceback  # noqa: F401  # loaded once, not in every fork

    send(answers, {"ready": True, "filtered": filtered})
    while True:
        try:
            request = json.loads(exactly(requests, struct.unpack("!I", exactly(requests, 4))[0]))
        except EOFError:
            return
        send(answers, run_forked(request, orders["alone"], orders["limits"]))


if __name__ == "__main__":
    main()
