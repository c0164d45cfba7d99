"""Every case of verl's own answers, and where Libra differs."""

import json

import pytest

from libra.envs import parse_hermes
from libra.envs.tool_call_formats import parse_qwen3_coder
from verl_tool_calls import VerlCall, VerlReading, verl_hermes, verl_qwen3_coder

PARSERS = {"hermes": verl_hermes, "qwen3_coder": verl_qwen3_coder}
LIBRAS = {"hermes": parse_hermes, "qwen3_coder": parse_qwen3_coder}


@pytest.fixture(scope="module")
def cases(repository):
    return json.loads((repository / "tests" / "golden" / "tool_parsers.json").read_text())["cases"]


def test_every_case_is_verls_and_libra_reads_the_same_calls(cases):
    assert len(cases) == 9
    for case in cases:
        calls = tuple(VerlCall(call["name"], call["arguments"]) for call in case["calls"])
        assert PARSERS[case["parser"]](case["text"]) == VerlReading(case["content"], calls)
        expected = [(call["name"], json.loads(call["arguments"])) for call in case["calls"]]
        got = [(call.name, call.arguments) for call in LIBRAS[case["parser"]](case["text"]) if call.error is None]
        assert got == expected


def test_a_closing_tag_inside_an_argument_loses_the_call_in_verl_only():
    text = '<tool_call>{"name": "f", "arguments": {"code": "</tool_call>"}}</tool_call>'
    assert verl_hermes(text) == VerlReading('"}}</tool_call>', ())
    assert [call.arguments for call in parse_hermes(text)] == [{"code": "</tool_call>"}]
