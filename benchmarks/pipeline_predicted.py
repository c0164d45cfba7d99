"""What the simulator says of the sides of `benchmarks.pipeline_live`, from the prices and speeds that their runs measured.

Trajectories, engines and the seconds between them come from a run that is not streamed (`libra.sim.from_run`), the price of a
token's gradient from all of those, the end of a streamed step and the changes of roles from those that have them. Simulated
gradients are a fluid; that live ones come in waves, and that processes share a machine, is not predicted.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from libra.policy.role_messages import Role
from libra.policy.tail import price_s
from libra.policy.turning import OpenStep, Turn, TurningEngine, TurningRule
from libra.policy.waves import GroupId
from libra.sim.disciplines import DISCIPLINES
from libra.sim.from_run import RunSetting
from libra.sim.pipeline import Pipeline, PipelineOptions
from libra.sim.training_gpus import GroupWork

SYSTEMS = {"off": "split", "streaming": "streaming", "turning": "turning"}
"""The simulator's name of each side."""


class Prices(NamedTuple):
    """Measured seconds: of a token's gradient, of a step beside its gradient, and of changes of roles, without their drain."""

    token_s: float
    close_s: float
    to_training_s: float
    to_rollout_s: float


@dataclass(frozen=True)
class HybridsTurn(TurningRule):
    """The rule where only some engines may turn."""

    hybrids: frozenset[str] = frozenset()

    def turns(self, engines: Sequence[TurningEngine], num_open: int, step: OpenStep | None) -> tuple[Turn, ...]:
        """As `TurningRule.turns`."""
        known = [each._replace(may_turn=each.may_turn and each.name in self.hybrids) for each in engines]
        return super().turns(known, num_open, step)


def measured(
    rows: Mapping[str, Sequence[Mapping[str, Any]]], changed: Sequence[Mapping[str, Any]], assumed_s: float
) -> Prices:
    """From rows of metrics by side, and ``role_changed`` events; a change that did not happen costs half of ``assumed_s``."""
    close_s = statistics.mean(row["train_s"] - row["wave_s"] for row in rows["streaming"])
    gradients_s = sum(row["train_s"] - close_s for row in rows["off"])
    by_role = {
        role: [price_s(event["stage_s"]) for event in changed if event["to_role"] == role]
        for role in (Role.TRAIN, Role.ROLLOUT)
    }
    return Prices(
        gradients_s / sum(row["forwarded_tokens"] for row in rows["off"]),
        close_s,
        *(statistics.mean(seconds) if seconds else assumed_s / 2 for seconds in by_role.values()),
    )


def work_of(setting: RunSetting, token_s: float) -> Mapping[GroupId, GroupWork]:
    """GPU-seconds of the gradients of each group."""
    found: dict[GroupId, GroupWork] = {}
    for plan in setting.workload.trajectories:
        seconds, place = plan.final_tokens * token_s, (plan.iteration, plan.group)
        before = found.get(place, GroupWork(0.0, 0.0))
        found[place] = GroupWork(before.gpu_s + seconds, max(before.longest_s, seconds))
    return found


def simulated_s(setting: RunSetting, prices: Prices, hybrids: frozenset[str]) -> dict[str, float]:
    """Seconds of an iteration by side, the first one left out; an engine has enough where its slots are full."""
    calibration, slots = setting.calibration, min(engine.slots for engine in setting.engines)
    rule = HybridsTurn(
        trajectories_per_gpu=float(slots),
        min_gain_s=(prices.to_training_s + prices.to_rollout_s) / 2,
        to_training_s=prices.to_training_s,
        to_rollout_s=prices.to_rollout_s,
        hybrids=hybrids,
    )
    options = PipelineOptions(
        core_gpus=calibration.train_gpus, close_s=prices.close_s, load_s=calibration.load_s, merge_s=0.0, rule=rule,
        update_s=calibration.update_s + calibration.gate_s + calibration.commit_s,
    )  # fmt: skip
    engines = [each._replace(announced=()) for each in setting.engines]
    work = work_of(setting, prices.token_s)
    return {
        side: Pipeline(setting.workload, engines, setting.ordering(), DISCIPLINES[system], work, options)
        .train()
        .step_s()
        for side, system in SYSTEMS.items()
    }
