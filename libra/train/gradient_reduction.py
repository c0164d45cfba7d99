"""The gradient of an optimizer step: slices computed by core replicas and hybrids, merged as sums, checked, divided once.

Every replica of the core runs `merged_gradient` with the same minibatch::

    plan       rank 0 announces how many hybrids take part; all cut the same slices
    own slice  sum of weight x gradient, undivided, and sum of weights
    reduce     both summed over the core (all-reduce; fsdp2: reduce-scatter, in the backward pass; its adapters: all-reduce)
    hybrids    their sums added; the slice of one that was lost is cut again and computed by the core
    check      the sum of weights is that of the minibatch, else no step is taken

Invariants
----------
1. The result does not depend on how many replicas there are, except for the rounding of sums.
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


def merged_gradient(
    state: ReplicaState, gradient: SliceGradient, minibatch: Sequence[Sample], plan: StepSlices, step: int, tally: Tally
) -> float:
    """Leave the merged, undivided sum of weight x gradient in the parameters' ``grad``; returns the sum of weights.

    Raises
    ------
    TrainError
        A replica's loss is not finite, or slices are missing or repeated.
    GroupLost
        A replica of the core is lost.
    """
    group, pool = state.group, state.hybrids
    slices = split(minibatch, group.size + plan.hybrids)
    given = slices[group.size :]
    if pool is not None and plan.hybrids:
        pool.assign([present(part) for part in given], step, stepped=tally.stepped)
    weight_sum = _core_slices(state, gradient, slices[: group.size], step, tally)
    tally.at_least(replicas=group.size, hybrids=plan.hybrids, hybrids_joining=plan.joining)
    if plan.hybrids:
        weight_sum += _add_hybrids(state, gradient, given, step, tally)
    expected = gradient.weight_of(minibatch)
    if weight_sum != expected:
        raise TrainError(
            f"train step {step}: slices of weight {weight_sum:g} were merged where the minibatch weighs {expected:g}: one is "
            "missing or was counted twice; no step is taken"
        )
    return weight_sum


def _core_slices(
    state: ReplicaState, gradient: SliceGradient, slices: Sequence[Sequence[Sample]], step: int, tally: Tally
) -> float:
    """Compute one slice per replica of the core and add their sum to the gradients; returns the sum of weights."""
    group = state.group
    parameters = state.optimized()
    before = {name: parameter.grad for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    part, fault, weight = tally.part(), None, 0.0
    try:
        weight = gradient.accumulate(present(slices[group.rank]), step, part)
    except GroupLost:
        raise
    except TrainError as error:
        if group.size == 1:
            raise
        fault = str(error)
    held = [parameter.grad is not None for parameter in parameters.values()]
    facts = group.gather({"weight": weight, "fault": fault, "held": held, "sums": part.sums, "maxima": part.maxima})
    faults = [f"rank {rank}: {fact['fault']}" for rank, fact in enumerate(facts) if fact["fault"]]
    if faults:
        raise TrainError("; ".join(faults))
    started = time.perf_counter()
    anywhere = [any(column) for column in zip(*(fact["held"] for fact in facts), strict=True)]
    wanted = [parameter for parameter, is_held in zip(parameters.values(), anywhere, strict=True) if is_held]
    for parameter in wanted:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    own = [parameter.grad for parameter in wanted if parameter.grad is not None and not in_shards(parameter)]
    if own:
        tally.add(reduce_bytes=group.sum_(own))
    for name, parameter in parameters.items():
        held_before = before[name]
        if parameter.grad is None:
            parameter.grad = held_before
        elif held_before is not None:
            parameter.grad.add_(held_before)
    tally.add(reduce_s=time.perf_counter() - started, **{n: v for n, v in part.sums.items() if n.endswith("_s")})
    for fact in facts:
        tally.take(fact["sums"], fact["maxima"])
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
    parameters = state.optimized()
    names = group.from_first(sorted({name for result in arrived for name in result.gradients}))
    for name in names:
        parameter = parameters[name]
        # One tensor at a time: the sum over hybrids is never a second model in memory.
        total = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        for result in arrived:
            if name in result.gradients:
                total += result.gradients.pop(name).to(total)
        group.send_([total])
        add_(parameter, total)
    for weight, sums, maxima in (facts := group.from_first([(r.weight_sum, r.sums, r.maxima) for r in arrived])):
        assert weight >= 0
        tally.take(sums, maxima)
    weight_sum = float(sum(weight for weight, _, _ in facts))
    if lost:
        tally.add(hybrids_lost=len(lost))
        orphans = [sample for number in lost for sample in given[number]]
        weight_sum += _core_slices(state, gradient, split(orphans, group.size), step, tally)
    return weight_sum
