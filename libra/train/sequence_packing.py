"""Variable-length trajectories laid out as rows and micro-batches for one forward pass each.

Shape legend: R rows, W width of a micro-batch in tokens, N action tokens of a micro-batch.

Invariants
----------
1. Every sequence is in exactly one row, in order, and whole except for a prompt that it shares with another of that row
   (`libra.train.prompt_sharing`); every action token is scored exactly once.
2. Positions restart at 0 with every sequence, also with those of one sample (`Sample.starts`); transformers reads restarts as
   borders that attention never crosses. Rows of shared prompts have a mask instead, and micro-batches of their own.
3. A micro-batch has at most ``micro_batch_tokens`` places (rows times width, padding included).
4. Padding lies at the end of a row and continues the positions of its last sequence: causal attention keeps it out of
   every real token, and a row that holds one sequence needs no mask at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from libra.errors import TrainError
from libra.train.even_micro_batches import Limits, Row, even_micro_batches
from libra.train.prompt_sharing import attention_mask, row_tokens, share_rows, shared_tokens
from libra.train.row_packing import FillRows, fill_rows
from libra.train.samples import Sample
from libra.train.sequences import Packed
from libra.train.taught_tokens import TaughtTokens, taught_tokens

MORE_FRAC = 0.125
"""Share by which even loads of experts may raise the number of micro-batches; at least two."""


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Rows of one forward pass, and the action tokens scored in it.

    ``action_at_N`` indexes the flattened (R * W) places; ``samples`` are in the order of the action tokens; ``num_tokens``
    counts inputs without padding. ``proximal_logp_N`` and ``kept_N`` are None if a sample has none; ``counted_N``, as of `Sample`,
    if all are. ``mask_R1WW`` is the attention mask if prompts are shared; None: positions separate sequences. ``routes_PLK`` has
    the experts of each place, -1 where not recorded; None if no sample has any.
    if all are. ``mask_R1WW`` is the attention mask if prompts are shared; None: positions separate sequences.
    ``taught`` is what a teacher says; None: nothing, of none of them.
    """

    token_ids_RW: Tensor
    position_ids_RW: Tensor
    action_at_N: Tensor
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
        """Whole sequences in the rows."""
        return len(self.samples)

    @property
    def packed(self) -> bool:
        """Whether positions have to separate sequences of one row."""
        more = len(self.samples) > len(self.token_ids_RW) or any(sample.starts for sample in self.samples)
        return self.mask_R1WW is None and more

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Arguments of `libra.train.logprobs.Scorer.logp`."""
        return self.token_ids_RW, self.position_ids_RW, self.action_at_N, self.target_N, self.mask_R1WW

    @property
    def sequences(self) -> Packed:
        """The sequences of the action tokens."""
        counts_S = torch.tensor([sample.num_actions for sample in self.samples])
        sequence_N = torch.repeat_interleave(torch.arange(len(self.samples)), counts_S)
        return Packed(sequence_N.to(self.target_N.device), len(self.samples))

    def to(self, device: torch.device) -> MicroBatch:
        """The same on ``device``."""
        if device == self.target_N.device:
            return self
        here = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: v.to(device) for name, v in here.items() if isinstance(v, Tensor | TaughtTokens)}
        return replace(self, **moved)

    @property
    def num_places(self) -> int:
        """Rows times width."""
        return self.token_ids_RW.numel()


def pack(
    samples: Sequence[Sample],
    *,
    max_row_tokens: int,
    micro_batch_tokens: int,
    logp_dtype: torch.dtype = torch.float32,
    fill: FillRows = fill_rows,
    share_prompts: bool = False,
    num_experts: int = 0,
) -> list[MicroBatch]:
    """``samples`` as micro-batches of rows of similar length, widest first.

    ``fill`` (`fill_rows` or `fill_rows_mffd`) decides which sequences share a row; ``share_prompts`` puts samples with the same
    prompt into rows that hold it once, for models that `libra.train.prompt_sharing.can_share`; ``num_experts`` above 0
    chooses which sequences share a micro-batch so that the load of the experts is even (`libra.train.even_micro_batches`). None
    of it changes the result.
    TrainError if one sequence is longer than ``micro_batch_tokens``.
    """
    lengths = [sample.num_tokens for sample in samples]
    if lengths and max(lengths) > micro_batch_tokens:
        raise TrainError(
            f"packing: a sequence of {max(lengths)} tokens exceeds trainer.micro_batch_tokens={micro_batch_tokens}; "
            f"type trainer.micro_batch_tokens={max(lengths)} or more, or a smaller rollout.max_context_tokens"
        )
    row_limit = min(max_row_tokens, micro_batch_tokens)
    shared, rest = share_rows(samples, row_limit, fill) if share_prompts else ([], list(samples))
    shared.sort(key=row_tokens, reverse=True)
    plain = [[rest[index] for index in row] for row in fill([sample.num_tokens for sample in rest], row_limit)]
    of_shared, of_plain = _cut(shared, row_tokens, micro_batch_tokens), _cut(plain, _tokens, micro_batch_tokens)
    if num_experts:
        limits = Limits(row_limit, micro_batch_tokens, fill)
        of_shared = _even([sample for row in shared for sample in row], of_shared, limits, num_experts, share=True)
        of_plain = _even(rest, of_plain, limits, num_experts, share=False)
    return [
        *(_micro_batch(rows, row_tokens(rows[0]), logp_dtype, share=True) for rows in of_shared),
        *(_micro_batch(rows, _tokens(rows[0]), logp_dtype, share=False) for rows in of_plain),
    ]


def _tokens(row: Row) -> int:
    return sum(sample.num_tokens for sample in row)


def _cut(rows: list[Row], width: Callable[[Row], int], micro_batch_tokens: int) -> list[list[Row]]:
    """Rows, widest first, as micro-batches; each is as wide as its first row."""
    cuts: list[list[Row]] = []
    first = 0
    for number in range(1, len(rows) + 1):
        if number == len(rows) or width(rows[first]) * (number - first + 1) > micro_batch_tokens:
            cuts.append(rows[first:number])
            first = number
    return cuts


def _even(
    samples: list[Sample], given: list[list[Row]], limits: Limits, num_experts: int, *, share: bool
) -> list[list[Row]]:
    """``samples`` as micro-batches of even loads, as many as ``given`` or up to `MORE_FRAC` more; ``given`` itself where routes are
    missing or none are found. ``share``: rows hold each prompt once."""
    if len(given) < 2:
        return given
    most = len(given) + max(2, int(len(given) * MORE_FRAC))
    width = row_tokens if share else _tokens
    made = even_micro_batches(samples, share=share, limits=limits, num_experts=num_experts, most=most)
    return given if made is None else [sorted(rows, key=width, reverse=True) for rows in made]


def _micro_batch(rows: list[list[Sample]], width: int, logp_dtype: torch.dtype, *, share: bool) -> MicroBatch:
    token_ids_RW = np.zeros((len(rows), width), dtype=np.int64)
    position_ids_RW = np.zeros((len(rows), width), dtype=np.int64)
    action_at: list[NDArray[np.int64]] = []
    num_tokens = 0
    for number, row in enumerate(rows):
        start = begins = 0  # of the sample, and of its prompt
        for sample, skipped in zip(row, shared_tokens(row) if share else [0] * len(row), strict=True):
            begins = begins if skipped else start
            end = start + sample.num_tokens - skipped
            token_ids_RW[number, start:end] = sample.token_ids[skipped:]
            # Numbered up to the end of the row, padding included; the next sequence overwrites its part.
            position_ids_RW[number, start:] = np.arange(skipped, skipped + width - start)
            for begin in sample.starts:
                position_ids_RW[number, start + begin :] = np.arange(width - start - begin)
            at = sample.action_at
            at = np.where(at < skipped, at + begins, at - skipped + start)
            action_at.append(at + number * width)
            start = end
        num_tokens += start
    position_ids_RW %= max(
        sample.num_tokens for row in rows for sample in row
    )  # padding: none beyond those of a sequence
    flat = [sample for row in rows for sample in row]
    routes_PLK = None
    recorded = next((sample.routes for sample in flat if sample.routes is not None), None)
    if recorded is not None:
        routes_PLK = np.full((len(rows) * width, *recorded.shape[1:]), -1, np.int16)
        for number, row in enumerate(rows):
            start = number * width
            for sample, skipped in zip(row, shared_tokens(row) if share else [0] * len(row), strict=True):
                end = start + sample.num_tokens - skipped
                if sample.routes is not None:
                    routes_PLK[start:end] = sample.routes[skipped:]
                start = end
    advantage_N = np.concatenate([sample.advantages for sample in flat])
    behaviour_logp_N = np.concatenate([sample.behaviour_logp for sample in flat])
    proximal_N = _known([sample.proximal_logp for sample in flat])
    return MicroBatch(
        token_ids_RW=torch.from_numpy(token_ids_RW),
        position_ids_RW=torch.from_numpy(position_ids_RW),
        action_at_N=torch.from_numpy(np.concatenate(action_at)),
        target_N=torch.from_numpy(np.concatenate([sample.target for sample in flat])),
        behaviour_logp_N=torch.from_numpy(behaviour_logp_N).to(logp_dtype),
        advantage_N=torch.from_numpy(advantage_N).to(logp_dtype),
        current_N=torch.from_numpy(np.concatenate([sample.current for sample in flat])),
        proximal_logp_N=None if proximal_N is None else proximal_N.to(logp_dtype),
        kept_N=_known([sample.kept for sample in flat]),
        counted_N=_counted(flat),
        taught=taught_tokens(flat, logp_dtype),
        samples=tuple(flat),
        num_tokens=num_tokens,
        mask_R1WW=torch.from_numpy(attention_mask(rows, width)) if share else None,
        routes_PLK=None if routes_PLK is None else torch.from_numpy(routes_PLK),
    )


def _counted(samples: Sequence[Sample]) -> Tensor | None:
    """Whether each action's sample is counted; None if all are."""
    if all(sample.counted for sample in samples):
        return None
    return torch.from_numpy(np.repeat([sample.counted for sample in samples], [s.num_actions for s in samples]))


def _known(arrays: Sequence[NDArray[Any] | None]) -> Tensor | None:
    """The arrays one after the other; None if one is missing."""
    known = [array for array in arrays if array is not None]
    return torch.from_numpy(np.concatenate(known)) if len(known) == len(arrays) else None
