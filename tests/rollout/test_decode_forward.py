from __future__ import annotations

import numpy as np
import pytest
import torch

from libra.errors import ModelError
from libra.rollout import kv_slots as slot_cache
from libra.rollout.decode_forward import Forward
from libra.rollout.kv_slots import SLOT_ATTENTION, SlotKV
from libra.rollout.slot_batch import SlotBatch
from libra.rollout.slot_table import Job
from libra.rollout.weight_loading import load_causal_lm


@pytest.fixture
def load(make_model):
    slot_cache.register()
    return lambda family="qwen3", dtype="float32": load_causal_lm(make_model(family), dtype, SLOT_ATTENTION)


def kv_for(model, dtype=torch.float32):
    return SlotKV(model.config, 2, 64, dtype)


def test_fused_projections_are_the_stock_modules_own_storage(load):
    model = load("qwen2")
    forward = Forward(model, kv_for(model))
    layer, attention = forward.fused.layers[0], model.model.layers[0].self_attn
    attention.k_proj.weight.data[0, 0] = 123.0
    attention.v_proj.bias.data[0] = 321.0
    assert layer.qkv[attention.q_proj.out_features, 0] == 123.0
    assert 321.0 in layer.qkv_bias


def test_a_pass_that_disagrees_with_transformers_is_refused(load, monkeypatch):
    model = load()
    true_attend = slot_cache.attend
    monkeypatch.setattr("libra.rollout.fused_decoder.attend", lambda *a: true_attend(*a) * 1.05)
    with pytest.raises(ModelError, match=r"differ by .* nats.*qwen3"):
        Forward(model, kv_for(model))
    Forward(model, kv_for(model), fused=False)


def test_models_of_other_families_run_their_own_modules(load, tmp_path):
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=48, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=None,
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(tmp_path)
    model = load_causal_lm(tmp_path, "float32", SLOT_ATTENTION)
    assert Forward(model, kv_for(model)).fused is None


def test_bfloat16_logprobs_are_near_those_of_transformers(load, make_model, make_request, reference_logprobs):
    batch = SlotBatch(load("qwen3", "bfloat16"), slots=2, max_context_tokens=64, version=0)
    request = make_request("b", length=20, new=30)
    batch.submit(Job(0, request, 0.0))
    outputs = []
    while batch.has_work:
        outputs += [output for _, output in batch.step()]
    expected = reference_logprobs(make_model(), request.context_ids, outputs[0].token_ids)
    assert np.abs(outputs[0].logprobs - expected).mean() < 0.1


def test_the_cache_grows_with_the_longest_context_and_keeps_what_it_holds(load, make_request):
    batch = SlotBatch(load(), slots=3, max_context_tokens=200, version=0)
    assert batch.kv.context_tokens == 32
    short, long = make_request("s", length=5, new=60), make_request("l", length=120, new=40)
    batch.submit(Job(0, short, 0.0))
    for _ in range(30):
        batch.step()
    lengths, outputs = {batch.kv.context_tokens}, {}
    batch.submit(Job(1, long, 0.0))
    while batch.has_work:
        outputs |= {job.request.trajectory_id: output for job, output in batch.step()}
        lengths.add(batch.kv.context_tokens)
    assert min(lengths) == 64
    assert max(lengths) == 160
    alone = SlotBatch(load(), slots=3, max_context_tokens=200, version=0)
    alone.submit(Job(0, short, 0.0))
    while alone.has_work:
        for _, output in alone.step():
            assert output.token_ids.tolist() == outputs["s"].token_ids.tolist()
    assert alone.kv.context_tokens == 64
