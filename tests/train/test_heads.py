import pytest
import torch
from transformers import CohereConfig, Gemma2Config, GPT2Config, GraniteConfig, Qwen3Config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from libra.errors import ModelError, TrainError
from libra.heads import after_head, head_of, score_alone
from libra.train.logprobs import Scorer, chunked_columns

SIZES = {
    "vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip
CONFIGS = {
    "qwen3": Qwen3Config(**SIZES),
    "qwen3 tied": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "gemma2 caps": Gemma2Config(**SIZES, final_logit_softcapping=2.0),
    "granite divides": GraniteConfig(**SIZES, logits_scaling=3.0),
    "cohere multiplies": CohereConfig(**SIZES, logit_scale=0.25, eos_token_id=1, bos_token_id=2),
    "gpt2": GPT2Config(vocab_size=31, n_embd=16, n_layer=2, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=1),
}
DOES_SOMETHING = {"gemma2 caps", "granite divides", "cohere multiplies"}


def model_of(name):
    torch.manual_seed(0)
    config = CONFIGS[name]
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.4)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_chunks_score_as_the_whole_logits_do_gradients_included(name):
    model = model_of(name)
    assert (after_head(model) is not None) == (name in DOES_SOMETHING)
    ids_RW = torch.randint(1, 31, (2, 9), generator=torch.Generator().manual_seed(1))
    position_RW = torch.arange(9).expand(2, 9)
    at_N, target_N = torch.tensor([1, 2, 5, 10, 11, 16]), torch.tensor([3, 30, 7, 0, 9, 3])
    slope_N, bonus_N = torch.linspace(-1, 2, 6).double(), torch.linspace(1, -0.5, 6).double()
    results = []
    for whole in (True, False):
        model.zero_grad(set_to_none=True)
        if whole:
            logits = model(input_ids=ids_RW, position_ids=position_RW, use_cache=False).logits.flatten(0, 1)[at_N]
            all_logp = (logits / 0.7).log_softmax(-1)
            logp_N = all_logp.gather(-1, target_N[:, None])[:, 0]
            entropy_N = -(all_logp.exp() * all_logp).sum(-1)
        else:
            scorer = Scorer(model, 0.7, 4)
            logp_N, entropy_N = scorer.logp(ids_RW, position_RW, at_N, target_N, entropy_gradient=True)
        (logp_N * slope_N + entropy_N * bonus_N).sum().backward()
        results.append([logp_N.detach(), entropy_N.detach(), *(p.grad for p in model.parameters())])
    for expected, got in zip(*results, strict=True):
        # Norms and softmax of some architectures are float32 in a float64 model too: both sides see the same there.
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12 if name.startswith("qwen3") else 1e-7)
    assert max(float(grad.abs().max()) for grad in results[0][2:]) > 1e-3


def test_a_sequence_scored_alone_is_scored_by_the_model(monkeypatch):
    monkeypatch.setattr("libra.heads.CHUNK_TOKENS", 4)
    model = model_of("gemma2 caps").float()
    ids = torch.arange(1, 16)
    with torch.no_grad():
        logits = model(input_ids=ids[None, :-1]).logits[0, 4:].float() / 0.7
    expected = logits.log_softmax(-1).gather(1, ids[5:, None])[:, 0]
    torch.testing.assert_close(torch.from_numpy(score_alone(model, ids.numpy(), 5, 0.7)), expected, rtol=0, atol=1e-5)


def test_never_more_logits_than_a_chunk(monkeypatch):
    model = model_of("qwen3")
    seen = []
    linear = torch.nn.functional.linear

    def watched(inputs, weight, bias=None):
        output = linear(inputs, weight, bias)
        if output.shape[-1] == 31:
            seen.append(output.numel() // 31)
        return output

    monkeypatch.setattr(torch.nn.functional, "linear", watched)
    ids_RW = torch.randint(1, 31, (1, 20))
    logp_N, _ = Scorer(model, 1.0, 6).logp(ids_RW, torch.arange(20)[None], torch.arange(19), ids_RW[0, 1:])
    logp_N.sum().backward()
    assert max(seen) == 6
    assert sum(seen) == 2 * 19  # once forward, once again in the backward pass, and no others


def test_heads_that_cannot_be_taken_apart_are_refused():
    model = model_of("qwen3")
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(ModelError, match="Sequential"):
        head_of(model)
    model = model_of("qwen3")
    model.base_model_prefix = ""
    with pytest.raises(ModelError, match="base_model_prefix"):
        after_head(model)


def test_a_frozen_head_gets_no_gradient_and_no_tokens_are_no_error():
    hidden = torch.randn(4, 3, requires_grad=True)
    weight = torch.randn(6, 3)
    logp, *_ = chunked_columns(hidden, weight, torch.zeros(4, 1, dtype=torch.int64), chunk_tokens=2)
    logp.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None
    none, entropy, _ = chunked_columns(hidden[:0], weight, torch.zeros(0, 1, dtype=torch.int64))
    assert none.shape == (0, 1) and entropy.shape == (0,)
    with pytest.raises(TrainError):
        chunked_columns(hidden, weight, torch.zeros(4, 1, dtype=torch.int64), chunk_tokens=0)


def test_a_token_of_probability_zero_leaves_the_entropy_finite():
    bias = torch.tensor([0.0, 0.0, -torch.inf])
    logp, entropy, _ = chunked_columns(torch.zeros(2, 1), torch.zeros(3, 1), torch.tensor([[0], [1]]), bias_V=bias)
    torch.testing.assert_close(entropy, torch.full((2,), 2.0).log())
    torch.testing.assert_close(logp[:, 0], -torch.full((2,), 2.0).log())
