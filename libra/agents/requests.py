"""A request of an agent, whatever dialect it came in, and its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.agents.messages import Message, digest


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """What an agent asks the model for.

    Attributes
    ----------
    dialect : str
        "chat", "responses", "messages" or "generate": how the answer is written.
    messages : tuple of Message
    tools : tuple of JSON schemas
    template_args : mapping
        Further variables of the chat template (``chat_template_kwargs``).
    tools_text : str
        One text for equal tools and template arguments (`libra.agents.conversation.tools_text`).
    size : int
        Bytes of its body.
    max_tokens : int or None
        None: as many as the run allows.
    stop : tuple of str
        Texts that end the generation; they are no part of the content.
    stream, usage : bool
        Whether the answer is a stream of events, and whether that ends with the counts of tokens.
    model : str
        As the client calls it; it comes back as it was.
    token_ids : tuple of int or None
        The whole context of a "generate" request, which has no messages.
    logprobs, return_ids : bool
        Whether the answer of a chat request has log-probabilities, and token ids.
    ignored : tuple of str
        Parameters that the run decides, and the client asked otherwise.
    """

    dialect: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    template_args: Mapping[str, Any] = field(default_factory=dict)
    tools_text: str = ""
    size: int = 0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    usage: bool = False
    model: str = "policy"
    token_ids: tuple[int, ...] | None = None
    logprobs: bool = False
    return_ids: bool = False
    ignored: tuple[str, ...] = ()
    _fingerprint: list[bytes] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def fingerprint(self) -> bytes:
        """Equal for requests that would be answered alike."""
        if not self._fingerprint:  # it takes long for long ones
            self._fingerprint.append(self._digest())
        return self._fingerprint[0]

    def _digest(self) -> bytes:
        keys = b"".join([message.key for message in self.messages])
        ids = b"" if self.token_ids is None else np.array(self.token_ids, np.int64).tobytes()
        limits = repr((self.max_tokens, self.stop)).encode()
        return digest(self.tools_text.encode(), b"/", keys, b"/", ids, b"/", limits)


@dataclass(frozen=True, slots=True)
class Reply:
    """One generated turn.

    Attributes
    ----------
    message : Message
    finish : "stop", "length" or "tool_calls"
    prompt_tokens : int
    token_ids, logprobs, versions : arrays (T,)
        As the engine gave them: ids, behaviour log-probabilities in nats, weight versions.
    stop : str or None
        The client's stop text, which ended it.
    """

    message: Message
    finish: str
    prompt_tokens: int
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    name: str
    stop: str | None = None
