"""Ways to take a step, a closed form for the seconds of each, and the best way for a run.

A *split* step computes gradients once the batch is complete. A *streaming* step computes those of
complete groups while other groups are generated. A *turning* step also trains on engines that the
tail does not need. With W the GPU-seconds of a step, G the GPUs and L the longest trajectory alone,
x = ((L + update) / (eta + 1)) / (W / G): small x means GPUs are the limit, large x that they wait
for one trajectory. The forms are within 15 % of a simulation. A live run that may choose replays
the waves of each measured step and compares the ways.

Invariants
----------
1. A choice depends on the settings, the choice before, and the run's measurements.
2. ``restore(snapshot())`` changes no later choice.
3. Gradients do not depend on the choice, except for the rounding of their sums.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import msgspec

from libra.config.sections import RunSections
from libra.config.streaming import ways_of
from libra.facts import StepMeasured, TakeSteps
from libra.policy.saved import Saved

SPLIT, STREAMING, TURNING = "split", "streaming", "turning"
LATENCY_BOUND, WORK_BOUND = 3.0, 0.8  # values of x beyond which one of the two is the limit
LEFT_FRAC = 0.5  # share of the gradient that is left when the last group arrives
WORTH_FRAC, STAYS_FRAC = 0.05, 0.025  # gain from which another way is taken, and stays taken
CHANGES_S = 10.8 + 8.0  # seconds to turn an engine to training, and back (Libra, Qwen3-14B on A800)
CHANGES_FRAC = 0.1  # roles change only where both changes take less of a step
MOST_ETA = 4  # largest recommended staleness bound


@dataclass(frozen=True, slots=True)
class StepParts:
    gpus: int
    train_gpus: int
    eta: int
    rollout_s: float  # until the last trajectory has ended
    train_s: float  # gradient on the GPUs that always train
    update_s: float  # until engines have the new weights
    throughput_s: float  # GPU-seconds of the rollout over its GPUs
    longest_s: float  # longest trajectory alone, with tools
    tool_s: float = 0.0  # part of it in tools; 0: none, or not known
    left_s: float | None = None  # training left after the last group is complete
    needed_gpus: int = 0  # fewest GPUs with as short a step; 0: not known
    beside_s: float = 0.0  # part of ``update_s`` beside the next step (`libra.worker.training.publications`)

    @property
    def work_s(self) -> float:
        """GPU-seconds of a step over all GPUs, W / G."""
        rolling = max(self.gpus - self.train_gpus, 1)
        return max((self.throughput_s * rolling + self.train_s * self.train_gpus) / self.gpus, 1e-12)

    @property
    def path_over_work(self) -> float:
        return (self.longest_s + self.update_s) / (self.eta + 1) / self.work_s


def forms(parts: StepParts, changes_s: float = CHANGES_S) -> dict[str, float]:
    """Seconds of a step by way; ``turning`` only if the step is long against both changes."""
    update_s, eta, train_s = parts.update_s, parts.eta, parts.train_s
    left_s = LEFT_FRAC * train_s if parts.left_s is None else parts.left_s
    all_left_s = max(left_s, train_s - parts.rollout_s) * parts.train_gpus / parts.gpus
    if eta:
        trainer_s, after_s = update_s + max(train_s - parts.beside_s, 0.0), parts.rollout_s + update_s
        least_s = max(trainer_s, parts.throughput_s)
        split_s = max(least_s, (after_s + train_s) / (eta + 1))
        streaming_s = max(least_s, (after_s + left_s) / (eta + 1))
        # Trainers do not generate: engines bound turning, too.
        turning_s = max(parts.work_s, parts.throughput_s, (after_s + all_left_s) / (eta + 1))
    else:
        split_s = parts.rollout_s + train_s + update_s
        streaming_s = max(parts.rollout_s + left_s, train_s) + update_s
        turning_s = max(parts.rollout_s + all_left_s, parts.work_s) + update_s
    found = {SPLIT: split_s, STREAMING: streaming_s}
    return found if changes_s >= CHANGES_FRAC * split_s else found | {TURNING: turning_s + changes_s}


def chosen(x: float, step_s: Mapping[str, float], ways: Sequence[str], now: str = "") -> str:
    """The best of ``ways``, listed by size of change; a later way must save `WORTH_FRAC`.

    The way ``now`` stays as long as it saves `STAYS_FRAC`. Only the first way may lack seconds.
    """
    found = ways[0]
    for way in ways[1:]:
        if way not in step_s or (way == TURNING and x > LATENCY_BOUND):
            continue
        worth = STAYS_FRAC if way == now else WORTH_FRAC
        if found not in step_s or step_s[way] <= (1.0 - worth) * step_s[found]:
            found = way
    return found


@dataclass(frozen=True, slots=True)
class Regime:
    path_over_work: float  # x of the module
    step_s: Mapping[str, float]  # predicted, by way
    choice: str  # the fastest that can be configured; ``split`` unless another saves `WORTH_FRAC`
    obstacles: Mapping[str, str]  # why this configuration cannot take a way
    words: str  # for the user


def regime(parts: StepParts, *, changes_s: float = CHANGES_S, obstacles: Mapping[str, str] | None = None) -> Regime:
    """The bound of a planned step, and how to take it; ``obstacles``: why a way is impossible."""
    barred, step_s, x = dict(obstacles or {}), forms(parts, changes_s), parts.path_over_work
    if STREAMING in barred:
        step_s = {SPLIT: step_s[SPLIT]}
    choice = chosen(x, step_s, [way for way in (SPLIT, STREAMING, TURNING) if way not in barred])
    return Regime(x, step_s, choice, barred, _words(parts, x, step_s, choice, barred))


_HOW = {
    STREAMING: "gradients of complete groups while others are generated (trainer.streaming=on)",
    TURNING: "engines that train while the tail runs (trainer.streaming=on trainer.turning=on, with cluster.hybrid_workers)",
}


def _words(parts: StepParts, x: float, step_s: Mapping[str, float], choice: str, obstacles: Mapping[str, str]) -> str:
    kind = "latency-bound" if x > LATENCY_BOUND else "work-bound" if x < WORK_BOUND else "bound by work and by latency"
    words = f"{kind}: the longest trajectory takes {x:.2g} times as long as the work of all GPUs"
    saves = {way: 1.0 - seconds / step_s[SPLIT] for way, seconds in step_s.items()}
    best = max(saves, key=lambda way: saves[way])
    if x > LATENCY_BOUND:
        words, best = f"{words}; {_remedies(parts)}; other roles do not help", choice
    if saves[best] < WORTH_FRAC or (choice == SPLIT and best not in obstacles):
        return f"{words}; change nothing: no other way to take a step would save {100 * WORTH_FRAC:.0f} %"
    words += f"; {_HOW[best]} would save about {100 * saves[best]:.0f} % of a step"
    if best in obstacles:
        words += f", but {obstacles[best]}"
    if best != choice:
        words += "; change nothing" if choice == SPLIT else f"; {_HOW[choice]} saves {100 * saves[choice]:.0f} %"
    return words


def _remedies(parts: StepParts) -> str:
    path_s = parts.longest_s + parts.update_s
    enough = parts.needed_gpus or max(2, math.ceil(parts.gpus / parts.path_over_work))
    eta = min(max(parts.eta + 1, math.ceil(path_s / parts.work_s) - 1), max(MOST_ETA, parts.eta + 1))
    now_s, later_s = forms(parts)[SPLIT], forms(replace(parts, eta=eta))[SPLIT]
    words = [f"fewer GPUs ({enough} would be as fast, now {parts.gpus})"]
    if later_s < now_s:
        words.append(f"a larger run.eta (at {eta} a step takes about {later_s:.3g} s, now {now_s:.3g} s)")
    faster = "tools" if parts.tool_s > 0.01 * parts.longest_s else "engines"
    words.append(f"or faster {faster} (tools take {parts.tool_s:.3g} s of its {parts.longest_s:.3g} s)")
    return f"{', '.join(words)} would help"


class WaySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a run's choice: its ``ways``, the least change first, and a reason."""

    ways: tuple[str, ...]
    way: str
    reason: str
    train_gpus: int
    change_s: float = CHANGES_S

    @classmethod
    def of(cls, config: RunSections) -> Self | None:
        """The settings of a configuration; None if it has only one way."""
        ways, planned = ways_of(config), config.planner.planned
        if len(ways) == 1:
            return None
        way, reason = ways[-1], "not planned: all that is possible, until a step was measured"
        if planned is not None and planned.way in ways:
            way, reason = planned.way, f"planned: {planned.way_why}"
        return cls(ways, way, reason, config.cluster.train_workers, config.planner.change_cost_s)


class WayChoice(Saved):
    """The choice of one run; without settings, steps are streamed and engines turn."""

    settings: WaySettings | None
    _eta: int
    _most: int
    way: str
    _fixed_s: float  # seconds of a wave besides its groups
    _told: bool

    def __init__(self, settings: WaySettings | None = None, eta: int = 0, most_waves: int = 0) -> None:
        super().__init__()
        self.settings, self._eta, self._most = settings, eta, most_waves
        self.way = "" if settings is None else settings.way

    @property
    def streams(self) -> bool:
        return self.way != SPLIT

    @property
    def turns(self) -> bool:
        return self.settings is None or self.way == TURNING

    def measured(self, step: StepMeasured) -> TakeSteps | None:
        settings = self.settings
        if settings is None or not step.complete_s or not step.waves:
            return None
        self._fixed_s, each_s = wave_price(step.waves, self._fixed_s)
        groups = len(step.complete_s)
        last_s, streamed_s = step.complete_s[-1], streamed_end_s(step.complete_s, self._fixed_s, each_s, self._most)
        parts = StepParts(
            gpus=round(step.rollout_gpus) + settings.train_gpus, train_gpus=settings.train_gpus, eta=self._eta,
            rollout_s=last_s, train_s=self._fixed_s + each_s * groups, update_s=step.update_s,
            throughput_s=step.rollout_gpu_s / max(step.rollout_gpus, 1.0), longest_s=step.longest_s or last_s,
            left_s=streamed_s - last_s, beside_s=step.beside_s if self._eta else 0.0,
        )  # fmt: skip
        changes_s = step.change_s or settings.change_s
        step_s, x = forms(parts, changes_s), parts.path_over_work
        way = chosen(x, step_s, settings.ways, self.way)
        if way == self.way and self._told:
            return None
        self.way, self._told = way, True
        return TakeSteps(way, _reason(step.step, way, settings.ways, step_s, x))


def wave_price(waves: Sequence[tuple[int, float]], fixed_s: float = 0.0) -> tuple[float, float]:
    """Fixed seconds of a wave, and seconds of a group, from (groups, seconds) of waves."""
    number, groups, seconds = len(waves), sum(size for size, _ in waves), sum(took for _, took in waves)
    mean, mean_s = groups / number, seconds / number
    spread = sum((size - mean) ** 2 for size, _ in waves)
    if spread > 0.0:
        slope = sum((size - mean) * (took - mean_s) for size, took in waves) / spread
        slope = min(max(slope, 0.0), mean_s / mean)
        return mean_s - slope * mean, slope
    fixed_s = min(fixed_s, mean_s)
    return fixed_s, (mean_s - fixed_s) / mean


def streamed_end_s(complete_s: Sequence[float], fixed_s: float, each_s: float, most_waves: int) -> float:
    """When the last wave of a streamed batch would be trained (`libra.policy.waves`)."""
    now_s, taken, groups, most = 0.0, 0, len(complete_s), max(most_waves, 1)
    for wave in range(min(most, groups)):
        wanted = taken + -(-(groups - taken) // (most - wave))
        if taken == groups:
            break
        now_s = max(now_s, complete_s[wanted - 1])
        ready = max(wanted, bisect_right(complete_s, now_s))
        now_s += fixed_s + each_s * (ready - taken)
        taken = ready
    return now_s


def _reason(step: int, way: str, ways: Sequence[str], step_s: Mapping[str, float], x: float) -> str:
    others = ", ".join(f"{other} {step_s[other]:.3g} s" for other in ways if other != way and other in step_s)
    bound = "; latency-bound, so roles stay" if x > LATENCY_BOUND and TURNING in ways else ""
    longest = f"the longest trajectory takes {x:.2g} times as long as the work of all GPUs"
    own = f"{step_s[way]:.3g} s" if way in step_s else "seconds are not known"
    return f"as step {step} was measured: {own} a step, {others or 'no other way'}; {longest}{bound}"
