"""The conversations of one trajectory: each request as token ids that follow what was generated before, never rendered again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from libra.agents.history import TEMPLATE, Found, History
from libra.agents.messages import Message, canonical_json
from libra.errors import ContextOverflow, LibraError, RequestRefused

TOO_LONG = "context_length_exceeded"
"""The code of a refusal of a request that does not fit."""


class Renderer(Protocol):
    """The model's chat format; `libra.rollout.conversation_format.ConversationFormat` is one."""

    def prompt_ids(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), **args: Any
    ) -> NDArray[np.int32]: ...

    def tail_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        last: int,
        **args: Any,
    ) -> NDArray[np.int32]: ...


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as the model will read it.

    Attributes
    ----------
    parent : int
        The turn whose tokens come first; -1: none.
    ids : int32 array (T,)
        Tokens to append after that turn, or the whole prompt.
    reason : str
        As of `libra.agents.history.Found`.
    tail : tuple of Message
        The messages that ``ids`` are of.
    tools : str
        One text for equal tools and template arguments.
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
        """A request as token ids; RequestRefused if the model's template cannot show it. `ask` takes it.

        ``text`` is `tools_text` of the tools and arguments, where that is known.
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
        except (
            Exception
        ) as error:  # jinja runs the model's own template, with the agent's arguments: it may raise anything
            raise RequestRefused(f"messages: {error}", "messages") from error

    def ask(self, parent: int, tail: Sequence[Message], tools: str) -> int:
        """Take a request; returns its turn."""
        return self._history.ask(parent, tail, tools)

    def answer(self, turn: int, *answers: Message, last: int) -> None:
        """The model's answer to a request, in the forms that clients may send back.

        ``last`` is its last token; -1: it has none.
        """
        self._last[turn] = last
        self._history.answer(turn, *answers)


def tools_text(tools: Sequence[Mapping[str, Any]], args: Mapping[str, Any]) -> str:
    """One text for equal tools and template arguments; tools come in their order."""
    return canonical_json([list(tools), dict(args)])


def offers_tools(text: str) -> bool:
    """Whether there are tools in a text of `tools_text`."""
    return not text.startswith("[[],")
