from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from libra.train import k3


@given(st.floats(-30, 0), st.floats(-30, 0))
def test_never_negative_and_bounded(logp, reference):
    one, other = torch.tensor([logp], dtype=torch.float64), torch.tensor([reference], dtype=torch.float64)
    assert -1e-15 <= float(k3(one, other)) <= 10
    assert float(k3(one, one)) == 0


def test_its_mean_under_the_policy_is_the_divergence():
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    torch.testing.assert_close((p * k3(p.log(), q.log(), bound=None)).sum(), (p * (p / q).log()).sum())
