import json

import pytest
from coroutine_tests import pytest_pyfunc_call  # noqa: F401

from libra.types import EndReason, Episode, Turn


@pytest.fixture
def make_episode():
    """Episode of one answering turn, or of the given turns."""

    def make(prompt, answer="", turns=None):
        return Episode("train-0-0-0", prompt, turns if turns is not None else (Turn(answer),), EndReason.ANSWERED)

    return make


@pytest.fixture
def call_text():
    """A call as a model writes it."""

    def make(name, **arguments):
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    return make
