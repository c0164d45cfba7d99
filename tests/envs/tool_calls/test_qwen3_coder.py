import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.envs import Tool, parse_qwen3_coder


def written(name, arguments):
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def tool(**types):
    properties = {name: kind if isinstance(kind, dict) else {"type": kind} for name, kind in types.items()}
    return Tool("f", print, {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}})


def ends(value):
    text = "".join((value + "</parameter>").split())
    return "</parameter></fun" in text or "</parameter><par" in text


names = st.text(st.characters(exclude_characters="<>\n", exclude_categories=("Z", "C")), min_size=1, max_size=9)
# Any text, and much of what looks like the format; no value may hold the two marks that end it, one after the other.
marks = st.sampled_from(["</parameter>", "</function>", "</tool_call>", "<tool_call>", "<function=", "x", "\n"])
values = st.one_of(st.text(), st.lists(marks).map("".join)).filter(lambda value: not ends(value))


@given(st.lists(st.tuples(names, st.dictionaries(names, values, max_size=3)), max_size=4))
def test_calls_come_back_as_they_were_written(calls):
    text = "I will.\n" + "\n".join(written(name, arguments) for name, arguments in calls)
    found = [(call.name, call.arguments, call.error) for call in parse_qwen3_coder(text)]
    assert found == [(name, arguments, None) for name, arguments in calls]


pieces = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>", "</parameter>", "\n", ">", "x", "<"]
)


@given(st.lists(pieces, max_size=60).map("".join))
def test_any_text_is_read_without_raising_and_nothing_is_dropped_in_silence(text):
    calls = parse_qwen3_coder(text)
    assert bool(calls) == ("<tool_call>" in text)
    assert sum(call.error is not None for call in calls) <= text.count("<tool_call>")
    assert len(calls) <= text.count("<tool_call>") + text.count("</function>")


def test_one_tag_may_hold_several_functions():
    text = "<tool_call><function=f></function>\n<function=g><parameter=a>1</parameter></function></tool_call>"
    assert [(call.name, call.arguments) for call in parse_qwen3_coder(text)] == [("f", {}), ("g", {"a": "1"})]


@pytest.mark.parametrize(("inside", "reason"), [
    ("", "no <function=NAME>"),
    ('{"name": "f", "arguments": {}}', "no <function=NAME>"),
    ("<function=>", "a function without a name"),
    ("<function=f>", "function f is not closed"),
    ("<function=f><parameter=a>1</function>", "parameter a is not closed"),
    ("<function=f><parameter=>1</parameter></function>", "a parameter without a name"),
    ("<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>", "a is given twice"),
    ("<function=f></function> and more", "no <function=NAME>"),
])  # fmt: skip
def test_a_malformed_call_says_what_is_wrong_and_the_next_one_is_still_read(inside, reason):
    bad, good = parse_qwen3_coder(f"<tool_call>{inside}</tool_call>{'<tool_call><function=g></function></tool_call>'}")
    assert reason in bad.error
    assert (bad.name, bad.arguments) == ("", {})
    assert (good.name, good.error) == ("g", None)


@pytest.mark.parametrize(("kind", "text", "value"), [
    ("string", "null", "null"),
    ({"type": "string", "nullable": True}, "null", None),
    ({"type": ["string", "null"]}, "null", None),
    ("integer", "twelve", "twelve"),
    ("number", "-1.5e3", -1500.0),
    ("boolean", "False", False),
    ("array", '[1, {"k": "</parameter>"}]', [1, {"k": "</parameter>"}]),
    ("object", '{"k": null}', {"k": None}),
    ("array", "[" * 100_000, "[" * 100_000),
])  # fmt: skip
def test_values_take_the_type_of_the_schema_or_stay_text(kind, text, value):
    (call,) = parse_qwen3_coder(written("f", {"x": text}), [tool(x=kind)])
    assert call.arguments == {"x": value}
