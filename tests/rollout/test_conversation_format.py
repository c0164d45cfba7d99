from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import libra
from libra.errors import ContextOverflow
from libra.rollout.chat_format import load_chat_format
from libra.rollout.conversation_format import ConversationFormat, most_bytes_of_a_token


def tokenizer(**parts):
    """A tokenizer over bytes, with a token of six spaces; ``parts`` replace those that it has."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "\u0120" * 2, "\u0120" * 6]
    vocab = {text: index for index, text in enumerate(words)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[("\u0120", "\u0120")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for name, part in parts.items():
        if name == "added":
            made.add_special_tokens([part])
        else:
            setattr(made, name, part)
    return PreTrainedTokenizerFast(tokenizer_object=made)


PLAIN, NFC = tokenizer(), tokenizer(normalizer=normalizers.NFC())


@given(st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(" \u1fbe\u0308\u0301\u212a")))
def test_no_text_has_fewer_tokens_than_its_size_says(text):
    for each in (PLAIN, NFC):
        most = most_bytes_of_a_token(each)
        assert len(text.encode()) <= most * len(each.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("parts", [
    {"normalizer": normalizers.Strip()}, {"pre_tokenizer": pre_tokenizers.Whitespace()},
    {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()])},
    {"model": models.BPE(vocab={"a": 0}, merges=[])}, {"added": AddedToken("<x>", lstrip=True)},
])  # fmt: skip
def test_where_a_token_may_stand_for_any_text_nothing_is_said(parts):
    assert most_bytes_of_a_token(tokenizer(**parts)) is None


def test_a_text_that_cannot_fit_is_not_tokenised(monkeypatch):
    chat = load_chat_format(Path(libra.__file__).parent / "assets" / "tiny_arithmetic")
    monkeypatch.setattr("libra.rollout.conversation_format.most_bytes_of_a_token", lambda _: 8)
    limited = ConversationFormat(chat, 512)
    short, long = [{"role": "user", "content": "1 + 1?"}], [{"role": "user", "content": "1" * 5000}]
    assert len(limited.prompt_ids(short)) == len(ConversationFormat(chat).prompt_ids(short))
    for ids_of in (limited.prompt_ids, lambda messages: limited.tail_ids(messages, last=-1)):
        with pytest.raises(ContextOverflow):
            ids_of(long)
