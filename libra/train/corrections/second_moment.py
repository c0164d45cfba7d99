"""M2PO: the fewest tokens are masked for which the second moment of the log ratio stays small.

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

    The tokens with the largest squared log ratio go first, until the mean square of those that are left is at most
    ``threshold`` (the paper's 0.04). The choice is made over all tokens given, so it is not the same for a minibatch and
    for its parts: call it on the whole minibatch. Library only for that reason.

    Parameters
    ----------
    log_ratio_N : Tensor
        log p_now - log p_behaviour.
    advantage_N : Tensor, optional
        Only tokens that the advantage would push further away may go (A > 0 and ratio > 1, or A < 0 and ratio < 1), as in
        the paper. None: any token may (AReaL).
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
    enough[-1] = True  # nothing more may go
    num_masked = int(torch.nonzero(enough)[0])
    keep = mask_N.flatten().clone()
    keep[order[:num_masked]] = False
    return keep.view(mask_N.shape)
