"""Programs that attack the sandbox they run in, each with its permitted endings.

A program prints ``BREACH`` if it obtained something forbidden. `contained` runs one: it is contained if it did not print
that, ended in a permitted way, and the next program runs normally.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from libra.envs.sandbox import Finished, Sandbox

BREACH = "BREACH"


@dataclass(frozen=True, slots=True)
class Attack:
    """A program.

    Attributes
    ----------
    source : str
        ``{secret}`` stands for the path of a file of the host that only Libra's user may read.
    ends : str
        Permitted endings: "refused" (an exception), "ended" (without a breach), "killed", "cut off", joined by "or".
    timeout_s : float
    needs_group : bool
        Whether only a control group contains it.
    """

    source: str
    ends: str = "refused"
    timeout_s: float = 20.0
    needs_group: bool = False


def containable(*, groups: bool) -> list[str]:
    """Names of the attacks that bubblewrap contains, on a machine that can make control groups or cannot."""
    return [name for name, attack in ATTACKS.items() if groups or not attack.needs_group]


def _refused(*lines: str) -> Attack:
    """All lines together must raise."""
    return Attack("\n".join((*lines, f"print('{BREACH}')")))


def _system_call(number: int, *arguments: str) -> Attack:
    """A system call by its number on x86-64, which must fail; none is made elsewhere."""
    words = ", ".join(f"ctypes.c_long({word})" if word.lstrip("-").isalnum() else word for word in arguments)
    return _refused(
        "import ctypes, os",
        "if os.uname().machine != 'x86_64': raise PermissionError('another machine')",
        "libc = ctypes.CDLL(None, use_errno=True)",
        f"if libc.syscall(ctypes.c_long({number}), {words}) < 0: raise PermissionError(ctypes.get_errno())",
    )


ATTACKS: Mapping[str, Attack] = {
    "reads the host's name": _refused("print(open('/etc/hostname').read())"),
    "reads the password file": _refused("print(open('/etc/shadow').read())"),
    "lists the home of root": _refused("import os; os.listdir('/root')"),
    "lists homes": _refused("import os; os.listdir('/home')"),
    "reads a file of Libra's user": _refused("print(open({secret!r}).read())"),
    "reads it through /proc": _refused("import os; print(open(f'/proc/{{os.getppid()}}/root' + {secret!r}).read())"),
    "reads memory of the supervisor": _refused("import os; open(f'/proc/{os.getppid()}/mem', 'rb').read(1)"),
    "lists descriptors of the supervisor": _refused("import os; os.listdir(f'/proc/{os.getppid()}/fd')"),
    "reads the supervisor's environment": _refused("import os; open(f'/proc/{os.getppid()}/environ').read()"),
    "imports Libra": _refused("import libra"),
    "lists kernel settings": _refused("import os; os.listdir('/sys/kernel')"),
    "opens a disk": _refused("open('/dev/sda', 'rb')"),
    "opens the machine's memory": _refused("open('/dev/mem', 'rb')"),
    "makes a device": _refused("import os, stat; os.mknod('disk', stat.S_IFBLK | 0o600, os.makedev(8, 0))"),
    "runs a shell": _refused("import subprocess; subprocess.run(['/bin/sh', '-c', 'id'], check=True)"),
    "runs a program that is another user's": _refused("import os; os.execv('/usr/bin/su', ['su'])"),
    # network
    "connects by TCP": _refused("import socket; socket.create_connection(('127.0.0.1', 22), timeout=1)"),
    "listens": _refused("import socket; socket.create_server(('0.0.0.0', 0))"),
    "sends by UDP": _refused(
        "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 53))"
    ),
    "sends raw packets": _refused("import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)"),
    "opens a Unix socket": _refused("import socket; socket.socket(socket.AF_UNIX)"),
    "asks the kernel by netlink": _refused("import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)"),
    "makes a pair of sockets for another": _refused(
        "import socket; socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)"
    ),
    # privileges
    "becomes root": _refused("import os; os.setuid(0)"),
    "joins root's group": _refused("import os; os.setgid(0)"),
    "joins more groups": _refused("import os; os.setgroups([0])"),
    "lifts its limit on memory": _refused("import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))"),
    "limits its supervisor": _refused(
        "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))"
    ),
    "is preferred by the scheduler": _refused("import os; os.setpriority(os.PRIO_PROCESS, 0, -5)"),
    "takes a core for itself": _refused("import os; os.sched_setaffinity(0, {0})"),
    "traces its supervisor": _system_call(101, "16", "os.getppid()", "0", "0"),
    "reads another process's memory": _system_call(310, "os.getppid()", "0", "0", "0", "0", "0"),
    "writes another process's memory": _system_call(311, "os.getppid()", "0", "0", "0", "0", "0"),
    "makes a user namespace": _system_call(272, "0x10000000"),
    "clones into namespaces": _system_call(56, "0x10000011", "0", "0", "0", "0"),
    "enters a namespace": _system_call(308, "0", "0"),
    "mounts": _system_call(165, "b'none'", "b'/tmp'", "b'tmpfs'", "0", "0"),
    "changes its root": _system_call(161, "b'/tmp'"),
    "loads a filter into the kernel": _system_call(321, "0", "0", "0"),
    "watches performance counters": _system_call(298, "0", "0", "-1", "-1", "0"),
    "makes an io_uring": _system_call(425, "8", "0"),
    "handles page faults": _system_call(323, "0"),
    "reads the kernel's keys": _system_call(250, "0", "-3", "0"),
    "shares memory": _system_call(29, "1", "4096", "0o1600"),
    "makes a file without a name": _refused("import os; os.memfd_create('x')"),
    "opens a file by its handle": _system_call(304, "0", "0", "0"),
    "loads a module": _system_call(175, "0", "0", "b''"),
    "reboots": _system_call(169, "0xfee1dead", "672274793", "0"),
    "sets the clock": _refused("import time; time.clock_settime(time.CLOCK_REALTIME, 0)"),
    "renames the machine": _refused("import socket; socket.sethostname('mine')"),
    # files
    "changes the standard library": _refused("import os; open(os.__file__, 'a')"),
    "writes beside its folder": _refused("import os; os.mkdir('/made')"),
    "renames its folder": _refused("import os; os.rename(os.getcwd(), '/tmp/../other')"),
    "writes kernel settings": _refused("open('/proc/sys/kernel/core_pattern', 'w').write('|/tmp/x')"),
    "triggers the kernel's console": _refused("open('/proc/sysrq-trigger', 'w').write('b')"),
    "fills shared memory": _refused("open('/dev/shm/x', 'wb').write(b'x')"),
    "fills the disk": Attack(f"for i in range(100): open(str(i), 'wb').write(b'x' * (1 << 19))\nprint('{BREACH}')"),
    "writes one large file": _refused("open('big', 'wb').write(b'x' * (1 << 22))"),
    "nests 3,000 folders": Attack("import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')", "ended"),
    "leaves a folder that cannot be entered": Attack("import os; os.mkdir('x', 0o000)", "ended"),
    "puts a FIFO where a result might be": Attack(
        "import os\nfor name in ('result', 'out.json'): os.mkfifo(name)", "ended"
    ),
    "links a result to the host": Attack("import os; os.symlink('/etc/passwd', 'result')", "ended"),
    # uses
    "takes memory": _refused("x = bytearray(1 << 30)"),
    "takes memory in processes": Attack(
        "import os\nfor _ in range(12):\n    if os.fork() == 0:\n        x = b'x' * (200 << 20)\n        os._exit(0)\n"
        "for _ in range(12): os.wait()",
        "ended or refused or killed",
        needs_group=True,
    ),
    "takes descriptors": _refused("fs = [open('a', 'w') for _ in range(200)]"),
    "forks without end": Attack("import os\nfor _ in range(10): os.fork()", "refused"),
    "starts threads without end": Attack(
        "import threading, time\nfor _ in range(100): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        f"print('{BREACH}')"
    ),
    "computes without end": Attack("while True: pass", "cut off", 1.0),
    "sleeps": Attack("import time; time.sleep(600)", "cut off", 1.0),
    "ignores signals and sleeps": Attack(
        "import signal, time\nfor s in range(1, 32):\n    try: signal.signal(s, signal.SIG_IGN)\n"
        "    except OSError: pass\ntime.sleep(600)",
        "cut off",
        1.0,
    ),
    "closes its output and sleeps": Attack("import os, time; os.closerange(0, 100); time.sleep(600)", "cut off", 1.0),
    "writes without end": Attack("while True: print('x' * 100_000)", "cut off", 1.0),
    "recurses without end": Attack(
        "import sys; sys.setrecursionlimit(10**9)\ndef f(): return f()\nf()", "refused or killed or cut off", 5.0
    ),
    "computes one huge number": Attack("x = 10 ** 10 ** 9", "refused or killed or cut off", 2.0),
    # processes
    "kills its supervisor": Attack("import os; os.kill(os.getppid(), 9)", "ended or cut off", 2.0),
    "stops its supervisor": Attack("import os, time; os.kill(os.getppid(), 19); time.sleep(60)", "cut off", 2.0),
    "interrupts its supervisor": Attack("import os; os.kill(os.getppid(), 2)", "ended or cut off", 2.0),
    "kills all it can": Attack("import os; os.kill(-1, 9)", "ended or refused or killed or cut off", 2.0),
    "kills its process group": Attack("import os; os.killpg(0, 9)", "killed"),
    "kills itself": Attack("import os; os.kill(os.getpid(), 9)", "killed"),
    "ends early": Attack("import os; os._exit(0)", "ended"),
    "leaves a child in another session": Attack(
        "import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(600)\ntime.sleep(0.1)", "ended"
    ),
    "leaves a daemon": Attack(
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(600)\n    os._exit(0)\nos.wait()",
        "ended",
    ),
    "patches what others use": Attack("import builtins, json\nbuiltins.print = json.dumps = len = None", "ended"),
    "prints what is no text": Attack("print('\\ud800')", "ended"),
    "is no program": Attack("1 +"),
    "returns from under its caller": Attack("import sys; sys.settrace(lambda *a: 1 / 0); sys.exit(7)"),
}


def end_of(finished: Finished) -> str:
    """How a program ended, in the words of `Attack.ends`."""
    if finished.exit_code is None:
        return "cut off"
    return "ended" if finished.exit_code == 0 else "killed" if finished.exit_code < 0 else "refused"


def why_not_contained(session: Sandbox, attack: Attack, secret: Path) -> str | None:
    """The forbidden outcome of the attack; None if it was contained. ``secret``: a file with a unique text."""
    source = attack.source.replace("{secret!r}", repr(str(secret))).replace("{{", "{").replace("}}", "}")
    finished = session.run(source, timeout_s=attack.timeout_s)
    if BREACH in finished.output or secret.read_text() in finished.output:
        return f"it succeeded: {finished.output[-300:]}"
    if end_of(finished) not in attack.ends.split(" or "):
        return f"it was {end_of(finished)}, where it may be {attack.ends}: {finished.output[-300:]}"
    after = session.run("print(1)", timeout_s=20.0)
    return None if after.output == "1\n" else f"the next program printed {after.output[:300]!r}"
