from __future__ import annotations

import json

import pytest

from libra.types import EndReason, Episode, Prompt, Turn


@pytest.fixture
def make_episode():
    """Episode of one answering turn, or of the given turns."""

    def make(prompt: Prompt, answer: str = "", turns: tuple[Turn, ...] | None = None) -> Episode:
        return Episode("train-0-0-0", prompt, turns if turns is not None else (Turn(answer),), EndReason.ANSWERED)

    return make


@pytest.fixture
def call_text():
    """A call as a model writes it."""

    def make(name: str, **arguments: object) -> str:
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    return make
