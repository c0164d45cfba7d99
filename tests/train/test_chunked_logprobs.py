from __future__ import annotations

import pytest
import torch

from libra.errors import TrainError
from libra.train.chunked_logprobs import chunked_logp


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("with_bias", [False, True])
def test_it_is_log_softmax_gradients_included(chunk, with_bias):
    torch.manual_seed(0)
    temperature = 0.7
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in ((7, 5), (11, 5), (11,))]
    target, slope = torch.randint(11, (7,)), torch.randn(7, dtype=torch.float64)
    results = []
    for whole in (True, False):
        hidden, weight, bias = (tensor.clone().requires_grad_() for tensor in inputs)
        used = bias if with_bias else None
        if whole:
            all_logp = (torch.nn.functional.linear(hidden, weight, used) / temperature).log_softmax(-1)
            logp, entropy = all_logp.gather(-1, target[:, None])[:, 0], -(all_logp.exp() * all_logp).sum(-1)
        else:
            logp, entropy = chunked_logp(
                hidden, weight, target, bias_V=used, temperature=temperature, chunk_tokens=chunk
            )
            assert not entropy.requires_grad
        (logp * slope).sum().backward()
        results.append([logp.detach(), entropy.detach(), hidden.grad, weight.grad, bias.grad])
    for expected, got in zip(*results, strict=True):
        if expected is not None:
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_a_frozen_head_gets_no_gradient_and_no_tokens_are_no_error():
    hidden = torch.randn(4, 3, requires_grad=True)
    weight = torch.randn(6, 3)
    logp, _ = chunked_logp(hidden, weight, torch.zeros(4, dtype=torch.int64), chunk_tokens=2)
    logp.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None
    none, entropy = chunked_logp(hidden[:0], weight, torch.zeros(0, dtype=torch.int64))
    assert none.shape == entropy.shape == (0,)
    with pytest.raises(TrainError):
        chunked_logp(hidden, weight, torch.zeros(4, dtype=torch.int64), chunk_tokens=0)


def test_a_token_of_probability_zero_leaves_the_entropy_finite():
    bias = torch.tensor([0.0, 0.0, -torch.inf])
    logp, entropy = chunked_logp(torch.zeros(2, 1), torch.zeros(3, 1), torch.tensor([0, 1]), bias_V=bias)
    torch.testing.assert_close(entropy, torch.full((2,), 2.0).log())
    torch.testing.assert_close(logp, -torch.full((2,), 2.0).log())
