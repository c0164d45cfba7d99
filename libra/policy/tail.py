"""The tail of a live rollout as `libra.policy.turning.TurningRule` sees it: what is open, left to train, and done by whom. Pure.

It follows the messages that orderings receive, and a few of its own; `look` answers with turns when something has happened that
may change the rule's mind. The simulator asks the same rule, and counts the same quantities in its own clock.

Invariants
----------
1. A worker is asked once: until its change has begun and ended, or was refused, `look` does not name it again.
2. A worker that was refused or could not change rests until the next version.
3. One worker at least generates, or is on its way to it. Workers that others moved (``libra roles``) are never moved back.
4. Before a wave was trained nothing is known of the price of a gradient, and no engine turns.
5. ``restore(snapshot())`` changes no later answer.
6. Where the run chooses not to turn for now (`libra.policy.step_ways`), engines only return.

Sources of the rule's numbers: changes cost what the run measured, before its first one `ASSUMED_LOADS` loads of a version on its
engines, at most ``planner.change_cost_s``; engines should have as many trajectories as slow each of them down by `SLOWER`, by the
speed that they declare; core trainers are the training workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

from libra.config.sections import RunSections
from libra.config.streaming import turns
from libra.facts import (
    Fact,
    GroupCommitted,
    QuantumFinished,
    QuantumStarted,
    RoleChanged,
    RoleChangeStarted,
    RoleMemberKnown,
    RoleRestored,
    TrajectoryEnded,
    TrajectoryParked,
    Turn,
    Turned,
    TurnRefused,
    VersionPublished,
    VersionServed,
    WaveTrained,
    WorkerCapacity,
    WorkerWithdrawn,
)
from libra.policy.admission import Admission
from libra.policy.engine_table import degree_of
from libra.policy.role_changes import Role, Stage
from libra.policy.snapshots import Saved
from libra.policy.turning import OpenStep, TurningEngine, TurningRule
from libra.policy.waves import GroupId
from libra.types import Phase

ASSUMED_LOADS = 3.0
"""A change that was not measured yet is assumed to take as long as so many loads of a version: weights, state, and a check."""
SLOWER = 1.5
"""An engine in the tail should have as many trajectories as make each take this much longer than alone."""
FADES = 0.8
"""Weight of the waves before, in the seconds of a token's gradient, when another one was trained."""
_PARTS = TurningRule()
_ASSUMED_S = _PARTS.to_training_s + _PARTS.to_rollout_s
_CHANGES = {Role.TRAIN: Turned.TO_TRAINING, Role.ROLLOUT: Turned.TO_ROLLOUT}
_SETTLED = {Role.TRAIN: Turned.TRAINING, Role.ROLLOUT: Turned.ROLLOUT}


class TailSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a run says of its turning engines.

    Attributes
    ----------
    core_gpus : int
        Workers that always train.
    group_size : int
        Trajectories of a group.
    change_s : float
        Assumed seconds of both changes together, until they were measured.
    """

    core_gpus: int
    group_size: int
    change_s: float = _ASSUMED_S

    @classmethod
    def of(cls, config: RunSections) -> Self | None:
        """Those of a configuration; None: no engine trains while the tail of a rollout runs."""
        if not turns(config):
            return None
        return cls(config.cluster.train_workers, config.trainer.group_size, config.planner.change_cost_s)


@dataclass(slots=True)
class _Member:
    """A worker that can change roles. ``own``: the tail moved it; ``rests`` until the next version."""

    gpus: int
    doing: Turned | None = Turned.ROLLOUT  # None: its GPUs are lent
    own: bool = False
    rests: bool = False
    asked: bool = False


@dataclass(slots=True)
class _Price:
    """Mean of measured seconds, or what is assumed before the first."""

    assumed_s: float
    total_s: float = 0.0
    count: int = 0

    @property
    def mean_s(self) -> float:
        return self.total_s / self.count if self.count else self.assumed_s


@dataclass(slots=True)
class _Open(Saved):
    """Open trajectories: of training groups those that have ended, of evaluations those that have not; tokens and homes by key."""

    SAVED = {
        "ended": dict[GroupId, set[str]],
        "begun": set[int],
        "group_of": dict[str, GroupId],
        "evaluated": set[str],
        "tokens": dict[str, int],
        "home": dict[str, str],
    }

    ended: dict[GroupId, set[str]] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    group_of: dict[str, GroupId] = field(default_factory=dict)
    evaluated: set[str] = field(default_factory=set)
    tokens: dict[str, int] = field(default_factory=dict)
    home: dict[str, str] = field(default_factory=dict)


class Tail(Saved):
    """One per run with ``trainer.turning``.

    Parameters
    ----------
    admission : Admission
        Of the run; the groups of the open step are read from it.
    settings : TailSettings or None
        None: no engine turns, and nothing is followed.
    """

    SAVED = {
        "settings": TailSettings | None,
        "_members": dict[str, _Member],
        "_engines": dict[str, WorkerCapacity],
        "_open": _Open,
        "_group_tokens": dict[GroupId, float],
        "_gradient": list[float],
        "_price": dict[Turned, _Price],
        "_due": bool,
    }

    def __init__(self, admission: Admission, settings: TailSettings | None = None) -> None:
        self._admission, self.settings = admission, settings
        self._members: dict[str, _Member] = {}
        self._engines: dict[str, WorkerCapacity] = {}
        self._open = _Open()
        self._group_tokens: dict[GroupId, float] = {}
        self._gradient = [0.0, 0.0]  # GPU-seconds, tokens
        change_s = settings.change_s if settings is not None else _ASSUMED_S
        self._price = {
            Turned.TRAINING: _Price(change_s * _PARTS.to_training_s / _ASSUMED_S),
            Turned.ROLLOUT: _Price(change_s * _PARTS.to_rollout_s / _ASSUMED_S),
        }
        self._due = False

    # ---------------------------------------------------------------- what happens

    def handle(self, event: Fact) -> None:
        """Follow one fact."""
        if self.settings is not None and not self._handled(event):
            self._role_handled(event)

    def _handled(self, event: Fact) -> bool:
        match event:
            case QuantumFinished(key=key):
                self._open.tokens[key] = self._open.tokens.get(key, 0) + event.tokens + event.payload_tokens
            case QuantumStarted(key=key, phase=Phase.ROLLOUT, worker=worker):
                self._open.home[key] = worker
            case TrajectoryParked():
                self._parked(event)
            case TrajectoryEnded(key=key):
                self._ended(key)
            case WorkerCapacity(worker=worker):
                if event.rollout_slots > 0:
                    self._engines[worker] = event
                else:
                    self._engines.pop(worker, None)
                self._due = True
            case WorkerWithdrawn(worker=worker):
                self._engines.pop(worker, None)
                self._due = True
            case VersionPublished(version=version):
                self._published(version)
            case VersionServed(load_s=load_s) if load_s > 0.0:
                for price in self._price.values():
                    price.assumed_s = min(price.assumed_s, ASSUMED_LOADS * load_s)
            case GroupCommitted(split="train"):
                self._due = True  # admission has one more group
            case WaveTrained():
                self._trained(event)
            case _:
                return False
        return True

    def _role_handled(self, event: Fact) -> None:
        match event:
            case RoleMemberKnown(worker=worker, tp=gpus):
                self._members.setdefault(worker, _Member(gpus))
            case RoleChangeStarted(assignments=assignments):
                for worker, has in assignments.items():
                    self._role_begins(worker, Role(has["role"]))
            case RoleChanged(worker=worker, to_role=role):
                self._role_taken(worker, Role(role), price_s(event.stage_s))
            case RoleRestored(worker=worker, role=role):
                self._role_taken(worker, Role(role), None)
            case TurnRefused(worker=worker):
                if (member := self._member(worker)) is not None:
                    member.asked, member.rests = False, True

    def _parked(self, event: TrajectoryParked) -> None:
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
        """Forget what is long done."""
        eldest = min(version - self._admission.eta - 1, self._admission.consumed_below)
        self._open.begun = {k for k in self._open.begun if k >= eldest}
        self._open.ended = {at: keys for at, keys in self._open.ended.items() if at[0] >= eldest}
        self._group_tokens = {at: tokens for at, tokens in self._group_tokens.items() if at[0] >= eldest}
        for member in self._members.values():
            member.rests = False
        self._due = True

    def _trained(self, event: WaveTrained) -> None:
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
        """A worker whose change has begun, ended or was refused; None: it cannot change."""
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
        """It is in a role, after ``seconds`` of the change, its drain not counted; None: they say nothing of the price."""
        if (member := self._member(worker)) is None:
            return
        member.doing = _SETTLED.get(role)
        if member.doing is Turned.ROLLOUT:
            member.own = False
        if seconds is not None and member.doing is not None:
            price = self._price[member.doing]
            price.total_s, price.count = price.total_s + seconds, price.count + 1

    # ---------------------------------------------------------------- what follows

    def look(self) -> tuple[Turn, ...]:
        """The turns to make now; they are taken as asked for."""
        if not self._due or self.settings is None:
            return ()
        self._due = False
        engines, step = self.engines(), self.step()
        turns = [
            turn
            for turn in self.rule().turns(engines, self.num_open, step)
            if self._admission.ways.turns or turn.to is not Turned.TRAINING
        ]
        stays = sum(e.doing in (Turned.ROLLOUT, Turned.TO_ROLLOUT) for e in engines)
        leaves = [turn for turn in turns if turn.to is Turned.TRAINING]
        if leaves and len(leaves) == stays:  # invariant 3
            turns.remove(leaves[-1])
        for turn in turns:
            self._members[turn.worker].asked = True
        return tuple(turns)

    def rule(self) -> TurningRule:
        """The rule with the prices known by now."""
        to_training_s, to_rollout_s = self._price[Turned.TRAINING].mean_s, self._price[Turned.ROLLOUT].mean_s
        return TurningRule(
            trajectories_per_gpu=self.trajectories_per_gpu(),
            min_gain_s=(to_training_s + to_rollout_s) / 2,
            to_training_s=to_training_s,
            to_rollout_s=to_rollout_s,
        )

    def trajectories_per_gpu(self) -> float:
        """Open trajectories that an engine should have for each of its GPUs, at least 1; of engines that differ, the least."""
        held = list(self._open.tokens.values())
        context = sum(held) / len(held) if held else 0.0
        return max(1.0, min((_fits(spec, context) for spec in self._engines.values()), default=1.0))

    @property
    def num_open(self) -> int:
        """Trajectories that have begun, or are about to, and have not ended."""
        assert self.settings is not None
        found, size = len(self._open.evaluated), self.settings.group_size
        for iteration in self._open.begun:
            for group in range(self._admission.groups_per_batch):
                if not self._admission.is_complete(iteration, group):
                    found += size - min(size, len(self._open.ended.get((iteration, group), ())))
        return found

    def engines(self) -> list[TurningEngine]:
        """Engines that generate, and workers that train for the tail or change."""
        homes = list(self._open.home.values())
        found = []
        for name, member in self._members.items():
            if member.doing is None or (member.doing is Turned.ROLLOUT and name not in self._engines):
                continue  # its GPUs are lent, or its engine is out of service
            if member.doing in (Turned.TRAINING, Turned.TO_TRAINING) and not member.own:
                continue  # a core trainer, as long as it pleases whoever moved it
            may = not (member.rests or member.asked)
            found.append(TurningEngine(name, member.gpus, member.doing, homes.count(name), may))
        for name, spec in self._engines.items():
            if name not in self._members:
                found.append(TurningEngine(name, degree_of(spec.bucket), Turned.ROLLOUT, homes.count(name), False))
        return found

    def step(self) -> OpenStep | None:
        """The open step; None while its weights are applied and published, and before the first."""
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
        if not tokens:  # invariant 4
            return None
        left = [*taken[trained:], *ready]
        backlog = sum(map(self._tokens_of, left)) * seconds / tokens
        others = sum(m.gpus for m in self._members.values() if m.doing is Turned.TRAINING and not m.own)
        return OpenStep(backlog, self.settings.core_gpus + others, len(taken) + len(ready) >= whole, admission.eta == 0)

    def _tokens_of(self, group: GroupId) -> float:
        """Tokens of a group; of one that an earlier start generated, those of the mean."""
        known = self._group_tokens
        return known.get(group) or (sum(known.values()) / len(known) if known else 1.0)

    def snapshot(self) -> dict[str, Any]:
        """Its state, as JSON-able values; empty without turning."""
        return {} if self.settings is None else super().snapshot()

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Take the state of ``snapshot``; empty: nothing is followed. KeyError, TypeError or ValueError if it is none."""
        if snapshot:
            super().restore(snapshot)
        else:
            self.__init__(self._admission)  # type: ignore[misc]


def price_s(stage_s: Mapping[str, float]) -> float:
    """Seconds of a change that its GPUs did nothing, by stage: while it drains, an engine still generates."""
    return sum(seconds for stage, seconds in stage_s.items() if stage != Stage.DRAINING)


def _fits(spec: WorkerCapacity, context_tokens: float) -> float:
    """Trajectories per GPU of an engine of which each takes `SLOWER` times as long as alone, its slots at most."""
    gpus = degree_of(spec.bucket)
    if not spec.declared:
        return spec.rollout_slots / gpus
    each_s = spec.beside_s_per_token + spec.context_s_per_token * context_tokens
    room_s = (SLOWER - 1.0) * spec.alone_s_per_token
    return min(float(spec.rollout_slots), 1.0 + room_s / each_s if each_s else float("inf")) / gpus
