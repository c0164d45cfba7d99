import pytest
import torch
from safetensors.torch import load_file, save_file

from libra.errors import ModelError, WeightsError
from libra.rollout.weight_loading import ExpectedWeights, copy_weights, load_causal_lm


@pytest.fixture
def load(make_model):
    return lambda family="qwen3", seed=0: load_causal_lm(make_model(family, seed), "float32", "sdpa")


def logits(model):
    return model(torch.arange(12)[None]).logits


@pytest.mark.parametrize("family", ["qwen3", "llama"])
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
        assert ExpectedWeights.of_directory(make_model(), tied=True).check(tmp_path) == tmp_path / "model.safetensors"


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.pop("model.norm.weight"),
        lambda t: t.update(stray=torch.zeros(2)),
        lambda t: t.update({"model.norm.weight": torch.zeros(3)}),
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}),  # which this model ties
    ],
)
@pytest.mark.parametrize("engine", ["slots", "vllm"])
def test_a_file_that_does_not_fit_is_refused_whole(change, engine, load, make_model, tmp_path):
    tensors = load_file(make_model("qwen3", 1) / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    model = load()
    before = logits(model)
    expected = ExpectedWeights.of_directory(make_model(), tied=True)
    with pytest.raises(WeightsError):
        copy_weights(model, tmp_path) if engine == "slots" else expected.check(tmp_path)
    torch.testing.assert_close(logits(model), before, rtol=0, atol=0)


def test_a_torn_file_is_a_weights_error(load, make_model, tmp_path):
    expected = ExpectedWeights.of_directory(make_model(), tied=True)
    whole = make_model("qwen3", 1) / "model.safetensors"
    for size in (0, 5, 200, whole.stat().st_size - 1):
        (tmp_path / "model.safetensors").write_bytes(whole.read_bytes()[:size])
        with pytest.raises(WeightsError):
            copy_weights(load(), tmp_path)
        with pytest.raises(WeightsError):
            expected.check(tmp_path)


def test_a_dtype_that_no_engine_has_is_refused(make_model):
    with pytest.raises(ModelError, match="float16"):
        load_causal_lm(make_model(), "float16", "sdpa")
