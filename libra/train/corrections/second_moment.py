"""M2PO: masks the fewest tokens that keep the second moment of the log ratio small.

Shape legend: N tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from libra.train.sequences import Sequences


@torch.no_grad()
def m2po_mask(
    log_ratio_N: Tensor,
    sequences: Sequences,
    *,
    threshold: float = 0.04,
    advantage_N: Tensor | None = None,
) -> Tensor:
    """Whether a token is kept (N,) bool; False in masked places. M2PO, arXiv:2510.01161.

    The tokens with the largest squared log ratio (log p_now - log p_behaviour) are masked first, until the mean square of the
    rest is at most ``threshold`` (the paper's 0.04). With ``advantage_N`` only tokens that the advantage would push further away
    (A > 0 and ratio > 1, or A < 0 and ratio < 1), as in the paper; None: any token (AReaL). The choice is over all tokens given,
    so it differs between a minibatch and its parts: call it on the whole minibatch, as
    ``trainer.m2po_threshold`` does.
    """
    mask_N = sequences.mask_N
    square_N = sequences.only(log_ratio_N).double().square()
    candidate_N = mask_N if advantage_N is None else mask_N & (advantage_N * log_ratio_N > 0)
    count, total = int(mask_N.sum()), float(square_N[mask_N].sum())
    where = torch.nonzero(candidate_N.flatten())[:, 0]
    order = where[square_N.flatten()[where].argsort(descending=True, stable=True)]
    removed = torch.cat([square_N.new_zeros(1), square_N.flatten()[order].cumsum(0)])
    left = count - torch.arange(len(removed), device=removed.device)
    enough = (total - removed) <= threshold * left + 1e-15 * total
    enough[-1] = True  # no further token may be masked
    num_masked = int(torch.nonzero(enough)[0])
    keep = mask_N.flatten().clone()
    keep[order[:num_masked]] = False
    return keep.view(mask_N.shape)
