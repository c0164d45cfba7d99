"""Decisions of policy objects, each with its reason; logged when they are carried out."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from libra.facts.fact import Command


class Priority(NamedTuple):
    """Order of parked tasks (``ts.priority``), compared left to right, smaller first."""

    deadline: int  # iteration that must not wait for later ones
    level: int  # MLFQ level, 0 first; -1 is overdue
    order: int  # within a level


class SetPriority(Command, frozen=True, gc=False, tag="priority_set"):
    words = "{key} has priority {priority}"
    plural = "priorities"
    key: str
    priority: Priority
    reason: str


class Prefer(Command, frozen=True, gc=False, tag="buckets_preferred"):
    """Let a parked trajectory take slots of these buckets, besides the slots of its KV owner.

    Its forecast is ``left_tokens`` more, up to a context of ``final_tokens``; 0 without a forecast.
    Without a KV owner it should begin at degree ``begins_tp`` or the next higher one; 0: any.
    """

    words = "{key} may use buckets {buckets}, forecast final context {final_tokens} tokens"
    plural = "bucket preferences"
    key: str
    buckets: tuple[str, ...]
    reason: str
    left_tokens: int = 0
    final_tokens: int = 0
    begins_tp: int = 0


class OpenGate(Command, frozen=True, gc=False, tag="gate_opened"):
    words = "iteration {iteration} begins"
    plural = "gate openings"
    subject = "gate"
    iteration: int
    reason: str


class OpenBatch(Command, frozen=True, gc=False, tag="batch_opened"):
    words = "batch {batch} opens with {members:n} groups"
    plural = "batch openings"
    subject = "batch"
    batch: int
    members: tuple[tuple[int, int], ...]
    reason: str


class OpenWave(Command, frozen=True, gc=False, tag="wave_opened"):
    """Let wave ``wave`` of step ``batch`` train on these groups, given as (iteration, group).

    No members: earlier waves have all groups of the batch.
    """

    words = "wave {wave} of batch {batch} opens with {members:n} groups"
    plural = "wave openings"
    subject = "batch"
    batch: int
    wave: int
    members: tuple[tuple[int, int], ...]
    reason: str


class Turned(StrEnum):
    """Work of an engine's GPUs; changing between the two takes time."""

    ROLLOUT = "rollout"
    TO_TRAINING = "to_training"
    TRAINING = "training"
    TO_ROLLOUT = "to_rollout"


class Turn(Command, frozen=True, gc=False, tag="engine_turned"):
    """Let the GPUs of an engine train for the open step, or generate again (``to``).

    A role switch or `libra.facts.TurnRefused` follows; see `libra.policy.tail`.
    """

    words = "the engine of {worker} turns to {to}"
    plural = "turns of engines"
    subject = "worker"
    worker: str
    to: Turned
    reason: str


class TakeSteps(Command, frozen=True, gc=False, tag="steps_chosen"):
    """Take steps in this way from now on: split, streaming or turning."""

    words = "steps are taken by {way}"
    plural = "choices of how steps are taken"
    subject = "steps"
    way: str
    reason: str

    @property
    def about(self) -> str:
        return "steps"


class LoadVersion(Command, frozen=True, gc=False, tag="version_ordered"):
    """Let the engine of ``worker`` take weights of ``version`` (one version per trajectory)."""

    words = "{worker} is to take version {version}"
    plural = "loads of versions"
    subject = "worker"
    worker: str
    version: int
    reason: str


class Vacate(Command, frozen=True, gc=False, tag="engine_vacated"):
    """Move trajectories off ``worker``, which loads newer weights, to engines of their own version.

    A trajectory that generates there first ends its turn, and is named later.
    """

    words = "{worker} gives {keys:n} trajectories to other engines of their version"
    plural = "engines that give their trajectories away"
    subject = "worker"
    worker: str
    keys: tuple[str, ...]
    reason: str
