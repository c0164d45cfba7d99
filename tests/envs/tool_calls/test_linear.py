"""Hostile text of 200,000 characters, on which a quadratic reader would take minutes, where the time-out is one."""

import pytest

from libra.envs import TOOL_FORMATS, tool_call_formats

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
