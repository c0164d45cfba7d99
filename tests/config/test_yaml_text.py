"""YAML 1.2's core types, lines of keys, and what is refused."""

import pytest

from libra.config.yaml_text import read_mapping, read_value, write
from libra.errors import ConfigError


@pytest.mark.parametrize(("text", "value"), [
    ("1e-4", 1e-4), ("1E5", 1e5), (".5", 0.5), ("010", 10), ("12:30", "12:30"), ("no", "no"), ("on", "on"),
    ("2026-01-31", "2026-01-31"), ("True", True), ("~", None), ("1_000", "1_000"), ("0x1F", "0x1F"), ("'1'", "1"),
    ("{a: [1, x]}", {"a": [1, "x"]}), ("-3", -3),
])  # fmt: skip
def test_values_have_the_types_of_yaml_1_2(text, value):
    got = read_value(text, "here")
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    "value", ["1e-4", "no", "010", "null", "", "a: b", "#x", "~", "1", "-", "é\u2028x", "a\nb", "=", "<<"]
)
def test_text_stays_text(value):
    assert read_mapping(write({"key": value}), "here")[0] == {"key": value}


def test_every_key_has_its_line():
    _, lines = read_mapping("a:\n  b: 1\n\n  c:\n    - d: 2\n", "here")
    assert lines == {("a",): 1, ("a", "b"): 2, ("a", "c"): 4, ("a", "c", "0", "d"): 5}


@pytest.mark.parametrize(("text", "said"), [
    ("a: 1\na: 2\n", "here:2: the key a is repeated"), ("a:\n  b: 1\n  b: 2\n", "here:3: the key a.b is repeated"),
    ("1: x\n", "here:1: the key 1 is not text"), ("a: 1\n  b: 2\n", "here:2: not valid YAML"),
    ("- a\n", "here:1: got a list ([a]); a configuration is a mapping"),
    ("a: &x [*x]\n", "an alias that contains itself"), ("a: *gone\n", "here:1: not valid YAML"),
    ("a: !!python/object:os.system x\n", "here:1: not valid YAML"), ("a: 1\n---\nb: 2\n", "not valid YAML"),
    ("a: \x00\n", "not valid YAML"),
])  # fmt: skip
def test_what_would_be_lost_or_misread_is_refused(text, said):
    with pytest.raises(ConfigError) as caught:
        read_mapping(text, "here")
    assert said in str(caught.value)


def test_aliases_stand_for_what_they_name():
    assert read_mapping("a: &x [1]\nb: *x\n", "here")[0] == {"a": [1], "b": [1]}


def test_an_empty_document_is_an_empty_mapping():
    assert read_mapping("# nothing\n", "here") == ({}, {})
