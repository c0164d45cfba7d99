"""Tokens drawn beside the generated ones: the generated ones stay as they are, and each draw has the log-probability it had."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from libra.rollout import kv_slots as slot_cache
from libra.rollout.further_draws import draw_further, further_uniforms
from libra.rollout.slot_batch import SlotBatch
from libra.rollout.slot_table import Job
from libra.rollout.weight_loading import load_causal_lm


@pytest.mark.parametrize("speculate", [False, True])
def test_further_draws_change_no_token_and_have_their_log_probabilities(
    speculate, make_model, make_request, reference_logprobs
):
    slot_cache.register()
    requests = [make_request(f"d{n}", length=9, new=12, seed=n, temperature=0.8, group="g") for n in (1, 2)]

    def outputs(asked):
        model = load_causal_lm(make_model("qwen3"), "float32", slot_cache.SLOT_ATTENTION)
        batch, found = SlotBatch(model, slots=4, max_context_tokens=96, version=0, speculate=speculate), {}
        for ticket, request in enumerate(asked):
            batch.submit(Job(ticket, request, 0.0))
        while batch.has_work:
            found |= {job.request.trajectory_id: output for job, output in batch.step()}
        return [found[request.trajectory_id] for request in asked]

    plain = outputs(requests)
    with_draws = outputs([replace(requests[0], draws=5), requests[1]])
    for one, other in zip(plain, with_draws, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist() and one.logprobs.tolist() == other.logprobs.tolist()
    assert with_draws[1].drawn is None and plain[0].drawn is None
    drawn = with_draws[0].drawn
    assert drawn.token_ids.shape == drawn.logprobs.shape == (12, 5)
    context, ids = requests[0].context_ids, with_draws[0].token_ids
    for place in range(12):
        before = np.concatenate([context, ids[:place]])
        for token, logp in zip(drawn.token_ids[place], drawn.logprobs[place], strict=True):
            (expected,) = reference_logprobs(make_model("qwen3"), before, np.array([token]), 0.8)
            assert logp == pytest.approx(expected, abs=1e-4)


def test_draws_follow_the_distribution_and_go_on_in_the_next_part_of_a_turn():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    uniforms = np.stack([further_uniforms(3, place, 50) for place in range(200)]).reshape(1, -1)
    ids, logp = draw_further(logits, torch.from_numpy(uniforms), torch.tensor([0.5]))
    expected = (logits / 0.5).softmax(-1)[0]
    np.testing.assert_allclose(np.bincount(ids[0], minlength=4) / ids.numel(), expected, atol=0.02)
    assert torch.allclose(logp[0], expected.log()[ids[0]], atol=1e-6)
    assert (
        further_uniforms(3, 7, 4).tolist() == further_uniforms(3, 7, 4).tolist() != further_uniforms(3, 8, 4).tolist()
    )
