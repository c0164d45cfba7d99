"""Hostile texts, and what reads them: parsers, tools, and what Unicode says of characters."""

import unicodedata
from typing import Any

import numpy as np
from hypothesis import strategies as st

from libra.envs import TOOL_FORMATS, tool
from libra.errors import ToolFault
from libra.testing import FixedTurns
from libra.testing.hostile_text import hostile_texts
from libra.types import EndReason, FailureClass, Prompt, StopReason, Trajectory, TrajectoryId, TurnOutput
from libra.untrusted import storable_call

TEXTS = hostile_texts(largest_chars=200_000)
SHORT = [text for text in TEXTS if len(text) <= 100_000]
PARSERS = {name: (lambda text, parse=made.parse: parse(text, TOOLS)) for name, made in TOOL_FORMATS.items()}
PROMPT = Prompt("q-0", ({"role": "user", "content": "?"},), {"answer": "42"})
PIECES = st.one_of(st.sampled_from([text for text in TEXTS if len(text) < 200]), st.text(max_size=8))
HOSTILE_TEXT = st.lists(PIECES, max_size=6).map("".join)


def echo(text: Any) -> Any:
    """Return it.

    Args:
        text: What.
    """
    return text


def raises(text: str) -> str:
    """Raise it.

    Args:
        text: What.
    """
    raise RuntimeError(text)


def faults(text: str) -> str:
    """Fail with it.

    Args:
        text: What.
    """
    raise ToolFault(text)


TOOLS = (tool(echo), tool(raises), tool(faults))


class Tools(FixedTurns):
    def __init__(self):
        super().__init__()
        self.tools = TOOLS


def is_storable(text):
    """By Unicode's categories: no control character but three, no surrogate."""
    return all(unicodedata.category(char) not in ("Cc", "Cs") or char in "\n\r\t" for char in set(text))


def acts(text):
    """Characters that act on a terminal, or reorder or hide text, by Unicode's own properties."""
    bidi = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    return sorted(
        char
        for char in set(text) - {"\n", "\t"}
        if unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp")
        or unicodedata.bidirectional(char) in bidi
        or char in "\u200e\u200f\u061c"
        or 0xE0000 <= ord(char) <= 0xE007F
    )


def calls_of(text):
    return [storable_call(call) for made in TOOL_FORMATS.values() for call in made.parse(text, TOOLS)]


def output_of(num_tokens=3):
    ids = np.arange(num_tokens, dtype=np.int32)
    return TurnOutput(ids, np.zeros(num_tokens, np.float32), ids * 0, ids * 0, StopReason.STOP)


def hostile_trajectory(sample, text):
    """A trajectory with this text wherever a text can be."""
    ids = np.array([3 * sample, 3 * sample + 1, 3 * sample + 2], np.int32)
    turn = {"turn": 0, "tool": text, "status": "ok", "worker": "w", "stop_reason": "stop"}
    return Trajectory(
        TrajectoryId(0, 0, sample), Prompt(text, ({"role": "user", "content": text},), {"answer": text, text: text}),
        ids, np.array([False, True, False]), np.zeros(3, np.float32), ids * 0, ids * 0, [turn], EndReason.FAILURE,
        FailureClass.TOOL, text, float("nan"),
    )  # fmt: skip
