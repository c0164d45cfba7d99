"""Every event survives its JSON form; nothing unknown is read as known."""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.errors import StoreError
from libra.events import EVENTS, SCHEMA, Event, GateOpened, from_dict, from_json, to_dict, to_json
from libra.events.lines import Lines
from libra.types import NO_TOOL, ToolStatus

_FLOATS = st.floats(allow_nan=False, allow_infinity=False)
_BY_TYPE = {
    "str": st.text(),
    "bool": st.booleans(),
    "int": st.integers(),
    "float": _FLOATS,
    "ToolOutcome": st.sampled_from([NO_TOOL, *ToolStatus]),
    "str | None": st.none() | st.text(),
    "int | None": st.none() | st.integers(),
    "float | None": st.none() | _FLOATS,
    "tuple[int, ...]": st.lists(st.integers()).map(tuple),
    "tuple[str, ...]": st.lists(st.text()).map(tuple),
    "tuple[float, ...]": st.lists(_FLOATS).map(tuple),
    "tuple[tuple[int, int, int], ...]": st.lists(st.tuples(*[st.integers()] * 3)).map(tuple),
    "tuple[tuple[str, str], ...]": st.lists(st.tuples(st.text(), st.text())).map(tuple),
    "tuple[tuple[int, int], ...]": st.lists(st.tuples(st.integers(), st.integers())).map(tuple),
    "tuple[tuple[int, float], ...]": st.lists(st.tuples(st.integers(), _FLOATS)).map(tuple),
    "dict[str, int]": st.dictionaries(st.text(), st.integers()),
    "dict[str, float]": st.dictionaries(st.text(), _FLOATS),
    "dict[str, Any]": st.dictionaries(st.text(), _FLOATS | st.text() | st.booleans()),
}


@pytest.mark.parametrize("kind", EVENTS.values(), ids=EVENTS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_an_event_comes_back_from_its_line(kind, data):
    event = kind(**{f.name: data.draw(_BY_TYPE[str(f.type)], label=f.name) for f in fields(kind)})
    line = to_json(event)
    assert "\n" not in line
    assert from_json(line) == event
    assert json.loads(line)["schema"] == SCHEMA


FREQUENT = [name for name in vars(Lines) if name in EVENTS]


@pytest.mark.parametrize("name", FREQUENT)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_the_frequent_lines_are_those_of_their_events(name, data):
    values = {f.name: data.draw(_BY_TYPE[str(f.type)], label=f.name) for f in fields(EVENTS[name])}
    run, t_s, *rest = values.values()
    assert getattr(Lines(run, SCHEMA), name)(t_s, *rest) == to_json(EVENTS[name](**values))
    assert len(FREQUENT) == 5


def test_a_frequent_line_refuses_what_json_has_no_word_for():
    with pytest.raises(StoreError, match="latency_s is inf"):
        Lines("demo", SCHEMA).quantum_finished(0.0, "k", "TOOL", 0, 0, "", "", 0, float("inf"), "w", 0, "")


@pytest.mark.parametrize("word", ["success", "failure", "OK", "other"])
def test_a_word_that_is_no_outcome_of_a_tool_is_refused_with_those_that_are(word):
    line = Lines("demo", SCHEMA).quantum_finished(0.0, "k", "TOOL", 0, 0, "ls", ToolStatus.OK, 0, 1.0, "w", 0, "")
    assert from_json(line).status is ToolStatus.OK
    allowed = "allowed are ok, error, timeout, malformed, truncated, and nothing where no tool came back"
    with pytest.raises(
        StoreError, match=f"event quantum_finished: status '{word}'.*{allowed}; use the Libra that wrote it"
    ):
        from_json(line.replace('"status":"ok"', f'"status":"{word}"'))


def test_names_are_past_tense_snake_case_and_each_event_says_run_and_time():
    assert {kind.__name__ for kind in EVENTS.values()} == {kind.__name__ for kind in Event.__subclasses__()}
    for name, kind in EVENTS.items():
        assert re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower() == name
        assert [f.name for f in fields(kind)][:2] == ["run", "t_s"]
        assert all(f.default is MISSING for f in fields(kind)[:2])


def test_numbers_that_json_has_no_word_for_are_refused():
    with pytest.raises(StoreError, match="gate_opened"):
        to_json(GateOpened(run="demo", t_s=float("nan"), iteration=0, reason=""))


def test_unknown_schemas_names_and_fields_are_refused_by_name():
    good = to_dict(GateOpened(run="demo", t_s=0.0, iteration=0, reason=""))
    for bad, words in (
        (good | {"schema": SCHEMA + 1}, f"schema {SCHEMA + 1}"),
        (good | {"name": "gate_closed"}, "gate_closed"),
        (good | {"colour": 1}, "colour"),
        ({key: value for key, value in good.items() if key != "reason"}, "reason"),
    ):
        with pytest.raises(StoreError, match=words):
            from_dict(bad)
    for line in ("{", "[]", "3"):
        with pytest.raises(StoreError, match="event line"):
            from_json(line)
