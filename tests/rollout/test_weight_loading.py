from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from libra.errors import ModelError, WeightsError
from libra.rollout.weight_loading import copy_weights, load_causal_lm


@pytest.fixture
def load(make_model):
    return lambda family="qwen3", seed=0: load_causal_lm(make_model(family, seed), "float32", "sdpa")


def logits(model):
    return model(torch.arange(12)[None]).logits


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_copied_weights_give_the_other_models_logits_tied_head_included(family, load, make_model):
    model, other = load(family, 0), load(family, 1)
    assert not torch.allclose(logits(model), logits(other))
    copy_weights(model, make_model(family, 1))
    torch.testing.assert_close(logits(model), logits(other), rtol=0, atol=0)


def test_a_tied_head_may_be_in_the_file_or_stand_for_the_embedding(load, make_model, tmp_path):
    tensors, expected = load_file(make_model("qwen3", 1) / "model.safetensors"), logits(load("qwen3", 1))
    assert "lm_head.weight" not in tensors
    for names in (["model.embed_tokens.weight", "lm_head.weight"], ["lm_head.weight"]):
        table = tensors["model.embed_tokens.weight"]
        rest = {name: tensor for name, tensor in tensors.items() if name != "model.embed_tokens.weight"}
        save_file(rest | {name: table.clone() for name in names}, tmp_path / "model.safetensors")
        model = load("qwen3", 0)
        copy_weights(model, tmp_path)
        torch.testing.assert_close(logits(model), expected, rtol=0, atol=0)


def test_two_different_tensors_for_one_tied_weight_are_refused(load, make_model, tmp_path):
    tensors = load_file(make_model("qwen3", 1) / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, tmp_path / "model.safetensors")
    model = load()
    before = logits(model)
    with pytest.raises(WeightsError, match=r"embed_tokens.*lm_head.weight differ.*one tensor"):
        copy_weights(model, tmp_path)
    torch.testing.assert_close(logits(model), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "1 missing .model.norm.weight"),
        (lambda t: t.update(stray=torch.zeros(2)), "1 unknown .stray"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), r"model.norm.weight: file \(3,\), model \(32,\)"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_whole(change, message, load, make_model, tmp_path):
    tensors = load_file(make_model("qwen3", 1) / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    model = load()
    before = logits(model)
    with pytest.raises(WeightsError, match=message):
        copy_weights(model, tmp_path)
    torch.testing.assert_close(logits(model), before, rtol=0, atol=0)


def test_a_torn_file_is_a_weights_error(load, make_model, tmp_path):
    whole = (make_model("qwen3", 1) / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(WeightsError, match="cannot be read as safetensors"):
        copy_weights(load(), tmp_path)


def test_models_that_slots_cannot_hold_are_refused(make_model, tmp_path):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, use_sliding_window=True, sliding_window=4, max_window_layers=1,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="sliding_attention"):
        load_causal_lm(tmp_path, "float32", "sdpa")
    with pytest.raises(ModelError, match=r"float16.*allowed: float32, bfloat16"):
        load_causal_lm(make_model(), "float16", "sdpa")
