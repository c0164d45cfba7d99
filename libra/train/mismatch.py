"""The mismatch of one step, rollout against trainer on the same tokens under the same weights, and its alarm.

With g = log p(trainer) - log p(rollout) of a token and w = e^g: largest and mean |g|; k3 = mean of w - 1 - g (never negative,
an estimate of KL(rollout | trainer)); and the effective sample size (sum w)^2 / (n sum w^2), 1 if the two agree. Mean |g| and k3
are kept per engine and per length class too (`libra.train.mismatch_parts`): one engine of many that goes wrong hardly moves the
mean.

Invariants
1. Only tokens whose weights and KV cache are both of the version being trained count: staleness is not mismatch. With
   ``trainer.old_logp=version`` those of one older version count too, against the trainer under that version. Tokens that an
   engine generated with KV kept from older weights are left out.
2. Only tokens scored before the first optimizer step of a batch count, so that the trainer's weights are of that version
   too. Without any such token nothing was measured: the figures are None, not 0.
3. Exactly 0 means bit for bit equal: with ``rollout.exact_logprobs`` both sides run `libra.scoring.score_alone` on the same
   prefixes, one at a time.

Shape legend: N tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from libra.config.trainer import FEWEST_MISMATCH_TOKENS, ROUNDING_NATS
from libra.errors import MismatchAlarm
from libra.scoring import score_alone
from libra.train.mismatch_parts import add_actions, parts_of, worst_part
from libra.train.replica_settings import TrainSettings
from libra.train.samples import Sample
from libra.train.sequence_packing import MicroBatch
from libra.train.step_report import Tally


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


def observe_batch(tally: Tally, batch: MicroBatch, logp_N: Tensor) -> None:
    """The current tokens of a micro-batch, in all and by engine and length class; ``logp_N``: the trainer's of all its actions."""
    current_N = batch.current_N
    observe(tally, logp_N[current_N], batch.behaviour_logp_N[current_N])
    gaps, first = (logp_N - batch.behaviour_logp_N).double().cpu().numpy(), 0
    for sample in batch.samples:
        actions = np.flatnonzero(sample.current)
        add_actions(tally, sample, actions, gaps[first + actions])
        first += sample.num_actions


def observe_alone(tally: Tally, model: Any, samples: Sequence[Sample], temperature: float) -> None:
    """The same for whole samples: each run of tokens is scored as the engine scored it, alone and at that length."""
    for sample in samples:
        for begin, end in stretches(sample):
            start = max((each for each in sample.starts if each <= sample.action_at[begin]), default=0)
            ids = np.append(sample.token_ids, sample.target[-1])[start : sample.action_at[end - 1] + 2]
            logp = score_alone(model, ids, int(sample.action_at[begin]) + 1 - start, temperature)
            behaviour = sample.behaviour_logp[begin:end]
            observe(tally, torch.from_numpy(logp), torch.from_numpy(behaviour))
            add_actions(tally, sample, np.arange(begin, end), (logp - behaviour).astype(np.float64))


def observe_versions(tally: Tally, samples: Sequence[Sample]) -> None:
    """The stale tokens that were scored under the weights of their own version."""
    for sample in samples:
        if sample.proximal_logp is None:
            continue
        actions = np.flatnonzero(~sample.current & (sample.version >= 0) & np.isfinite(sample.proximal_logp))
        logp, behaviour = sample.proximal_logp[actions].astype(np.float64), sample.behaviour_logp[actions]
        observe(tally, torch.from_numpy(logp), torch.from_numpy(behaviour))
        add_actions(tally, sample, actions, logp - behaviour)


def stretches(sample: Sample) -> Iterator[tuple[int, int]]:
    """Runs of actions of one generation by the version being trained, as (first, last + 1) among the sample's actions."""
    cuts = np.flatnonzero(
        (np.diff(sample.action_at) != 1) | np.diff(sample.current) | np.isin(sample.action_at[1:], sample.turn_at)
    )
    for begin, end in zip([0, *cuts + 1], [*cuts + 1, sample.num_actions], strict=True):
        if sample.current[begin]:
            yield int(begin), int(end)


def numbers_of(tally: Tally) -> dict[str, Any]:
    """The fields of the report of a step that `alarm_text` reads, of a step that is not taken yet."""
    return tally.mismatch() | {
        "mismatch_tokens": int(tally.sums.get("mismatch_tokens", 0)),
        "mismatch_parts": parts_of(tally),
    }


def alarm_text(
    numbers: Mapping[str, Any],
    step: int,
    *,
    mean_nats: float | None = None,
    k3_nats: float | None = None,
    rounding_nats: float | None = None,
) -> str | None:
    """The alarm of a step's mismatch, None if it is within both thresholds, in all and in each part of enough tokens.

    ``numbers`` has the fields ``mismatch_...`` of a step's report; ``mean_nats`` is ``trainer.mismatch_alarm``, ``k3_nats``
    ``trainer.mismatch_k3_alarm``; None: no threshold. ``rounding_nats`` takes the place of ``mean_nats``; in narrow types, where
    single tokens are far off, not for fewer than `FEWEST_MISMATCH_TOKENS`.
    """
    if not numbers["mismatch_tokens"]:
        return None
    if mean_nats is None and rounding_nats is not None:
        narrow = rounding_nats > ROUNDING_NATS["float32"]
        mean_nats = None if narrow and numbers["mismatch_tokens"] < FEWEST_MISMATCH_TOKENS else rounding_nats
    checks = (
        ("mismatch_alarm", "|log p(rollout) - log p(trainer)|", "mean_abs", mean_nats),
        ("mismatch_k3_alarm", "KL(rollout | trainer) by k3", "k3", k3_nats),
    )
    for name, what, figure, threshold in checks:
        where, value, tokens = "", float(numbers[f"mismatch_{figure}"]), int(numbers["mismatch_tokens"])
        if threshold is None:
            continue
        if value <= threshold:
            part = worst_part(numbers.get("mismatch_parts", {}), figure)
            if part is None or part[1] <= threshold:
                continue
            where, value, tokens = f" of {part[0]}", part[1], part[2]
        return (
            f"trainer.{name}: step {step}: {what}{where} is {value:.3g} nats on average (largest "
            f"{float(numbers['mismatch_max_abs']):.3g}, {tokens} tokens), above {threshold:g}: engine and "
            "trainer do not compute the same model"
        )
    return None


def raise_alarm(tally: Tally, settings: TrainSettings, step: int) -> None:
    """Before the first optimizer step: MismatchAlarm if ``trainer.mismatch_action`` is "stop" and a threshold is passed."""
    if settings.mismatch_action != "stop":
        return
    text = alarm_text(
        numbers_of(tally),
        step,
        mean_nats=settings.mismatch_alarm,
        k3_nats=settings.mismatch_k3_alarm,
        rounding_nats=settings.rounding_nats,
    )
    if text is not None:
        name = text.split(":", 1)[0]
        raise MismatchAlarm(
            f"{text}. The step was not taken, weights stay those of version {step}; libra diagnose RUN names the engines. To "
            f"continue: libra resume RUN with {name} above it, or trainer.mismatch_action=warn"
        )
