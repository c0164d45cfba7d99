"""Milliseconds to start a sandbox and to call a program in it, and the share of contained attacks.

bubblewrap is measured, and programs without confinement beside it. A start is `Session` until its
supervisor answers; a call is one function of a program, in a process that the supervisor forks.
Attacks are from `benchmarks.live.sandbox_attacks`.

* ``start_ms_LEVEL``, ``call_ms_LEVEL``: medians (bubblewrap is ``bwrap``); ``call_ms_forkserver``
  is bubblewrap's.
* ``attacks_contained_frac``: by bubblewrap.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.live.sandbox_attacks import ATTACKS, containable, why_not_contained
from benchmarks.report import Figure, command_parser, emit
from libra.envs.sandbox import BUBBLEWRAP, MEGABYTE, NONE, Limits, Session
from libra.envs.sandbox.confined import can_make_groups

LIMITS = Limits(memory_bytes=256 * MEGABYTE)
PROGRAM = "def solve(x): return x + 1"


def seconds_of(isolation: str, starts: int, calls: int) -> tuple[list[float], list[float]]:
    started, called = [], []
    for _ in range(starts):
        began = time.perf_counter()
        session = Session(LIMITS, isolation)
        started.append(time.perf_counter() - began)
        session.close()
    with Session(LIMITS, isolation) as session:
        for number in range(calls):
            began = time.perf_counter()
            assert session.call(PROGRAM, "solve", [number], timeout_s=20.0).result == str(number + 1)
            called.append(time.perf_counter() - began)
    return started, called


def contained() -> tuple[int, int]:
    """Attacks that were contained, and those that were tried; what was not is printed."""
    tried = {name: ATTACKS[name] for name in containable(groups=can_make_groups())}
    held = 0
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder, "secret")
        secret.write_text("what no program may read")
        for name, attack in tried.items():
            with Session(LIMITS) as session:
                why = why_not_contained(session, attack, secret)
            held += why is None
            if why is not None:
                print(f"{name}: {why}")
    return held, len(tried)


def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("sandbox", __doc__)
    parser.add_argument("--starts", type=int, default=30, help="sandboxes to start of each kind")
    parser.add_argument("--calls", type=int, default=200, help="calls to make of each kind")
    options = parser.parse_args(arguments)
    figures: dict[str, Figure] = {}
    for isolation, name in ((BUBBLEWRAP, "bwrap"), (NONE, "none")):
        started, called = seconds_of(isolation, options.starts, options.calls)
        start_ms, call_ms = 1000 * statistics.median(started), 1000 * statistics.median(called)
        figures[f"start_ms_{name}"] = Figure(start_ms, "ms", "lower")
        figures[f"call_ms_{name}"] = Figure(call_ms, "ms", "lower")
        if isolation == BUBBLEWRAP:
            figures["call_ms_forkserver"] = Figure(call_ms, "ms", "lower")
    held, tried = contained()
    print(f"{held} of {tried} attacks contained")
    figures["attacks_contained_frac"] = Figure(held / tried, "frac", "higher", 1.0)
    emit("sandbox", figures, arguments=arguments, as_json=options.json)
