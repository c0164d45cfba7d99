"""The task of ``vs_trl``: a random model generates words, and even ones are rewarded.

Nothing here imports Libra or TRL, because both environments read this file. It makes the two sides
comparable:

1. Every prompt has the same number of tokens, so that neither side pads, or gains by packing.
2. No completion can end early: the output rows of all special tokens point against a constant
   direction of the last hidden state, about 100 nats below every word. Neither side needs a logits
   processor to reach the full length.
3. The reward needs no model and takes microseconds.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

VOCABULARY = 384
SPECIALS = ("<|pad|>", "<|im_start|>", "<|im_end|>", "user", "assistant", "system")
"""First ids of the vocabulary; ``<|im_end|>`` ends a turn, the chat template uses the roles."""
PROMPT_WORDS = 16
PROMPTS_PER_STEP = 16
GROUP_SIZE = 8
NEW_TOKENS = 32
LEARNING_RATE = 1e-4
BETAS = (0.9, 0.95)
MAX_GRAD_NORM = 1.0
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
TEMPERATURE = 1.0

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|> {{ message['role'] }} {{ message['content'] }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant{% endif %}"
)


def word(index: int) -> str:
    return f"w{index}"


def question(seed: int) -> str:
    generator = random.Random(seed)
    return " ".join(word(generator.randrange(len(SPECIALS), VOCABULARY)) for _ in range(PROMPT_WORDS))


def reward(text: str) -> float:
    words = text.split()
    return sum(int(each[1:]) % 2 == 0 for each in words if each.startswith("w")) / len(words) if words else 0.0


def save_model(directory: Path, *, seed: int = 0, positions: int = 1024) -> int:
    """Write model and tokenizer to ``directory`` in Hugging Face layout; returns the number of
    parameters.

    Qwen3 architecture in float32 with contexts up to ``positions``: 4 layers of width 256, 8 heads
    on 2 key-value heads, feed-forward width 512, separate embeddings. Channel 0 of the residual
    stream is the constant of invariant 2: every input embedding holds it and no layer writes it.
    """
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    end = SPECIALS.index("<|im_end|>")
    pad = SPECIALS.index("<|pad|>")
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=positions, tie_word_embeddings=False,
        attention_dropout=0.0, bos_token_id=None, eos_token_id=end, pad_token_id=pad,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 0.2
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[: len(SPECIALS)] = 0.0
        model.lm_head.weight[: len(SPECIALS), 0] = -20.0
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=pad, do_sample=True)
    model.save_pretrained(directory)
    _tokenizer().save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIALS, *(word(index) for index in range(len(SPECIALS), VOCABULARY))]
    inner = Tokenizer(models.WordLevel({text: index for index, text in enumerate(words)}, unk_token="<|pad|>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<|pad|>", eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"], chat_template=CHAT_TEMPLATE,
    )  # fmt: skip
