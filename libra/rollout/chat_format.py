"""Messages to token ids and back, by the model's own chat template.

A conversation grows by appending; generated text is never tokenised again. Observation ids are the
text that the template puts after a placeholder for the assistant's turn. If the template omits
tools (SmolLM2's), the system message explains them.

1. No special token comes from the text of a tool or of an environment: otherwise a text such as
   ``<|im_end|>`` could forge the next speaker's turn. Prompts are unchanged.
2. `SpecialTokens.broken` replaces the first character of each guarded token by U+FFFD; the result
   has the same length and no guarded token. Guarded are special tokens, and added tokens in the
   template (``<tool_response>``), but not runs of spaces or HTML tags.
3. Tool returns that fit into the context are unchanged. Others, long returns first, are cut and end
   with a note: ``[cut: 812 of 5,000 tokens kept]``. Room for the next generation remains.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.errors import ContextOverflow, ModelError
from libra.model_loader import build_tokenizer
from libra.untrusted import REPLACEMENT, valid_unicode


class SpecialTokens:
    """The guarded tokens of a tokenizer with a chat template."""

    def __init__(self, tokenizer: Any) -> None:
        template = str(tokenizer.chat_template)
        spelled = {
            int(token_id): token.content
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.content.strip() and (token.special or token.content in template)
        }
        # U+FFFD may encode to the token for unknown text, so that token is not guarded.
        ids = sorted(spelled.keys() - {tokenizer.unk_token_id})
        self._guarded = np.zeros(max(ids, default=-1) + 2, bool)  # by id; the last entry is for all greater ids
        self._guarded[ids] = True
        rests: dict[str, list[str]] = {}
        for text in spelled.values():
            rests.setdefault(text[0], []).append(re.escape(text[1:]))
        # Only the first character is consumed, so that spellings which overlap are all found, in one pass.
        parts = [f"{re.escape(first)}(?={'|'.join(sorted(rest))})" for first, rest in sorted(rests.items())]
        self._first = re.compile("|".join(parts)) if parts else None

    def broken(self, text: str) -> str:
        """``text`` with the first character of every guarded token replaced by U+FFFD."""
        return text if self._first is None else self._first.sub(REPLACEMENT, text)

    def count(self, ids: NDArray[np.int32]) -> int:
        """Number of guarded tokens in ``ids``."""
        return int(np.count_nonzero(self._guarded.take(ids, mode="clip")))


logger = logging.getLogger(__name__)

_STAND_IN = "LIBRA-STANDS-IN"
_AWKWARD = " \"q\" 'a'\n{b}\\ <c> & \n"
"""Text that a template which trims, escapes or quotes tool messages would change."""


class ChatFormat:
    """A tokenizer, its chat template, and the tools that the template shows to the model.

    ``tool_schemas`` are JSON-schema function descriptions, ``generation_stop_ids`` the stop ids of
    the model's generation_config, and ``template_args`` further variables of the template, e.g.
    ``{"enable_thinking": False}``. ``tool_format`` is how the environment reads calls; only
    "hermes" can be explained to a model whose template omits tools.
    """

    def __init__(
        self,
        tokenizer: Any,
        tool_schemas: Sequence[Mapping[str, Any]] = (),
        *,
        generation_stop_ids: Sequence[int] = (),
        template_args: Mapping[str, Any] | None = None,
        tool_format: str = "hermes",
    ) -> None:
        if getattr(tokenizer, "chat_template", None) is None:
            raise ModelError(f"{tokenizer.name_or_path}: its tokenizer has no chat template; use a chat model")
        self.tokenizer = tokenizer
        self.tool_schemas = [dict(schema) for schema in tool_schemas]
        self._template_args = dict(template_args or {})
        self._generation_stop_ids, self._tool_format = tuple(generation_stop_ids), tool_format
        self.most_bytes: int | None = None
        """Bytes of UTF-8 beyond which a text is refused before it is tokenised, with ContextOverflow."""
        self._frames: dict[tuple[str, int], list[str] | None] = {}
        self.special = SpecialTokens(tokenizer)
        self._special_counts: dict[tuple[str, int], int] = {}
        self._explanation = self._missing_explanation(tool_format)
        self._markers = {int(i) for i, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
        self._ends = self._ends_of_turns()
        self.end_of_turn_id = next(iter(self._ends.values()))
        """The token with which the template ends an assistant turn, or begins the user's that follows."""
        ids = {*self._ends.values(), *generation_stop_ids}
        if tokenizer.eos_token_id is not None:
            ids.add(tokenizer.eos_token_id)
        self.stop_ids: tuple[int, ...] = tuple(sorted(int(i) for i in ids))
        """Ids that end a generation: the template's end of turn, the tokenizer's and the generation_config's eos."""

    def _ends_of_turns(self) -> dict[str, int]:
        found: dict[str, int] = {}
        fault: ModelError | None = None
        for role in ("user", "tool"):
            try:
                before, shown, _ = self._after_assistant([_STAND_IN], role).partition(_STAND_IN)
                if not shown:
                    raise ModelError(f"{self.tokenizer.name_or_path}: its template leaves out {role} messages")
                ids = self._encode(before)
                marked = self._marker(ids)
                if marked == len(ids) or self.tokenizer.decode(ids[:marked]).strip():
                    raise ModelError(
                        f"{self.tokenizer.name_or_path}: its template ends an assistant turn with {before!r}, without a special "
                        "token, so no turn could end"
                    )
                found[role] = int(ids[marked])
            except ModelError as error:
                if role == "tool" and self.tool_schemas:
                    raise
                fault = fault or error
        if not found and fault is not None:
            raise fault
        return found

    def _marker(self, ids: NDArray[np.int32]) -> int:
        return next((position for position, each in enumerate(ids) if int(each) in self._markers), len(ids))

    def ends(self, token_id: int, role: str) -> bool:
        """Whether ``token_id`` ends a turn as the template does before a message of ``role``."""
        return token_id == self._ends.get(role)

    def rest(self, ids: NDArray[np.int32], last: int | None = None) -> NDArray[np.int32]:
        """``ids`` after a turn, without their marker if it is ``last`` (default: always)."""
        marked = self._marker(ids)
        return ids[marked + 1 :] if marked < len(ids) and last in (None, ids[marked]) else ids

    def with_tools(self, tools: Sequence[Mapping[str, Any]], args: Mapping[str, Any]) -> ChatFormat:
        """The same model's format with other tools, and further variables of the template."""
        return ChatFormat(
            self.tokenizer,
            tools,
            generation_stop_ids=self._generation_stop_ids,
            template_args={**self._template_args, **args},
            tool_format=self._tool_format,
        )

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]]) -> NDArray[np.int32]:
        """A conversation up to and including the generation prompt, int32 (T,)."""
        given = [dict(message) for message in messages]
        if self._explanation:
            system = given.pop(0)["content"] + "\n" if given and given[0]["role"] == "system" else ""
            given.insert(0, {"role": "system", "content": system + self._explanation})
        return self._encode(self.render(given))

    def conversation_ids(self, messages: Sequence[Mapping[str, Any]]) -> NDArray[np.int32]:
        """As `prompt_ids`; ModelError if the template fails, ContextOverflow by `most_bytes`."""
        try:
            return self.prompt_ids(messages)
        except ContextOverflow:
            raise
        except Exception as error:  # jinja runs the model's own template, which may raise anything
            name = self.tokenizer.name_or_path
            raise ModelError(f"{name}: its template cannot show these messages: {error}") from error

    def after_assistant_ids(self, messages: Sequence[Mapping[str, Any]]) -> NDArray[np.int32]:
        """An assistant's end of turn, messages and generation prompt, int32 (T,); or ModelError."""
        return self._encode(self._render_messages_after(messages))

    def _missing_explanation(self, tool_format: str) -> str:
        if not self.tool_schemas:
            return ""
        messages = [{"role": "user", "content": "?"}]
        options = {"add_generation_prompt": True, "tokenize": False, **self._template_args}
        if self.render(messages) != self.tokenizer.apply_chat_template(messages, **options):
            return ""
        if tool_format != "hermes":
            raise ModelError(
                f"{self.tokenizer.name_or_path}: its chat template shows the model no tools, and calls in the format "
                f"{tool_format!r} cannot be explained to it; type rollout.tool_format=hermes"
            )
        name = self.tokenizer.name_or_path
        logger.info("%s: its template shows no tools; the system message explains them", name)
        return explanation(self.tool_schemas)

    def observation_ids(self, contents: Sequence[str], *, ended: bool = True) -> NDArray[np.int32]:
        """Tool messages and generation prompt, to append after an assistant turn, int32 (T,).
        Unless ``ended`` (the turn's last token `ends` the turn), the end-of-turn token comes first.
        ValueError if a content still yields a special token."""
        if not contents:
            raise ValueError("observation_ids: got no contents; there must be at least one tool message")
        texts = [self.special.broken(content) for content in contents]
        ids = self._encode(self._after_assistant(texts))
        self._check_special(ids, texts)
        return self.rest(ids) if ended else ids

    def text_ids(self, text: str) -> NDArray[np.int32]:
        """Token ids of text alone, int32 (T,)."""
        return self._encode(text)

    def user_ids(self, content: str, *, ended: bool = True) -> NDArray[np.int32]:
        """As `observation_ids`, for a user's message."""
        text = self.special.broken(content)
        ids = self._encode(self._after_assistant([text], role="user"))
        self._check_special(ids, [text], role="user")
        return self.rest(ids) if ended else ids

    def decode(self, ids: Sequence[int] | NDArray[np.int32]) -> str:
        """Text of generated ids, special tokens included, without final stop ids."""
        ids = [int(i) for i in ids]
        while ids and ids[-1] in self.stop_ids:
            ids.pop()
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _check_special(self, ids: NDArray[np.int32], texts: list[str], role: str = "tool") -> None:
        kind = role, len(texts)
        if self._frames[kind] is None:  # the template changes texts, so its output for others proves nothing
            forged = any(self.special.count(self._encode(text)) for text in texts)
        else:
            if kind not in self._special_counts:
                harmless = self._encode(self._after_assistant([_STAND_IN] * len(texts), role))
                self._special_counts[kind] = self.special.count(harmless)
            forged = self.special.count(ids) > self._special_counts[kind]
        if forged:
            raise ValueError("a text spells special tokens in a way that this tokenizer finds and Libra does not")

    def _encode(self, text: str) -> NDArray[np.int32]:
        most = self.most_bytes
        if most is not None and 4 * len(text) > most and len(text.encode("utf-8", "replace")) > most:
            raise ContextOverflow(
                f"this model's maximum context length is exceeded: a text of {len(text):,} characters has more tokens in any case"
            )
        return np.asarray(self.tokenizer.encode(valid_unicode(text), add_special_tokens=False), dtype=np.int32)

    def render(self, messages: list[dict[str, Any]]) -> str:
        """The text of messages and the generation prompt."""
        return self.tokenizer.apply_chat_template(
            messages, tools=self.tool_schemas or None, add_generation_prompt=True, tokenize=False, **self._template_args
        )

    def _render_after(self, contents: list[str], role: str) -> str:
        named = {"name": "tool"} if role == "tool" else {}
        return self._render_messages_after([{"role": role, **named, "content": content} for content in contents])

    def _render_messages_after(self, added: Sequence[Mapping[str, Any]]) -> str:
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _STAND_IN + "-ASSISTANT"}]
        try:
            text = self.render([*messages, *map(dict, added)])
        except Exception as error:  # jinja runs the model's own template, which may raise anything
            shown = " and ".join(dict.fromkeys(str(message["role"]) for message in added))
            name = self.tokenizer.name_or_path
            raise ModelError(f"{name}: its template cannot show {shown} messages: {error}") from error
        _before, found, after = text.partition(_STAND_IN + "-ASSISTANT")
        if not found:
            raise ModelError(f"{self.tokenizer.name_or_path}: its template leaves out assistant turns")
        return after

    def _after_assistant(self, contents: list[str], role: str = "tool") -> str:
        kind = role, len(contents)
        if kind not in self._frames:
            self._frames[kind] = self._frame(len(contents), role)
        frame = self._frames[kind]
        if frame is None:
            return self._render_after(contents, role)
        return "".join(part for pair in zip(frame, [*contents, ""], strict=True) for part in pair)

    def _frame(self, count: int, role: str) -> list[str] | None:
        """The text around ``count`` messages; None if the template changes their text."""
        marks = [f"{_STAND_IN}-{i}-" for i in range(count)]
        rest, frame = self._render_after(marks, role), []
        for mark in marks:
            if rest.count(mark) != 1:
                return None
            before, _, rest = rest.partition(mark)
            frame.append(before)
        frame.append(rest)
        awkward = [f"{_AWKWARD}{i}{_AWKWARD}" for i in range(count)]
        joined = "".join(part for pair in zip(frame, [*awkward, ""], strict=True) for part in pair)
        return frame if joined == self._render_after(awkward, role) else None


def explanation(tool_schemas: Sequence[Mapping[str, Any]]) -> str:
    """Tools and the form of a call, in as few words as a small model needs."""
    lines = []
    for schema in tool_schemas:
        function = schema["function"]
        parameters = function.get("parameters", {}).get("properties", {})
        call = {"name": function["name"], "arguments": dict.fromkeys(parameters, "...")}
        details = "".join(
            f" {name}: {' '.join(str(about.get('description', about.get('type', ''))).split())}"
            for name, about in parameters.items()
        )
        lines.append(f"{' '.join(str(function.get('description', '')).split())}{details}")
        lines.append(f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>")
    return "\n".join(["You can write calls, and are shown what they give:", *lines])


def load_chat_format(
    model_dir: Path | str,
    tool_schemas: Sequence[Mapping[str, Any]] = (),
    *,
    tool_format: str = "hermes",
    loader: str | None = None,
) -> ChatFormat:
    """The chat format of a model directory, its tokenizer by ``model.loader``; or ModelError."""
    directory = Path(model_dir)
    tokenizer = build_tokenizer(loader, directory)
    try:
        path = directory / "generation_config.json"
        stop = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    except (OSError, ValueError) as error:
        raise ModelError(f"{directory}: no usable generation_config.json: {error}") from error
    stop_ids = [] if stop is None else [stop] if isinstance(stop, int) else list(stop)
    return ChatFormat(tokenizer, tool_schemas, generation_stop_ids=stop_ids, tool_format=tool_format)


_ANSWER_SHARE = 4
"""The next generation gets a quarter of the remaining context, at most a turn's limit."""


def fitted(
    chat: ChatFormat, contents: Sequence[str], left_tokens: int, max_new_tokens: int, *, ended: bool, role: str = "tool"
) -> tuple[list[str], NDArray[np.int32]]:
    """The returns of a turn's calls, cut to the context, and their token ids. The context has room
    for ``left_tokens``; the ids exceed it only if not even the notes fit. ``ended`` is as in
    `ChatFormat.observation_ids`. Role "user" has one message, the environment's answer."""

    def rendered(texts: Sequence[str]) -> NDArray[np.int32]:
        return chat.user_ids(texts[0], ended=ended) if role == "user" else chat.observation_ids(texts, ended=ended)

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
    shares, left = [0] * len(lengths), total
    for rank, index in enumerate(sorted(range(len(lengths)), key=lambda each: lengths[each])):
        shares[index] = min(lengths[index], left // (len(lengths) - rank))
        left -= shares[index]
    return shares
