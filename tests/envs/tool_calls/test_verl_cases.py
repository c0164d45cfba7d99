"""Recorded answers of verl's parsers (tests/golden/README.md): Libra reads the same calls."""

import json

import pytest

from libra.envs import parse_hermes
from libra.envs.tool_call_formats import parse_qwen3_coder

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
