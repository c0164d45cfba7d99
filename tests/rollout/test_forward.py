import numpy as np
import pytest
import torch

from libra.errors import ModelError
from libra.rollout import attention as slot_cache
from libra.rollout.attention import SLOT_ATTENTION, SlotKV
from libra.rollout.forward import Forward
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
    monkeypatch.setattr("libra.rollout.forward.attend", lambda *a: true_attend(*a) * 1.05)
    with pytest.raises(ModelError, match="nats"):
        Forward(model, kv_for(model))
    Forward(model, kv_for(model), fused=False)


def test_bfloat16_logprobs_are_near_those_of_transformers(
    make_batch, make_model, make_request, reference_logprobs, serve_all
):
    request = make_request("b", length=20, new=30)
    output = serve_all(make_batch(dtype="bfloat16"), request)["b"]
    expected = reference_logprobs(make_model(), request.context_ids, output.token_ids)
    assert np.abs(output.logprobs - expected).mean() < 0.1
