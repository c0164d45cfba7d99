"""A minibatch over replicas and micro-batches: balanced slices, similar rows, shared prompts.

A shared row is ``prompt, rest of sample 1, rest of sample 2, ...``, and may continue with another
prompt and its samples; the rest of a sample is its tokens from the prompt's end to its last action.

Shape legend: R rows, W width of a micro-batch in tokens, P = R * W places, N action tokens.

1. Every sequence is in exactly one slice and one row, whole except for a shared prompt; every
   action token is scored once. No slice is empty if there are enough samples.
2. Positions restart at 0 with every sequence, also within one sample (`Sample.starts`), and
   transformers reads a restart as a border. Rows of shared prompts have a mask instead.
3. In a shared row a token reads its prompt and the tokens of its own sample up to itself. Samples
   share a prompt only if all tokens before the first action agree.
4. A micro-batch has at most ``micro_batch_tokens`` places (rows times width, padding included).
5. Padding is at the end of a row and continues the positions of its last sequence: causal attention
   hides it from real tokens, and a row of one sequence needs no mask.
6. The same samples in the same order give the same slices and rows.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from libra.errors import TrainError
from libra.model_loader import plain_attention
from libra.train.losses import Sequences
from libra.train.samples import Sample, TaughtTokens, taught_tokens

logger = logging.getLogger(__name__)

_Part = tuple[int, int, tuple[int, ...]]  # (sum, number of items, items): compared in that order


def karmarkar_karp(weights: Sequence[int], num_parts: int) -> list[list[int]]:
    """Indices of ``weights`` in ``num_parts`` parts of nearly equal sum, by largest differencing.

    Karmarkar & Karp (1982), k-way: merge the two partial partitions of widest spread, the heaviest
    part of one with the lightest of the other. Sums agree with ``get_seqlen_balanced_partitions``
    of verl 0.9.1. TrainError if a part would be empty.
    """
    if not 1 <= num_parts <= len(weights):
        raise TrainError(
            f"balanced partition: got {num_parts} parts of {len(weights)} sequences; a part would be empty"
        )
    # Each entry: (-spread, order key, parts from heaviest to lightest). The order key breaks ties by the heaviest part.
    heap: list[tuple[int, tuple[int, int, tuple[int, ...]], list[_Part]]] = []
    lightest_first: list[_Part] = sorted((int(weight), 1, (index,)) for index, weight in enumerate(weights))
    for part in lightest_first:
        heapq.heappush(heap, _entry([part] + [(0, 0, ())] * (num_parts - 1)))
    while len(heap) > 1:
        widest, other = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = [
            (heavy[0] + light[0], heavy[1] + light[1], heavy[2] + light[2])
            for heavy, light in zip(widest, reversed(other), strict=True)
        ]
        heapq.heappush(heap, _entry(sorted(merged, reverse=True)))
    return _without_empty([list(items) for _, _, items in heap[0][2]], weights)


def _entry(parts: list[_Part]) -> tuple[int, _Part, list[_Part]]:
    total, count, items = parts[0]
    return parts[-1][0] - total, (-total, -count, tuple(-item for item in items)), parts


def _without_empty(parts: list[list[int]], weights: Sequence[int]) -> list[list[int]]:
    for part in parts:
        if not part:
            donor = max(parts, key=len)
            part.append(donor.pop(donor.index(min(donor, key=lambda index: weights[index]))))
    return [sorted(part) for part in parts]


def split(samples: Sequence[Sample], num_slices: int) -> list[list[Sample]]:
    """``samples`` in slices of nearly equal tokens, in their order; surplus slices are empty."""
    filled = min(num_slices, len(samples))
    parts = karmarkar_karp([sample.num_tokens for sample in samples], filled) if filled else []
    parts += [[] for _ in range(num_slices - filled)]
    return [[samples[index] for index in sorted(part)] for part in parts]


Row = list[Sample]


def fill_rows(lengths: Sequence[int], max_row_tokens: int) -> list[list[int]]:
    """Indices of ``lengths`` in rows of up to ``max_row_tokens``, first-fit decreasing. A longer
    sequence has its own row. At most 11/9 OPT + 6/9 rows (Johnson 1973; Dosa 2007)."""
    rows: list[list[int]] = []
    used: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        row = next((row for row in range(len(rows)) if used[row] + lengths[index] <= max_row_tokens), len(rows))
        if row == len(rows):
            rows.append([])
            used.append(0)
        rows[row].append(index)
        used[row] += lengths[index]
    return [rows[row] for row in sorted(range(len(rows)), key=lambda row: -used[row])]


def can_share(model: Any) -> bool:
    """Whether every layer has full attention, so that Libra's mask alone decides."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    able = kinds == {"full_attention"} and not sliding and plain_attention(config) == "sdpa"
    if not able:
        logger.info("prompts are not shared: %s has other layers than full attention", type(model).__name__)
    return able


def share_rows(samples: Sequence[Sample], max_row_tokens: int) -> tuple[list[Row], list[Sample]]:
    """Rows of at least two samples that share their prompt, and the remaining samples."""
    groups: dict[bytes, list[Sample]] = {}
    branched = [sample for sample in samples if sample.starts]
    for sample in (sample for sample in samples if not sample.starts):
        groups.setdefault(sample.token_ids[: sample.num_prompt_tokens].tobytes(), []).append(sample)
    found = [[each] for each in branched]
    for members in groups.values():
        room = max_row_tokens - members[0].num_prompt_tokens
        if len(members) < 2 or room < 1:
            found += [[each] for each in members]
            continue
        rests = [max(sample.num_tokens - sample.num_prompt_tokens, 1) for sample in members]
        found += [[members[index] for index in row] for row in fill_rows(rests, room)]
    return [row for row in found if len(row) > 1], [row[0] for row in found if len(row) == 1]


def shared_tokens(row: Sequence[Sample]) -> list[int]:
    """Prompt tokens that each sample of a shared row has in common with the sample before."""
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
    """The attention mask (R, 1, W, W): True where a token (axis 2) reads a token (axis 3)."""
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


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Rows of one forward pass, and the action tokens scored in it.

    ``action_at_N`` indexes places; ``sequence_N`` indexes ``samples``, which are in the order of
    the action tokens; ``num_tokens`` counts inputs without padding. ``proximal_logp_N`` and
    ``kept_N`` are None if a sample has none; ``counted_N`` if all samples count; ``mask_R1WW``
    unless prompts are shared; ``routes_PLK`` (experts, -1: not recorded) and ``taught`` if no
    sample has any.
    """

    token_ids_RW: Tensor
    position_ids_RW: Tensor
    action_at_N: Tensor
    sequence_N: Tensor
    target_N: Tensor
    behaviour_logp_N: Tensor
    advantage_N: Tensor
    current_N: Tensor
    proximal_logp_N: Tensor | None
    samples: tuple[Sample, ...]
    num_tokens: int
    mask_R1WW: Tensor | None = None
    kept_N: Tensor | None = None
    counted_N: Tensor | None = None
    routes_PLK: Tensor | None = None
    taught: TaughtTokens | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.samples)

    @property
    def packed(self) -> bool:
        """Whether positions have to separate sequences of one row."""
        more = len(self.samples) > len(self.token_ids_RW) or any(sample.starts for sample in self.samples)
        return self.mask_R1WW is None and more

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        return self.token_ids_RW, self.position_ids_RW, self.action_at_N, self.target_N, self.mask_R1WW

    @property
    def sequences(self) -> Sequences:
        return Sequences(self.sequence_N, len(self.samples))

    def to(self, device: torch.device) -> MicroBatch:
        if device == self.target_N.device:
            return self
        here = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: v.to(device) for name, v in here.items() if isinstance(v, Tensor | TaughtTokens)}
        return replace(self, **moved)

    @property
    def num_places(self) -> int:
        return self.token_ids_RW.numel()


def pack(
    samples: Sequence[Sample],
    *,
    max_row_tokens: int,
    micro_batch_tokens: int,
    logp_dtype: torch.dtype = torch.float32,
    share_prompts: bool = False,
) -> list[MicroBatch]:
    """``samples`` as micro-batches of rows of similar length, widest first. ``share_prompts`` puts
    samples of one prompt into rows that have the prompt once, for models that `can_share`.
    TrainError if one sequence is longer than ``micro_batch_tokens``."""
    lengths = [sample.num_tokens for sample in samples]
    if lengths and max(lengths) > micro_batch_tokens:
        raise TrainError(
            f"packing: a sequence of {max(lengths)} tokens exceeds trainer.micro_batch_tokens={micro_batch_tokens}; "
            f"type trainer.micro_batch_tokens={max(lengths)} or more, or a smaller rollout.max_context_tokens"
        )
    row_limit = min(max_row_tokens, micro_batch_tokens)
    shared, rest = share_rows(samples, row_limit) if share_prompts else ([], list(samples))
    shared.sort(key=row_tokens, reverse=True)
    plain = [[rest[index] for index in row] for row in fill_rows([sample.num_tokens for sample in rest], row_limit)]
    of_shared, of_plain = _cut(shared, row_tokens, micro_batch_tokens), _cut(plain, _tokens, micro_batch_tokens)
    return [
        *(_micro_batch(rows, row_tokens(rows[0]), logp_dtype, share=True) for rows in of_shared),
        *(_micro_batch(rows, _tokens(rows[0]), logp_dtype, share=False) for rows in of_plain),
    ]


def _tokens(row: Row) -> int:
    return sum(sample.num_tokens for sample in row)


def _cut(rows: list[Row], width: Callable[[Row], int], micro_batch_tokens: int) -> list[list[Row]]:
    cuts: list[list[Row]] = []
    first = 0
    for number in range(1, len(rows) + 1):
        if number == len(rows) or width(rows[first]) * (number - first + 1) > micro_batch_tokens:
            cuts.append(rows[first:number])
            first = number
    return cuts


def _micro_batch(rows: list[list[Sample]], width: int, logp_dtype: torch.dtype, *, share: bool) -> MicroBatch:
    flat = [sample for row in rows for sample in row]
    token_ids_RW, position_ids_RW = (np.zeros((len(rows), width), dtype=np.int64) for _ in range(2))
    recorded = next((sample.routes for sample in flat if sample.routes is not None), None)
    routes = None if recorded is None else np.full((len(rows), width, *recorded.shape[1:]), -1, np.int16)
    action_at: list[NDArray[np.int64]] = []
    num_tokens = 0
    for number, row in enumerate(rows):
        start = begins = 0  # of the sample, and of its prompt
        for sample, skipped in zip(row, shared_tokens(row) if share else [0] * len(row), strict=True):
            begins = begins if skipped else start
            end = start + sample.num_tokens - skipped
            token_ids_RW[number, start:end] = sample.token_ids[skipped:]
            if routes is not None and sample.routes is not None:
                routes[number, start:end] = sample.routes[skipped:]
            # Numbered up to the end of the row, padding included; the next sequence overwrites its part.
            position_ids_RW[number, start:] = np.arange(skipped, skipped + width - start)
            for begin in sample.starts:
                position_ids_RW[number, start + begin :] = np.arange(width - start - begin)
            at = sample.action_at
            at = np.where(at < skipped, at + begins, at - skipped + start)
            action_at.append(at + number * width)
            start = end
        num_tokens += start
    position_ids_RW %= max(sample.num_tokens for sample in flat)  # padding: none beyond a sequence's

    def joined(name: str) -> Tensor:
        return torch.from_numpy(np.concatenate([getattr(sample, name) for sample in flat]))

    def known(name: str) -> Tensor | None:
        return None if any(getattr(sample, name) is None for sample in flat) else joined(name)

    lengths = [sample.num_actions for sample in flat]
    counted = None if all(sample.counted for sample in flat) else np.repeat([s.counted for s in flat], lengths)
    proximal_N = known("proximal_logp")
    return MicroBatch(
        token_ids_RW=torch.from_numpy(token_ids_RW),
        position_ids_RW=torch.from_numpy(position_ids_RW),
        action_at_N=torch.from_numpy(np.concatenate(action_at)),
        sequence_N=torch.from_numpy(np.repeat(np.arange(len(flat)), lengths)),
        target_N=joined("target"),
        behaviour_logp_N=joined("behaviour_logp").to(logp_dtype),
        advantage_N=joined("advantages").to(logp_dtype),
        current_N=joined("current"),
        proximal_logp_N=None if proximal_N is None else proximal_N.to(logp_dtype),
        kept_N=known("kept"),
        counted_N=None if counted is None else torch.from_numpy(counted),
        taught=taught_tokens(flat, logp_dtype),
        samples=tuple(flat),
        num_tokens=num_tokens,
        mask_R1WW=torch.from_numpy(attention_mask(rows, width)) if share else None,
        routes_PLK=None if routes is None else torch.from_numpy(routes).flatten(0, 1),
    )
