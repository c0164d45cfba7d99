"""Slots of an engine on another device than the host: `pretended_gpu` computes on the CPU and refuses mixtures."""

import numpy as np
import pytest
from torch.utils._python_dispatch import _disable_current_modes

from libra.rollout import attention as slot_cache
from libra.rollout.slot_batch import SlotBatch
from libra.rollout.slot_table import Job
from libra.rollout.weight_loading import load_causal_lm
from pretended_gpu import PretendedTensor, pretended_gpu


def served(make_model, make_request, device, family, fused, exact):
    """Everything a batch on ``device`` answers: turns of several trajectories, probes, and all of it after other weights."""
    slot_cache.register()
    with _disable_current_modes():  # transformers loads by way of the device ``meta``, a name the pretended GPU has
        model = load_causal_lm(make_model(family), "float32", slot_cache.SLOT_ATTENTION)
        others = make_model(family, 1)
    model.to(device)
    batch = SlotBatch(model, slots=3, max_context_tokens=96, version=0, fused=fused, exact_logprobs=exact)
    tokens, answers = [], []
    for version in (0, 1):
        if version:
            batch.load(version, others)
        requests = [make_request("a", length=40, new=4), make_request("b", new=6, temperature=0.7, top_p=0.9)]
        requests += [make_request("c", length=40, new=3, temperature=0.0), make_request("d", new=3)]
        requests += [make_request("e", new=4, context=requests[0].context_ids)]
        for ticket, request in enumerate(requests):
            batch.submit(Job(ticket, request, 0.0))
        turns = {}
        while batch.has_work:
            turns |= {job.request.trajectory_id: output for job, output in batch.step()}
        assert len(turns) == len(requests)
        tokens += [output.token_ids for _, output in sorted(turns.items())]
        answers += [output.logprobs for _, output in sorted(turns.items())]
        answers.append(batch.score(np.arange(20, dtype=np.int32)))
        answers += [np.array(numbers) for _, numbers in sorted(batch.forward.project(7).items())]
        wanted = {"model.embed_tokens.weight": (3, 5), "model.norm.weight": ()}
        wanted["model.layers.0.self_attn.q_proj.weight"] = (1,)
        answers += [found for _, found in sorted(batch.forward.columns(wanted).items())]
    return batch, tokens, answers


@pytest.mark.parametrize(("family", "fused"), [("qwen3", True), ("qwen2", False)])
def test_an_engine_elsewhere_answers_as_one_here(make_model, make_request, family, fused):
    exact = not fused
    _, expected_tokens, expected = served(make_model, make_request, "cpu", family, fused, exact)
    with pretended_gpu() as device:
        batch, got_tokens, got = served(make_model, make_request, device, family, fused, exact)
        assert all(isinstance(layer, PretendedTensor) for layer in batch.kv.data)
    for one, other in zip(got_tokens, expected_tokens, strict=True):
        assert one.tolist() == other.tolist()
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
