"""Settings of a simulation besides workload, engines and policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from libra.errors import ConfigError
from libra.hardware import Residuals
from libra.hardware.host_kv import HostPool
from libra.policy import StalenessPolicy, Verdict
from libra.sim.engines import NO_OVERHEAD, QuantumOverhead


class Loss(NamedTuple):
    """A worker that dies at ``at_s`` and returns, empty, ``away_s`` later (None: never)."""

    worker: str
    at_s: float
    away_s: float | None = None


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """Settings of a simulation besides workload, engines and policy.

    Attributes
    ----------
    eta : int
        Staleness bound in versions; 0 is synchronous.
    over_age, window, in_flight
        The rest of the `StalenessPolicy`.
    train_s, load_s : float
        Seconds of an optimizer step with its weight update, and of an engine's change to the new weights.
    publish_s : float
        Seconds in which a step's version is published after its ``train_s``: beside the next step, which does not end before that
        (`libra.worker.publications`). 0: ``train_s`` has all of the weight update.
    steps_s : tuple of float
        ``train_s`` of the first steps, if each is known.
    tool_slots : int or None
        Actions at once. None: no limit, and actions do not wait in the scheduler.
    inline_tools : frozenset of str
        Tools that run within the generation's slot; their trajectory keeps it if no other waits for one. The empty name is
        that of malformed calls.
    tool_overhead : QuantumOverhead
        Overhead of actions, if they have slots.
    gate_s, commit_s : float
        From a gate to its first trajectory, and from a group's last end to its record.
    reserve : (int, int) or None
        An engine reserves KV for the maximum of a turn: (generated tokens, context tokens). None: for the tokens that the
        turn will have.
    residuals : Residuals or None
        Ratios of measured to predicted seconds, from which noise is drawn. None: seconds are as predicted.
    losses : tuple of Loss
    chunk_tokens : int or None
        Most tokens of one quantum (`rollout.chunk_tokens`): a longer turn parks as often as it takes. None: a turn is one quantum.
    boundaries : tuple of (TP degree, tokens)
        As of `libra.policy.placements.BoundariesSet`; empty: none.
    host : HostPool or None
        KV in host memory. None: an engine computes the context of a trajectory that comes from another one.
    teacher_token_s : float
        Seconds of the teacher (`distil.teacher`) per token of a trajectory; a step waits for its groups' scores. 0: there is none.
    preempts : bool
        Engines do not reserve KV for whole turns, and preempt (`libra.hardware.virtual_engine`, invariant 3).
    """

    eta: int = 0
    train_s: float = 0.0
    load_s: float = 0.0
    publish_s: float = 0.0
    steps_s: tuple[float, ...] = ()
    tool_slots: int | None = None
    inline_tools: frozenset[str] = frozenset()
    tool_overhead: QuantumOverhead = NO_OVERHEAD
    gate_s: float = 0.0
    commit_s: float = 0.0
    reserve: tuple[int, int] | None = None
    residuals: Residuals | None = None
    losses: tuple[Loss, ...] = ()
    chunk_tokens: int | None = None
    boundaries: tuple[tuple[int, float], ...] = ()
    host: HostPool | None = None
    preempts: bool = False
    over_age: Verdict = Verdict.WAIT
    window: int | None = None
    in_flight: int | None = None
    teacher_token_s: float = 0.0

    @property
    def staleness(self) -> StalenessPolicy:
        """How old what a step consumes may be."""
        return StalenessPolicy(self.eta, self.over_age, self.window, self.in_flight)

    def __post_init__(self) -> None:
        if self.preempts and self.host is not None:
            raise ConfigError("preempts: got True with host; a preempted request's KV is dropped, take one of the two")

    def step_s(self, batch: int) -> float:
        """Seconds of step ``batch`` with its weight update, as far as that is not ``publish_s``."""
        return self.steps_s[batch] if batch < len(self.steps_s) else self.train_s
