"""The gradient of an optimizer step: sums of core replicas and hybrids, merged and divided once.

Every core replica calls `StepGradient.add` with the same samples, at once or wave by wave, and then
`StepGradient.sum_over_core` once. Rank 0 announces the number of hybrids, and all cut the same
slices; the core computes the slice of a lost hybrid. Shards are summed in each backward pass.

1. The result does not depend on the number of replicas or waves, except for the rounding of sums.
2. A slice counts once or the step fails: a hybrid's sums are added whole, after all arrived, or not
   at all.
3. A fault on one replica (NaN, a bad sequence) is raised by all, before the optimizer steps.
4. A replica waits only for hybrids that it planned with; a joining hybrid contributes zeros until
   it has its state.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from libra.errors import GroupLost, TrainError
from libra.train.hybrid_pool import Message
from libra.train.packing import split
from libra.train.replica_group import add_, in_shards, lost_connection
from libra.train.replica_state import ReplicaState
from libra.train.samples import Sample, present
from libra.train.step_report import Tally


@dataclass(slots=True)
class StepGradient:
    """The gradient of a step while it is summed; the tensors are the parameters' ``grad``."""

    state: ReplicaState
    step: int
    tally: Tally = field(default_factory=Tally)
    merged: float = 0.0  # sum of weights of the slices added
    expected: float = 0.0  # sum of weights of the samples due
    useful: bool = False  # whether any sample had a gradient
    connected: bool = False  # whether a hybrid was connected
    hybrids: int = 0  # hybrids that were given a slice of the last samples added
    waves: int = 0  # waves added, of a step that is taken in waves
    began_s: float = 0.0  # within `working`: present less the seconds worked on the step, on the performance counter
    _worked_s: float = 0.0

    @contextmanager
    def working(self) -> Iterator[None]:
        self.began_s = time.perf_counter() - self._worked_s
        try:
            yield
        finally:
            self._worked_s = time.perf_counter() - self.began_s

    def check(self) -> None:
        if self.merged != self.expected:
            raise TrainError(
                f"train step {self.step}: slices of weight {self.merged:g} were merged where the samples weigh "
                f"{self.expected:g}: one is missing or was counted twice; no step is taken"
            )

    def add(self, samples: Sequence[Sample]) -> None:
        """Add the undivided sum of weight x gradient of ``samples`` to the parameters' ``grad``.
        Unless sharded, ``grad`` is this replica's part, on rank 0 with the hybrids' parts.
        TrainError if a loss is not finite, GroupLost if a replica of the core is lost."""
        weight = self.state.gradient.weight_of(samples)
        self.expected += weight
        if not self.state.gradient.useful(samples):
            self.merged += weight
            return
        group, pool = self.state.group, self.state.hybrids
        hybrids, joining = self._planned()
        slices = split(samples, group.size + hybrids)
        given = slices[group.size :]
        if pool is not None and hybrids:
            pool.assign([present(part) for part in given], self.step, stepped=self.tally.stepped)
        self.merged += self._core_slices(slices[: group.size])
        self.tally.at_least(replicas=group.size, hybrids=hybrids, hybrids_joining=joining)
        if hybrids:
            self.merged += self._add_hybrids(given)
        self.useful, self.connected, self.hybrids = True, self.connected or hybrids + joining > 0, hybrids

    def sum_over_core(self) -> None:
        """Replace ``grad`` by the sum over all replicas; shards are already summed."""
        started = time.perf_counter()
        group, parameters = self.state.group, list(self.state.optimized().values())
        held = group.gather([parameter.grad is not None for parameter in parameters])
        wanted = [parameter for parameter, *anywhere in zip(parameters, *held, strict=True) if any(anywhere)]
        for parameter in wanted:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        own = [parameter.grad for parameter in wanted if parameter.grad is not None and not in_shards(parameter)]
        if own:
            self.tally.add(reduce_bytes=group.sum_(own))
        self.tally.add(reduce_s=time.perf_counter() - started)

    def _planned(self) -> tuple[int, int]:
        pool, group = self.state.hybrids, self.state.group
        if group.from_first(pool is not None and pool.connected and pool.stale):
            self.state.offer_weights()
        hybrids, joining = group.from_first((0, 0) if pool is None else pool.counts())
        return hybrids, joining

    def _core_slices(self, slices: Sequence[Sequence[Sample]]) -> float:
        group = self.state.group
        part, fault, weight = self.tally.part(), None, 0.0
        try:
            weight = self.state.gradient.accumulate(present(slices[group.rank]), self.step, part)
        except GroupLost:
            raise
        except TrainError as error:
            if group.size == 1:
                raise
            fault = str(error)
        except RuntimeError as error:
            if not (self.state.is_sharded and lost_connection(error)):
                raise
            raise GroupLost(
                f"training group: rank {group.rank} of {group.size} lost the others in a pass: "
                f"{str(error).splitlines()[0]}; a new group repeats the step"
            ) from error
        facts = group.gather([weight, fault, part.sums, part.maxima, part.worst])
        if faults := [f"rank {rank}: {fact[1]}" for rank, fact in enumerate(facts) if fact[1]]:
            raise TrainError("; ".join(faults))
        self.tally.add(**{name: value for name, value in part.sums.items() if name.endswith("_s")})
        for _, _, sums, maxima, worst in facts:
            self.tally.take(sums, maxima)
            self.tally.worst += worst
        return float(sum(fact[0] for fact in facts))

    def _add_hybrids(self, given: Sequence[Sequence[Sample]]) -> float:
        group, pool = self.state.group, self.state.hybrids
        results: list[Message | None] = []
        if pool is not None:
            started = time.perf_counter()
            results = pool.collect()
            self.tally.add(hybrid_wait_s=time.perf_counter() - started)
        lost = group.from_first([number for number, result in enumerate(results) if result is None])
        arrived = [result for result in results if result is not None]
        names = sorted({name for result in arrived for name in result.tensors})
        self._add_sums(group.from_first(names) if self.state.is_sharded else names, arrived)
        facts = group.from_first([result.fields for result in arrived])
        for fact in facts:
            self.tally.take(fact["sums"], fact["maxima"])
        weight_sum = float(sum(fact["weight_sum"] for fact in facts))
        if lost:
            self.tally.add(hybrids_lost=len(lost))
            orphans = [sample for number in lost for sample in given[number]]
            weight_sum += self._core_slices(split(orphans, group.size))
        return weight_sum

    def _add_sums(self, names: Sequence[str], arrived: Sequence[Message]) -> None:
        parameters = self.state.optimized()
        for name in names:
            parameter = parameters[name]
            # One tensor at a time: the sum over hybrids is never a second model in memory.
            total = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            for result in arrived:
                if name in result.tensors:
                    total += result.tensors.pop(name).to(total)
            if in_shards(parameter):
                self.state.group.send_([total])
            if in_shards(parameter) or self.state.group.rank == 0:
                add_(parameter, total)
