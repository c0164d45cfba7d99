"""The written reference is the models', every field of it documented."""

from __future__ import annotations

from pathlib import Path

import pytest
from doc_pages import reference_markdown

from libra.config import config_from_dict
from libra.config.field_help import field_references
from libra.config.run_config import RunConfig
from libra.config.yaml_text import one_line_yaml, read_value


def test_the_page_in_docs_is_up_to_date(repository: Path) -> None:
    assert (repository / "docs/configuration.md").read_text() == reference_markdown(), "type: make docs"


def test_every_field_is_documented() -> None:
    for field in field_references().values():
        assert len(field.description) > 15, f"{field.name} has no docstring"
        assert field.description.endswith("."), field.name
        assert f"`{field.name}`" in reference_markdown()


def test_every_default_can_be_typed_as_it_is_shown() -> None:
    for field in field_references().values():
        assert config_from_dict({}, [f"{field.name}={field.default}"]) == RunConfig()


@pytest.mark.parametrize("value", [None, 1e-6, 0.2, True, "a: b", "null", [1, [2, "x"]], {"a": {"b": None}}, {}, []])
def test_a_value_on_one_line_reads_back(value: object) -> None:
    text = one_line_yaml(value)
    assert "\n" not in text
    assert read_value(text, "here") == value
