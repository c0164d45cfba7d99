"""The objective of a step: the loss of each action token, its aggregation, and sums for a report.

::

    loss of a token = keep x weight x policy loss(p_now / p_old, advantage) + kl_coef x KL estimate - entropy_coef x entropy

``keep`` is 0 where a mask leaves a token out of the policy loss (``reject``, ``reject_args``,
``m2po_threshold``); it still counts in the denominator and in its sequence's mean ratio. With a
teacher the policy loss is multiplied by ``distil.reward_coef`` and the divergence is added. A late
correction (`Sample.counted` False) has the policy loss alone. ``old_logp`` defines p_old:

=============  ==========================================  =======================================================
old_logp       p_old                                       weight (where ``correction`` is not none)
=============  ==========================================  =======================================================
``behaviour``  the engine's, as recorded                   1
``proximal``   the trainer's at the start of the step      p_old / p_engine: mismatch and staleness (decoupled PPO)
``exact``      the trainer's where the token is of the     p_old / p_engine there: mismatch alone; 1 for stale
               weights being trained, else the engine's    tokens, whose ratio holds everything (two factors)
``version``    the trainer's under the weights that        p_old / p_engine: mismatch alone, for stale tokens too
               sampled the token                           (1 where those weights are gone)
``ewma``       under a moving average of the weights       p_old / p_engine: mismatch and staleness
=============  ==========================================  =======================================================

Shape legend: N action tokens of a micro-batch, K columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from libra.named_parts import is_named
from libra.train import losses
from libra.train.corrections import (
    binary_kl_mask,
    importance_weights,
    off_policy_sequence_mask,
    rejection_mask,
    two_factors,
)
from libra.train.losses import KL_BOUND, Aggregation, Sequences, kl_estimate, sampled_divergence, top_k_divergence
from libra.train.own_parts import own_losses
from libra.train.packing import MicroBatch
from libra.train.replica_settings import TrainSettings
from libra.train.samples import TaughtTokens

_TOKEN_LOSSES: dict[str, Callable[..., Tensor]] = {
    "ppo": losses.ppo_loss,
    "cispo": losses.cispo_loss,
    "sapo": losses.sapo_loss,
    "dppo": losses.dppo_loss,
    "reinforce": lambda logp_N, _old_logp_N, advantage_N: losses.reinforce_loss(logp_N, advantage_N),
}
_SEQUENCE_LOSSES: dict[str, Callable[..., Tensor]] = {"gspo": losses.gspo_loss, "gmpo": losses.gmpo_loss}


@dataclass(frozen=True, slots=True)
class Objective:
    """The loss that ``settings`` describe."""

    settings: TrainSettings

    @property
    def aggregation(self) -> Aggregation:
        return Aggregation(self.settings.aggregation, horizon_tokens=self.settings.loss_divisor)

    @property
    def needs_every_sequence(self) -> bool:
        """Whether a sequence without advantage has a gradient."""
        settings = self.settings
        if is_named(settings.loss) or settings.distil is not None:  # may have a term without the advantage
            return True
        in_loss = settings.kl_coef > 0 and not settings.kl_args["in_reward"]
        return in_loss or settings.entropy_coef > 0 or settings.loss_args.get("log_ratio_coef", 0.0) > 0

    def token_losses(
        self,
        batch: MicroBatch,
        logp_N: Tensor,
        *,
        entropy_N: Tensor,
        reference_logp_N: Tensor | None = None,
        columns_NK: Tensor | None = None,
        rest_N: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of each token (N,), with gradient, and sums for a report (scalars). ``columns_NK``
        and ``rest_N`` are log-probabilities, with gradient, of ``batch.taught.columns_NK`` and of
        all other tokens. Without ``batch.proximal_logp_N``, ``logp_N`` replaces it."""
        settings = self.settings
        sequences = batch.sequences
        old_N, weight_N, exact_N = self._old(batch, logp_N.detach(), sequences)
        keep_N = self._kept(batch, logp_N.detach(), old_N, sequences).to(weight_N.dtype)
        loss_N = keep_N * self.policy_losses(logp_N, old_N, batch.advantage_N, sequences, weight_N)
        sums = self._sums(logp_N.detach(), old_N, batch.advantage_N, sequences)
        if (distil := settings.distil) is not None:
            loss_N = distil.reward_coef * loss_N if distil.reward_coef else torch.zeros_like(logp_N)
            if batch.taught is not None and columns_NK is not None:
                taught_N, of_teacher = self._taught(batch.taught, columns_NK, rest_N)
                loss_N, sums = loss_N + _once(taught_N, batch), sums | of_teacher
        if reference_logp_N is not None:
            kl_N = kl_estimate(logp_N, reference_logp_N, settings.kl_args["estimator"], bound=KL_BOUND)
            loss_N = loss_N + settings.kl_coef * _once(kl_N, batch)
            sums["kl_reference"] = kl_N.detach().sum()
        if settings.entropy_coef:
            loss_N = loss_N - settings.entropy_coef * _once(entropy_N, batch)
        sums |= {
            "weight_sum": (keep_N * weight_N).sum(),
            "weight_square_sum": (keep_N * weight_N).double().square().sum(),
            "rejected": len(keep_N) - keep_N.sum(),
            "exact_old": exact_N.sum(),
        }
        return loss_N, sums | self._corrected(batch, old_N, weight_N)

    def _taught(
        self, taught: TaughtTokens, columns_NK: Tensor, rest_N: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert self.settings.distil is not None
        known_N, sums = taught.known_N, {"taught": taught.known_N.sum()}
        gap_NK = (taught.logp_NK - columns_NK.detach()).abs()
        if taught.rest_N is not None and rest_N is not None:
            gap_N = (taught.logp_NK.softmax(-1) * gap_NK).sum(-1)
            direction = self.settings.distil.divergence
            found_N = top_k_divergence(columns_NK, rest_N, taught.logp_NK, taught.rest_N, direction)
            teacher_N, student_N = (1 - each.detach().exp() for each in (taught.rest_N, rest_N))
            sums["top_k_teacher"] = (teacher_N * known_N).sum()
            sums["top_k_student"] = (student_N * known_N).sum()
        else:
            gap_N = gap_NK.mean(-1)
            found_N = sampled_divergence(columns_NK, taught.logp_NK, taught.old_NK)
        # A difference that rounding explains has no gradient: AdamW would scale its noise up to a whole step.
        differs_N = known_N & ~(gap_N <= self.settings.distil.rounding_nats)
        found_N = torch.where(differs_N, found_N, torch.zeros_like(found_N))
        sums["kl_teacher"] = found_N.detach().sum()
        return found_N, sums

    def policy_losses(
        self, logp_N: Tensor, old_N: Tensor, advantage_N: Tensor, sequences: Sequences, weight_N: Tensor
    ) -> Tensor:
        """The weighted policy loss of each token before masks (N,)."""
        settings = self.settings
        tokens, args = (logp_N, old_N, advantage_N), settings.loss_args
        if settings.loss == "vespo":
            inside_N = None if settings.correction == "none" else weight_N
            return losses.vespo_loss(*tokens, sequences, weight_N=inside_N, **args)
        if settings.loss in _SEQUENCE_LOSSES:
            return weight_N * _SEQUENCE_LOSSES[settings.loss](*tokens, sequences, **args)
        if settings.loss in _TOKEN_LOSSES:
            return weight_N * _TOKEN_LOSSES[settings.loss](*tokens, **args)
        return weight_N * own_losses(settings, *tokens, sequences)

    @torch.no_grad()
    def _old(self, batch: MicroBatch, logp_N: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor, Tensor]:
        settings, engine_N = self.settings, batch.behaviour_logp_N
        if settings.old_logp == "behaviour":
            return engine_N, torch.ones_like(engine_N), torch.zeros_like(batch.current_N)
        proximal_N = logp_N if batch.proximal_logp_N is None else batch.proximal_logp_N
        known_N = torch.ones_like(batch.current_N)  # where the trainer's is p_old
        exact_N = batch.current_N
        if settings.old_logp == "exact":
            known_N = exact_N
        elif settings.old_logp == "version":
            known_N = exact_N = batch.current_N | ~proximal_N.isnan() if batch.proximal_logp_N is not None else exact_N
            proximal_N = torch.where(proximal_N.isnan(), logp_N, proximal_N)
        elif settings.old_logp == "ewma":
            exact_N = torch.zeros_like(exact_N)
        old_N, mismatch_N = two_factors(proximal_N, engine_N, known_N)
        if settings.correction == "none":
            return old_N, torch.ones_like(engine_N), exact_N
        weight_N = importance_weights(mismatch_N, sequences, action=settings.correction, **settings.correction_args)
        return old_N, weight_N, exact_N

    @torch.no_grad()
    def _kept(self, batch: MicroBatch, logp_N: Tensor, old_N: Tensor, sequences: Sequences) -> Tensor:
        settings, engine_N = self.settings, batch.behaviour_logp_N
        keep_N = sequences.mask_N if batch.kept_N is None else sequences.mask_N & batch.kept_N
        trainer_N = logp_N if settings.old_logp == "behaviour" else old_N
        if settings.reject == "binary-kl":
            keep_N = keep_N & binary_kl_mask(trainer_N, engine_N, sequences, high=settings.reject_args["high"])
        elif settings.reject != "none":
            ratio_N = trainer_N - engine_N
            bounds = {key: settings.reject_args[key] for key in ("level", "reduce", "low", "high")}
            keep_N = keep_N & rejection_mask(ratio_N, sequences, metric=settings.reject, **bounds)
        if (threshold := settings.reject_args["off_policy"]) is not None:
            tokens = (logp_N, engine_N, batch.advantage_N, sequences)
            keep_N = keep_N & off_policy_sequence_mask(*tokens, threshold=threshold)
        return keep_N

    @torch.no_grad()
    def _corrected(self, batch: MicroBatch, old_N: Tensor, weight_N: Tensor) -> dict[str, Tensor]:
        if self.settings.correction == "none":
            return {}
        free_N = importance_weights(
            old_N - batch.behaviour_logp_N, batch.sequences, level=self.settings.correction_args["level"], action="none"
        )
        return {"corrected": (free_N != weight_N).sum()}

    @torch.no_grad()
    def _sums(self, logp_N: Tensor, old_N: Tensor, advantage_N: Tensor, sequences: Sequences) -> dict[str, Tensor]:
        name, args = self.settings.loss, self.settings.loss_args
        clips = name in ("ppo", "gspo", "cispo", "gmpo")
        low, high = (args["clip_low"], args["clip_high"]) if clips else (1.0, float("inf"))
        seen_N = logp_N
        if name == "gspo":
            seen_N = old_N + losses.sequence_ratio(logp_N, old_N, sequences).log()
        elif name == "gmpo":  # clips the logarithm
            low, high = 1 - float(torch.tensor(-low).exp()), float(torch.tensor(high).exp()) - 1
        sums = losses.clip_sums(seen_N, old_N, advantage_N, clip_low=low, clip_high=high)
        if name == "dppo":
            bounds = {"low": args["clip_low"], "high": args["clip_high"], "divergence": args["divergence"]}
            out_N = ~losses.dppo_keep(logp_N, old_N, advantage_N, **bounds)
            sums |= {
                f"clipped_{side}": (out_N & (advantage_N.sign() == sign)).sum()
                for side, sign in (("low", -1), ("high", 1))
            }
        return sums


def _once(term_N: Tensor, batch: MicroBatch) -> Tensor:
    return term_N if batch.counted_N is None else term_N * batch.counted_N
