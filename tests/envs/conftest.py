import json

import pytest
from coroutine_tests import pytest_pyfunc_call  # noqa: F401


@pytest.fixture
def call_text():
    """A call as a model writes it."""

    def make(name, **arguments):
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    return make
