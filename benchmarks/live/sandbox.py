"""Milliseconds to start a bubblewrap sandbox, and the share of contained attacks.

* ``start_ms_bwrap``: median of ``--starts`` sessions, each until its supervisor answers.
* ``attacks_contained_frac``: of the attacks of `benchmarks.live.sandbox_attacks`.
"""

from __future__ import annotations

import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.live.sandbox_attacks import ATTACKS, containable, why_not_contained
from benchmarks.report import Figure, command_parser, emit, seconds_of
from libra.envs.sandbox import BUBBLEWRAP, MEGABYTE, Limits, Session
from libra.envs.sandbox.confined import can_make_groups

LIMITS = Limits(memory_bytes=256 * MEGABYTE)


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
    parser.add_argument("--starts", type=int, default=30, help="sandboxes to start")
    options = parser.parse_args(arguments)
    started_s = []
    for _ in range(options.starts):
        with ExitStack() as stack:
            started_s.append(seconds_of(lambda stack=stack: stack.enter_context(Session(LIMITS, BUBBLEWRAP))))
    held, tried = contained()
    print(f"{held} of {tried} attacks contained")
    figures = {
        "start_ms_bwrap": Figure(1000 * statistics.median(started_s), "ms", "lower"),
        "attacks_contained_frac": Figure(held / tried, "frac", "higher", 1.0),
    }
    emit("sandbox", figures, arguments=arguments, as_json=options.json)
