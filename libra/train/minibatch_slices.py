"""Slices of a minibatch: the sequences that each replica computes, and a slice as flat tensors for a hybrid replica.

Invariants
----------
1. Every sample is in exactly one slice, whole; slices are balanced by tokens, and the same on every replica.
2. `from_tensors` returns the slice that `to_tensors` was given, bit for bit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from libra.train.balanced_partition import karmarkar_karp
from libra.train.samples import Sample
from libra.train.taught_tokens import from_flat, to_flat


def split(samples: Sequence[Sample], num_slices: int) -> list[list[Sample]]:
    """``samples`` in ``num_slices`` slices of nearly equal tokens, in their order; some are empty if there are fewer
    samples than slices."""
    filled = min(num_slices, len(samples))
    parts = karmarkar_karp([sample.num_tokens for sample in samples], filled) if filled else []
    parts += [[] for _ in range(num_slices - filled)]
    return [[samples[index] for index in sorted(part)] for part in parts]


def to_tensors(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """A slice as flat tensors: tokens and actions of all samples one after the other, and how many of each."""
    counts = [
        (
            s.num_tokens, s.num_actions, s.proximal_logp is not None, s.kept is not None, s.token_advantage is not None, s.counted,
            len(s.starts),
        )
        for s in samples
    ]  # fmt: skip
    tensors = {
        "counts": torch.tensor(counts, dtype=torch.int64).reshape(len(samples), 7),
        "advantage": torch.tensor([s.advantage for s in samples], dtype=torch.float64),
        "token_ids": _joined([s.token_ids for s in samples], np.int64),
        "action_at": _joined([s.action_at for s in samples], np.int64),
        "target": _joined([s.target for s in samples], np.int64),
        "behaviour_logp": _joined([s.behaviour_logp for s in samples], np.float32),
        "current": _joined([s.current for s in samples], np.bool_),
        "origin": _origins(samples),
        "routes": _joined([s.routes.reshape(-1) for s in samples if s.routes is not None], np.int16),
        "starts": _joined([np.array(s.starts, np.int64) for s in samples], np.int64),
    }
    known = [s.proximal_logp for s in samples if s.proximal_logp is not None]
    return tensors | {
        "proximal_logp": _joined(known, known[0].dtype if known else np.float32),
        "token_advantage": _joined([s.token_advantage for s in samples if s.token_advantage is not None], np.float64),
        "kept": _joined([s.kept for s in samples if s.kept is not None], np.bool_),
        **to_flat(samples),
    }


def from_tensors(tensors: Mapping[str, Tensor]) -> list[Sample]:
    """The slice that `to_tensors` made."""
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    samples, tokens, actions, proximal, kept, rewarded, begun = [], 0, 0, 0, 0, 0, 0
    origins, routed = json.loads(arrays["origin"].tobytes()), 0
    taught = from_flat(tensors, arrays["counts"][:, 1].tolist())
    for number, (num_tokens, num_actions, *has, counted, starts) in enumerate(arrays["counts"].tolist()):
        has_proximal, has_kept, has_rewards = has
        here, shape = slice(actions, actions + num_actions), origins[number][3]
        size = 0 if shape is None else math.prod(shape)
        samples.append(
            Sample(
                token_ids=arrays["token_ids"][tokens : tokens + num_tokens],
                action_at=arrays["action_at"][here],
                target=arrays["target"][here],
                behaviour_logp=arrays["behaviour_logp"][here],
                current=arrays["current"][here],
                advantage=float(arrays["advantage"][number]),
                proximal_logp=arrays["proximal_logp"][proximal : proximal + num_actions] if has_proximal else None,
                token_advantage=arrays["token_advantage"][rewarded : rewarded + num_actions] if has_rewards else None,
                kept=arrays["kept"][kept : kept + num_actions] if has_kept else None,
                counted=bool(counted),
                name=origins[number][0],
                turn_at=np.array(origins[number][1], np.int64),
                engines=tuple(origins[number][2]),
                routes=None if shape is None else arrays["routes"][routed : routed + size].reshape(shape),
                taught=taught[number],
                starts=tuple(arrays["starts"][begun : begun + starts].tolist()),
            )
        )
        routed += size
        begun += starts
        tokens, actions, proximal = tokens + num_tokens, actions + num_actions, proximal + num_actions * has_proximal
        kept, rewarded = kept + num_actions * has_kept, rewarded + num_actions * has_rewards
    return samples


def _origins(samples: Sequence[Sample]) -> Tensor:
    """Names, turns and engines of the samples, and the shapes of their routes, as bytes of JSON."""
    shapes = [None if s.routes is None else s.routes.shape for s in samples]
    text = json.dumps(
        [[s.name, s.turn_at.tolist(), s.engines, shape] for s, shape in zip(samples, shapes, strict=True)]
    )
    return torch.from_numpy(np.frombuffer(text.encode(), np.uint8).copy())


def _joined(arrays: Sequence[NDArray[Any]], dtype: Any) -> Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype, copy=False))
