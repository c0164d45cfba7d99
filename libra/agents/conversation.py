"""The conversations of one trajectory: which generated turn each request continues, and its token
ids after that turn.

Invariants
----------
1. A request continues the last turn in it that the model generated in this trajectory, after the
   same messages, tools and template arguments. Its tail, the messages after that turn, has no
   assistant's message: nothing generated is rendered again.
2. Every other request starts a sequence of its own, with the reason.
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

FIRST, NEW, CONTINUED, BRANCHED, REGENERATED = "first", "new", "continued", "branched", "regenerated"
EDITED, COMPACTED, TOOLS_CHANGED, TEMPLATE = "edited", "compacted", "tools_changed", "template"

KEPT_WALKS = 64
"""Conversations whose last walk is kept."""


@dataclass(frozen=True, slots=True)
class Found:
    """The place of a request in the history.

    Attributes
    ----------
    parent : int
        The turn that the request continues; -1 if it starts a sequence.
    tail : tuple of Message
        The messages after that turn; all of them without one.
    reason : str
        ``first``: the first request. ``continued``: the next turn of a conversation. ``branched``:
        another continuation of a turn that has one. ``regenerated``: a request that was answered
        before. ``new``: another conversation, such as a sub-agent's. ``edited``: an assistant's
        message that was not generated like this. ``compacted``: the start of an earlier
        conversation without its turns. ``tools_changed``: the same messages with other tools or
        template arguments. ``template``: the model's template cannot show the messages after the
        turn.
    """

    parent: int
    tail: tuple[Message, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class _Asked:
    end: bytes  # the text of all its messages
    first: bytes  # the first message of its conversation
    length: int  # messages with all before it


@dataclass(slots=True)
class _Walk:
    """Texts that lead through a request's messages, each with the last generated turn on its way
    and the messages up to that turn's end. An answer after one of the ``inner`` texts, those before
    the last message, may change the walk."""

    messages: tuple[Message, ...]
    states: dict[bytes, tuple[int, int]]
    inner: set[bytes] = field(default_factory=set)


class History:
    """The requests and answers of one trajectory's present draw."""

    def __init__(self) -> None:
        self._asked: list[_Asked] = []
        self._continued: set[int] = set()  # turns that a request continues
        self._walks: dict[tuple[str, bytes], _Walk] = {}  # of the last request of each conversation
        self._answers: dict[bytes, list[int]] = {}  # turns by the text up to and including their answer
        self._ids: dict[int, frozenset[str]] = {}
        self._roots: set[bytes] = set()
        self._known: set[bytes] = set()  # requests that were taken, by their text
        self._longest: dict[bytes, int] = {}  # most messages of a conversation, by its first one

    def find(self, messages: Sequence[Message], tools: str) -> Found:
        """The place of a request with these messages; ``tools`` is a text of `tools_text`."""
        every = tuple(messages)
        parent, at, end = self._deepest(every, tools)
        tail, continues = every[at:], parent >= 0
        if continues and (not tail or any(message.role == "assistant" for message in tail)):
            return Found(-1, every, self._why_new(every, tools))
        if end in self._known:
            return Found(parent, tail, REGENERATED)
        if continues:
            return Found(parent, tail, BRANCHED if parent in self._continued else CONTINUED)
        return Found(-1, every, self._why_new(every, tools))

    def ask(self, parent: int, tail: Sequence[Message], tools: str) -> int:
        """Record a request at the place from `find`; returns its turn."""
        turn = len(self._asked)
        text = _turn_digest(parent) if parent >= 0 else _root(tools)
        for message in tail:
            text = digest(text, message.key)
        if parent < 0:
            self._roots.add(_root(tools))
            asked = _Asked(text, tail[0].key if tail else b"", len(tail))
        else:
            self._continued.add(parent)
            before = self._asked[parent]
            asked = _Asked(text, before.first, before.length + 1 + len(tail))
        self._asked.append(asked)
        self._known.add(text)
        self._longest[asked.first] = max(self._longest.get(asked.first, 0), asked.length)
        return turn

    def answer(self, turn: int, *answers: Message) -> None:
        """Record the answer to a request, in all forms in which clients may send it back."""
        end = self._asked[turn].end
        forms = [form for answer in answers for form in (answer, replace(answer, reasoning=""))]
        for key in dict.fromkeys(form.key for form in forms):
            self._answers.setdefault(digest(end, key), []).append(turn)
        self._walks = {name: walk for name, walk in self._walks.items() if end not in walk.inner}
        self._ids[turn] = frozenset(call.id for answer in answers for call in answer.calls)

    def _deepest(self, messages: tuple[Message, ...], tools: str) -> tuple[int, int, bytes]:
        """The last generated turn in the messages or -1, the number of messages up to its end, and
        the digest of all."""
        name = tools, messages[0].key if messages else b""
        walk = self._walks.get(name)
        begun = len(walk.messages) if walk is not None else 0
        if walk is None or walk.messages != messages[:begun]:  # a client mostly adds to what it sent before
            walk, begun = _Walk((), {_root(tools): (-1, 0)}), 0
        states = walk.states
        for index in range(begun, len(messages)):
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
        """The turns with this answer; of several with the same text, one whose calls have the same
        ids."""
        turns, ids = self._answers.get(text, []), {call.id for call in message.calls}
        return [turn for turn in turns if ids and self._ids[turn] == ids] or turns

    def _why_new(self, messages: tuple[Message, ...], tools: str) -> str:
        if not self._asked:
            return FIRST
        own = _root(tools)
        for other in self._roots - {own}:
            if self._reaches(messages, other):
                return TOOLS_CHANGED
        first = messages[0].key if messages else b""
        if first not in self._longest:
            return NEW
        if any(message.role == "assistant" for message in messages):
            return EDITED
        return COMPACTED if len(messages) < self._longest[first] else NEW

    def _reaches(self, messages: Sequence[Message], root: bytes) -> bool:
        """Whether the messages, under another root, lead through a generated turn or are a known
        request."""
        texts = {root}
        for message in messages:
            texts = {digest(text, message.key) for text in texts}
            if any(text in self._answers for text in texts):
                return True
        return bool(texts & self._known)


def _root(tools: str) -> bytes:
    return digest(b"root", tools.encode())


def _turn_digest(turn: int) -> bytes:
    return digest(b"turn", turn.to_bytes(8))


@dataclass(frozen=True, slots=True)
class Step:
    """One turn of a path, and whether this sequence trains its tokens."""

    turn: int
    trained: bool


def paths(parents: Sequence[int]) -> list[list[Step]]:
    """The sequences of turns with these parents (-1 starts a conversation), in the order of their
    last turns.

    ``parents[turn]`` is below ``turn``. All steps with ``trained`` together have every turn once.
    """
    for turn, parent in enumerate(parents):
        assert -1 <= parent < turn, f"turn {turn} continues turn {parent}"
    inner = set(parents)
    seen: set[int] = set()
    found = []
    for leaf in range(len(parents)):
        if leaf in inner:
            continue
        path = path_to(leaf, parents)
        found.append([Step(turn, turn not in seen) for turn in path])
        seen.update(path)
    return found


def path_to(turn: int, parents: Sequence[int]) -> list[int]:
    """The turns from the start of a conversation to ``turn``; none for -1."""
    path = []
    while turn >= 0:
        path.append(turn)
        turn = parents[turn]
    return path[::-1]


TOO_LONG = "context_length_exceeded"
"""Error code of a request that does not fit."""


class Renderer(Protocol):
    """The model's chat format; `libra.rollout.conversation_format.ConversationFormat` is one."""

    def prompt_ids(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), **args: Any
    ) -> NDArray[np.int32]: ...

    def tail_ids(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), *, last: int, **args: Any
    ) -> NDArray[np.int32]: ...


@dataclass(frozen=True, slots=True)
class Asked:
    """A `Found` request with ``ids`` (T,), int32: the tokens of its tail after the parent's, or the
    whole prompt.

    ``tools`` is a text of `tools_text`.
    """

    parent: int
    ids: NDArray[np.int32]
    reason: str
    tail: tuple[Message, ...]
    tools: str


class Conversation:
    """All requests and answers of one draw of a trajectory, in order."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._history = History()
        self._last: dict[int, int] = {}

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        args: Mapping[str, Any] | None = None,
        text: str = "",
    ) -> Asked:
        """A request as token ids, to be recorded by `ask`; RequestRefused if the model's template
        cannot show it.

        ``text`` is the `tools_text` of the tools and arguments, if known.
        """
        args, name = args or {}, text or tools_text(tools, args or {})
        if not messages or messages[-1].role == "assistant":
            raise RequestRefused("messages: the last one is of the user, a tool or the system", "messages")
        found = self._history.find(messages, name)
        try:
            if found.parent >= 0:
                try:
                    chat = [message.as_chat() for message in found.tail]
                    ids = self._renderer.tail_ids(chat, tools, last=self._last[found.parent], **args)
                    return Asked(found.parent, ids, found.reason, found.tail, name)
                except ContextOverflow:
                    raise
                except (LibraError, ValueError):
                    found = Found(-1, tuple(messages), TEMPLATE)
            chat = [message.as_chat() for message in found.tail]
            return Asked(-1, self._renderer.prompt_ids(chat, tools, **args), found.reason, found.tail, name)
        except ContextOverflow as error:
            raise RequestRefused(f"messages: {error}", "messages", code=TOO_LONG) from error
        except Exception as error:  # the boundary to the model's template and the agent's arguments
            raise RequestRefused(f"messages: {error}", "messages") from error

    def ask(self, parent: int, tail: Sequence[Message], tools: str) -> int:
        """Record a request; returns its turn."""
        return self._history.ask(parent, tail, tools)

    def answer(self, turn: int, *answers: Message, last: int) -> None:
        """Record the answer to a request in the forms that clients may send back; ``last`` is its
        last token, or -1."""
        self._last[turn] = last
        self._history.answer(turn, *answers)
