"""Requests of agents as token ids: whole conversations, and the messages after a generated turn.

A generated turn is never rendered again: the ids after it are the text that the template puts after
a placeholder. All texts are the agent's, so none may yield a special token.
"""

from __future__ import annotations

import contextlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.rollout.chat_format import ChatFormat

NFC_SHRINKS = 4
"""Bound of the factor by which NFC shortens UTF-8 (U+1FBE U+0308 U+0301: 7 to 2)."""
_KEEP_ALL = {"Sequence", "ByteLevel", "Split", "Digits"}
"""Pre-tokenizer steps that lose no character, as long as splits are not "Removed"."""


def most_bytes_of_a_token(tokenizer: Any) -> int | None:
    """Most bytes of UTF-8 text that one token stands for; None without a known bound. Known for BPE
    over bytes without a normalizer or with NFC, with a token for every byte (GPT-2, Qwen, Llama
    3)."""
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
    if any(token.lstrip or token.rstrip for token in added):  # such tokens include any number of spaces
        return None
    longest = max([*map(len, vocabulary), *(len(token.content.encode()) for token in added)])
    return longest * (1 if normalizer is None else NFC_SHRINKS)


def _steps(pre_tokenizer: Any) -> list[dict[str, Any]]:
    if pre_tokenizer is None:
        return []
    steps, pending = [], [json.loads(pre_tokenizer.__getstate__())]
    while pending:
        step = pending.pop()
        steps.append(step)
        pending += step.get("pretokenizers", [])
    return steps


Messages = Sequence[Mapping[str, Any]]

KEPT_TOOLS = 64
"""Sets of tools whose format is kept."""
_NAME = "libra_stands_in"


class ConversationFormat:
    """The tokens of agents' messages, with tokenizer and stop ids of the run's own format ``chat``.
    A text that must have more than ``most_tokens`` tokens raises ContextOverflow before it is
    tokenised. Several threads may call this object at once."""

    def __init__(self, chat: ChatFormat, most_tokens: int | None = None) -> None:
        self.chat = chat
        bytes_of_a_token = None if most_tokens is None else most_bytes_of_a_token(chat.tokenizer)
        self._most_bytes = None if most_tokens is None or bytes_of_a_token is None else most_tokens * bytes_of_a_token
        self._formats: OrderedDict[str, _Format] = OrderedDict()
        self._last: tuple[Sequence[Mapping[str, Any]], Mapping[str, Any], _Format] | None = None

    def prompt_ids(self, messages: Messages, tools: Sequence[Mapping[str, Any]] = (), **args: Any) -> NDArray[np.int32]:
        """A conversation with its generation prompt, int32 (T,); ``args`` are template variables.
        ModelError if the template cannot show the messages, ValueError if a text yields a special
        token."""
        return self._of(tools, args).prompt_ids(messages)

    def tail_ids(
        self, messages: Messages, tools: Sequence[Mapping[str, Any]] = (), *, last: int, **args: Any
    ) -> NDArray[np.int32]:
        """The ids of messages after a generated turn, and of the next generation prompt. ``last``
        is the turn's last token; unless it is the template's marker, the marker comes first. Raises
        as `prompt_ids`."""
        return self.chat.rest(self._of(tools, args).tail_ids(messages), last)

    def _of(self, tools: Sequence[Mapping[str, Any]], args: Mapping[str, Any]) -> _Format:
        last = self._last
        if last is not None and tools is last[0] and args == last[1]:
            return last[2]
        name = json.dumps([list(tools), dict(args)], sort_keys=True)
        made = self._formats.pop(name, None) or _Format(self.chat, tools, args, self._most_bytes)
        self._formats[name] = made
        if len(self._formats) > KEPT_TOOLS:
            with contextlib.suppress(KeyError):  # another thread may have done so
                self._formats.popitem(last=False)
        self._last = tools, args, made
        return made


class _Format:
    def __init__(
        self, chat: ChatFormat, tools: Sequence[Mapping[str, Any]], args: Mapping[str, Any], most_bytes: int | None
    ) -> None:
        self._chat = chat.with_tools(tools, args)
        self._chat.most_bytes = most_bytes
        self._structures: dict[Any, int] = {}
        self._plain: dict[int, bool] = {}
        self._shows_calls = self._tries_calls()

    def _tries_calls(self) -> bool:
        try:
            return _NAME in self._chat.render([{"role": "user", "content": "?"}, _calling("", _NAME, {})])
        except Exception:  # noqa: BLE001 - jinja runs the model's own template, which may raise anything
            return False

    def prompt_ids(self, messages: Messages) -> NDArray[np.int32]:
        return self._checked(messages, self._chat.conversation_ids)

    def tail_ids(self, messages: Messages) -> NDArray[np.int32]:
        contents = [message["content"] for message in messages if message["role"] == "tool"]
        if len(contents) < len(messages):
            return self._checked(messages, self._chat.after_assistant_ids)
        if self._plain.get(len(contents)):
            return self._chat.observation_ids(contents, ended=False)  # usually needs no rendering, which is slow
        ids = self._checked(messages, self._chat.after_assistant_ids)
        if len(contents) not in self._plain:  # a template may show the ids of calls
            self._plain[len(contents)] = np.array_equal(ids, self._chat.observation_ids(contents, ended=False))
        return ids

    def _checked(self, messages: Messages, ids_of: Any) -> NDArray[np.int32]:
        ids: NDArray[np.int32] = ids_of([self._shown(self._broken(message)) for message in messages])
        structure = (ids_of.__name__, *(_structure(message) for message in messages))
        special = self._structures.get(structure)
        if special is None:
            if len(self._structures) > 256:
                self._structures.clear()
            harmless = [self._shown(_harmless(message)) for message in messages]
            special = self._structures[structure] = self._chat.special.count(ids_of(harmless))
        if self._chat.special.count(ids) > special:
            raise ValueError("a text spells special tokens in a way that this tokenizer finds and Libra does not")
        return ids

    def _broken(self, given: Any) -> Any:
        if isinstance(given, str):
            return self._chat.special.broken(given)
        if isinstance(given, Mapping):
            return {key: self._broken(value) if key != "role" else value for key, value in given.items()}
        return [self._broken(each) for each in given] if isinstance(given, list) else given

    def _shown(self, message: Mapping[str, Any]) -> dict[str, Any]:
        calls = message.get("tool_calls")
        if not calls or self._shows_calls:
            return dict(message)
        parts = [message["content"]] if message["content"] else []
        parts += [f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls]
        return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": "\n".join(parts)}


def _calling(text: str, name: str, arguments: Any) -> dict[str, Any]:
    call = {"id": "call_0", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": text, "tool_calls": [call]}


def _structure(message: Mapping[str, Any]) -> tuple[Any, ...]:
    calls = len(message.get("tool_calls", ()))
    return message["role"], bool(message["content"].strip()), bool(message.get("reasoning_content")), calls


def _harmless(message: Mapping[str, Any]) -> dict[str, Any]:
    made = {**message, "content": "x" if message["content"].strip() else ""}
    if "reasoning_content" in made:
        made["reasoning_content"] = "x"
    if "tool_calls" in made:
        made["tool_calls"] = _calling("", "x", {})["tool_calls"] * len(made["tool_calls"])
    return made
