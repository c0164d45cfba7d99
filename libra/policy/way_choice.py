"""Which way a live run takes its steps: streams them or not, and lets engines turn or not, decided from measured steps. Pure.

A run that may choose (``trainer.streaming`` or ``trainer.turning`` auto) begins with the planned way, or without a plan with all
that is possible. After each step its waves are played again on the times at which the groups of its batch were complete, and the
forms of `libra.policy.step_ways` compare the ways. A choice costs nothing: it opens waves or holds them back
(`libra.policy.admission`), and lets the rule of turning act or not (`libra.policy.tail`).

Invariants
----------
1. A choice depends on the settings, on the choice before, and on what was measured since the run began, and on nothing else.
2. ``restore(snapshot())`` changes no later choice.
3. Gradients do not depend on the choice, except for the rounding of their sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from libra.facts import StepMeasured, TakeSteps
from libra.policy.snapshots import Saved
from libra.policy.step_ways import CHANGES_S, LATENCY_BOUND, SPLIT, TURNING, StepParts, chosen, forms


class WaySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a run says of its choice.

    Attributes
    ----------
    ways : tuple of str
        Ways that it may take, the least change first.
    way, reason : str
        The way of its first steps, and why.
    train_gpus : int
        Workers that always train.
    change_s : float
        Assumed seconds of both changes of an engine, until they were measured.
    """

    ways: tuple[str, ...]
    way: str
    reason: str
    train_gpus: int
    change_s: float = CHANGES_S


class WayChoice(Saved):
    """The choice of one run.

    Parameters
    ----------
    settings : WaySettings or None
        None: there is nothing to choose; steps are streamed where there are waves, and engines turn where they can.
    eta, most_waves : int
        Staleness bound, and waves of a batch.
    """

    SAVED = {"settings": WaySettings | None, "_eta": int, "_most": int, "way": str, "_fixed_s": float, "_told": bool}

    def __init__(self, settings: WaySettings | None = None, eta: int = 0, most_waves: int = 0) -> None:
        self.settings, self._eta, self._most = settings, eta, most_waves
        self.way = "" if settings is None else settings.way
        self._fixed_s = 0.0  # seconds of a wave beside those of its groups
        self._told = False

    @property
    def streams(self) -> bool:
        """Whether waves open before their batch is complete."""
        return self.way != SPLIT

    @property
    def turns(self) -> bool:
        """Whether engines may turn to training."""
        return self.settings is None or self.way == TURNING

    def measured(self, step: StepMeasured) -> TakeSteps | None:
        """Learn from a step; the choice, if it is the first one or another than before."""
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
    """Seconds of a wave beside those of its groups, and of a group, from (groups, seconds) of waves.

    The line through them; where all have as many groups, ``fixed_s`` is what they have besides.
    """
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
    """When the last wave of a streamed batch would be trained, its groups complete at these seconds, ascending.

    As `libra.policy.waves` opens them: one after the other, each with all groups that are complete, at most ``most_waves``.
    """
    now_s, taken, groups = 0.0, 0, len(complete_s)
    for wave in range(max(most_waves, 1)):
        if taken == groups:
            break
        wanted = -(-(groups - taken) // (max(most_waves, 1) - wave))
        now_s = max(now_s, complete_s[taken + wanted - 1])
        ready = taken + wanted
        while ready < groups and complete_s[ready] <= now_s:
            ready += 1
        now_s += fixed_s + each_s * (ready - taken)
        taken = ready
    return now_s


def _reason(step: int, way: str, ways: Sequence[str], step_s: Mapping[str, float], x: float) -> str:
    others = ", ".join(f"{other} {step_s[other]:.3g} s" for other in ways if other != way and other in step_s)
    bound = "; latency-bound, so roles stay" if x > LATENCY_BOUND and TURNING in ways else ""
    longest = f"the longest trajectory takes {x:.2g} times as long as the work of all GPUs"
    own = f"{step_s[way]:.3g} s" if way in step_s else "seconds are not known"
    return f"as step {step} was measured: {own} a step, {others or 'no other way'}; {longest}{bound}"
