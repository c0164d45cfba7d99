"""All formats: hostile text of 200,000 characters in linear time, and recorded answers of verl's parsers."""

import json

import pytest

from libra.envs import TOOL_FORMATS, parse_hermes, tool_call_formats
from libra.envs.tool_call_formats import parse_qwen3_coder

CALL = "<tool_call><function=f><parameter=x></tool_call>"
HOSTILE = {
    "open tags": "<tool_call>" * 18_000,
    "open braces": "<tool_call>{" * 17_000,
    "strings across tags": '<tool_call>["</tool_call>",' * 7_000,
    "escapes": '<tool_call>{"a": "\\' * 11_000,
    "long strings": ('<tool_call>{"a": "' + "x" * 10**4) * 20,
    "spaces": ("<tool_call>" + " " * 10) * 9_600,
    "deep": "<tool_call>" + "[" * 200_000,
    "digits": ("<tool_call>" + "9" * 5000) * 40,
    "no end, then one": "<tool_call><function=f><parameter=x>" * 5_600 + "</parameter></function></tool_call>",
    "late ends": CALL * 2_000 + "".join(f"</parameter><parameter=y{i}>" for i in range(3_000)),
    "false ends and spaces": "<tool_call><function=f><parameter=x>" + ("</parameter>" + " " * 1000) * 200,
    "names": "<tool_call><function=" * 9_600,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", HOSTILE)
def test_reading_takes_linear_time(name, monkeypatch):
    """Counted where it can be: the characters of all windows that are decoded are bounded by the text's."""
    decoded, decoder, text = 0, tool_call_formats._DECODER, HOSTILE[name]

    class Counting:
        def raw_decode(self, window):
            nonlocal decoded
            decoded += len(window)
            return decoder.raw_decode(window)

    monkeypatch.setattr(tool_call_formats, "_DECODER", Counting())
    for made in TOOL_FORMATS.values():
        assert made.parse(text, ())
    assert decoded <= 16 * len(text) + tool_call_formats._WINDOW_CHARS * text.count(tool_call_formats.OPEN)


LIBRAS = {"hermes": parse_hermes, "qwen3_coder": parse_qwen3_coder}


@pytest.fixture(scope="module")
def cases(repository):
    return json.loads((repository / "tests" / "golden" / "tool_parsers.json").read_text())["cases"]


def test_libra_reads_the_calls_that_verl_reads(cases):
    assert len(cases) == 9
    for case in cases:
        expected = [(call["name"], json.loads(call["arguments"])) for call in case["calls"]]
        got = [(call.name, call.arguments) for call in LIBRAS[case["parser"]](case["text"]) if call.error is None]
        assert got == expected
