import gc
import json
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra import facts
from libra.errors import StoreError
from libra.facts import fact as codec
from libra.types import NO_TOOL, Phase, ToolStatus

_INTS = st.integers(-(2**63), 2**64 - 1)
_FLOATS = st.floats(allow_nan=False, allow_infinity=False)
_PLAIN = {
    int: _INTS, float: _FLOATS, Any: _FLOATS | st.text() | st.booleans(),
    facts.Priority: st.builds(facts.Priority, _INTS, _INTS, _INTS),
    facts.ToolNeeds: st.builds(facts.ToolNeeds, _INTS, _INTS, _INTS, _INTS, st.none() | st.dictionaries(_INTS, _FLOATS)),
}  # fmt: skip
_OUTCOMES = st.sampled_from([NO_TOOL, *ToolStatus])


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


@pytest.mark.parametrize("kinds", [list(facts.known().values())[n::8] for n in range(8)])
@given(data=st.data())
def test_an_event_comes_back_from_its_line(kinds, data):
    kind = data.draw(st.sampled_from(kinds))
    types = get_type_hints(kind)
    strategies = {name: _OUTCOMES if name == "status" else values_of(types[name]) for name in kind.__struct_fields__}
    fact = kind(**{name: data.draw(strategy, label=name) for name, strategy in strategies.items()})
    line = facts.Line(data.draw(st.text()), data.draw(_FLOATS), fact)
    text = facts.to_json(line)
    assert "\n" not in text
    assert facts.from_json(text) == line
    assert json.loads(text) == json.loads(json.dumps(facts.to_dict(line)))
    assert facts.sentence(fact) is not None
    assert facts.unpack(facts.pack([fact, fact])) == (fact, fact)


def test_lines_that_were_encoded_by_hand_are_read_and_written_with_the_same_fields_in_the_same_order():
    lines = (Path(__file__).parent / "data" / "events_schema_5.jsonl").read_bytes().splitlines()
    logged = {name for name, kind in facts.known().items() if not issubclass(kind, facts.Signal)}
    assert {json.loads(line)["name"] for line in lines} == logged
    for line in lines:
        event = facts.from_json(line.decode())
        assert list(json.loads(facts.to_json(event)).items()) == list(json.loads(line).items())


@pytest.mark.parametrize("word", ["success", "OK"])
def test_a_word_that_is_no_outcome_of_a_tool_is_refused(word):
    line = facts.to_json(facts.Line("demo", 0.0, facts.QuantumFinished("k", Phase.TOOL, 0, "ls", ToolStatus.OK, 1.0)))
    assert facts.from_json(line).fact.status == ToolStatus.OK
    with pytest.raises(StoreError, match=f"quantum_finished: status '{word}'"):
        facts.from_json(line.replace('"status":"ok"', f'"status":"{word}"'))


def test_numbers_that_json_has_no_word_for_are_refused():
    with pytest.raises(StoreError, match="gate_opened: t_s is nan"):
        facts.to_json(facts.Line("demo", float("nan"), facts.OpenGate(iteration=0, reason="")))
    snapshot = facts.PolicySnapshot("fifo", "", {"parts": [{"learned": float("inf")}]}, {})
    with pytest.raises(StoreError, match="policy_snapshot: learned is inf"):
        facts.to_json(facts.Line("demo", 0.0, snapshot))


def test_numbers_of_numpy_are_plain_numbers_in_the_log():
    event = facts.Line("demo", 0.0, facts.IterationFinished(np.int64(3), np.float64(0.5), np.float32(0.25)))
    assert facts.to_dict(event) == facts.to_dict(facts.from_json(facts.to_json(event)))
    assert {type(value) for value in facts.to_dict(event).values()} == {int, float, str}
    with pytest.raises(StoreError, match="iteration_finished: reward is nan"):
        facts.to_json(facts.Line("demo", 0.0, facts.IterationFinished(3, np.float64("nan"), 0.0)))
    with pytest.raises(StoreError, match=r"iteration_finished: object .* has no form in JSON"):
        facts.to_json(facts.Line("demo", 0.0, facts.IterationFinished(3, object(), 0.0)))


def test_text_that_is_no_unicode_is_kept():
    event = facts.Line("demo", 0.0, facts.WorkerLost("file \udcff"))  # a file name that is not UTF-8, as Python has it
    assert facts.from_dict(json.loads(facts.to_json(event))) == event
    assert facts.unpack(facts.pack([event.fact])) == (facts.WorkerLost("file ?"),)


@pytest.mark.parametrize(("field", "value"), [("iteration", "0"), ("iteration", 0.5), ("t_s", "now"), ("reason", None)])
def test_a_value_of_another_type_is_refused_with_its_place(field, value):
    values = facts.to_dict(facts.Line("demo", 0.0, facts.OpenGate(iteration=0, reason=""))) | {field: value}
    with pytest.raises(StoreError, match=rf"event gate_opened: Expected .*\$\.{field}"):
        facts.from_dict(values)


def test_unknown_schemas_names_and_fields_are_refused_by_name():
    good = facts.to_dict(facts.Line("demo", 0.0, facts.OpenGate(iteration=0, reason="")))
    for bad, words in (
        (good | {"schema": facts.SCHEMA + 1}, f"schema {facts.SCHEMA + 1}"),
        (good | {"name": "gate_closed"}, "gate_closed"),
        (good | {"colour": 1}, "colour"),
        ({key: value for key, value in good.items() if key != "reason"}, "reason"),
    ):
        with pytest.raises(StoreError, match=words):
            facts.from_dict(bad)
    for line in ("{", "[]", "3"):
        with pytest.raises(StoreError, match="event line"):
            facts.from_json(line)


def test_a_new_signal_is_one_struct_and_its_consumer():
    """A fact that nobody knows goes from a worker to the log and back, and has words, without a line elsewhere."""

    class WindSpeed(facts.Fact, frozen=True):
        words = "the wind blows at {metres_per_s} m/s"

        metres_per_s: float

    for cached in (codec.known, codec._decoder):
        cached.cache_clear()
    try:
        (received,) = facts.unpack(facts.pack([WindSpeed(3.5)]))
        assert received == WindSpeed(3.5)
        line = facts.Line("demo", 1.0, received)
        assert facts.from_json(facts.to_json(line)) == line
        assert facts.sentence(received) == "the wind blows at 3.5 m/s"
    finally:
        del WindSpeed, received, line
        gc.collect()
        for cached in (codec.known, codec._decoder):
            cached.cache_clear()
