"""Synchronises the replicas of a newly formed group to the state of a replica with most steps."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from libra.tensors import digest
from libra.train.step_report import StepReport

if TYPE_CHECKING:
    from libra.train.replica import Replica

logger = logging.getLogger(__name__)


def synchronise(replica: Replica) -> int:
    """Give every replica of the group the state (weights, optimizer, report) of the first with most steps.

    A collective, for replicas that hold the whole model. Nothing is sent where all are equal. Returns the steps taken.
    """
    group = replica.group
    assert not replica.is_sharded, "no other rank has a shard that was lost"
    facts = group.gather([replica.steps_done, digest(replica.weights())])
    steps = max(taken for taken, _ in facts)
    source = next(rank for rank, (taken, _) in enumerate(facts) if taken == steps)
    if all(fact == facts[source] for fact in facts):
        return steps
    logger.info("ranks are at steps %s: all take the state of rank %d", [taken for taken, _ in facts], source)
    is_source = group.rank == source
    held = [name for name, parameter in replica.optimized().items() if replica.optimizer.state.get(parameter)]
    report = None if replica.last_report is None else asdict(replica.last_report)
    held, report = group.gather([held, report] if is_source else None)[source]
    if not is_source:
        _make_room(replica, held)
    group.send_(list(replica.tensors().values()), source)
    if replica.master is not None:
        group.send_([tensor.detach() for tensor in replica.master.tensors.values()], source)
    group.send_(_moments(replica, held), source)
    if not is_source:
        replica.steps_done = steps
        replica.last_report = None if report is None else StepReport(**report)
    return steps


def _make_room(replica: Replica, held: list[str]) -> None:
    """Optimizer state for the parameters of these names and no others, to be filled."""
    replica.optimizer.state.clear()
    parameters = replica.optimized()
    for name in held:
        own = parameters[name].detach()
        replica.optimizer.state[parameters[name]] = {
            "step": torch.zeros((), dtype=torch.float32, device=own.device),
            "exp_avg": torch.zeros_like(own),
            "exp_avg_sq": torch.zeros_like(own),
        }


def _moments(replica: Replica, held: list[str]) -> list[Tensor]:
    parameters = replica.optimized()
    states = [replica.optimizer.state[parameters[name]] for name in held]
    return [state[key] for key in ("step", "exp_avg", "exp_avg_sq") for state in states]
