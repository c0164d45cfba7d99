import numpy as np
import pytest
import torch
import transformers

from libra.errors import LibraError
from libra.rollout.attention import SLOT_ATTENTION, register
from libra.rollout.capacity import architecture_of, read_model_config
from libra.rollout.slot_batch import SlotBatch
from libra.rollout.weight_loading import check_served, load_causal_lm
from libra.train.logprobs import Scorer, check_packing, load_model

# fmt: off
SIZES = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "num_local_experts": 4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 1e4}
OLD = {"vocab_size": 48, "hidden_size": 32, "bos_token_id": 1, "eos_token_id": 2, "n_layer": 2, "n_head": 4, "n_positions": 64}
NEO = {"vocab_size": 48, "hidden_size": 32, "num_heads": 4, "num_layers": 2, "attention_types": [[["global", "local"], 1]]}
WINDOW = {"sliding_window": 8}
BOTH = WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}
SERVED = {
    "Llama": {"tie_word_embeddings": True}, "Llama yarn": {"rope_parameters": YARN}, "Llama dynamic": DYNAMIC, "Mistral": WINDOW,
    "Qwen2 both": WINDOW | {"use_sliding_window": True, "max_window_layers": 1}, "Qwen3 tied": {"tie_word_embeddings": True},
    "Qwen3Moe": EXPERTS, "Mixtral": EXPERTS | WINDOW, "Phi3": {"partial_rotary_factor": 0.5}, "Olmo2": {}, "Gemma3Text": BOTH,
    "Gemma2": WINDOW | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 4}, "Cohere2": BOTH,
    "Granite": {"attention_multiplier": 0.4, "logits_scaling": 3.0}, "Starcoder2": WINDOW, "SmolLM3": {"no_rope_layers": [1, 0]},
    "Glm4": {"partial_rotary_factor": 0.5}, "GPTNeoX": {"num_key_value_heads": 4}, "Phi": {}, "Exaone4": BOTH, "GPT2": OLD,
}
REFUSED = {
    "Llama dynamic": DYNAMIC | {"max_position_embeddings": 32}, "GptOss": EXPERTS | WINDOW, "StableLm": {}, "DeepseekV3": {},
    "Phi3 long": {"original_max_position_embeddings": 32, "rope_parameters": LONG}, "Bloom": OLD, "Llama4Text": EXPERTS,
    "Lfm2": {"layer_types": ["conv", "full_attention"]}, "GPTNeo": NEO,
}
# fmt: on


@pytest.fixture
def make(tmp_path):
    def build(name, settings):
        torch.manual_seed(0)
        given = settings if settings.keys() & {"n_head", "num_layers"} else SIZES | settings
        config = getattr(transformers, f"{name.split()[0]}Config")(**given)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(tmp_path)
        register()
        return SlotBatch(load_causal_lm(tmp_path, "float32", SLOT_ATTENTION), slots=2, max_context_tokens=64, version=0)

    return build


@pytest.mark.parametrize("name", SERVED)
def test_a_batch_is_the_model_on_each_sequence_alone_as_a_packed_row_is(name, make, tmp_path, make_request, serve_all):
    requests = {each: make_request(each, length=length, new=12) for each, length in (("a", 5), ("b", 45))}
    outputs, model = serve_all(make(name, SERVED[name]), *requests.values()), load_model(tmp_path, torch.float32)
    check_served(tmp_path, 64)
    assert "-2x32-h4" in architecture_of(read_model_config(tmp_path))
    ids = [torch.from_numpy(np.append(r.context_ids, outputs[k].token_ids)).long() for k, r in requests.items()]
    positions, at = torch.cat([torch.arange(len(each)) for each in ids])[None], torch.arange(sum(map(len, ids)) - 1)
    packed = Scorer(model).logp(torch.cat(ids)[None], positions, at, torch.cat(ids)[1:])[0].detach().numpy()
    check_packing(Scorer(model), 1e-4)
    model.set_attn_implementation("eager")
    for key, own, first in zip(requests, ids, (0, len(ids[0])), strict=True):
        with torch.no_grad():
            logits = model(own[None, :-1], use_cache=False).logits[0]
        expected = logits.log_softmax(-1).gather(1, own[1:, None])[:, 0].numpy()
        np.testing.assert_allclose(outputs[key].logprobs, expected[-12:], rtol=0, atol=1e-5)
        np.testing.assert_allclose(packed[first : first + len(expected)], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_what_slots_cannot_hold_is_refused_with_what_to_type(name, make, tmp_path):
    with pytest.raises(LibraError, match="; type rollout"):
        make(name, REFUSED[name])
    if name not in ("Llama4Text", "StableLm", "DeepseekV3"):  # which need weights for that
        with pytest.raises(LibraError, match="; type rollout"):
            check_served(tmp_path, 64)
