"""Further tokens that are drawn at each place beside the generated one, for requests that want them (``TurnRequest.draws``).

They have uniform numbers of their own, so that a request generates the same tokens with and without them.

Shapes: N rows of a pass, M draws, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from libra.rollout.slot_table import Job, SlotTable
from libra.types import Drawn


class FurtherDraws:
    """The further draws of the last pass of a batch over slots, until they are kept."""

    def __init__(self) -> None:
        self._last: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None

    def draw(self, logits_NV: Tensor, table: SlotTable, slots: NDArray[np.int64], index: NDArray[np.int64]) -> None:
        """Draw after each row, which gives a slot its ``index``-th token, where a request wants it."""
        self._last = None
        requests = [table.running_job(slot).request for slot in slots]
        draws = max(request.draws for request in requests)
        if not draws:
            return
        uniforms_NM = np.zeros((len(slots), draws), np.float32)
        for row, (request, at) in enumerate(zip(requests, index, strict=True)):
            if request.draws:
                uniforms_NM[row] = further_uniforms(request.seed, request.generated + int(at), draws)
        temperature_N = torch.from_numpy(table.sampling.temperature[slots]).to(logits_NV.device)
        ids_NM, nats_NM = draw_further(logits_NV, torch.from_numpy(uniforms_NM).to(logits_NV.device), temperature_N)
        self._last = ids_NM.cpu().numpy(), nats_NM.cpu().numpy()

    def keep(self, table: SlotTable, slots: NDArray[np.int64], first: int = 0) -> None:
        """Note them, from row ``first`` on, for the requests in ``slots`` that want them."""
        if self._last is None:
            return
        ids, nats = self._last
        for row, slot in enumerate(slots, start=first):
            job = table.running_job(slot)
            if job.request.draws:
                job.drawn.append((ids[row], nats[row]))


def drawn_of(job: Job) -> Drawn | None:
    """The further draws of a request (tokens, draws); None if it wants none."""
    if not (draws := job.request.draws):
        return None
    ids = np.array([ids for ids, _ in job.drawn], np.int32).reshape(-1, draws)
    return Drawn(ids, np.array([nats for _, nats in job.drawn], np.float32).reshape(-1, draws))


def draw_further(logits_NV: Tensor, uniforms_NM: Tensor, temperature_N: Tensor | None) -> tuple[Tensor, Tensor]:
    """M further tokens of each row's distribution (N, M) int64, by inverse CDF, and their log-probabilities (N, M) float32.

    Rows of temperature 0 or a top_p below 1 are drawn at temperature 1 and uncut, or uncut: nobody asks for them there.
    """
    logits_NV = logits_NV.float()
    if temperature_N is not None:
        logits_NV = logits_NV / torch.where(temperature_N == 0, 1.0, temperature_N)[:, None]
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    cdf_NV = logprobs_NV.exp().cumsum_(dim=-1)
    total_N1 = cdf_NV[:, -1:]
    aim_NM = torch.minimum(uniforms_NM * total_N1, torch.nextafter(total_N1, torch.zeros_like(total_N1)))
    tokens_NM = torch.searchsorted(cdf_NV, aim_NM, right=True).clamp_(max=logits_NV.shape[-1] - 1)
    return tokens_NM, logprobs_NV.gather(1, tokens_NM)


def further_uniforms(seed: int, place: int, draws: int) -> NDArray[np.float32]:
    """The uniform numbers in [0, 1) of a turn's further tokens at a place (draws,), which do not depend on those of its tokens."""
    return np.random.default_rng((seed, place, 1)).random(draws, dtype=np.float32)
