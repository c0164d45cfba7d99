"""How few tokens a text can have, from its size alone, for tokenizers of which that is known."""

from __future__ import annotations

import json
from typing import Any

NFC_SHRINKS = 4
"""More bytes of UTF-8 than NFC ever makes one of: seven of U+1FBE U+0308 U+0301 become two."""
_KEEP_ALL = {"Sequence", "ByteLevel", "Split", "Digits"}
"""Steps before the model that lose no character, as long as splits are not "Removed"."""


def most_bytes_of_a_token(tokenizer: Any) -> int | None:
    """Most bytes of a text, as UTF-8, that one token stands for; None where there is no such bound that holds for every text.

    It is known of BPE over bytes without a normalizer or with NFC, which has a token for every byte: GPT-2's, Qwen's, Llama 3's and
    their like. Others may drop characters, or make one token of any unknown word.
    """
    from tokenizers import pre_tokenizers
    from tokenizers.models import BPE
    from tokenizers.normalizers import NFC

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not isinstance(backend.model, BPE):
        return None
    normalizer = backend.normalizer
    if normalizer is not None and not isinstance(normalizer, NFC):
        return None
    vocabulary, steps = backend.get_vocab(with_added_tokens=False), _steps(backend.pre_tokenizer)
    over_bytes = any(step["type"] == "ByteLevel" for step in steps)
    loses = any(step["type"] not in _KEEP_ALL or step.get("behavior") == "Removed" for step in steps)
    if not over_bytes or loses or not set(pre_tokenizers.ByteLevel.alphabet()) <= vocabulary.keys():
        return None
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):  # they take any number of spaces
        return None
    longest = max([*map(len, vocabulary), *(len(token.content.encode()) for token in added)])
    return longest * (1 if normalizer is None else NFC_SHRINKS)


def _steps(pre_tokenizer: Any) -> list[dict[str, Any]]:
    """The parts of a pre-tokenizer, as its file has them."""
    if pre_tokenizer is None:
        return []
    steps, pending = [], [json.loads(pre_tokenizer.__getstate__())]
    while pending:
        step = pending.pop()
        steps.append(step)
        pending += step.get("pretokenizers", [])
    return steps
