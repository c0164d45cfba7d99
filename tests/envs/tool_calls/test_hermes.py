import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.envs import parse_hermes

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(st.tuples(st.text(min_size=1), st.dictionaries(st.text(), json_values, max_size=3)), max_size=4))
def test_calls_written_as_json_come_back_as_they_were(calls):
    written = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    text = "thinking... " + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)
    found = [(call.name, dict(call.arguments), call.error) for call in parse_hermes(text)]
    assert found == [(name, arguments, None) for name, arguments in calls]


pieces = st.sampled_from([*'{}[]",:ae1 \n\\', "<tool_call>", "</tool_call>"])


@given(st.lists(pieces, max_size=60).map("".join))
def test_any_text_is_read_without_raising_and_each_opening_tag_counts_at_most_once(text):
    calls = parse_hermes(text)
    assert len(calls) <= text.count("<tool_call>")
    assert bool(calls) == ("<tool_call>" in text)
    assert all(call.error is None or (call.name == "" and not call.arguments) for call in calls)


def test_an_argument_may_contain_the_closing_tag(call_text):
    code = "print('</tool_call>')\n# <tool_call> {"
    (call,) = parse_hermes(call_text("run", code=code) + "<|im_end|>")
    assert call.error is None
    assert call.arguments == {"code": code}


@pytest.mark.parametrize(("inside", "reason"), [
    ("{'name': 'f'}", "not valid JSON"),
    ('{"name": "f", "arguments": {"x": 1}', "not valid JSON"),
    ("", "not valid JSON"),
    ("9" * 10_000, "not valid JSON"),
    ('{"name": "f", "arguments": {}} and more', "not closed"),
    ('{"arguments": {}}', '"name"'),
    ("[1]", '"name"'),
    ('{"name": "f"}', '"arguments"'),
    ('{"name": "f", "arguments": "x"}', '"arguments"'),
])  # fmt: skip
def test_a_malformed_call_says_what_is_wrong_and_the_next_one_is_still_read(inside, reason, call_text):
    bad, good = parse_hermes(f"<tool_call>{inside}</tool_call>{call_text('g', y=2)}")
    assert reason in bad.error
    assert good == parse_hermes(call_text("g", y=2))[0]
    assert good.error is None


@given(json_values, st.integers(480, 560))
def test_a_value_is_read_whole_wherever_a_window_ends(value, padding):
    arguments = {"pad": "x" * padding, "value": value, "more": ["\U0001f600" * 300, -1e-7, True, None, float("inf")]}
    (call,) = parse_hermes(f"<tool_call>{json.dumps({'name': 'f', 'arguments': arguments})}</tool_call>")
    assert call.arguments == arguments
