"""Hostile text of a megabyte. Quadratic reading would take minutes or hours, where the time-out is one minute."""

from __future__ import annotations

import sys

import pytest

from libra.envs import TOOL_FORMATS
from libra.envs.tool_calls import hermes, tags
from libra.envs.tool_calls.as_verl import verl_hermes, verl_qwen3_coder

PARSERS = {
    **{name: (lambda text, parse=made.parse: parse(text, ())) for name, made in TOOL_FORMATS.items()},
    "verl_hermes": verl_hermes,
    "verl_qwen3_coder": verl_qwen3_coder,
}
CALL = "<tool_call><function=f><parameter=x></tool_call>"
HOSTILE = {
    "open tags": "<tool_call>" * 90_000,
    "closed tags": "<tool_call></tool_call>" * 45_000,
    "open braces": "<tool_call>{" * 85_000,
    "braces on lines": "<tool_call>{\n\n\n</tool_call>" * 37_000,
    "open strings": '<tool_call>["</tool_call>' * 40_000,
    "strings across tags": '<tool_call>["</tool_call>",' * 37_000,
    "escapes": '<tool_call>{"a": "\\' * 55_000,
    "one long string": '<tool_call>{"a": "' + "x" * 10**6,
    "long strings": ('<tool_call>{"a": "' + "x" * 10**4) * 100,
    "spaces": ("<tool_call>" + " " * 10) * 48_000,
    "one long space": "<tool_call>" + " " * 10**6,
    "deep": "<tool_call>" + "[" * 10**6,
    "deep and many": ("<tool_call>" + "[" * 50) * 16_000,
    "digits": ("<tool_call>" + "9" * 5000) * 200,
    "good calls": '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>' * 14_000,
    "no end": "<tool_call><function=f><parameter=x>" * 28_000,
    "no end, then one": "<tool_call><function=f><parameter=x>" * 28_000 + "</parameter></function></tool_call>",
    "a late end": CALL * 10_000 + "</parameter>" + "<parameter=y>1</parameter>" * 20_000,
    "late ends": CALL * 10_000 + "".join(f"</parameter><parameter=y{i}>" for i in range(15_000)),
    "false ends": "<tool_call><function=f><parameter=x>" + "</parameter> " * 75_000,
    "false ends and spaces": "<tool_call><function=f><parameter=x>" + ("</parameter>" + " " * 1000) * 1000,
    "functions": "<tool_call>" + "<function=f></function>" * 45_000,
    "names": "<tool_call><function=" * 48_000,
    "one long name": "<tool_call><function=" + "f" * 10**6,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_megabyte_is_read(text, parser):
    found = PARSERS[parser](text)
    if parser in TOOL_FORMATS:
        assert found


def test_a_megabyte_of_good_calls_is_read_whole():
    calls = hermes.parse_hermes(HOSTILE["good calls"])
    assert len(calls) == 14_000
    assert {call.error for call in calls} == {None}


@pytest.mark.parametrize("name", HOSTILE)
def test_characters_decoded_are_bounded_by_the_length(name, monkeypatch):
    """Counted, not timed: the characters of all windows together, for texts of one and of two lengths."""
    decoded = 0

    class Counting:
        def raw_decode(self, window):
            nonlocal decoded
            decoded += len(window)
            return decoder.raw_decode(window)

    decoder = hermes._DECODER
    monkeypatch.setattr(hermes, "_DECODER", Counting())
    text = HOSTILE[name]
    hermes.parse_hermes(text)
    num_calls = text.count(tags.OPEN)
    assert decoded <= 16 * len(text) + hermes._WINDOW_CHARS * num_calls


def test_the_recursion_limit_is_left_alone():
    limit = sys.getrecursionlimit()
    hermes.parse_hermes(HOSTILE["deep"])
    assert sys.getrecursionlimit() == limit
