"""What a sandbox costs and what it holds: milliseconds to start one and to call a program in it, attacks contained of those tried.

Every level that works on this machine is measured. A start is `Session` until its supervisor answers; a call is one function of a
program, in a process that the supervisor forks. Attacks are those of `libra.testing.sandbox_attacks` that the level must contain.
Figures:

* ``start_ms_LEVEL``, ``call_ms_LEVEL``: medians (bubblewrap is ``bwrap``); ``call_ms_forkserver`` is that of the best level.
* ``attacks_contained_frac``: at the best level.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.report import Figure, command_parser, emit
from libra.envs.sandbox import MEGABYTE, Level, Limits, SandboxFailed, Session, available
from libra.envs.sandbox.cgroups import can_make_groups
from libra.envs.sandbox.isolation import why_not
from libra.testing.sandbox_attacks import ATTACKS, contained_at, why_not_contained

LIMITS = Limits(memory_bytes=256 * MEGABYTE)
PROGRAM = "def solve(x): return x + 1"


def seconds_of(level: Level, starts: int, calls: int) -> tuple[list[float], list[float]]:
    started, called = [], []
    for _ in range(starts):
        began = time.perf_counter()
        session = Session(level, LIMITS)
        started.append(time.perf_counter() - began)
        session.close()
    with Session(level, LIMITS) as session:
        for number in range(calls):
            began = time.perf_counter()
            assert session.call(PROGRAM, "solve", [number], timeout_s=20.0).result == str(number + 1)
            called.append(time.perf_counter() - began)
    return started, called


def contained(level: Level) -> tuple[int, int]:
    """Attacks that were contained, and those that were tried; what was not is printed."""
    tried = {name: ATTACKS[name] for name in contained_at(level, groups=can_make_groups())}
    held = 0
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder, "secret")
        secret.write_text("what no program may read")
        for name, attack in tried.items():
            with Session(level, LIMITS) as session:
                why = why_not_contained(session, attack, secret)
            held += why is None
            if why is not None:
                print(f"{level.label}: {name}: {why}")
    return held, len(tried)


def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("sandbox", __doc__)
    parser.add_argument("--starts", type=int, default=30, help="sandboxes to start at each level")
    parser.add_argument("--calls", type=int, default=200, help="calls to make at each level")
    options = parser.parse_args(arguments)
    best, missing = available()
    for label, reason in missing.items():
        print(f"{label}: not here: {reason}")
    figures: dict[str, Figure] = {}
    for level in sorted(Level, reverse=True):
        if level > best or why_not(level) is not None:
            continue
        try:
            started, called = seconds_of(level, options.starts, options.calls)
        except SandboxFailed as error:
            print(f"{level.label}: not here: {error}")
            continue
        start_ms, call_ms = 1000 * statistics.median(started), 1000 * statistics.median(called)
        name = "bwrap" if level is Level.BUBBLEWRAP else level.label
        figures[f"start_ms_{name}"] = Figure(start_ms, "ms", "lower")
        figures[f"call_ms_{name}"] = Figure(call_ms, "ms", "lower")
        if level is best:
            figures["call_ms_forkserver"] = Figure(call_ms, "ms", "lower")
    held, tried = contained(best)
    print(f"{best.label}: {held} of {tried} attacks contained")
    figures["attacks_contained_frac"] = Figure(held / tried, "frac", "higher", 1.0)
    emit("sandbox", figures, arguments=arguments, as_json=options.json)
