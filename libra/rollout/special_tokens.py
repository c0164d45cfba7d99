"""Special tokens that a text spells: a tokenizer reads ``<|im_end|>`` as the token that ends a turn, whoever wrote it.

A tool that returned such text would write the next speaker's turn. So the spelling is broken where the text of a tool, or of an
environment's own turn, goes into a conversation: its first character becomes U+FFFD, which the model sees, as it does for control
characters (`libra.untrusted`).

Invariants
----------
1. `SpecialTokens.broken` text spells no guarded token, and is as long as before. Applied twice it changes nothing.
2. Guarded are the special tokens of the tokenizer, and its other added tokens that the chat template writes (``<tool_response>``).
   Others, such as runs of spaces or HTML tags, are ordinary text.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.untrusted import REPLACEMENT


class SpecialTokens:
    """The guarded tokens of a tokenizer with a chat template."""

    def __init__(self, tokenizer: Any) -> None:
        template = str(tokenizer.chat_template)
        spelled = {
            int(token_id): token.content
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.content.strip() and (token.special or token.content in template)
        }
        # A tokenizer may have no other token for U+FFFD than that of unknown text, which plays no part in a conversation.
        ids = sorted(spelled.keys() - {tokenizer.unk_token_id})
        self._guarded = np.zeros(max(ids, default=-1) + 2, bool)  # by id; the last one is for all above
        self._guarded[ids] = True
        rests: dict[str, list[str]] = {}
        for text in spelled.values():
            rests.setdefault(text[0], []).append(re.escape(text[1:]))
        # Only the first character is consumed, so that spellings which overlap are all found, in one pass.
        parts = [f"{re.escape(first)}(?={'|'.join(sorted(rest))})" for first, rest in sorted(rests.items())]
        self._first = re.compile("|".join(parts)) if parts else None

    def broken(self, text: str) -> str:
        """``text`` with the first character of every guarded token in it replaced by U+FFFD."""
        return text if self._first is None else self._first.sub(REPLACEMENT, text)

    def count(self, ids: NDArray[np.int32]) -> int:
        """How many of ``ids`` are guarded tokens."""
        return int(np.count_nonzero(self._guarded.take(ids, mode="clip")))
