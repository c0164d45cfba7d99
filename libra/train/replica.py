"""One training replica: a model, its optimizer, and the step from weights k to weights k + 1.

A replica is alone, or in a group that takes each step together (`libra.train.replica_group`). Each
member receives the whole batch and computes its slice; hybrid replicas may compute slices as well.

1. `Replica.step` accepts step ``steps_done`` only. The step just done returns its report again, so
   a relaunched task changes nothing; every other number is a TrainError.
2. A step that fails (NaN, bad trajectory) leaves weights, optimizer state and step count as they
   were. A failed wave leaves no gradient: all waves are added again.
3. A gradient is the sum over the minibatch's action tokens of weight x gradient, divided once, when
   complete (`libra.train.losses`). So micro-batches, replicas and waves (`Replica.accumulate`, then
   `Replica.close`) change only the rounding of sums.
4. ``behaviour_logprob`` is never written; trajectories of a failure class that does not train count
   neither in numerator nor in denominator.
5. Equal weights, trajectories, waves, settings, seed and thread count give equal weights after the
   step.
6. The replicas of a group have the same weights, bit for bit, after every step, and report the same
   digest.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from libra.errors import TrainError
from libra.train import mismatch
from libra.train.checkpoint import ReplicaSnapshot, load_checkpoint, load_optimizer, save_checkpoint
from libra.train.gradient_reduction import StepGradient
from libra.train.logprobs import load_model
from libra.train.mismatch import largest, parts_of
from libra.train.packing import karmarkar_karp
from libra.train.replica_group import TrainGroup, local, part_of
from libra.train.replica_settings import TrainSettings
from libra.train.replica_state import ReplicaState
from libra.train.samples import LazyBatch, Sample, samples_of
from libra.train.slice_gradient import SliceGradient
from libra.train.step_report import StepMemory, StepReport, Tally
from libra.types import Trajectory

logger = logging.getLogger(__name__)

Published = Callable[[int], Mapping[str, Tensor] | None]
"""The whole weights of a version by name, None if they no longer exist."""


class Replica(ReplicaState):
    """A model in training on one process.

    ``model_dir`` (Hugging Face layout) has the initial weights, in ``dtype``; the optimizer's
    weights may be wider (``master_dtype``). ``base_dir``, by default the same, is the reference of
    the KL term and has the tokenizer's files. ``seed`` orders minibatches; nothing else is random.
    ``loader`` is ``model.loader``. ``published`` returns the weights of earlier versions, for
    ``trainer.old_logp=version``. Without ``digests`` the publisher computes the digest of a step's
    weights. ModelError if ``model_dir`` has no causal language model; TrainError if the model does
    not support the layout.
    """

    def __init__(
        self,
        model_dir: str | Path,
        settings: TrainSettings,
        *,
        dtype: torch.dtype | str = torch.float32,
        master_dtype: torch.dtype | str | None = None,
        threads: int | None = None,
        device: torch.device | str = "cpu",
        seed: int = 0,
        base_dir: str | Path | None = None,
        group: TrainGroup | None = None,
        loader: str | None = None,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self._memory = StepMemory(device)
        model = load_model(Path(model_dir), _dtype(dtype), loader)
        self._memory.model_loaded(sum(weight.nbytes for weight in model.parameters()))
        group, base, place = group or TrainGroup(), Path(base_dir or model_dir), torch.device(device)
        reference = load_model(base, _dtype(dtype), loader).requires_grad_(False) if settings.kl_coef > 0 else None
        for each in (model, reference):
            if each is not None:
                each.to(place)
        self.open_step: StepGradient | None = None
        self.published: Published | None = None
        self.digests = True
        wide = None if master_dtype is None else _dtype(master_dtype)
        gradient = SliceGradient(model, settings, group, place, reference)
        super().__init__(model, gradient, master_dtype=wide, seed=seed, base_dir=base)

    def save(self, directory: str | Path) -> None:
        """Write model (Hugging Face layout), tokenizer and optimizer state, whole or not at all."""
        save_checkpoint(Path(directory), ReplicaSnapshot.of(self, copy=False))

    def snapshot(self) -> ReplicaSnapshot:
        """A copy of the state in host memory; the replica may take further steps."""
        return ReplicaSnapshot.of(self)

    def load(self, directory: str | Path) -> None:
        """Take weights, optimizer state, step count and last report from a checkpoint."""
        self.content = None
        self.abandon()
        load_checkpoint(Path(directory), self)

    def continue_optimizer(self, directory: str | Path) -> None:
        """Take the optimizer's state, not the step count, from the checkpoint ``model_dir``."""
        load_optimizer(Path(directory), self)

    def step(self, trajectories: Sequence[Trajectory] | LazyBatch, step: int) -> StepReport:
        """Train weights ``step`` on a batch whose trajectories carry their advantages. Without any
        gradient the step counts as taken, with loss 0 and optimizer_steps 0. TrainError for a step
        out of order, a bad trajectory, or a loss or gradient that is not finite."""
        if (done := self._done(step)) is not None:
            return done
        self.abandon()
        with self.undisturbed():
            return self._step(trajectories, step)

    def accumulate(self, trajectories: Sequence[Trajectory] | LazyBatch, step: int) -> int:
        """Add the next wave's gradient, a collective; returns the number of waves so far.
        TrainError as in `step`; the earlier waves are then dropped, too."""
        self._check_next(step)
        opened = self.open_step = self.open_step or StepGradient(self, step)
        try:
            with self.undisturbed(), opened.working():
                self._memory.start()
                self._add(self._samples(trajectories, step, opened.tally), opened)
                opened.tally.at_least(peak_bytes=self._memory.peak_bytes())
        except BaseException:
            self.abandon()
            raise
        opened.waves += 1
        return opened.waves

    def close(self, step: int) -> StepReport:
        """Divide, clip and apply the sum of all waves; report and errors as of `step`."""
        if (done := self._done(step)) is not None:
            return done
        opened = self.open_step
        assert opened is not None, f"step {step} is closed before a wave of it was added"
        try:
            with self.undisturbed(), opened.working():
                self._set_lr(step)
                self._apply(opened)
                return self._report(step, opened.tally, opened.began_s)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Drop the gradients of an open step."""
        self.open_step = None
        self.gradient.kl.seen = (0.0, 0)
        self.optimizer.zero_grad(set_to_none=True)

    def _done(self, step: int) -> StepReport | None:
        if self.last_report is not None and step == self.last_report.step == self.steps_done - 1:
            return self.last_report
        self._check_next(step)
        return None

    def _check_next(self, step: int) -> None:
        if step != self.steps_done:
            raise TrainError(f"train step: got step {step}, and the next is {self.steps_done}")

    def _set_lr(self, step: int) -> None:
        lr = self.settings.lr_at(step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def _samples(self, trajectories: Sequence[Trajectory] | LazyBatch, step: int, tally: Tally) -> list[Sample]:
        started = time.perf_counter()
        settings, old_logp = self.settings, self.settings.old_logp
        proximal = old_logp not in ("behaviour", "ewma") and settings.epochs * settings.minibatches > 1
        whole = proximal or old_logp in ("version", "ewma") or settings.has_token_rewards
        whole = whole or settings.exact_logprobs or settings.reject_args["m2po"] is not None
        samples = samples_of(trajectories, step, whole=whole)
        tally.add(
            sequences=len(samples),
            excluded_sequences=len(trajectories) - len(samples),
            action_tokens=sum(sample.num_actions for sample in samples),
            pack_s=time.perf_counter() - started,
        )
        if settings.exact_logprobs:
            mismatch.observe_alone(tally, self.model, samples, settings.temperature)
        began = time.perf_counter()
        if settings.has_token_rewards:
            samples = self.gradient.with_token_advantages(samples, tally)
        if proximal:
            samples = self.gradient.with_proximal(samples)
        if old_logp == "version":
            samples = self.under_versions(samples, step)
            if not settings.exact_logprobs:  # else the engine's are the version's
                mismatch.observe_versions(tally, samples)
        elif self.average is not None:
            with self.lending() as put:
                put({name: local(tensor) for name, tensor in self.average.tensors.items()})
                samples = self.gradient.with_proximal(samples)
        tally.add(old_logp_s=time.perf_counter() - began)
        return samples

    def under_versions(self, samples: Sequence[Sample], step: int) -> list[Sample]:
        """``samples`` with the log-probability of each stale token under the weights that sampled
        it.

        NaN for tokens of the trained weights that were not scored (the step's own log-probabilities
        count), and of weights that are gone. TrainError for stale tokens without `published`.
        """
        useful = self.gradient.useful(samples)
        old: dict[int, NDArray[np.floating[Any]]] = {
            id(each): np.where(each.current, np.nan if each.proximal_logp is None else each.proximal_logp, np.nan)
            for each in useful
        }
        versions = sorted({int(version) for sample in useful for version in np.unique(sample.version)} - {step, -1})
        if self.settings.exact_logprobs:
            for sample in useful:
                stale = np.isin(sample.version, versions)
                old[id(sample)] = np.where(stale, sample.behaviour_logp, old[id(sample)])
        elif versions:
            if self.published is None:
                raise TrainError(
                    f"trainer.old_logp: version, and step {step} has tokens of versions {versions}, whose weights this replica "
                    "was not given; set Replica.published, or give trainer.old_logp=exact"
                )
            with self.lending() as put:
                for version in versions:
                    self._score_version(useful, version, self.published(version), old, put)
        return [replace(sample, proximal_logp=old[id(sample)]) if id(sample) in old else sample for sample in samples]

    def _score_version(
        self,
        samples: Sequence[Sample],
        version: int,
        weights: Mapping[str, Tensor] | None,
        old: dict[int, NDArray[np.floating[Any]]],
        put: Callable[[Mapping[str, Tensor]], None],
    ) -> None:
        if not all(self.group.gather(weights is not None)):
            logger.warning(
                "the weights of version %d are gone; its tokens have the engine's log-probabilities", version
            )
            return
        assert weights is not None
        put({name: part_of(weights[name], tensor) for name, tensor in self.tensors().items() if name in weights})
        places = [(sample, at) for sample in samples if len(at := np.flatnonzero(sample.version == version))]
        for (sample, at), logp in zip(places, self.gradient.scored([s.only(at) for s, at in places]), strict=True):
            old[id(sample)] = old[id(sample)].astype(logp.dtype)
            old[id(sample)][at] = logp

    def _step(self, trajectories: Sequence[Trajectory] | LazyBatch, step: int) -> StepReport:
        started = time.perf_counter()
        self._memory.start()
        tally = Tally()
        self._set_lr(step)
        passes = self._minibatches(self._samples(trajectories, step, tally), step)
        backup = self.backup() if len(passes) > 1 else None
        try:
            for minibatch in passes:
                partial = StepGradient(self, step, tally)
                self._add(self.gradient.with_kept(minibatch, fresh=tally.stepped), partial)
                self._apply(partial)
        except BaseException:
            if backup is not None:
                self.restore(*backup)
            raise
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        return self._report(step, tally, started)

    def _minibatches(self, samples: list[Sample], step: int) -> list[list[Sample]]:
        settings, passes = self.settings, []
        for epoch in range(settings.epochs if samples else 0):
            if settings.minibatches == 1:
                passes.append(samples)
                continue
            order = np.random.default_rng((self.seed, step, epoch)).permutation(len(samples))
            shuffled = [samples[index] for index in order]
            parts = karmarkar_karp([sample.num_tokens for sample in shuffled], min(settings.minibatches, len(shuffled)))
            passes += [[shuffled[index] for index in part] for part in parts]
        return passes

    def _add(self, samples: list[Sample], partial: StepGradient) -> None:
        began = time.perf_counter()
        partial.add(samples)
        packed_s = partial.tally.sums.pop("slice_pack_s", 0.0)
        partial.tally.add(pack_s=packed_s, forward_backward_s=time.perf_counter() - began - packed_s)

    def _apply(self, partial: StepGradient) -> None:
        step, tally = partial.step, partial.tally
        tally.add(minibatches=1)
        if not partial.useful:
            return
        began = time.perf_counter()
        partial.sum_over_core()
        summed = time.perf_counter()
        partial.check()
        divisor = self.gradient.objective.aggregation.divisor_of(partial.merged)
        torch._foreach_div_([local(p.grad) for p in self.optimized().values() if p.grad is not None], divisor)
        tally.add(loss=tally.sums.pop("loss_sum", 0.0) / divisor)
        if not tally.stepped:
            mismatch.raise_alarm(tally, self.settings, step)
        waited_s = self.before_change(step)
        self.apply_gradient(step, tally)
        if partial.connected:
            self.offer_weights()
        optimizer_s = time.perf_counter() - summed - waited_s
        tally.add(forward_backward_s=summed - began, optimizer_s=optimizer_s, publish_wait_s=waited_s)

    def _report(self, step: int, tally: Tally, began_s: float) -> StepReport:
        tally.add(publish_wait_s=self.before_change(step))  # without a gradient too
        if self.average is not None:
            self.average.move(self.tensors())
        tally.add(kl_coef=self.gradient.kl.value)
        if self.settings.kl_args["target"] is not None:
            self.gradient.kl.adapt(self.settings.kl_args["target"], self.settings.kl_horizon)
        self.content = None
        content = self.hashed() if self.digests else ""
        if self.hybrids is not None:
            if self.hybrids.stale and self.hybrids.connected and not self.is_sharded:
                self.offer_weights()  # to a hybrid that joined during the step
            tally.add(**self.hybrids.traffic())
        tally.at_least(peak_bytes=self._memory.peak_bytes())
        lr, total_s = self.optimizer.param_groups[0]["lr"], time.perf_counter() - began_s
        report = tally.report(step=step, digest=content, lr=lr, total_s=total_s)
        self.last_report = replace(report, mismatch_parts=parts_of(tally), mismatch_worst=largest(tally.worst))
        self.steps_done = step + 1
        return self.last_report


def _dtype(given: torch.dtype | str) -> torch.dtype:
    return getattr(torch, given) if isinstance(given, str) else given  # type: ignore[no-any-return]
