"""The mismatch of one step, engine against trainer on the same tokens and weights, and its alarm.

With g = log p(trainer) - log p(engine) of a token and w = e^g, the figures are mean and largest
|g|, k3 (mean of w - 1 - g, an estimate of KL(engine | trainer)), and the effective sample size (sum
w)^2 / (n sum w^2). A *part* is all tokens of one engine, or of one length class; a *cell* is all
tokens of one engine and one length class.

1. Only tokens whose weights and KV cache are of the version being trained count. With
   ``trainer.old_logp=version``, tokens of one older version count too, compared with the trainer
   under that version.
2. Only tokens scored before the first optimizer step of a batch count. Without such tokens, the
   figures are None.
3. Exactly 0 means bit for bit equal: with ``rollout.exact_logprobs`` engine and trainer run
   `libra.heads.score_alone` on the same prefixes, one at a time.
4. Parts of fewer than `FEWEST_MISMATCH_TOKENS` tokens raise no alarm. The largest gaps omit the
   slices of hybrids.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from libra.config.trainer import FEWEST_MISMATCH_TOKENS, ROUNDING_NATS
from libra.errors import MismatchAlarm
from libra.heads import score_alone
from libra.train.packing import MicroBatch
from libra.train.replica_settings import TrainSettings
from libra.train.samples import Sample
from libra.train.step_report import Tally

NUM_WORST: Final = 16
"""Tokens with the largest gaps that a step records."""
UNKNOWN: Final = "unknown"
"""Engine of a token whose trajectory does not name the engine."""
_CELL: Final = "mismatch/"
Part = dict[str, float]
"""tokens, mean_abs (nats), k3 (nats), max_abs (nats)."""


def length_class(num_tokens: int) -> int:
    """Half an octave of trajectory lengths: class c starts at 2^(c/2) - 1 tokens."""
    return math.floor(2 * math.log2(num_tokens + 1))


def observe(tally: Tally, sample: Sample, actions: NDArray[np.integer[Any]], gaps: NDArray[np.float64]) -> None:
    """Add actions of a sample (indices) with their log p(trainer) - log p(engine)."""
    if not len(actions):
        return
    weights = np.exp(gaps)
    tally.add(
        mismatch_tokens=len(gaps),
        mismatch_sum=float(np.abs(gaps).sum()),
        mismatch_k3=float((np.expm1(gaps) - gaps).sum()),
        mismatch_weight=float(weights.sum()),
        mismatch_weight_square=float(np.square(weights).sum()),
    )
    tally.at_least(mismatch=float(np.abs(gaps).max()))
    lengths = length_class(sample.num_tokens + 1)
    turns = np.searchsorted(sample.turn_at, sample.action_at[actions], side="right") - 1
    engines = [sample.engines[turn] if 0 <= turn < len(sample.engines) else UNKNOWN for turn in turns]
    names = sorted(set(engines))
    for engine in names:
        here = gaps if len(names) == 1 else gaps[np.array(engines) == engine]
        cell, sizes = f"{_CELL}{engine}/{lengths}/", np.abs(here)
        sums = {"tokens": len(here), "sum": float(sizes.sum()), "k3": float((np.expm1(here) - here).sum())}
        tally.add(**{f"{cell}{name}": value for name, value in sums.items()})
        tally.at_least(**{f"{cell}max": float(sizes.max())})
    full = len(tally.worst) == NUM_WORST
    floor = abs(tally.worst[-1]["trainer"] - tally.worst[-1]["rollout"]) if full else -1.0
    for index in np.argsort(-np.abs(gaps), kind="stable")[:NUM_WORST]:
        action, gap = int(actions[index]), float(gaps[index])
        if abs(gap) <= floor:
            break
        tally.worst.append(
            {
                "trajectory": sample.name,
                "token": int(sample.action_at[action]) + 1,
                "token_id": int(sample.target[action]),
                "engine": engines[index],
                "rollout": float(sample.behaviour_logp[action]),
                "trainer": float(sample.behaviour_logp[action]) + gap,
            }
        )
    tally.worst = largest(tally.worst)


def largest(tokens: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The `NUM_WORST` tokens with the largest gaps, the largest first."""
    return sorted(tokens, key=lambda token: -abs(token["trainer"] - token["rollout"]))[:NUM_WORST]


def parts_of(tally: Tally) -> dict[str, Part]:
    """Every part of a step by name: ``engine NAME`` or ``length class N``."""
    parts: dict[str, Part] = {}
    for name, count in tally.sums.items():
        if not (name.startswith(_CELL) and name.endswith("/tokens")):
            continue
        cell = name.removesuffix("tokens")
        engine, lengths = cell.removeprefix(_CELL).rstrip("/").rsplit("/", 1)
        for part in (f"engine {engine}", f"length class {lengths}"):
            kept = parts.setdefault(part, {"tokens": 0.0, "mean_abs": 0.0, "k3": 0.0, "max_abs": 0.0})
            kept["tokens"] += count
            kept["mean_abs"] += tally.sums[f"{cell}sum"]
            kept["k3"] += tally.sums[f"{cell}k3"]
            kept["max_abs"] = max(kept["max_abs"], tally.maxima[f"{cell}max"])
    for kept in parts.values():
        kept["mean_abs"] /= kept["tokens"]
        kept["k3"] /= kept["tokens"]
    return dict(sorted(parts.items()))


def worst_part(parts: Mapping[str, Mapping[str, float]], figure: str) -> tuple[str, float, int] | None:
    """Name, figure and tokens of the part with the largest ``figure`` and enough tokens, if any."""
    enough = [
        (name, float(part[figure]), int(part["tokens"]))
        for name, part in parts.items()
        if part["tokens"] >= FEWEST_MISMATCH_TOKENS
    ]
    return max(enough, key=lambda each: (each[1], each[0]), default=None)


def metrics_of(parts: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Metrics of the parts: mean gap and k3 of each engine and length class."""
    labels = {name: name.removeprefix("engine ").replace("length class ", "length_") for name in parts}
    return {f"mismatch_{key}/{labels[name]}": float(parts[name][key]) for name in parts for key in ("mean_abs", "k3")}


def observe_batch(tally: Tally, batch: MicroBatch, logp_N: Tensor) -> None:
    """Add the current tokens of a micro-batch; ``logp_N`` is the trainer's, for all actions."""
    gaps, first = (logp_N - batch.behaviour_logp_N).double().cpu().numpy(), 0
    for sample in batch.samples:
        actions = np.flatnonzero(sample.current)
        observe(tally, sample, actions, gaps[first + actions])
        first += sample.num_actions


def observe_alone(tally: Tally, model: Any, samples: Sequence[Sample], temperature: float) -> None:
    """Add whole samples, scored as the engine scored them: alone, one generation at a time."""
    for sample in samples:
        for begin, end in stretches(sample):
            start = max((each for each in sample.starts if each <= sample.action_at[begin]), default=0)
            ids = np.append(sample.token_ids, sample.target[-1])[start : sample.action_at[end - 1] + 2]
            logp = score_alone(model, ids, int(sample.action_at[begin]) + 1 - start, temperature)
            gaps = (logp - sample.behaviour_logp[begin:end]).astype(np.float64)
            observe(tally, sample, np.arange(begin, end), gaps)


def observe_versions(tally: Tally, samples: Sequence[Sample]) -> None:
    """Add the stale tokens that were scored under the weights of their own version."""
    for sample in samples:
        if sample.proximal_logp is not None:
            actions = np.flatnonzero(~sample.current & (sample.version >= 0) & np.isfinite(sample.proximal_logp))
            gaps = sample.proximal_logp[actions].astype(np.float64) - sample.behaviour_logp[actions]
            observe(tally, sample, actions, gaps)


def stretches(sample: Sample) -> Iterator[tuple[int, int]]:
    """Runs of actions of one generation by the trained version, as (first, last + 1) action."""
    cuts = np.flatnonzero(
        (np.diff(sample.action_at) != 1) | np.diff(sample.current) | np.isin(sample.action_at[1:], sample.turn_at)
    )
    for begin, end in zip([0, *cuts + 1], [*cuts + 1, sample.num_actions], strict=True):
        if sample.current[begin]:
            yield int(begin), int(end)


def alarm_text(
    numbers: Mapping[str, Any],
    step: int,
    *,
    mean_nats: float | None = None,
    k3_nats: float | None = None,
    rounding_nats: float | None = None,
) -> str | None:
    """The alarm of a step's mismatch, None if the step and each part are within both thresholds.

    ``numbers`` are the report's fields ``mismatch_...``; ``mean_nats`` is
    ``trainer.mismatch_args.mean`` and ``k3_nats`` is ``trainer.mismatch_args.k3``.
    ``rounding_nats`` replaces a missing ``mean_nats``; in narrow dtypes only if the step has at
    least `FEWEST_MISMATCH_TOKENS`.
    """
    if not numbers["mismatch_tokens"]:
        return None
    if mean_nats is None and rounding_nats is not None:
        narrow = rounding_nats > ROUNDING_NATS["float32"]
        mean_nats = None if narrow and numbers["mismatch_tokens"] < FEWEST_MISMATCH_TOKENS else rounding_nats
    checks = (
        ("mismatch_args.mean", "|log p(rollout) - log p(trainer)|", "mean_abs", mean_nats),
        ("mismatch_args.k3", "KL(rollout | trainer) by k3", "k3", k3_nats),
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
    """Raise MismatchAlarm beyond a threshold if ``trainer.mismatch_action`` is ``stop``."""
    if settings.mismatch_action != "stop":
        return
    tokens = int(tally.sums.get("mismatch_tokens", 0))
    text = alarm_text(
        {**tally.mismatch(), "mismatch_tokens": tokens, "mismatch_parts": parts_of(tally)},
        step,
        mean_nats=settings.mismatch_args["mean"],
        k3_nats=settings.mismatch_args["k3"],
        rounding_nats=settings.rounding_nats,
    )
    if text is not None:
        name = text.split(":", 1)[0]
        raise MismatchAlarm(
            f"{text}. The step was not taken, weights remain at version {step}; libra diagnose RUN names the engines. To "
            f"continue: libra resume RUN with {name} above it, or trainer.mismatch_action=warn"
        )
