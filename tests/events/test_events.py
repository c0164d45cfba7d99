import json
import re
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import fields

from libra import events
from libra.errors import StoreError
from libra.types import NO_TOOL, ToolStatus

_INTS = st.integers(-(2**63), 2**64 - 1)
_FLOATS = st.floats(allow_nan=False, allow_infinity=False)
_PLAIN = {int: _INTS, float: _FLOATS, Any: _FLOATS | st.text() | st.booleans()}


def values_of(kind):
    """Values of a field's type, with numbers that JSON has."""
    arguments = [values_of(each) for each in get_args(kind) if each is not Ellipsis]
    if kind in _PLAIN:
        return _PLAIN[kind]
    if get_origin(kind) is dict:
        return st.dictionaries(*arguments)
    if get_origin(kind) is tuple:
        return st.lists(arguments[0]).map(tuple) if Ellipsis in get_args(kind) else st.tuples(*arguments)
    return st.one_of(*arguments) if arguments else st.from_type(kind)


_OUTCOMES = st.sampled_from([NO_TOOL, *ToolStatus])


@pytest.mark.parametrize("kinds", [list(events.EVENTS.values())[n::8] for n in range(8)])
@given(data=st.data())
def test_an_event_comes_back_from_its_line(kinds, data):
    kind = data.draw(st.sampled_from(kinds))
    types = get_type_hints(kind)
    strategies = {name: _OUTCOMES if name == "status" else values_of(types[name]) for name in kind.__struct_fields__}
    event = kind(**{name: data.draw(strategy, label=name) for name, strategy in strategies.items()})
    line = events.to_json(event)
    assert "\n" not in line
    assert events.from_json(line) == event
    assert json.loads(line)["schema"] == events.SCHEMA


def test_lines_that_were_encoded_by_hand_are_read_and_written_with_the_same_fields_in_the_same_order():
    lines = (Path(__file__).parent / "data" / "events_schema_4.jsonl").read_bytes().splitlines()
    assert {json.loads(line)["name"] for line in lines} == set(events.EVENTS)
    for line in lines:
        event = events.from_json(line.decode())
        assert list(json.loads(events.to_json(event)).items()) == list(json.loads(line).items())


@pytest.mark.parametrize("word", ["success", "OK"])
def test_a_word_that_is_no_outcome_of_a_tool_is_refused(word):
    event = events.QuantumFinished("demo", 0.0, "k", "TOOL", 0, 0, "ls", ToolStatus.OK, 0, 1.0, "w", 0, "")
    line = events.to_json(event)
    assert events.from_json(line).status == ToolStatus.OK
    with pytest.raises(StoreError, match=f"quantum_finished: status '{word}'"):
        events.from_json(line.replace('"status":"ok"', f'"status":"{word}"'))


def test_names_are_past_tense_snake_case_and_each_event_says_run_and_time():
    for name, kind in events.EVENTS.items():
        assert re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower() == name
        assert [f.name for f in fields(kind)[:2] if f.required] == ["run", "t_s"]


def test_numbers_that_json_has_no_word_for_are_refused():
    with pytest.raises(StoreError, match="gate_opened: t_s is nan"):
        events.to_json(events.GateOpened(run="demo", t_s=float("nan"), iteration=0, reason=""))
    with pytest.raises(StoreError, match="policy_snapshot: learned is inf"):
        events.to_json(events.PolicySnapshot("demo", 0.0, "fifo", "", {"parts": [{"learned": float("inf")}]}, {}))


def test_numbers_of_numpy_are_plain_numbers_in_the_log():
    event = events.IterationFinished("demo", 0.0, np.int64(3), np.float64(0.5), np.float32(0.25))
    assert events.to_dict(event) == events.to_dict(events.from_json(events.to_json(event)))
    assert {type(value) for value in events.to_dict(event).values()} == {int, float, str}
    with pytest.raises(StoreError, match="iteration_finished: reward is nan"):
        events.to_json(events.IterationFinished("demo", 0.0, 3, np.float64("nan"), 0.0))
    with pytest.raises(StoreError, match=r"iteration_finished: object .* has no form in JSON"):
        events.to_json(events.IterationFinished("demo", 0.0, 3, object(), 0.0))


def test_text_that_is_no_unicode_is_kept():
    event = events.WorkerLost("demo", 0.0, "file \udcff")  # a file name that is not UTF-8, as Python has it
    assert events.from_dict(json.loads(events.to_json(event))) == event


@pytest.mark.parametrize(("field", "value"), [("iteration", "0"), ("iteration", 0.5), ("t_s", "now"), ("reason", None)])
def test_a_value_of_another_type_is_refused_with_its_place(field, value):
    values = events.to_dict(events.GateOpened(run="demo", t_s=0.0, iteration=0, reason="")) | {field: value}
    with pytest.raises(StoreError, match=rf"event gate_opened: Expected .*\$\.{field}"):
        events.from_dict(values)


def test_unknown_schemas_names_and_fields_are_refused_by_name():
    good = events.to_dict(events.GateOpened(run="demo", t_s=0.0, iteration=0, reason=""))
    for bad, words in (
        (good | {"schema": events.SCHEMA + 1}, f"schema {events.SCHEMA + 1}"),
        (good | {"name": "gate_closed"}, "gate_closed"),
        (good | {"colour": 1}, "colour"),
        ({key: value for key, value in good.items() if key != "reason"}, "reason"),
    ):
        with pytest.raises(StoreError, match=words):
            events.from_dict(bad)
    for line in ("{", "[]", "3"):
        with pytest.raises(StoreError, match="event line"):
            events.from_json(line)
