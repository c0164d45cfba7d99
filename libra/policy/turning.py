"""Engines that train while the tail of a rollout runs: which engines turn, and when they return.

When a rollout thins out, its open trajectories fit on fewer engines. The thinnest engine hands its
trajectories over, and its GPUs train on complete groups of a streaming step (`libra.policy.waves`).

Invariants
----------
1. While a trajectory is open, at least one engine generates, or returns to do so.
2. An engine turns only if the others have ``trajectories_per_gpu`` or fewer open trajectories per
   GPU without it, and if the backlog keeps all trainers busy for ``min_gain_s``.
3. Engines return when more trajectories are open than the generating ones should have. So none
   turns back at once.
4. When nothing is open and the batch is complete, all engines turn if that is over sooner than the
   trainers alone are, including the return where the next rollout waits for this step.

Differs from Libra's paper (arXiv:2606.03077 v2), which changes roles between iterations only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from libra.errors import ConfigError
from libra.facts import Turn, Turned


class TurningEngine(NamedTuple):
    """An engine as the rule sees it; ``residents``: open trajectories at home there."""

    name: str
    gpus: int
    doing: Turned
    residents: int
    may_turn: bool = True


class OpenStep(NamedTuple):
    """The open step."""

    backlog_gpu_s: float  # gradients of complete groups that are not computed
    core_gpus: int  # that always train
    is_full: bool  # its batch has all groups
    rollout_waits: bool  # the next rollout begins only after this step (eta 0)


@dataclass(frozen=True, slots=True)
class TurningRule:
    """When engines turn; the default seconds are Libra's for Qwen3-14B on A800."""

    trajectories_per_gpu: float = 4.0  # that engines should have in the tail
    min_gain_s: float = 10.0  # of training left that a change is worth
    to_training_s: float = 8.0
    to_rollout_s: float = 10.8

    def __post_init__(self) -> None:
        for name in ("trajectories_per_gpu", "min_gain_s", "to_training_s", "to_rollout_s"):
            value = getattr(self, name)
            if not 0.0 <= value < float("inf") or (name == "trajectories_per_gpu" and not value):
                raise ConfigError(f"{name}: got {value}; a finite number above 0 (seconds may be 0)")

    def turns(self, engines: Sequence[TurningEngine], num_open: int, step: OpenStep | None) -> tuple[Turn, ...]:
        """The changes to make now; without a step, engines only return.

        ``engines`` are in the order in which they return; ``num_open`` trajectories have begun, or
        may begin, and have not ended.
        """
        generating = [e for e in engines if e.doing in (Turned.ROLLOUT, Turned.TO_ROLLOUT)]
        has_room_for = sum(e.gpus for e in generating) * self.trajectories_per_gpu
        if num_open > has_room_for:
            return self._returns(engines, num_open, has_room_for)
        rolling = sorted(
            (e for e in engines if e.doing is Turned.ROLLOUT and e.may_turn),
            key=lambda e: (e.gpus, e.residents, e.name),
        )
        if step is None or not rolling:
            return ()
        training = step.core_gpus + sum(e.gpus for e in engines if e.doing in (Turned.TRAINING, Turned.TO_TRAINING))
        if not num_open:
            return self._all_train(rolling, training, step)
        found: list[Turn] = []
        for engine in rolling:
            others = has_room_for - engine.gpus * self.trajectories_per_gpu
            left_s = step.backlog_gpu_s / (training + engine.gpus)
            if num_open > others or left_s < self.min_gain_s:
                break
            reason = (
                f"{num_open} open trajectories fit on {others / self.trajectories_per_gpu:.0f} other GPUs; "
                f"{left_s:.3g} s of training are left with its {engine.gpus} beside {training}"
            )
            found.append(Turn(engine.name, Turned.TRAINING, reason))
            has_room_for, training = others, training + engine.gpus
        return tuple(found)

    def _returns(self, engines: Sequence[TurningEngine], num_open: int, has_room_for: float) -> tuple[Turn, ...]:
        found = []
        for engine in engines:
            if engine.doing is Turned.TRAINING and engine.may_turn and num_open > has_room_for:
                has_room_for += engine.gpus * self.trajectories_per_gpu
                found.append(Turn(engine.name, Turned.ROLLOUT, f"{num_open} trajectories are open"))
        return tuple(found)

    def _all_train(self, rolling: Sequence[TurningEngine], training: int, step: OpenStep) -> tuple[Turn, ...]:
        gpus = sum(engine.gpus for engine in rolling)  # invariant 4
        alone_s = step.backlog_gpu_s / training if training else float("inf")
        during_s = training * self.to_training_s  # GPU-seconds of training during the change
        together_s = self.to_training_s + max(0.0, step.backlog_gpu_s - during_s) / (training + gpus)
        price_s = self.to_rollout_s if step.rollout_waits else 0.0
        if not step.is_full or not step.backlog_gpu_s or alone_s < together_s + price_s:
            return ()
        reason = f"no trajectory is open: {together_s:.0f} s of training together instead of {alone_s:.0f} s"
        return tuple(Turn(engine.name, Turned.TRAINING, reason) for engine in rolling)
