"""Rows in which samples of one group share their prompt: its tokens pass through the model once, not once per sample.

Shape legend: R rows, W width of a row in tokens. A shared row is ``prompt, rest of sample 1, rest of sample 2, ...``, and may go on
with another prompt and its samples; the rest of a sample is what follows the prompt, up to its last action token.

Invariants
----------
1. A token sees its prompt and its own sample up to itself, and nothing else; positions continue the prompt's. So its hidden
   state equals that in a row of its own, up to rounding.
2. Samples share a prompt only if their tokens before the first action are equal, compared one by one, and each is one sequence.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.model_loader import plain_attention
from libra.train.row_packing import FillRows
from libra.train.samples import Sample

logger = logging.getLogger(__name__)


def can_share(model: Any) -> bool:
    """Whether every layer of a transformers model has full attention, so that our mask alone decides what a token attends
    to."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    able = kinds == {"full_attention"} and not sliding and plain_attention(config) == "sdpa"
    if not able:
        logger.info("prompts are not shared: %s has other layers than full attention", type(model).__name__)
    return able


def share_rows(
    samples: Sequence[Sample], max_row_tokens: int, fill: FillRows
) -> tuple[list[list[Sample]], list[Sample]]:
    """Rows of at least two samples that share their prompt, and the remaining samples."""
    groups: dict[bytes, list[Sample]] = {}
    branched = [sample for sample in samples if sample.starts]
    for sample in (sample for sample in samples if not sample.starts):
        groups.setdefault(sample.token_ids[: sample.num_prompt_tokens].tobytes(), []).append(sample)
    rows: list[list[Sample]] = []
    alone: list[Sample] = branched
    for members in groups.values():
        room = max_row_tokens - members[0].num_prompt_tokens
        if len(members) < 2 or room < 1:
            alone += members
            continue
        for bin_ in fill([max(sample.num_tokens - sample.num_prompt_tokens, 1) for sample in members], room):
            row = [members[index] for index in bin_]
            if len(row) > 1:
                rows.append(row)
            else:
                alone += row
    return rows, alone


def shared_tokens(row: Sequence[Sample]) -> list[int]:
    """Tokens of each sample of a shared row that are those of the prompt before it, and not repeated."""
    found = [0]
    for before, sample in pairwise(row):
        prompt = sample.num_prompt_tokens
        same = prompt == before.num_prompt_tokens and np.array_equal(
            before.token_ids[:prompt], sample.token_ids[:prompt]
        )
        found.append(prompt if same else 0)
    return found


def row_tokens(row: Sequence[Sample]) -> int:
    """Tokens of a shared row."""
    return sum(sample.num_tokens - shared for sample, shared in zip(row, shared_tokens(row), strict=True))


def attention_mask(rows: Sequence[Sequence[Sample]], width: int) -> NDArray[np.bool_]:
    """The attention mask (R, 1, W, W), True where a token of the third axis reads one of the fourth; padding reads padding."""
    part_RW = np.full((len(rows), width), -1, dtype=np.int64)  # prompts and rests of samples, counted; -1 padding
    prompt_RW = part_RW.copy()  # the part of the prompt
    for number, row in enumerate(rows):
        start = part = prompt = 0
        for sample, shared in zip(row, shared_tokens(row), strict=True):
            if not shared:
                part, prompt = part + 1, part + 1
                end = start + sample.num_prompt_tokens
                part_RW[number, start:end] = prompt_RW[number, start:end] = prompt
                start = end
            part += 1
            end = start + sample.num_tokens - sample.num_prompt_tokens
            part_RW[number, start:end], prompt_RW[number, start:end] = part, prompt
            start = end
    read_R1W = part_RW[:, None, :]
    sees = (read_R1W == part_RW[:, :, None]) | (read_R1W == prompt_RW[:, :, None])
    return (sees & np.tri(width, dtype=np.bool_))[:, None]
