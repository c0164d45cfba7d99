"""Systems of a cell, each tuned and scored, beside the lower bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.systems.disciplines import DISCIPLINES, Discipline
from benchmarks.systems.tuning import Cell, Setting, lower_bound_s, tune
from libra.errors import ConfigError

TUNING_SEED = 101
"""Seed of the trajectories that systems are tuned on; scores use 0, 1, ..."""

Seconds = Callable[[str, Sequence[tuple[Setting, int]], float], Sequence[float]]
"""Seconds of a step by (setting, seed); infinite where they must exceed the last argument."""


FIRST = "turning_kv"
"""First of the non-static systems in a race, best in most cells; others start at its setting."""
MARGIN = 1.02
"""In a race, a system that is slower by this factor where its search starts is not tuned."""


class Scored(NamedTuple):
    """A system in a cell: its setting, and seconds of a step on the tuning seed and on each scored
    seed.

    In a race ``step_s`` is empty for all but two, ``tuning_s`` infinite for untuned systems.
    """

    system: str
    setting: Setting
    tuning_s: float
    step_s: tuple[float, ...]

    @property
    def discipline(self) -> Discipline:
        return DISCIPLINES[self.system]

    @property
    def may_be_best(self) -> bool:
        """Whether it knows only what a system can know."""
        return self.discipline.order != "oracle"


class Comparison(NamedTuple):
    """All systems of a cell; ``bound_s`` is the mean lower bound over scored seeds."""

    cell: Cell
    scored: tuple[Scored, ...]
    bound_s: float

    @property
    def static(self) -> Scored:
        return min((one for one in self.scored if one.discipline.static), key=lambda one: one.tuning_s)

    @property
    def ours(self) -> Scored:
        """The best on the tuning seed among systems without true lengths."""
        return min((one for one in self.scored if one.may_be_best), key=lambda one: one.tuning_s)

    @property
    def ratio(self) -> float:
        """Steps per hour of the best system over the best static one: geometric mean over seeds."""
        return math.exp(float(np.mean(np.log(np.array(self.static.step_s) / np.array(self.ours.step_s)))))

    def interval(self, one: Scored) -> tuple[float, float]:
        """Steps per hour over the best static system: mean, and half the 95 % interval."""
        each = np.array(self.static.step_s) / np.array(one.step_s)
        return float(each.mean()), float(1.96 * each.std(ddof=1) / math.sqrt(len(each))) if len(each) > 1 else 0.0

    def rows(self) -> list[dict[str, Any]]:
        found = []
        for one in self.scored:
            if not one.step_s:
                continue
            mean, half = self.interval(one)
            found.append({
                "system": one.system, "text": one.discipline.text, "static": one.discipline.static,
                "step_s": list(one.step_s), "over_best_static": mean, "interval_95": half,
                "of_bound": self.bound_s / float(np.mean(one.step_s)), **one.setting._asdict(),
            })  # fmt: skip
        return found

    def lines(self) -> list[str]:
        rows = {row["system"]: row for row in self.rows()}
        found = [
            f"{self.cell.gpus} GPUs, eta {self.cell.eta}, {self.cell.groups} groups of {self.cell.group_size}: no system is faster "
            f"than {_seconds(self.bound_s).strip()} a step; best static {self.static.system}, best {self.ours.system}, "
            f"{self.ratio:.3f} times as fast"
        ]
        for one in self.scored:
            text = f"{_seconds(one.tuning_s)} on the tuning seed"
            if (row := rows.get(one.system)) is not None:
                text = (
                    f"{_seconds(float(np.mean(one.step_s)))}  {row['over_best_static']:.3f} +- {row['interval_95']:.3f} times the "
                    f"best static  {row['of_bound']:.2f} of the bound"
                )
            per_gpu = f", {one.setting.per_gpu:.0f} per GPU" if one.discipline.streaming else ""
            found.append(f"  {one.system:21s}{text}  ({one.setting.core_gpus} train, TP {one.setting.tp}{per_gpu})")
        return found


def _seconds(value: float) -> str:
    return f"{value:7.0f} s" if value >= 100.0 else f"{value:7.1f} s"


def compare(cell: Cell, systems: Sequence[str], seeds: int, seconds: Seconds) -> Comparison:
    """Tune each system on `TUNING_SEED`, and score it; ConfigError without a static one."""
    _yardsticks(cell, systems)
    return _scored(cell, [_tuned(cell, system, seconds) for system in systems], seeds, seconds, systems)


def race(cell: Cell, systems: Sequence[str], seeds: int, seconds: Seconds) -> Comparison:
    """`compare` in a fraction of the time: scores only the best static system and the best of all.

    Systems with true lengths are left out. Static ones and `FIRST` are tuned as
    in `compare`; others start at the best setting so far with their roles and are left out if
    slower there by `MARGIN`. One more system could only increase the ratio.
    """
    static = _yardsticks(cell, systems)
    others = [system for system in systems if not DISCIPLINES[system].static and DISCIPLINES[system].order != "oracle"]
    tuned, raced = [_tuned(cell, system, seconds) for system in static], list[Scored]()
    for system in sorted(others, key=lambda system: system != FIRST):
        raced.append(_tuned(cell, system, seconds, sorted(raced, key=lambda one: one.tuning_s)))
    found = Comparison(cell, (*tuned, *raced), math.nan)
    return _scored(cell, found.scored, seeds, seconds, {found.static.system, found.ours.system})


def _tuned(cell: Cell, system: str, seconds: Seconds, raced: Sequence[Scored] = ()) -> Scored:
    def tried(setting: Setting, limit_s: float) -> float:
        return seconds(system, [(setting, TUNING_SEED)], limit_s)[0]

    discipline, most_s = DISCIPLINES[system], MARGIN * raced[0].tuning_s if raced else math.inf
    alike = [one for one in raced if one.discipline.roles is discipline.roles]
    return Scored(system, *tune(cell, discipline, tried, alike[0].setting if alike else None, most_s), ())


def _yardsticks(cell: Cell, systems: Sequence[str]) -> list[str]:
    found = [system for system in systems if DISCIPLINES[system].static]
    if not found:
        static = [name for name, each in DISCIPLINES.items() if each.static and cell.eta in each.etas]
        raise ConfigError(f"--against: got {', '.join(systems)}; a yardstick is missing: {' or '.join(static)}")
    return found


def _scored(cell: Cell, tuned: Sequence[Scored], seeds: int, seconds: Seconds, scored: Collection[str]) -> Comparison:
    found = [
        one._replace(step_s=tuple(seconds(one.system, [(one.setting, seed) for seed in range(seeds)], math.inf)))
        if one.system in scored
        else one
        for one in tuned
    ]
    return Comparison(cell, tuple(found), float(np.mean([lower_bound_s(cell, seed) for seed in range(seeds)])))
