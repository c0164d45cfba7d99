"""What tools returned, cut in tokens to what a context still holds.

Invariants
----------
1. Returns that fit are unchanged. Others lose their end; short ones are cut after long ones.
2. A cut return ends with a note of its tokens, for the model: ``[cut: 812 of 5,000 tokens kept]``.
3. Room for the next generation is left, so that a tool does not end the trajectory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from libra.rollout.chat_format import ChatFormat

_ANSWER_SHARE = 4
"""A quarter of what is left of a context is for the next generation, but no more than a turn may have."""


def fitted(
    chat: ChatFormat,
    contents: Sequence[str],
    left_tokens: int,
    max_new_tokens: int,
    *,
    ended: bool,
    role: str = "tool",
) -> tuple[list[str], NDArray[np.int32]]:
    """The returns of a turn's calls as the model reads them, and their token ids.

    Parameters
    ----------
    chat : ChatFormat
    contents : sequence of str
    left_tokens : int
        Tokens that the context still holds.
    max_new_tokens : int
        Most tokens of the next generation.
    ended : bool
        As of `ChatFormat.observation_ids`.
    role : "tool" or "user"
        Of the messages; "user" has one, the environment's own answer.

    Returns
    -------
    list of str, array
        If not even the notes fit, the ids are longer than ``left_tokens``: then the context is full without any return.
    """

    def rendered(texts: Sequence[str]) -> NDArray[np.int32]:
        if role == "user":
            (text,) = texts
            return chat.user_ids(text, ended=ended)
        return chat.observation_ids(texts, ended=ended)

    ids = rendered(contents)
    room = left_tokens - max(1, min(max_new_tokens, left_tokens // _ANSWER_SHARE))
    shown = list(contents)
    if len(ids) <= room:
        return shown, ids
    tokens = [chat.text_ids(content) for content in contents]
    kept = sum(map(len, tokens))
    while len(ids) > room and kept > 0:
        kept = max(0, kept - max(1, len(ids) - room))
        shares = _shares([len(each) for each in tokens], kept)
        shown = [
            content if share == len(own) else _cut(chat, own, share)
            for content, own, share in zip(contents, tokens, shares, strict=True)
        ]
        ids = rendered(shown)
    return shown, ids


def _cut(chat: ChatFormat, ids: NDArray[np.int32], kept: int) -> str:
    text = chat.tokenizer.decode(ids[:kept].tolist(), clean_up_tokenization_spaces=False).rstrip("\ufffd")
    note = f"[cut: {kept:,} of {len(ids):,} tokens kept]"
    return f"{text}\n{note}" if text else note


def _shares(lengths: Sequence[int], total: int) -> list[int]:
    """Tokens of each return, ``total`` together: the shortest whole, the others as many each."""
    shares, left = [0] * len(lengths), total
    for rank, index in enumerate(sorted(range(len(lengths)), key=lambda each: lengths[each])):
        shares[index] = min(lengths[index], left // (len(lengths) - rank))
        left -= shares[index]
    return shares
