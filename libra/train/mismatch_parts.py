"""The mismatch of a step by engine and by length class of the trajectory, and the tokens with the largest gaps.

A *cell* is an engine and a length class; sums of cells are added up over micro-batches and replicas. A *part* is an engine, or a
length class: the sum of its cells. Parts of fewer than `FEWEST_MISMATCH_TOKENS` tokens raise no alarm.

Tokens of a slice that a hybrid replica computes count in the cells; the list of largest gaps has those of the core's replicas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from libra.config.trainer import FEWEST_MISMATCH_TOKENS
from libra.train.samples import Sample
from libra.train.step_report import Tally

NUM_WORST: Final = 16
"""Tokens with the largest gaps that a step records."""
UNKNOWN: Final = "unknown"
"""Engine of a token whose trajectory does not have it."""
_CELL: Final = "mismatch/"

Part = dict[str, float]
"""tokens, mean_abs (nats), k3 (nats), max_abs (nats)."""


def length_class(num_tokens: int) -> int:
    """Half an octave of trajectory lengths: class c begins at 2^(c/2) - 1 tokens."""
    return math.floor(2 * math.log2(num_tokens + 1))


def add_actions(tally: Tally, sample: Sample, actions: NDArray[np.integer[Any]], gaps: NDArray[np.float64]) -> None:
    """Add actions of a sample (indices) with their log p(trainer) - log p(rollout) to their cells, and to the largest gaps."""
    if not len(actions):
        return
    lengths = length_class(sample.num_tokens + 1)
    turns = np.searchsorted(sample.turn_at, sample.action_at[actions], side="right") - 1
    engines = [sample.engines[turn] if 0 <= turn < len(sample.engines) else UNKNOWN for turn in turns]
    names = sorted(set(engines))
    numbers = np.array([names.index(engine) for engine in engines]) if len(names) > 1 else np.zeros(len(actions), int)
    for number, engine in enumerate(names):
        here, cell = gaps[numbers == number], f"{_CELL}{engine}/{lengths}/"
        tally.add(
            **{
                f"{cell}tokens": len(here),
                f"{cell}sum": float(np.abs(here).sum()),
                f"{cell}k3": float((np.expm1(here) - here).sum()),
            }
        )
        tally.at_least(**{f"{cell}max": float(np.abs(here).max())})
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
    """The `NUM_WORST` tokens with the largest gaps, the largest first; ties as they came."""
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
    """Name, figure and tokens of the part of enough tokens with the largest ``figure``; None without such a part."""
    enough = [(part[figure], name) for name, part in parts.items() if part["tokens"] >= FEWEST_MISMATCH_TOKENS]
    if not enough:
        return None
    value, name = max(enough)
    return name, float(value), int(parts[name]["tokens"])


def metrics_of(parts: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Metrics of the parts: mean gap and k3 of each engine and each length class."""
    found = {}
    for name, part in parts.items():
        kind, _, which = name.rpartition(" ")
        label = which if kind == "engine" else f"length_{which}"
        found[f"mismatch_mean_abs/{label}"] = float(part["mean_abs"])
        found[f"mismatch_k3/{label}"] = float(part["k3"])
    return found
