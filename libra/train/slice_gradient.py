"""The undivided gradient of a slice of a minibatch, by passes of one replica.

If the model is sharded, passes are collectives: every replica runs equally many passes, if
necessary over empty micro-batches.

Shape legend: N action tokens of a micro-batch, S samples, T actions of the longest sample, A
actions of one sample, P places, L layers, K experts of a token.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from libra.errors import TrainError
from libra.experts import Routers
from libra.train import mismatch
from libra.train.advantages import reinforce_pp, rloo
from libra.train.corrections import m2po_mask
from libra.train.logprobs import Scorer, check_packing
from libra.train.losses import KL_BOUND, KLCoefficient, Sequences, kl_estimate
from libra.train.objective import Objective
from libra.train.packing import MicroBatch, can_share, pack, split
from libra.train.replica_group import TrainGroup, is_sharded
from libra.train.replica_settings import TrainSettings
from libra.train.samples import Sample
from libra.train.step_report import Tally

_PACKING_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # nats; 0.1 for narrower dtypes


class SliceGradient:
    """Forward and backward passes of one replica. ``model`` is on ``device`` and not sharded yet;
    ``reference`` is the frozen model of the KL term; ``kl`` is the coefficient of the penalty of
    ``trainer.kl_args.in_reward``."""

    def __init__(
        self, model: Any, settings: TrainSettings, group: TrainGroup, device: torch.device, reference: Any | None
    ) -> None:
        self.settings, self.group, self.device = settings, group, device
        self.objective = Objective(settings)
        self.kl = KLCoefficient(settings.kl_coef)
        options = settings.temperature, settings.logit_chunk_tokens
        self.scorer = Scorer(model, *options)
        self._reference = None if reference is None else Scorer(reference, *options)
        self.dtype: torch.dtype = next(model.parameters()).dtype
        self._logp_dtype = torch.promote_types(self.dtype, torch.float32)
        self._share_prompts = settings.share_prompts and can_share(model)
        self._collective = is_sharded(settings, group)
        self.routers = Routers(model) if settings.routes == "replay" else None
        self._packing_checked = settings.max_row_tokens == 1
        if self._collective and not self._packing_checked:
            self._check_packing()  # later it would be a collective that only some replicas enter

    def accumulate(self, samples: Sequence[Sample], step: int, tally: Tally) -> float:
        """Add the slice's sum of weight x gradient; returns its sum of weights. TrainError if the
        loss is not finite."""
        began = time.perf_counter()
        batches = self._pack(self.useful(samples))
        tally.add(slice_pack_s=time.perf_counter() - began)
        fault: TrainError | None = None
        with self._own_routes_after():
            for batch, counts in self._passes(batches):
                part = tally if counts else Tally()
                loss = self.micro_batch_loss(batch, part)
                if not np.isfinite(value := part.sums["loss_sum"]):  # of all so far
                    fault = TrainError(f"train step {step}: the loss is {value}; weights remain at version {step}")
                    if not self._collective:  # otherwise the other replicas would wait for this one in their next pass
                        raise fault
                (loss if counts else loss * 0).backward()  # type: ignore[no-untyped-call]
        if fault is not None:
            raise fault
        return self.weight_of(samples)

    def useful(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with a gradient; the others count only in the sum of weights."""
        every = self.objective.needs_every_sequence
        return [sample for sample in samples if sample.has_advantage or (every and sample.counted)]

    def weight_of(self, samples: Sequence[Sample]) -> float:
        """Sum of the weights of ``samples`` under the aggregation mode."""
        counted = [sample for sample in samples if sample.counted]
        return self.objective.aggregation.weight_sum(
            num_tokens=sum(sample.num_actions for sample in counted), num_sequences=len(counted)
        )

    def micro_batch_loss(self, batch: MicroBatch, tally: Tally) -> Tensor:
        """Sum of weight x loss of ``batch``, with gradient; updates ``tally``."""
        if self.routers is not None:
            self.routers.replay(batch.routes_PLK)
        taught = batch.taught if self.settings.distil is not None else None
        logp_NK, entropy_N, rest_N = self.scorer.columns(
            *batch.inputs,
            columns_NK=None if taught is None else taught.columns_NK,
            rest=taught is not None and taught.rest_N is not None,
            entropy_gradient=self.settings.entropy_coef > 0,
        )
        logp_N = logp_NK[:, 0]
        reference_logp_N = None
        if self._reference is not None and not self.settings.kl_args["in_reward"]:
            with torch.no_grad():
                reference_logp_N, _ = self._reference.logp(*batch.inputs)
        loss_N, sums = self.objective.token_losses(
            batch,
            logp_N,
            entropy_N=entropy_N,
            reference_logp_N=reference_logp_N,
            columns_NK=None if taught is None else logp_NK[:, 1:],
            rest_N=rest_N,
        )
        loss = self.objective.aggregation.weighted_sum(loss_N, batch.sequences)
        sums |= {"entropy": entropy_N.detach().sum(), "loss_sum": loss.detach()}
        # One transfer: each would wait for the device.
        numbers = torch.stack([value.double() for value in sums.values()]).tolist()
        found = dict(zip(sums, numbers, strict=True))
        tally.at_least(ratio_max=found.pop("ratio_max"))
        tally.add(
            **found,
            scored=len(logp_N),
            places=batch.num_places,
            forwarded_tokens=batch.num_tokens,
            forwarded_sequences=batch.num_sequences,
            rows=len(batch.token_ids_RW),
            micro_batches=1,
        )
        if self.routers is not None:
            replayed, equal = self.routers.compared()
            layer_places = batch.num_tokens * self.routers.shape[0]
            tally.add(routed_places=replayed, equal_places=equal, layer_places=layer_places)
            if batch.routes_PLK is not None:
                tally.add(expert_ratio=load_ratio(batch.routes_PLK, self.routers.num_experts), expert_batches=1)
        if not tally.stepped and not self.settings.exact_logprobs:
            mismatch.observe_batch(tally, batch, logp_N.detach())
        return loss

    @contextmanager
    def _own_routes_after(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self.routers is not None:
                self.routers.replay(None)

    def with_proximal(self, samples: Sequence[Sample]) -> list[Sample]:
        """``samples`` with their log-probabilities under the present weights."""
        return [replace(sample, proximal_logp=one) for sample, one in zip(samples, self.scored(samples), strict=True)]

    def with_token_advantages(self, samples: Sequence[Sample], tally: Tally) -> list[Sample]:
        """``samples``, a batch or a wave of whole groups, with an advantage for each token. A
        token's reward is ``-kl_coef x KL estimate`` (``trainer.kl_args.in_reward``); the last token
        also has the reward of its trajectory."""
        settings = self.settings
        if not samples:
            return []
        lengths = [sample.num_actions for sample in samples]
        mask_ST = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        reward_ST = torch.zeros(mask_ST.shape, dtype=torch.float64)
        if settings.kl_args["in_reward"] and settings.kl_coef > 0:
            for row, (sample, logp) in enumerate(zip(samples, self.scored(samples, by_reference=True), strict=True)):
                ours_A, theirs_A = (torch.from_numpy(each).double() for each in (sample.behaviour_logp, logp))
                kl_A = kl_estimate(ours_A, theirs_A, settings.kl_args["estimator"], bound=KL_BOUND)
                reward_ST[row, : len(kl_A)] = -self.kl.value * kl_A
                total, count = self.kl.seen
                self.kl.seen = (total + float(kl_A.mean()), count + 1)
                tally.add(kl_reward=float(kl_A.sum()), kl_reward_tokens=len(kl_A))
        reward_ST[torch.arange(len(samples)), torch.tensor(lengths) - 1] += torch.tensor(
            [sample.reward for sample in samples], dtype=torch.float64
        )
        if settings.advantage == "reinforce_pp":
            advantage_ST = reinforce_pp(reward_ST, mask_ST, gamma=settings.gamma)[0]
        else:
            numbers = {group: number for number, group in enumerate(dict.fromkeys(sample.group for sample in samples))}
            group_S = torch.tensor([numbers[sample.group] for sample in samples])
            advantage_S = rloo(reward_ST.sum(-1), group_S, singleton="reward" if settings.group_size == 1 else "zero")
            advantage_ST = advantage_S[:, None].expand(reward_ST.shape).clone()
        return [
            replace(sample, token_advantage=row[:length].numpy())
            for sample, row, length in zip(samples, advantage_ST, lengths, strict=True)
        ]

    def with_kept(self, samples: Sequence[Sample], *, fresh: bool) -> list[Sample]:
        """``samples``, a whole minibatch, with the tokens that M2PO keeps; the same on every
        replica. ``fresh`` is whether weights have changed since `with_proximal`, so that samples
        are scored again."""
        threshold = self.settings.reject_args["m2po"]
        if threshold is None or not samples:
            return list(samples)
        known = [sample.proximal_logp for sample in samples if sample.proximal_logp is not None]
        present = self.settings.old_logp in ("proximal", "exact") and not fresh and len(known) == len(samples)
        logp = known if present else self.scored(samples)
        lengths = torch.tensor([sample.num_actions for sample in samples])
        sequence_N = torch.repeat_interleave(torch.arange(len(samples)), lengths)
        engine_N = np.concatenate([sample.behaviour_logp for sample in samples])
        keep_N = m2po_mask(
            torch.from_numpy(np.concatenate(logp).astype(np.float64) - engine_N),
            Sequences(sequence_N, len(samples)),
            threshold=threshold,
            advantage_N=torch.from_numpy(np.concatenate([sample.advantages for sample in samples])),
        )
        parts = keep_N.split(lengths.tolist())
        return [replace(sample, kept=part.numpy()) for sample, part in zip(samples, parts, strict=True)]

    @torch.no_grad()
    def scored(self, samples: Sequence[Sample], *, by_reference: bool = False) -> list[NDArray[np.floating[Any]]]:
        """Log-probabilities of each sample's actions (A,); each sample is scored on one replica."""
        scorer = self._reference if by_reference else self.scorer
        assert scorer is not None, "there is a reference where trainer.kl_coef is above 0"
        numbered = {id(sample): index for index, sample in enumerate(samples)}
        flat = [torch.zeros(sample.num_actions, dtype=self._logp_dtype) for sample in samples]
        with self._own_routes_after():
            for batch, counts in self._passes(self._pack(split(samples, self.group.size)[self.group.rank])):
                if self.routers is not None and not by_reference:
                    self.routers.replay(batch.routes_PLK)
                logp_N, _ = scorer.logp(*batch.inputs)
                if counts:
                    parts = logp_N.cpu().split([sample.num_actions for sample in batch.samples])
                    for sample, part in zip(batch.samples, parts, strict=True):
                        flat[numbered[id(sample)]] = part
        joined_N = torch.cat([*flat, torch.zeros(0, dtype=self._logp_dtype)]).to(self.device)
        self.group.sum_([joined_N])
        return [part.numpy() for part in joined_N.cpu().split([sample.num_actions for sample in samples])]

    def _passes(self, batches: list[MicroBatch]) -> list[tuple[MicroBatch, bool]]:
        passes = [(batch, True) for batch in batches]
        if self._collective:
            most = max(self.group.gather(len(passes)))
            token_ids, one = np.zeros(2, np.int64), np.array([0])
            empty = Sample(token_ids, one, one, np.zeros(1, np.float32), np.zeros(1, np.bool_), 0.0)
            passes += [(self._pack([empty])[0], False) for _ in range(most - len(passes))]
        if not self._packing_checked and any(batch.packed for batch, _ in passes):
            self._check_packing()
        return passes

    def _check_packing(self) -> None:
        if self.routers is not None:
            self.routers.replay(None)
        check_packing(self.scorer, _PACKING_TOLERANCE.get(self.dtype, 0.1))
        self._packing_checked = True

    def _pack(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        batches = pack(
            samples,
            max_row_tokens=self.settings.max_row_tokens,
            micro_batch_tokens=self.settings.micro_batch_tokens,
            logp_dtype=self._logp_dtype,
            share_prompts=self._share_prompts,
        )
        return [batch.to(self.device) for batch in batches]


def load_ratio(routes_PLK: Tensor, num_experts: int) -> float:
    """Tokens of the busiest expert over the mean, averaged over layers; 1 without experts."""
    layers = routes_PLK.shape[1]
    flat_PLK = routes_PLK.long() + torch.arange(layers, device=routes_PLK.device)[None, :, None] * num_experts
    loads = torch.bincount(flat_PLK[routes_PLK >= 0], minlength=layers * num_experts).view(layers, num_experts).double()
    loads = loads[loads.sum(1) > 0]
    return float((loads.amax(1) / loads.mean(1)).mean()) if len(loads) else 1.0
