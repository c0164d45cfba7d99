"""The conversations of one trajectory: the generated turn that each request continues, and token
ids.

Invariants
----------
1. A request continues the last of its turns that the model generated in this trajectory after the
   same messages, tools and template arguments. Its tail, the messages after that turn, has no
   assistant's message, so nothing generated is rendered again.
2. Every other request starts its own sequence, with a reason.
3. The history after the same requests and answers is the same on every worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from libra.agents.messages import Message, digest, tools_text
from libra.errors import ContextOverflow, LibraError, RequestRefused

TOO_LONG = "context_length_exceeded"
"""Error code of a request that does not fit."""
KEPT_WALKS = 64
"""Conversations whose last walk is kept."""


class Renderer(Protocol):
    """The model's chat format, e.g. `libra.rollout.conversation_format.ConversationFormat`."""

    def prompt_ids(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), **args: Any
    ) -> NDArray[np.int32]: ...

    def tail_ids(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), *, last: int, **args: Any
    ) -> NDArray[np.int32]: ...


@dataclass(frozen=True, slots=True)
class Asked:
    """A request's place among the turns.

    ``reason``: ``first``: the first request. ``continued``: the next turn of a conversation.
    ``branched``: a second continuation of a turn. ``regenerated``: a request that was answered
    before. ``new``: another conversation, such as a sub-agent's. ``edited``: an assistant's message
    differs from the generated one. ``compacted``: the start of an earlier conversation without its
    turns. ``tools_changed``: the same messages with other tools or template arguments.
    ``template``: the model's template cannot show the messages after the turn.
    """

    parent: int  # the turn that the request continues; -1 if it starts a sequence
    ids: NDArray[np.int32]  # (T,), of the tail after the parent, or of the whole prompt
    reason: str
    tail: tuple[Message, ...]  # the messages after the parent; all of them without one
    tools: str  # a text of `tools_text`


@dataclass(frozen=True, slots=True)
class _Request:
    end: bytes  # the digest of all its messages
    first: bytes  # the first message of its conversation
    length: int  # messages with all before it


@dataclass(slots=True)
class _Walk:
    """Digests of a request's prefixes, with the last generated turn and the messages up to that
    turn. A later answer to an ``inner`` prefix, which ends before the last message, may change the
    walk."""

    messages: tuple[Message, ...]
    states: dict[bytes, tuple[int, int]]
    inner: set[bytes] = field(default_factory=set)


class Conversation:
    """All requests and answers of one draw of a trajectory, in order."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._requests: list[_Request] = []
        self._last: dict[int, int] = {}  # last token of each answered turn
        self._ids: dict[int, frozenset[str]] = {}  # of its calls
        self._continued: set[int] = set()  # turns that a request continues
        self._walks: dict[tuple[str, bytes], _Walk] = {}  # of the last request of each conversation
        self._answers: dict[bytes, list[int]] = {}  # turns by the digest up to and including their answer
        self._roots: set[bytes] = set()
        self._known: set[bytes] = set()  # requests that were recorded, by their digest
        self._longest: dict[bytes, int] = {}  # most messages of a conversation, by its first one

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        args: Mapping[str, Any] | None = None,
        text: str = "",
    ) -> Asked:
        """A request as token ids, for `ask`; RequestRefused if the model's template cannot show it.
        ``text`` is the `tools_text` of tools and arguments, if known."""
        every, args = tuple(messages), args or {}
        name = text or tools_text(tools, args)
        if not every or every[-1].role == "assistant":
            raise RequestRefused("messages: the last one is of the user, a tool or the system", "messages")
        parent, tail, reason = self._place(every, name)
        try:
            if parent >= 0:
                try:
                    chat = [message.as_chat() for message in tail]
                    ids = self._renderer.tail_ids(chat, tools, last=self._last[parent], **args)
                    return Asked(parent, ids, reason, tail, name)
                except ContextOverflow:
                    raise
                except (LibraError, ValueError):
                    reason = "template"
            ids = self._renderer.prompt_ids([message.as_chat() for message in every], tools, **args)
            return Asked(-1, ids, reason, every, name)
        except ContextOverflow as error:
            raise RequestRefused(f"messages: {error}", "messages", code=TOO_LONG) from error
        except Exception as error:  # the boundary to the model's template and the agent's arguments
            raise RequestRefused(f"messages: {error}", "messages") from error

    def ask(self, parent: int, tail: Sequence[Message], tools: str) -> int:
        """Record a request at the place that `prompt` found; returns its turn."""
        turn, root = len(self._requests), _root(tools)
        end = _after(_turn_digest(parent) if parent >= 0 else root, tail)
        if parent < 0:
            self._roots.add(root)
            asked = _Request(end, tail[0].key if tail else b"", len(tail))
        else:
            self._continued.add(parent)
            before = self._requests[parent]
            asked = _Request(end, before.first, before.length + 1 + len(tail))
        self._requests.append(asked)
        self._known.add(end)
        self._longest[asked.first] = max(self._longest.get(asked.first, 0), asked.length)
        return turn

    def answer(self, turn: int, *answers: Message, last: int) -> None:
        """Record the answer to a request in all forms that clients may send back. ``last`` is the
        answer's last token, or -1."""
        self._last[turn] = last
        end = self._requests[turn].end
        for key in dict.fromkeys(form.key for answer in answers for form in (answer, replace(answer, reasoning=""))):
            self._answers.setdefault(digest(end, key), []).append(turn)
        self._walks = {name: walk for name, walk in self._walks.items() if end not in walk.inner}
        self._ids[turn] = frozenset(call.id for answer in answers for call in answer.calls)

    def _place(self, every: tuple[Message, ...], tools: str) -> tuple[int, tuple[Message, ...], str]:
        parent, at, end = self._deepest(every, tools)
        tail = every[at:]
        if parent >= 0 and (not tail or any(message.role == "assistant" for message in tail)):
            return -1, every, self._why_new(every, tools)
        if end in self._known:
            return parent, tail, "regenerated"
        if parent >= 0:
            return parent, tail, "branched" if parent in self._continued else "continued"
        return -1, every, self._why_new(every, tools)

    def _deepest(self, messages: tuple[Message, ...], tools: str) -> tuple[int, int, bytes]:
        """The last generated turn (or -1), the messages up to its end, and the digest of all
        messages."""
        name = tools, messages[0].key
        walk = self._walks.get(name)
        start = len(walk.messages) if walk is not None else 0
        if walk is None or walk.messages != messages[:start]:  # a client mostly adds to what it sent before
            walk, start = _Walk((), {_root(tools): (-1, 0)}), 0
        states = walk.states
        for index in range(start, len(messages)):
            message, reached = messages[index], dict[bytes, tuple[int, int]]()
            for text, state in states.items():
                text = digest(text, message.key)
                reached[text] = state
                if message.role == "assistant":
                    for turn in self._candidates(text, message):
                        reached[_turn_digest(turn)] = (turn, index + 1)
            walk.inner.update(states)
            states = reached
        if len(self._walks) >= KEPT_WALKS:
            self._walks.clear()
        self._walks[name] = _Walk(messages, states, walk.inner)
        end, (turn, at) = max(states.items(), key=lambda item: (item[1][1], item[1][0]))
        return turn, at, end

    def _candidates(self, text: bytes, message: Message) -> list[int]:
        """The turns with this answer; among equal texts, the turn whose calls have the same ids."""
        turns, ids = self._answers.get(text, []), {call.id for call in message.calls}
        return [turn for turn in turns if ids and self._ids[turn] == ids] or turns

    def _why_new(self, messages: tuple[Message, ...], tools: str) -> str:
        if not self._requests:
            return "first"
        if any(self._reaches(messages, other) for other in self._roots - {_root(tools)}):
            return "tools_changed"
        longest = self._longest.get(messages[0].key)
        if longest is not None and any(message.role == "assistant" for message in messages):
            return "edited"
        return "compacted" if longest is not None and len(messages) < longest else "new"

    def _reaches(self, messages: Sequence[Message], root: bytes) -> bool:
        for message in messages:
            root = digest(root, message.key)
            if root in self._answers:
                return True
        return root in self._known


def _after(text: bytes, messages: Sequence[Message]) -> bytes:
    for message in messages:
        text = digest(text, message.key)
    return text


def _root(tools: str) -> bytes:
    return digest(b"root", tools.encode())


def _turn_digest(turn: int) -> bytes:
    return digest(b"turn", turn.to_bytes(8))


@dataclass(frozen=True, slots=True)
class Step:
    """One turn of a path, and whether this path trains the turn's tokens."""

    turn: int
    trained: bool


def paths(parents: Sequence[int]) -> list[list[Step]]:
    """The sequences of turns with these parents (-1 starts a conversation), ordered by their last
    turns. Over all sequences, every turn has ``trained`` exactly once."""
    inner, seen = set(parents), set[int]()
    found = []
    for leaf in range(len(parents)):
        if leaf not in inner:
            path = path_to(leaf, parents)
            found.append([Step(turn, turn not in seen) for turn in path])
            seen.update(path)
    return found


def path_to(turn: int, parents: Sequence[int]) -> list[int]:
    """The turns from the start of a conversation to ``turn``; empty for -1."""
    path = []
    while turn >= 0:
        assert parents[turn] < turn, f"turn {turn} continues turn {parents[turn]}"
        path.append(turn)
        turn = parents[turn]
    return path[::-1]
