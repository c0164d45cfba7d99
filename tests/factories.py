"""Models, tokenizers, trajectories and settings that tests of several rooms need, each made in one place.

Imports of torch and transformers are inside the functions: collecting tests must not cost them.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from libra.store.quantum_records import QuantumRecord
from libra.types import EndReason, Prompt, Trajectory, TrajectoryId

CHAT_TEMPLATE = (
    "{%- for m in messages %}{{'<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n'}}{%- endfor %}"
    "{%- if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{%- endif %}"
)
SHAPE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 1024, "tie_word_embeddings": True,
}  # fmt: skip
"""Of a random model, unless a test asks for another: about 40,000 parameters."""
MIXTURE = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
FAMILIES = {
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen2": ("Qwen2", {}),
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "mistral": ("Mistral", {"sliding_window": None, "tie_word_embeddings": False}),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 16, "decoder_sparse_step": 1, "initializer_range": 0.1} | MIXTURE),
}


def byte_tokenizer() -> Any:
    """A tokenizer with one token a byte, `CHAT_TEMPLATE`, and ``<|im_end|>`` at the end of a turn."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save_model(
    directory: Path,
    family: str = "qwen3",
    *,
    seed: int = 0,
    matrix_std: float | None = None,
    is_uneven: bool = False,
    **shape: Any,
) -> Path:
    """Save a random model of a family of `FAMILIES` in a directory, and return that.

    ``matrix_std`` replaces the standard deviation of every matrix: with the usual 0.02 all logits are nearly equal, and many
    mistakes would not show. ``is_uneven`` draws biases and norms, whose zeros and ones would hide one that was left out.
    """
    import torch
    import transformers

    name, own = FAMILIES[family]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**SHAPE | own | shape)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if matrix_std is not None and parameter.ndim == 2:
                parameter.normal_(std=matrix_std)
            elif is_uneven and key.endswith(".bias"):
                parameter.normal_(std=0.5)
            elif is_uneven and "norm" in key:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(directory)
    return directory


def save_chat_model(directory: Path, family: str = "qwen3", **shape: Any) -> Path:
    """Save a random model with `byte_tokenizer` in a directory: all that a run needs."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(directory)
    tokens = {"eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"), "pad_token_id": 256}
    return save_model(directory, family, vocab_size=len(tokenizer), **tokens | shape)


def kinds_of(records: Iterable[QuantumRecord]) -> list[str]:
    """The kind of each record of a journal, as its file has it."""
    return [str(record.__struct_config__.tag) for record in records]


def trajectory(
    trajectory_id: TrajectoryId | None = None,
    *,
    lengths: Sequence[int] = (5, 4, 3, 6),
    version: int = 0,
    versions: Sequence[int] | None = None,
    seed: int = 0,
    vocabulary: int = 48,
    **changes: Any,
) -> Trajectory:
    """A trajectory of random tokens, all fields set; ``changes`` replace any.

    Its tokens are a prompt, a generation, an observation, a generation and so on of the given ``lengths``, sampled at
    ``version``; or, with ``versions``, two tokens of a prompt and then one generated token of each version.
    """
    rng = np.random.default_rng(seed)
    if versions is None:
        is_action = np.concatenate([np.full(length, part % 2 == 1) for part, length in enumerate(lengths)])
        made = np.where(is_action, version, -1).astype(np.int32)
    else:
        made = np.array([-1, -1, *versions], np.int32)
        is_action = made >= 0
    values: dict[str, Any] = {
        "trajectory_id": trajectory_id or TrajectoryId(0, 0, seed),
        "prompt": Prompt("p", ()),
        "token_ids": rng.integers(0, vocabulary, len(made)).astype(np.int32),
        "is_action": is_action,
        "behaviour_logprob": np.where(is_action, rng.uniform(-4, -0.5, len(made)), 0).astype(np.float32),
        "weight_version": made,
        "kv_version": made.copy(),
        "turns": [],
        "end_reason": EndReason.ANSWERED,
        "reward": 1.0,
    }
    return Trajectory(**values | changes)


def run_settings(directory: Path, model: Path, /, **sections: dict[str, Any]) -> dict[str, Any]:
    """Settings of a small run, as `libra.config.config_from_dict` takes them; ``sections`` are laid over these, key by key."""
    values: dict[str, dict[str, Any]] = {
        "run": {"name": "demo", "dir": str(directory), "iterations": 2},
        "model": {"path": str(model)},
        "environment": {"name": "libra.testing:FixedTurns"},
        "rollout": {"max_new_tokens": 4, "max_turns": 3, "ignore_eos": True, "slots": 8},
        "trainer": {"prompts": 2, "group_size": 2, "lr": 1e-3},
        "cluster": {"threads": 1, "dashboard_port": 0},
        "observe": {"progress": False, "trackers": []},
    }
    for section, changes in sections.items():
        values.setdefault(section, {}).update(changes)
    return values
