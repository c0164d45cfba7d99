"""The mismatch of one step, rollout against trainer on the same tokens under the same weights, and its alarm.

With g = log p(trainer) - log p(rollout) of a token and w = e^g: largest and mean |g|; k3 = mean of w - 1 - g (never negative,
an estimate of KL(rollout | trainer)); and the effective sample size (sum w)^2 / (n sum w^2), 1 if the two agree.

Invariants
1. Only tokens whose weights and KV cache are both of the version being trained count: staleness is not mismatch. Tokens that
   an engine generated with KV kept from older weights are left out.
2. Only tokens scored before the first optimizer step of a batch count, so that the trainer's weights are of that version
   too.
3. Exactly 0 means bit for bit equal: with ``rollout.exact_logprobs`` both sides run `libra.scoring.score_alone` on the same
   prefixes, one at a time.

Shape legend: N tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from libra.errors import MismatchAlarm
from libra.scoring import score_alone
from libra.train.samples import Sample
from libra.train.step_report import Tally

logger = logging.getLogger(__name__)


def observe(tally: Tally, logp_N: Tensor, behaviour_logp_N: Tensor) -> None:
    """Add tokens to the mismatch of a step: the trainer's log-probabilities and the engine's, in nats."""
    if not len(logp_N):
        return
    gap_N = (logp_N - behaviour_logp_N).double()
    weight_N = gap_N.exp()
    tally.add(
        mismatch_tokens=len(gap_N),
        mismatch_sum=float(gap_N.abs().sum()),
        mismatch_k3=float((gap_N.expm1() - gap_N).sum()),
        mismatch_weight=float(weight_N.sum()),
        mismatch_weight_square=float(weight_N.square().sum()),
    )
    tally.at_least(mismatch=float(gap_N.abs().max()))


def observe_alone(tally: Tally, model: Any, samples: Sequence[Sample], temperature: float) -> None:
    """The same for whole samples: each run of tokens is scored as the engine scored it, alone and at that length."""
    for sample in samples:
        for begin, end in stretches(sample):
            ids = np.append(sample.token_ids, sample.target[-1])[: sample.action_at[end - 1] + 2]
            logp = score_alone(model, ids, int(sample.action_at[begin]) + 1, temperature)
            observe(tally, torch.from_numpy(logp), torch.from_numpy(sample.behaviour_logp[begin:end]))


def stretches(sample: Sample) -> Iterator[tuple[int, int]]:
    """Runs of actions of one generation by the version being trained, as (first, last + 1) among the sample's actions."""
    cuts = np.flatnonzero(
        (np.diff(sample.action_at) != 1) | np.diff(sample.current) | np.isin(sample.action_at[1:], sample.turn_at)
    )
    for begin, end in zip([0, *cuts + 1], [*cuts + 1, sample.num_actions], strict=True):
        if sample.current[begin]:
            yield int(begin), int(end)


def alarm_text(
    mean_nats: float, max_nats: float, num_tokens: int, threshold_nats: float | None, step: int
) -> str | None:
    """The alarm of a step's mismatch, None if it is within the threshold."""
    if threshold_nats is None or mean_nats <= threshold_nats:
        return None
    return (
        f"trainer.mismatch_alarm: step {step}: |log p(rollout) - log p(trainer)| is {mean_nats:.3g} nats on average (largest "
        f"{max_nats:.3g}, {num_tokens} tokens of version {step}), above {threshold_nats:g}: engine and trainer do not compute the "
        "same model"
    )


def raise_alarm(tally: Tally, threshold_nats: float | None, action: str, step: int) -> None:
    """Before the first optimizer step: MismatchAlarm if ``action`` is "stop" and the threshold is passed."""
    count = int(tally.sums.get("mismatch_tokens", 0))
    text = alarm_text(
        tally.mean("mismatch_sum", "mismatch_tokens"), tally.maxima.get("mismatch", 0.0), count, threshold_nats, step
    )
    if text is None:
        return
    if action == "stop":
        raise MismatchAlarm(
            f"{text}. The step was not taken, weights stay those of version {step}. To continue: libra resume RUN with "
            f"trainer.mismatch_alarm above it, or trainer.mismatch_action=warn"
        )
    logger.warning("%s", text)
