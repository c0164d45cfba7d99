"""The gradient of an optimizer step: slices computed by core replicas and hybrids, merged as sums, checked, divided once.

Every replica of the core calls `add_slices` with the same samples, for the whole minibatch or for one wave of it after the other,
and then `sum_over_core` once::

    plan       rank 0 announces how many hybrids take part; all cut the same slices
    own slice  sum of weight x gradient, undivided, and sum of weights
    hybrids    their sums added; the slice of one that was lost is cut again and computed by the core
    reduce     both summed over the core (all-reduce at the end; shards: reduce-scatter, in each backward pass)
    check      the sum of weights is that of the samples, else no step is taken

Invariants
----------
1. The result does not depend on how many replicas or waves there are, except for the rounding of sums.
2. A slice counts once or the step fails: a hybrid's sums are added whole, after all of them arrived, or not at all.
3. A fault on one replica (NaN, a bad sequence) is raised by all, before anything is stepped.
4. No replica waits for a hybrid that it did not plan with: one that joins contributes zeros until it has its state.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from libra.errors import GroupLost, TrainError
from libra.train.hybrid_pool import Contribution
from libra.train.lazy_batch import present
from libra.train.minibatch_slices import split
from libra.train.model_layout import add_, in_shards
from libra.train.replica_group import lost_connection
from libra.train.replica_state import ReplicaState
from libra.train.samples import Sample
from libra.train.slice_gradient import SliceGradient
from libra.train.step_report import Tally


@dataclass(frozen=True, slots=True)
class StepSlices:
    """How many hybrids compute a slice of the minibatch, how many are joining, and whether any is connected."""

    hybrids: int = 0
    joining: int = 0
    connected: bool = False


def plan(state: ReplicaState) -> StepSlices:
    """The same on every replica of the core. Hybrids without the present weights are offered them; no step waits for that."""
    pool = state.hybrids
    if state.group.from_first(pool is not None and pool.connected and pool.stale):
        offer_weights(state)
    facts = (pool.num_members, pool.num_joining, pool.connected) if pool is not None else (0, 0, False)
    return StepSlices(*state.group.from_first(facts))


def offer_weights(state: ReplicaState) -> None:
    """Copy the weights for hybrids to pull; a collective where they are sharded."""
    weights = state.weights()
    if state.hybrids is not None:
        state.hybrids.publish(weights)


@dataclass(slots=True)
class PartialGradient:
    """What the parameters' ``grad`` holds before it is divided.

    Attributes
    ----------
    merged, expected : float
        Sums of weights of the slices that were added, and of the samples that were to be.
    useful : bool
        Whether any sample had a gradient.
    connected : bool
        Whether a hybrid was connected.
    hybrids : int
        Those that were given a slice of the last samples added.
    """

    merged: float = 0.0
    expected: float = 0.0
    useful: bool = False
    connected: bool = False
    hybrids: int = 0

    def check(self, step: int) -> None:
        """TrainError unless every slice was merged once."""
        if self.merged != self.expected:
            raise TrainError(
                f"train step {step}: slices of weight {self.merged:g} were merged where the samples weigh {self.expected:g}: one "
                "is missing or was counted twice; no step is taken"
            )


def add_slices(
    state: ReplicaState,
    gradient: SliceGradient,
    samples: Sequence[Sample],
    partial: PartialGradient,
    step: int,
    tally: Tally,
) -> None:
    """Add the undivided sum of weight x gradient of ``samples`` to the parameters' ``grad``.

    Where each replica holds the whole model, its ``grad`` is then its own part of the sum, rank 0's with those of the hybrids.

    Raises
    ------
    TrainError
        A replica's loss is not finite.
    GroupLost
        A replica of the core is lost.
    """
    weight = gradient.weight_of(samples)
    partial.expected += weight
    if not gradient.useful(samples):
        partial.merged += weight
        return
    group, pool, planned = state.group, state.hybrids, plan(state)
    slices = split(samples, group.size + planned.hybrids)
    given = slices[group.size :]
    if pool is not None and planned.hybrids:
        pool.assign([present(part) for part in given], step, stepped=tally.stepped)
    partial.merged += _core_slices(state, gradient, slices[: group.size], step, tally)
    tally.at_least(replicas=group.size, hybrids=planned.hybrids, hybrids_joining=planned.joining)
    if planned.hybrids:
        partial.merged += _add_hybrids(state, gradient, given, step, tally)
    partial.useful, partial.connected = True, partial.connected or planned.connected
    partial.hybrids = planned.hybrids


def sum_over_core(state: ReplicaState, tally: Tally) -> None:
    """Add up the parts of all replicas, whose sum each then has; not of shards, which every backward pass adds up."""
    started = time.perf_counter()
    parameters = list(state.optimized().values())
    held = state.group.gather([parameter.grad is not None for parameter in parameters])
    wanted = [parameter for parameter, *anywhere in zip(parameters, *held, strict=True) if any(anywhere)]
    for parameter in wanted:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    own = [parameter.grad for parameter in wanted if parameter.grad is not None and not in_shards(parameter)]
    if own:
        tally.add(reduce_bytes=state.group.sum_(own))
    tally.add(reduce_s=time.perf_counter() - started)


def _core_slices(
    state: ReplicaState, gradient: SliceGradient, slices: Sequence[Sequence[Sample]], step: int, tally: Tally
) -> float:
    """Compute one slice per replica of the core, each into its own gradients; returns the sum of weights."""
    group = state.group
    part, fault, weight = tally.part(), None, 0.0
    try:
        weight = gradient.accumulate(present(slices[group.rank]), step, part)
    except GroupLost:
        raise
    except TrainError as error:
        if group.size == 1:
            raise
        fault = str(error)
    except RuntimeError as error:
        if not (state.is_sharded and lost_connection(error)):
            raise
        raise GroupLost(
            f"training group: rank {group.rank} of {group.size} lost the others in a pass: {str(error).splitlines()[0]}; "
            "a new group repeats the step"
        ) from error
    facts = group.gather(
        {"weight": weight, "fault": fault, "sums": part.sums, "maxima": part.maxima, "worst": part.worst}
    )
    faults = [f"rank {rank}: {fact['fault']}" for rank, fact in enumerate(facts) if fact["fault"]]
    if faults:
        raise TrainError("; ".join(faults))
    tally.add(**{name: value for name, value in part.sums.items() if name.endswith("_s")})
    for fact in facts:
        tally.take(fact["sums"], fact["maxima"])
        tally.worst += fact["worst"]
    return float(sum(fact["weight"] for fact in facts))


def _add_hybrids(
    state: ReplicaState, gradient: SliceGradient, given: Sequence[Sequence[Sample]], step: int, tally: Tally
) -> float:
    """Add the hybrids' slices, and compute the missing ones; returns the sum of weights of both."""
    group, pool = state.group, state.hybrids
    results: list[Contribution | None] = []
    if pool is not None:
        started = time.perf_counter()
        results = pool.collect()
        tally.add(hybrid_wait_s=time.perf_counter() - started)
    lost = group.from_first([number for number, result in enumerate(results) if result is None])
    arrived = [result for result in results if result is not None]
    names = sorted({name for result in arrived for name in result.gradients})
    _add_sums(state, group.from_first(names) if state.is_sharded else names, arrived)
    for weight, sums, maxima in (facts := group.from_first([(r.weight_sum, r.sums, r.maxima) for r in arrived])):
        assert weight >= 0
        tally.take(sums, maxima)
    weight_sum = float(sum(weight for weight, _, _ in facts))
    if lost:
        tally.add(hybrids_lost=len(lost))
        orphans = [sample for number in lost for sample in given[number]]
        weight_sum += _core_slices(state, gradient, split(orphans, group.size), step, tally)
    return weight_sum


def _add_sums(state: ReplicaState, names: Sequence[str], arrived: Sequence[Contribution]) -> None:
    """Add the hybrids' gradients to rank 0's; of a tensor in shards each replica adds the part that it holds."""
    parameters = state.optimized()
    for name in names:
        parameter = parameters[name]
        # One tensor at a time: the sum over hybrids is never a second model in memory.
        total = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        for result in arrived:
            if name in result.gradients:
                total += result.gradients.pop(name).to(total)
        if in_shards(parameter):
            state.group.send_([total])
        if in_shards(parameter) or state.group.rank == 0:
            add_(parameter, total)
