"""The table of `libra simulate --against`: systems of a cell, each tuned and scored, beside the lower bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from libra.errors import ConfigError
from libra.sim.disciplines import DISCIPLINES, Discipline
from libra.sim.tuning import Cell, Setting, lower_bound_s, tune

TUNING_SEED = 101
"""Seed of the trajectories that systems are tuned on; scores use 0, 1, ..."""

ORACLE = "oracle"
"""Order of the systems that know what nobody can know: a yardstick."""

Seconds = Callable[[str, Sequence[tuple[Setting, int]], float], Sequence[float]]
"""Seconds of a step of a system with each of some (setting, seed); infinite where they must exceed the last argument."""


class Scored(NamedTuple):
    """A system in a cell: its setting, seconds of a step on the tuning seed and on each scored seed."""

    system: str
    setting: Setting
    tuning_s: float
    step_s: tuple[float, ...]

    @property
    def discipline(self) -> Discipline:
        """What the system is."""
        return DISCIPLINES[self.system]


class Comparison(NamedTuple):
    """All systems of a cell; ``bound_s`` is the mean of `libra.sim.tuning.lower_bound_s` over the scored seeds."""

    cell: Cell
    scored: tuple[Scored, ...]
    bound_s: float

    @property
    def static(self) -> Scored:
        """The static system that is best on the tuning seed."""
        return min((one for one in self.scored if one.discipline.static), key=lambda one: one.tuning_s)

    @property
    def ours(self) -> Scored:
        """The system that is best on the tuning seed, of those that do not know the true lengths."""
        return min((one for one in self.scored if one.discipline.order != ORACLE), key=lambda one: one.tuning_s)

    @property
    def ratio(self) -> float:
        """Steps per hour of the best system over those of the best static one: geometric mean over seeds."""
        return math.exp(float(np.mean(np.log(np.array(self.static.step_s) / np.array(self.ours.step_s)))))

    def interval(self, one: Scored) -> tuple[float, float]:
        """Steps per hour of a system over the best static one's: mean over seeds, and half the width of its 95 % interval."""
        each = np.array(self.static.step_s) / np.array(one.step_s)
        return float(each.mean()), float(1.96 * each.std(ddof=1) / math.sqrt(len(each))) if len(each) > 1 else 0.0

    def rows(self) -> list[dict[str, Any]]:
        """A row per system, for JSON."""
        found = []
        for one in self.scored:
            mean, half = self.interval(one)
            found.append({
                "system": one.system, "text": one.discipline.text, "static": one.discipline.static,
                "step_s": list(one.step_s), "over_best_static": mean, "interval_95": half,
                "of_bound": self.bound_s / float(np.mean(one.step_s)), **one.setting._asdict(),
            })  # fmt: skip
        return found

    def lines(self) -> list[str]:
        """As text."""
        found = [
            f"{self.cell.gpus} GPUs, eta {self.cell.eta}, {self.cell.groups} groups of {self.cell.group_size}: no system is faster "
            f"than {self.bound_s:.0f} s a step; best static {self.static.system}, best {self.ours.system}, "
            f"{self.ratio:.3f} times as fast"
        ]
        for row, one in zip(self.rows(), self.scored, strict=True):
            found.append(
                f"  {one.system:21s}{np.mean(one.step_s):7.0f} s  {row['over_best_static']:.3f} +- {row['interval_95']:.3f} "
                f"times the best static  {row['of_bound']:.2f} of the bound  ({one.setting.core_gpus} train, TP {one.setting.tp}"
                + (f", {one.setting.per_gpu:.0f} per GPU" if one.discipline.streaming else "")
                + ")"
            )
        return found


def compare(cell: Cell, systems: Sequence[str], seeds: int, seconds: Seconds) -> Comparison:
    """Tune each system on `TUNING_SEED`, then score it on ``seeds`` others; ConfigError if none of them is static."""
    if not any(DISCIPLINES[system].static for system in systems):
        static = [name for name, each in DISCIPLINES.items() if each.static and cell.eta in each.etas]
        raise ConfigError(f"--against: got {', '.join(systems)}; a yardstick is missing: {' or '.join(static)}")
    found = []
    for system in systems:

        def tried(settings: Sequence[Setting], limit_s: float, system: str = system) -> Sequence[float]:
            return seconds(system, [(setting, TUNING_SEED) for setting in settings], limit_s)

        setting = tune(cell, DISCIPLINES[system], tried)
        (tuning_s,) = tried([setting], math.inf)
        scored = seconds(system, [(setting, seed) for seed in range(seeds)], math.inf)
        found.append(Scored(system, setting, tuning_s, tuple(scored)))
    return Comparison(cell, tuple(found), float(np.mean([lower_bound_s(cell, seed) for seed in range(seeds)])))
