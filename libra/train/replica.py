"""One training replica: a model, its optimizer, and the step that turns weights k into weights k + 1.

A replica may be alone, or one of a group that takes each step together (`libra.train.replica_group`); then every one of them is
given the whole batch and computes its slice of it, and hybrid replicas from outside may compute slices too.

Invariants
----------
1. Steps are taken in order, once: `Replica.step` accepts step ``steps_done``; the step just done returns its report
   again (a relaunched task changes nothing); every other number is a TrainError.
2. A step that fails (NaN, bad trajectory) leaves weights, optimizer state and step count as they were.
3. A gradient is the sum over the minibatch's action tokens of weight x gradient, divided once, after all of it is there,
   by what the sum of weights says (`libra.train.aggregation`), however it is laid out in micro-batches and over replicas.
4. ``behaviour_logprob`` is read and never written; trajectories of a failure class that does not train have no part in
   numerator or denominator.
5. Same weights, trajectories, settings, seed and thread count: same weights after the step.
6. With a ``master_dtype`` the optimizer's weights are `libra.train.master_weights.MasterWeights`; the model's are those, rounded.
7. The replicas of a group have the same weights, bit for bit, after every step, and report the same digest.

Shape legend: N action tokens of a micro-batch.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from libra.errors import TrainError
from libra.scoring import score_alone
from libra.tensors import digest, untied
from libra.train import mismatch
from libra.train.balanced_partition import karmarkar_karp
from libra.train.checkpoint import ReplicaSnapshot, load_checkpoint, load_optimizer, save_checkpoint
from libra.train.gradient_reduction import in_step, merged_gradient, offer_weights, plan, proximal_everywhere
from libra.train.hybrid_pool import TIMEOUT_S, HybridPool
from libra.train.lazy_batch import LazyBatch, samples_of
from libra.train.logprobs import Scorer, check_packing
from libra.train.master_weights import MasterWeights
from libra.train.minibatch_slices import split
from libra.train.model_layout import checkpoint_activations, local, part_of, shard, whole
from libra.train.model_loading import load_model
from libra.train.objective import Objective
from libra.train.process_memory import StepMemory
from libra.train.prompt_sharing import can_share
from libra.train.replica_group import TrainGroup
from libra.train.replica_settings import TrainSettings
from libra.train.sequence_packing import MicroBatch, Sample, pack
from libra.train.step_report import StepReport, Tally
from libra.types import Trajectory

logger = logging.getLogger(__name__)

_PACKING_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # nats; 0.1 for narrower dtypes


class Replica:
    """A model in training on one process.

    Parameters
    ----------
    model_dir : path
        Hugging Face layout: the weights to begin with.
    settings : TrainSettings
    dtype : torch.dtype or str
        Of weights and forward pass; log-probabilities are at least float32.
    master_dtype : torch.dtype or str, optional
        Of the weights that the optimizer updates, where that is wider than ``dtype``. None: the model's own.
    threads : int, optional
        torch threads of this process; None leaves them as they are.
    device : torch.device or str
        Where model, optimizer and micro-batches are.
    seed : int
        Orders minibatches; nothing else is random (dropout is off).
    base_dir : path, optional
        The model that ``model_dir`` came from: reference of the KL term, and the tokenizer files that travel with every
        checkpoint. None: ``model_dir`` itself.
    group : TrainGroup, optional
        The replicas that take each step together. None: this one alone.

    Attributes
    ----------
    hybrids : HybridPool or None
        Set on rank 0 where hybrid replicas may join; see `admit_hybrids`.

    Raises
    ------
    ModelError
        Where ``model_dir`` does not hold a causal language model.
    TrainError
        Where the model cannot be laid out as the settings say.
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
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.model_dir = Path(model_dir)
        self.base_dir = Path(base_dir or model_dir)
        self.settings = settings
        self.seed = seed
        self.dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        self._memory = StepMemory(device)
        self.model = load_model(self.model_dir, self.dtype)
        self._memory.model_loaded(sum(weight.nbytes for weight in self.model.parameters()))
        self.group = group or TrainGroup()
        self.hybrids: HybridPool | None = None
        self.steps_done = 0
        self.last_report: StepReport | None = None
        self.content: str | None = None  # digest of the present weights, where it was computed since they last changed
        self._objective = Objective(settings)
        self._scorer = Scorer(self.model, settings.temperature, settings.logit_chunk_tokens)
        self._reference: Scorer | None = None
        if settings.kl_coef > 0:
            frozen = load_model(self.base_dir, self.dtype).requires_grad_(False)
            self._reference = Scorer(frozen, settings.temperature, settings.logit_chunk_tokens)
        self.device = torch.device(device)
        for model in (self.model, *([] if self._reference is None else [self._reference.model])):
            model.to(self.device)
        self._share_prompts = settings.share_prompts and can_share(self.model)
        self._packing_checked = settings.max_row_tokens == 1
        kept, self._aliases = untied(self.model.state_dict())
        self._names = tuple(kept)
        self._lay_out()
        wide = getattr(torch, master_dtype) if isinstance(master_dtype, str) else master_dtype
        self.master: MasterWeights | None = None
        if wide is not None and wide.itemsize > self.dtype.itemsize:
            self.master = MasterWeights(self.parameters(), wide)
        self.optimizer = torch.optim.AdamW(
            self.optimized().values(),
            lr=settings.lr,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    @property
    def is_sharded(self) -> bool:
        """Whether each replica of the group holds a part of every tensor, so that passes and `weights` are collectives."""
        return self.settings.layout == "fsdp2" and self.group.size > 1

    def _lay_out(self) -> None:
        if self.settings.gradient_checkpointing:
            checkpoint_activations(self.model)
        if self.is_sharded:
            if not self._packing_checked:  # later it would be a collective that only some replicas come to
                check_packing(self._scorer, _PACKING_TOLERANCE.get(self.dtype, 0.1))
                self._packing_checked = True
            shard(self.model, self.group, offload=self.settings.offload)

    def description(self) -> dict[str, Any]:
        """What another replica must have in common with this one to compute a slice of its minibatch; JSON-able."""
        same_result = {
            "layout",
            "gradient_checkpointing",
            "offload",
            "max_row_tokens",
            "micro_batch_tokens",
            "logit_chunk_tokens",
            "share_prompts",
        }
        settings = {name: value for name, value in asdict(self.settings).items() if name not in same_result}
        shapes = [f"{name} {list(parameter.shape)}" for name, parameter in self.parameters().items()]
        return {
            "dtype": str(self.dtype),
            "master_dtype": None if self.master is None else str(next(iter(self.optimized().values())).dtype),
            **{
                f"trainer.{name}": list(value) if isinstance(value, tuple) else value
                for name, value in settings.items()
            },
            "parameters": hashlib.sha256("\n".join(shapes).encode()).hexdigest(),
        }

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Trained parameters by name, tied ones once."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def optimized(self) -> dict[str, torch.nn.Parameter]:
        """What the optimizer updates, by the names of `parameters`: those themselves, or their copies in ``master_dtype``."""
        return self.parameters() if self.master is None else self.master.tensors

    def weights(self) -> dict[str, Tensor]:
        """The state dict to publish, tied tensors once. Views of live storage, which the next step changes.

        Where the model is sharded: copies in host memory, and every replica of the group has to ask for them.
        """
        if not self.is_sharded:
            return self.tensors()
        # One at a time: a device that holds a shard of everything need not hold all of everything.
        return {name: whole(tensor).cpu() for name, tensor in self.tensors().items()}

    def tensors(self) -> dict[str, Tensor]:
        """The same tensors as they lie here, sharded or not."""
        state = self.model.state_dict()
        return {name: state[name].detach() for name in self._names}

    def all_weights(self) -> dict[str, Tensor]:
        """`weights` with tied tensors under every name they have."""
        own = self.weights()
        return own | {alias: own[name] for alias, name in self._aliases.items()}

    def score(self, token_ids: NDArray[np.integer]) -> NDArray[np.float32]:
        """Log-probability in nats of each token but the first under the present weights (T - 1,), at temperature 1."""
        return score_alone(self.model, token_ids)

    def take_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy ``weights``, named as in `weights`, over its own; optimizer state and step count stay."""
        self.content = None
        with torch.no_grad(), self._quiet():
            for name, tensor in self.tensors().items():
                local(tensor).copy_(part_of(weights[name], tensor))
            if self.master is not None:
                self.master.take_from_model()
            self._weights_moved()

    def admit_hybrids(self, token: str, *, host: str = "127.0.0.1", timeout_s: float = TIMEOUT_S) -> HybridPool:
        """From now on hybrid replicas that know ``token`` may join; on rank 0 of the group, between steps."""
        source = None if self.is_sharded else self.weights
        self.hybrids = HybridPool(token, self.description(), source=source, host=host, timeout_s=timeout_s)
        return self.hybrids

    def _quiet(self) -> AbstractContextManager[Any]:
        """Nobody copies the weights in here."""
        return nullcontext() if self.hybrids is None else self.hybrids.undisturbed()

    def _weights_moved(self) -> None:
        if self.hybrids is not None:
            self.hybrids.stale = True

    def save(self, directory: str | Path) -> None:
        """Write model (Hugging Face layout), tokenizer and optimizer state as a new directory, whole or not at all."""
        save_checkpoint(Path(directory), ReplicaSnapshot.of(self, copy=False))

    def snapshot(self) -> ReplicaSnapshot:
        """A copy of weights and optimizer state in host memory, to be saved while this replica steps on."""
        return ReplicaSnapshot.of(self)

    def load(self, directory: str | Path) -> None:
        """Take weights, optimizer state, step count and last report from a directory written by `save`."""
        self.content = None
        load_checkpoint(Path(directory), self)

    def continue_optimizer(self, directory: str | Path) -> None:
        """Take the optimizer's state, not the step count, from the checkpoint that ``model_dir`` is."""
        load_optimizer(Path(directory), self)

    def step(self, trajectories: Sequence[Trajectory] | LazyBatch, step: int) -> StepReport:
        """Train weights ``step`` on a batch whose trajectories carry their advantages.

        Where no trajectory has an advantage (and no other term has a gradient) nothing is learnt: the report says loss 0
        and optimizer_steps 0, weights and optimizer state stay, and the step counts as done.

        Raises
        ------
        TrainError
            Step out of order; a trajectory that cannot be trained on; a loss or gradient that is not finite.
        """
        if self.last_report is not None and step == self.last_report.step == self.steps_done - 1:
            return self.last_report
        if step != self.steps_done:
            raise TrainError(
                f"train step: got step {step}, but {self.steps_done} steps are done; allowed is {self.steps_done}"
            )
        with self._quiet():
            return self._step(trajectories, step)

    def _step(self, trajectories: Sequence[Trajectory] | LazyBatch, step: int) -> StepReport:
        started = time.perf_counter()
        self._memory.start()
        tally = Tally()
        proximal = self._objective.needs_proximal and self.settings.epochs * self.settings.minibatches > 1
        samples = samples_of(trajectories, step, whole=proximal or self.settings.exact_logprobs)
        tally.add(
            sequences=len(samples),
            excluded_sequences=len(trajectories) - len(samples),
            action_tokens=sum(sample.num_actions for sample in samples),
            pack_s=time.perf_counter() - started,
        )
        self.content = None
        lr = self.settings.lr_at(step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.settings.exact_logprobs:
            mismatch.observe_alone(tally, self.model, samples, self.settings.temperature)
        if proximal:
            samples = self._with_proximal(samples)
        passes = self._minibatches(samples, step)
        backup = self._snapshot() if len(passes) > 1 else None
        try:
            for minibatch in passes:
                self._train(minibatch, step, tally)
        except BaseException:
            if backup is not None:
                self._restore(*backup)
            raise
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        self.content = content = digest(self.weights())
        if self.hybrids is not None:
            if self.hybrids.stale and self.hybrids.connected and not self.is_sharded:
                offer_weights(self)  # to one that came while the step was under way
            tally.add(**self.hybrids.traffic())
        tally.at_least(peak_bytes=self._memory.peak_bytes())
        self.last_report = tally.report(step=step, digest=content, lr=lr, total_s=time.perf_counter() - started)
        self.steps_done = step + 1
        return self.last_report

    def _minibatches(self, samples: list[Sample], step: int) -> list[list[Sample]]:
        """All minibatches of all epochs, balanced by tokens; never an empty one, so fewer where samples are few."""
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

    def _train(self, minibatch: list[Sample], step: int, tally: Tally) -> None:
        """One optimizer step, or none where no sample has a gradient."""
        tally.add(minibatches=1)
        if not self._useful(minibatch):
            return
        planned = plan(self)
        began = time.perf_counter()
        weight_sum = merged_gradient(self, minibatch, planned, step, tally)
        merged = time.perf_counter()
        divisor = self._objective.aggregation.divisor_of(weight_sum)
        torch._foreach_div_([local(p.grad) for p in self.optimized().values() if p.grad is not None], divisor)
        tally.add(loss=tally.sums.pop("loss_sum", 0.0) / divisor)
        if not tally.stepped:
            mismatch.raise_alarm(tally, self.settings.mismatch_alarm, self.settings.mismatch_action, step)
        self._apply_gradient(step, tally)
        self._weights_moved()
        if planned.connected:
            offer_weights(self)
        packed_s = tally.sums.pop("slice_pack_s", 0.0)
        tally.add(
            pack_s=packed_s,
            forward_backward_s=merged - began - packed_s,
            optimizer_s=time.perf_counter() - merged,
        )

    def _useful(self, samples: Sequence[Sample]) -> list[Sample]:
        """Those with a gradient; a sequence without any would change nothing by its forward pass, but counts as weight."""
        return [sample for sample in samples if sample.advantage != 0 or self._objective.needs_every_sequence]

    def weight_of(self, samples: Sequence[Sample]) -> float:
        """Sum of the weights of ``samples``, as the aggregation mode has it."""
        return self._objective.aggregation.weight_sum(
            num_tokens=sum(sample.num_actions for sample in samples), num_sequences=len(samples)
        )

    def accumulate(self, samples: Sequence[Sample], step: int, tally: Tally) -> float:
        """Add this slice's sum of weight x gradient, undivided, to the ``grad`` of `optimized`; returns its sum of weights.

        Raises TrainError where its loss is not finite.
        """
        began = time.perf_counter()
        useful = self._useful(samples)
        batches = self._pack(useful)
        tally.add(slice_pack_s=time.perf_counter() - began)
        fault: TrainError | None = None
        for batch, counts in in_step(self, batches, self._empty_batch):
            self._check_packing(batch)
            loss = self.micro_batch_loss(batch, tally if counts else Tally())
            value = float(loss.detach())
            if not np.isfinite(value):
                fault = TrainError(f"train step {step}: the loss is {value}; weights stay those of version {step}")
                if not self.is_sharded:  # else the others wait for this replica in their next pass
                    raise fault
            (loss if counts else loss * 0).backward()
            if counts:
                tally.add(loss_sum=value)
        if fault is not None:
            raise fault
        return self.weight_of(samples)

    def _empty_batch(self) -> MicroBatch:
        """A micro-batch to take part in the others' collectives with; its loss is not counted."""
        token_ids = np.zeros(2, np.int64)
        sample = Sample(token_ids, np.array([0]), np.array([0]), np.zeros(1, np.float32), np.zeros(1, np.bool_), 0.0)
        return self._pack([sample])[0]

    def _pack(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        batches = pack(
            samples,
            max_row_tokens=self.settings.max_row_tokens,
            micro_batch_tokens=self.settings.micro_batch_tokens,
            logp_dtype=torch.promote_types(self.dtype, torch.float32),
            share_prompts=self._share_prompts,
        )
        return [batch.to(self.device) for batch in batches]

    @torch.no_grad()
    def _with_proximal(self, samples: Sequence[Sample]) -> list[Sample]:
        """``samples`` with their log-probabilities under the present weights; each is scored by one replica of the group."""
        numbered = {id(sample): index for index, sample in enumerate(samples)}
        scored: dict[int, NDArray[np.floating[Any]]] = {}
        for batch, counts in in_step(
            self, self._pack(split(samples, self.group.size)[self.group.rank]), self._empty_batch
        ):
            self._check_packing(batch)
            logp_N, _ = self._scorer.logp(*batch.inputs)
            if counts:
                parts = logp_N.split([sample.num_actions for sample in batch.samples])
                scored |= {
                    numbered[id(sample)]: part.cpu().numpy() for sample, part in zip(batch.samples, parts, strict=True)
                }
        everywhere = proximal_everywhere(self, samples, scored)
        return [replace(sample, proximal_logp=logp) for sample, logp in zip(samples, everywhere, strict=True)]

    def micro_batch_loss(self, batch: MicroBatch, tally: Tally) -> Tensor:
        """Sum of weight x loss over the action tokens of ``batch``, with gradient; what it saw goes into ``tally``."""
        logp_N, entropy_N = self._scorer.logp(*batch.inputs, entropy_gradient=self.settings.entropy_coef > 0)
        reference_logp_N = None
        if self._reference is not None:
            with torch.no_grad():
                reference_logp_N, _ = self._reference.logp(*batch.inputs)
        loss_N, sums = self._objective.token_losses(
            batch, logp_N, entropy_N=entropy_N, reference_logp_N=reference_logp_N
        )
        self._observe(batch, logp_N.detach(), entropy_N.detach(), sums, tally)
        return self._objective.aggregation.weighted_sum(loss_N, batch.sequences)

    def _observe(
        self, batch: MicroBatch, logp_N: Tensor, entropy_N: Tensor, sums: dict[str, float], tally: Tally
    ) -> None:
        tally.at_least(ratio_max=sums.pop("ratio_max"))
        tally.add(
            **sums,
            scored=len(logp_N),
            entropy=float(entropy_N.sum()),
            places=batch.num_places,
            forwarded_tokens=batch.num_tokens,
            forwarded_sequences=batch.num_sequences,
            rows=len(batch.token_ids_RW),
            micro_batches=1,
        )
        if not tally.stepped and not self.settings.exact_logprobs:
            mismatch.observe(tally, logp_N[batch.current_N], batch.behaviour_logp_N[batch.current_N])

    def _apply_gradient(self, step: int, tally: Tally) -> None:
        parameters = self.optimized()
        norm = whole(torch.nn.utils.get_total_norm([p.grad for p in parameters.values() if p.grad is not None]))
        if not bool(torch.isfinite(norm)):
            bad = [n for n, p in parameters.items() if p.grad is not None and not bool(torch.isfinite(p.grad).all())]
            raise TrainError(
                f"train step {step}: the gradient is not finite (norm {float(norm)}; {len(bad)} of {len(parameters)} "
                f"parameters, first {bad[:3]}); weights stay those of version {step}"
            )
        torch.nn.utils.clip_grads_with_norm_(parameters.values(), self.settings.max_grad_norm, norm)
        self.optimizer.step()
        if self.master is not None:
            self.master.round_into_model()
        self.optimizer.zero_grad(set_to_none=True)
        tally.add(grad_norm=float(norm), optimizer_steps=1)
        tally.stepped = True

    def _check_packing(self, batch: MicroBatch) -> None:
        """Once, before the first row that holds two sequences: does this architecture keep them apart?"""
        if batch.mask_R1WW is None and not self._packing_checked and batch.num_sequences > len(batch.token_ids_RW):
            check_packing(self._scorer, _PACKING_TOLERANCE.get(self.dtype, 0.1))
            self._packing_checked = True

    def _snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        weights = {name: parameter.detach().clone() for name, parameter in self.optimized().items()}
        return weights, copy.deepcopy(self.optimizer.state_dict())

    def _restore(self, weights: dict[str, Tensor], optimizer_state: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, parameter in self.optimized().items():
                parameter.copy_(weights[name])
        if self.master is not None:
            self.master.round_into_model()
        self._weights_moved()
        self.optimizer.load_state_dict(optimizer_state)
