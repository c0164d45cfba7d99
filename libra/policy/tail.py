"""Engines that train during the tail of a rollout: which engines turn, and when they return.

As a rollout thins out, its open trajectories fit on fewer engines. The engine with the fewest hands
them over, and its GPUs train on complete groups of a streaming step (`libra.policy.waves`).
`TurningRule` decides, live and simulated; `Tail` tracks a live run for it. A change costs the
seconds that the run measured, or before that `ASSUMED_LOADS` loads of a version, at most
``planner.change_cost_s``. The paper (arXiv:2606.03077 v2) changes roles between iterations only.

Invariants
----------
1. While a trajectory is open, at least one engine generates or is returning to generation. Workers
   that others moved (``libra roles``) are never moved back.
2. An engine turns to training only if the other engines then have at most ``trajectories_per_gpu``
   open trajectories per GPU, and the backlog keeps all trainers busy for ``min_gain_s``. Engines
   return when more trajectories are open than the generating engines should have.
3. When nothing is open and the batch is complete, all engines turn if the step then ends sooner,
   including the return if the next rollout waits for this step.
4. Each worker has at most one pending role-switch request. A worker that was refused or could not
   change rests until the next version.
5. No role switches before the first gradient is timed, and none to training while the run chooses
   not to turn (`libra.policy.step_ways`).
6. ``restore(snapshot())`` changes no later answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self

import msgspec

from libra import facts
from libra.config.sections import RunSections
from libra.config.streaming import turns
from libra.errors import ConfigError
from libra.facts import Turn, Turned
from libra.policy.admission import Admission
from libra.policy.engine_capacity import degree_of
from libra.policy.role_changes import Role, Stage
from libra.policy.saved import Saved
from libra.policy.waves import GroupId
from libra.types import Phase


class TurningEngine(NamedTuple):
    """An engine for the rule; ``residents`` counts the open trajectories whose KV it owns."""

    name: str
    gpus: int
    doing: Turned
    residents: int
    may_turn: bool = True


class OpenStep(NamedTuple):
    backlog_gpu_s: float  # gradients of complete groups that are not computed
    core_gpus: int  # that always train
    is_full: bool  # its batch has all groups
    rollout_waits: bool  # the next rollout begins only after this step (eta 0)


@dataclass(frozen=True, slots=True)
class TurningRule:
    """When engines turn; the default seconds are the paper's for Qwen3-14B on A800."""

    trajectories_per_gpu: float = 4.0  # that engines should have in the tail
    min_gain_s: float = 10.0  # of training left that a change is worth
    to_training_s: float = 8.0
    to_rollout_s: float = 10.8

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0.0 <= value < float("inf") or (name == "trajectories_per_gpu" and not value):
                raise ConfigError(f"{name}: got {value}; a finite number above 0 (seconds may be 0)")

    def turns(self, engines: Sequence[TurningEngine], num_open: int, step: OpenStep | None) -> tuple[Turn, ...]:
        """Role switches to make now, in order of return; without a step only returns."""
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
        gpus = sum(engine.gpus for engine in rolling)  # invariant 3
        alone_s = step.backlog_gpu_s / training if training else float("inf")
        during_s = training * self.to_training_s  # GPU-seconds of training during the change
        together_s = self.to_training_s + max(0.0, step.backlog_gpu_s - during_s) / (training + gpus)
        price_s = self.to_rollout_s if step.rollout_waits else 0.0
        if not step.is_full or not step.backlog_gpu_s or alone_s < together_s + price_s:
            return ()
        reason = f"no trajectory is open: {together_s:.0f} s of training together instead of {alone_s:.0f} s"
        return tuple(Turn(engine.name, Turned.TRAINING, reason) for engine in rolling)


ASSUMED_LOADS = 3.0  # an unmeasured change is assumed to take as long as so many loads of a version
SLOWER = 1.5  # slowdown of a trajectory in an engine that has enough of them in the tail
FADES = 0.8  # weight of earlier waves in the seconds of a token's gradient
_PARTS = TurningRule()
_ASSUMED_S = _PARTS.to_training_s + _PARTS.to_rollout_s
_CHANGES = {Role.TRAIN: Turned.TO_TRAINING, Role.ROLLOUT: Turned.TO_ROLLOUT}
_SETTLED = {Role.TRAIN: Turned.TRAINING, Role.ROLLOUT: Turned.ROLLOUT}


class TailSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a run's turning engines; ``change_s`` is assumed for both changes together."""

    core_gpus: int
    group_size: int
    change_s: float = _ASSUMED_S

    @classmethod
    def of(cls, config: RunSections) -> Self | None:
        """The settings of a configuration; None if its engines do not turn."""
        if not turns(config):
            return None
        return cls(config.cluster.train_workers, config.trainer.group_size, config.planner.change_cost_s)


@dataclass(slots=True)
class _Member:
    """A worker that can change roles; ``own``: the tail moved it; ``rests``: until a version."""

    gpus: int
    doing: Turned | None = Turned.ROLLOUT  # unset while its GPUs are lent
    own: bool = False
    rests: bool = False
    asked: bool = False


@dataclass(slots=True)
class _Price:
    assumed_s: float
    total_s: float = 0.0
    count: int = 0

    @property
    def mean_s(self) -> float:
        return self.total_s / self.count if self.count else self.assumed_s


class _Open(Saved):
    """Ended trajectories of training groups, and unfinished trajectories of evaluations."""

    ended: dict[GroupId, set[str]]
    begun: set[int]
    group_of: dict[str, GroupId]
    evaluated: set[str]
    tokens: dict[str, int]
    home: dict[str, str]


class Tail(Saved):
    """The tail of one run; without settings no engine turns, and nothing is tracked."""

    settings: TailSettings | None
    _members: dict[str, _Member]
    _engines: dict[str, facts.WorkerCapacity]
    _open: _Open
    _group_tokens: dict[GroupId, float]
    _gradient: list[float]  # GPU-seconds, tokens
    _price: dict[Turned, _Price]
    _due: bool

    def __init__(self, admission: Admission, settings: TailSettings | None = None) -> None:
        super().__init__()
        self._admission, self.settings = admission, settings
        self._open, self._gradient = _Open(), [0.0, 0.0]
        change_s = settings.change_s if settings is not None else _ASSUMED_S
        self._price = {
            Turned.TRAINING: _Price(change_s * _PARTS.to_training_s / _ASSUMED_S),
            Turned.ROLLOUT: _Price(change_s * _PARTS.to_rollout_s / _ASSUMED_S),
        }

    def handle(self, event: facts.Fact) -> None:
        if self.settings is None:
            return
        match event:
            case facts.QuantumFinished(key=key):
                self._open.tokens[key] = self._open.tokens.get(key, 0) + event.tokens + event.payload_tokens
            case facts.QuantumStarted(key=key, phase=Phase.ROLLOUT, worker=worker):
                self._open.home[key] = worker
            case facts.TrajectoryParked():
                self._parked(event)
            case facts.TrajectoryEnded(key=key):
                self._ended(key)
            case facts.WorkerCapacity(worker=worker, rollout_slots=slots) if slots:
                self._engines[worker], self._due = event, True
            case facts.WorkerCapacity(worker=worker) | facts.WorkerWithdrawn(worker=worker):
                self._engines.pop(worker, None)
                self._due = True
            case facts.VersionPublished(version=version):
                self._published(version)
            case facts.VersionServed(load_s=load_s) if load_s > 0.0:
                for price in self._price.values():
                    price.assumed_s = min(price.assumed_s, ASSUMED_LOADS * load_s)
            case facts.GroupCommitted(split="train"):
                self._due = True  # admission has one more group
            case facts.WaveTrained():
                self._trained(event)
            case _:
                self._role_handled(event)

    def _role_handled(self, event: facts.Fact) -> None:
        match event:
            case facts.RoleMemberKnown(worker=worker, tp=gpus):
                self._members.setdefault(worker, _Member(gpus))
            case facts.RoleChangeStarted(assignments=assignments):
                for worker, has in assignments.items():
                    self._role_begins(worker, Role(has["role"]))
            case facts.RoleChanged(worker=worker, to_role=role):
                self._role_taken(worker, Role(role), price_s(event.stage_s))
            case facts.RoleRestored(worker=worker, role=role):
                self._role_taken(worker, Role(role), None)
            case facts.TurnRefused(worker=worker):
                if (member := self._member(worker)) is not None:
                    member.asked, member.rests = False, True

    def _parked(self, event: facts.TrajectoryParked) -> None:
        key = event.key
        split, iteration, group = event.group.rsplit("-", 2)
        self._open.tokens[key] = max(event.context_tokens, self._open.tokens.get(key, 0))
        if split != "train":
            self._due = self._due or key not in self._open.evaluated
            self._open.evaluated.add(key)
            return
        self._open.group_of[key] = int(iteration), int(group)
        if event.iteration not in self._open.begun:  # all of its trajectories are about to wait
            self._open.begun.add(event.iteration)
            self._due = True

    def _ended(self, key: str) -> None:
        tokens = self._open.tokens.pop(key, 0)
        self._open.home.pop(key, None)
        self._open.evaluated.discard(key)
        group = self._open.group_of.pop(key, None)
        if group is not None:
            self._open.ended.setdefault(group, set()).add(key)
            self._group_tokens[group] = self._group_tokens.get(group, 0.0) + tokens
        self._due = True

    def _published(self, version: int) -> None:
        eldest = min(version - self._admission.eta - 1, self._admission.consumed_below)
        self._open.begun = {k for k in self._open.begun if k >= eldest}
        self._open.ended = {at: keys for at, keys in self._open.ended.items() if at[0] >= eldest}
        self._group_tokens = {at: tokens for at, tokens in self._group_tokens.items() if at[0] >= eldest}
        for member in self._members.values():
            member.rests = False
        self._due = True

    def _trained(self, event: facts.WaveTrained) -> None:
        assert self.settings is not None
        waves = self._admission.waves.opened.get(event.batch, [])
        members = waves[event.wave] if event.wave < len(waves) else ()
        gpus = self.settings.core_gpus + event.hybrids
        self._gradient = [
            self._gradient[0] * FADES + event.train_s * gpus,
            self._gradient[1] * FADES + sum(map(self._tokens_of, members)),
        ]
        self._due = True

    def _member(self, worker: str) -> _Member | None:
        member = self._members.get(worker)
        self._due = self._due or member is not None
        return member

    def _role_begins(self, worker: str, role: Role) -> None:
        if (member := self._member(worker)) is None:
            return
        was, member.doing = member.doing, _CHANGES.get(role)
        if not member.asked and was in (Turned.TO_TRAINING, Turned.TRAINING) and member.doing is Turned.TO_ROLLOUT:
            member.rests = True  # it could not train
        member.own, member.asked = member.own or member.asked, False

    def _role_taken(self, worker: str, role: Role, seconds: float | None) -> None:
        if (member := self._member(worker)) is None:
            return
        member.doing = _SETTLED.get(role)
        if member.doing is Turned.ROLLOUT:
            member.own = False
        if seconds is not None and member.doing is not None:
            price = self._price[member.doing]
            price.total_s, price.count = price.total_s + seconds, price.count + 1

    def look(self) -> tuple[Turn, ...]:
        """Role switches to make now, which count as requested."""
        if not self._due or self.settings is None:
            return ()
        self._due = False
        engines, may = self.engines(), self._admission.ways.turns
        found = self.rule().turns(engines, self.num_open, self.step())
        turns = [turn for turn in found if may or turn.to is not Turned.TRAINING]
        stays = sum(e.doing in (Turned.ROLLOUT, Turned.TO_ROLLOUT) for e in engines)
        leaves = [turn for turn in turns if turn.to is Turned.TRAINING]
        if leaves and len(leaves) == stays:  # invariant 1
            turns.remove(leaves[-1])
        for turn in turns:
            self._members[turn.worker].asked = True
        return tuple(turns)

    def rule(self) -> TurningRule:
        to_training_s, to_rollout_s = self._price[Turned.TRAINING].mean_s, self._price[Turned.ROLLOUT].mean_s
        return TurningRule(
            trajectories_per_gpu=self.trajectories_per_gpu(),
            min_gain_s=(to_training_s + to_rollout_s) / 2,
            to_training_s=to_training_s,
            to_rollout_s=to_rollout_s,
        )

    def trajectories_per_gpu(self) -> float:
        """Open trajectories per GPU that an engine should have, at least 1; least over engines."""
        held = list(self._open.tokens.values())
        context = sum(held) / len(held) if held else 0.0
        return max(1.0, min((_fits(spec, context) for spec in self._engines.values()), default=1.0))

    @property
    def num_open(self) -> int:
        assert self.settings is not None
        found, size = len(self._open.evaluated), self.settings.group_size
        for iteration in self._open.begun:
            for group in range(self._admission.groups_per_batch):
                if not self._admission.is_complete(iteration, group):
                    found += size - min(size, len(self._open.ended.get((iteration, group), ())))
        return found

    def engines(self) -> list[TurningEngine]:
        homes = list(self._open.home.values())
        found = []
        for name, member in self._members.items():
            if member.doing is None or (member.doing is Turned.ROLLOUT and name not in self._engines):
                continue  # its GPUs are lent, or its engine is out of service
            if member.own or member.doing not in (Turned.TRAINING, Turned.TO_TRAINING):
                may = not (member.rests or member.asked)
                found.append(TurningEngine(name, member.gpus, member.doing, homes.count(name), may))
        others = [(name, degree_of(spec.bucket)) for name, spec in self._engines.items() if name not in self._members]
        return found + [TurningEngine(name, tp, Turned.ROLLOUT, homes.count(name), False) for name, tp in others]

    def step(self) -> OpenStep | None:
        """The open step; None before the first, and while its weights are applied and published."""
        assert self.settings is not None
        admission = self._admission
        batch, whole = admission.version, admission.groups_per_batch
        if batch < 0:
            return None
        taken, ready = admission.waves.taken(batch), admission.ready(batch)
        trained = sum(map(len, admission.waves.opened.get(batch, [])[: admission.waves.num_trained(batch)]))
        if trained >= whole:
            return None
        seconds, tokens = self._gradient
        if not tokens:  # invariant 5
            return None
        left = [*taken[trained:], *ready]
        backlog = sum(map(self._tokens_of, left)) * seconds / tokens
        others = sum(m.gpus for m in self._members.values() if m.doing is Turned.TRAINING and not m.own)
        return OpenStep(backlog, self.settings.core_gpus + others, len(taken) + len(ready) >= whole, admission.eta == 0)

    def _tokens_of(self, group: GroupId) -> float:
        known = self._group_tokens
        return known.get(group) or (sum(known.values()) / len(known) if known else 1.0)

    def snapshot(self) -> dict[str, Any]:
        return {} if self.settings is None else super().snapshot()

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Take the state of ``snapshot``; empty turns the tail off. Errors as `Saved.restore`."""
        if snapshot:
            super().restore(snapshot)
        else:
            self.__init__(self._admission)  # type: ignore[misc]


def price_s(stage_s: Mapping[str, float]) -> float:
    """Seconds of a change during which its GPUs were idle; a draining engine still generates."""
    return sum(seconds for stage, seconds in stage_s.items() if stage != Stage.DRAINING)


def _fits(spec: facts.WorkerCapacity, context_tokens: float) -> float:
    gpus = degree_of(spec.bucket)
    if not spec.declared:
        return spec.rollout_slots / gpus
    each_s = spec.beside_s_per_token + spec.context_s_per_token * context_tokens
    room_s = (SLOWER - 1.0) * spec.alone_s_per_token
    return min(float(spec.rollout_slots), 1.0 + room_s / each_s if each_s else float("inf")) / gpus
