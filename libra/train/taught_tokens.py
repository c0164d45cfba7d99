"""What a teacher says of the action tokens of a micro-batch, as tensors, and as flat arrays for a replica elsewhere.

Shape legend: N action tokens of a micro-batch, K columns (tokens of the vocabulary) of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from libra.errors import TrainError
from libra.types import Taught

if TYPE_CHECKING:
    from libra.train.samples import Sample

_PREFIX = "taught_"


@dataclass(frozen=True, slots=True, eq=False)
class TaughtTokens:
    """Columns int64 with their log-probabilities, and ``known_N``: whether the teacher scored the token's sequence; elsewhere the
    others mean nothing. ``rest_N`` and ``old_NK`` as in `libra.types.Taught`."""

    columns_NK: Tensor
    logp_NK: Tensor
    known_N: Tensor
    rest_N: Tensor | None = None
    old_NK: Tensor | None = None

    def to(self, device: torch.device) -> TaughtTokens:
        """The same on ``device``."""
        here = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: value.to(device) for name, value in here.items() if value is not None})


def taught_tokens(samples: Sequence[Sample], dtype: torch.dtype) -> TaughtTokens | None:
    """Of the actions of ``samples``, one after the other; None if a teacher scored none of them.

    TrainError if samples differ in the number of columns.
    """
    known = [sample.taught for sample in samples if sample.taught is not None]
    if not known:
        return None
    if len(shapes := {(each.logp.shape[1], each.rest_logp is None, each.old_logp is None) for each in known}) != 1:
        raise TrainError(
            f"teacher: its scores in one batch are of several kinds: {sorted(shapes)}; they are of another run"
        )
    width = known[0].logp.shape[1]

    def joined(name: str, fill: float, *shape: int) -> Tensor:
        parts = [
            np.full((sample.num_actions, *shape), fill) if sample.taught is None else getattr(sample.taught, name)
            for sample in samples
        ]
        return torch.from_numpy(np.concatenate(parts))

    first = known[0]
    return TaughtTokens(
        columns_NK=joined("token_ids", 0, width).to(torch.int64),
        logp_NK=joined("logp", 0.0, width).to(dtype),
        known_N=torch.from_numpy(np.repeat([s.taught is not None for s in samples], [s.num_actions for s in samples])),
        rest_N=None if first.rest_logp is None else joined("rest_logp", -1.0).to(dtype),
        old_NK=None if first.old_logp is None else joined("old_logp", 0.0, width).to(dtype),
    )


def to_flat(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """What teachers say of ``samples``, by name; empty if nothing."""
    known = [sample.taught for sample in samples if sample.taught is not None]
    flat = {_PREFIX + "has": torch.tensor([sample.taught is not None for sample in samples])}
    for name in Taught._fields if known else ():
        parts = [each for each in (getattr(one, name) for one in known) if each is not None]
        if parts:
            flat[_PREFIX + name] = torch.from_numpy(np.concatenate(parts))
    return flat if known else {}


def from_flat(tensors: Mapping[str, Tensor], lengths: Sequence[int]) -> list[Taught | None]:
    """The inverse of `to_flat`, for samples of so many actions."""
    if _PREFIX + "has" not in tensors:
        return [None] * len(lengths)
    found: list[Taught | None] = []
    at = 0
    for has, length in zip(tensors[_PREFIX + "has"].tolist(), lengths, strict=True):
        if not has:
            found.append(None)
            continue
        flat = (tensors.get(_PREFIX + name) for name in Taught._fields)
        found.append(Taught(*(None if each is None else each[at : at + length].numpy() for each in flat)))  # type: ignore[arg-type]
        at += length
    return found
