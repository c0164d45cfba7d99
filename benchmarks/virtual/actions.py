"""Actions on cores that are leased for each of them, beside cores that are reserved; virtual time,
on turns of recorded agents.

256 trajectories begin together, their generations as long as recorded, and twice as long (``x2``),
on the same `LeaseTable` as live.

* ``act_ratio_96``: mean completion time of actions on 96 cores, each trajectory with a core
  reserved for its life, over leases.
* ``cores_saved_frac``: cores that leases do not need to finish within 5 % of one core for each
  trajectory (`SAVED` are taken).
* ``enlargement_gain``: by how much enlargement shortens completion where actions of a second and
  more are 90 % parallel. ``enlargement_worst``: the least ratio of arrival order over it, of three
  loads and curves that are steep and flat.
* ``revocable_worst``: on 8 cores, actions of 2 s beside some of 300 s on up to 8 cores: completion
  where these may be stopped and begun again, over where not; the largest median over loads and
  curves.

``--live`` adds, on two cores with real workers and processes: ``live_overhead_ms`` (what is around
an action, lease to report), ``live_over_simulated`` (completion over the same actions in virtual
time) and ``judge_hold_frac`` (by how much longer a step takes whose judge needs two seconds and is
late).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.live.actions_live import live_figures
from benchmarks.report import Figure, command_parser, emit
from benchmarks.virtual.action_loads import (
    ActionSimulation,
    Outcome,
    Source,
    Step,
    Way,
    drawn_load,
    drawn_tests,
    read_steps,
)  # fmt: skip
from benchmarks.virtual.draws import agent_turn_files
from libra.errors import ConfigError
from libra.policy.leases.elastic import SpeedUp

CORES, TRAJECTORIES, FACTORS = 96, 256, (1.0, 2.0)
LONGER, SAVED = 1.05, 0.75
STEEP = {cores: 1 / (0.1 + 0.9 / cores) for cores in (1, 2, 4, 8)}
WIDE = {cores: cores**0.9 for cores in range(1, 9)}
FLAT = {1: 1.0, 2: 1.1, 4: 1.2, 8: 1.3}
WAYS: tuple[Way, Way] = ("leases", "revocable")
PARALLEL_S = 1.0
"""Actions of so many seconds on one core are parallel where a load has such."""

Load = Sequence[Sequence[Step]]


def source_of(data: Path) -> Source:
    """The set of a data directory whose tools were timed, else the first with times between turns."""
    found = [source for path in agent_turn_files(data) if (source := read_steps(path)) is not None]
    if not found:
        raise ConfigError(f"--data {data}: no set has tool_s or gap_s, so no action has a length; give one that has")
    return max(found, key=lambda source: source.measured)


def simulated(load: Load, cores: int, way: Way, curve: dict[int, float] | None = None) -> Outcome:
    curves = None if curve is None else {"parallel": SpeedUp(1, max(curve), curve)}
    return ActionSimulation(load, cores, way, curves).run()


def parallel(load: Load) -> Load:
    return [[step._replace(tool="parallel") if step.work_s >= PARALLEL_S else step for step in steps] for steps in load]


def gain(load: Load, curve: dict[int, float]) -> float:
    load = parallel(load)
    return simulated(load, CORES, "arrival", curve).mean_act_s / simulated(load, CORES, "leases", curve).mean_act_s


def revocable_worst(seeds: int) -> float:
    medians = []
    for count, curve in ((8, WIDE), (24, WIDE), (8, STEEP), (24, STEEP), (8, None), (24, None)):
        ratios = []
        for seed in range(seeds):
            load = drawn_tests(count, seed)
            curves = [None if curve is None else {"long": SpeedUp(1, 8, curve)} for _ in range(2)]
            kept, may = (ActionSimulation(load, 8, way, each).run() for way, each in zip(WAYS, curves, strict=True))
            ratios.append(may.mean_act_s / kept.mean_act_s)
        medians.append(statistics.median(ratios))
    return max(medians)


def main(given: Sequence[str] | None = None) -> None:
    parser = command_parser("actions", __doc__, data=True)
    parser.add_argument("--seeds", type=int, default=5, help="loads that are drawn (default 5)")
    parser.add_argument("--live", action="store_true", help="also measure a live run on two cores (two minutes)")
    options = parser.parse_args(given)
    if options.seeds < 1:
        parser.error(f"--seeds {options.seeds}: type 1 or more")
    source = source_of(options.data)
    times = "measured" if source.measured else "drawn"
    print(f"{source.name}: {len(source.trajectories)} trajectories, seconds of tools {times}")
    ratios, longer = [], []
    for factor in FACTORS:
        rows = []
        for seed in range(options.seeds):
            load = drawn_load(source, TRAJECTORIES, factor, seed)
            leased, reserved = simulated(load, CORES, "leases"), simulated(load, CORES, "reserved")
            one_each = simulated(load, TRAJECTORIES, "reserved")
            fewer = simulated(load, round(TRAJECTORIES * (1 - SAVED)), "leases")
            rows.append((reserved.mean_act_s / leased.mean_act_s, fewer.makespan_s / one_each.makespan_s))
            print(
                f"  x{factor:g}, seed {seed}: ACT {leased.mean_act_s:.2f} s leased, {reserved.mean_act_s:.2f} reserved",
                flush=True,
            )
        ratios.append(statistics.median(ratio for ratio, _ in rows))
        longer.append(statistics.median(makespan for _, makespan in rows))
    gains = [gain(drawn_load(source, TRAJECTORIES, 1.0, seed), STEEP) for seed in range(options.seeds)]
    worst = min(gain(drawn_load(source, n, 1.0, 0), curve) for n in (64, TRAJECTORIES, 384) for curve in (STEEP, FLAT))
    figures = {
        "act_ratio_96": Figure(statistics.mean(ratios), "ratio", "higher", 2.4),
        "cores_saved_frac": Figure(SAVED if max(longer) <= LONGER else 0.0, "share", "higher", 0.75),
        "enlargement_gain": Figure(1 - 1 / statistics.median(gains), "share", "higher", 0.1),
        "enlargement_worst": Figure(worst, "ratio", "higher", 1.0),
        "revocable_worst": Figure(revocable_worst(max(options.seeds, 2)), "ratio", "lower", 1.0),
    }
    if options.live:
        figures |= live_figures()
    emit("actions", figures, arguments=given, as_json=options.json)
