"""The picture in ``docs/architecture.md`` shows what the imports are."""

from __future__ import annotations

from pathlib import Path

import picture
from import_graph import room


def test_the_page_shows_the_imports_as_they_are(repository: Path, graph: dict[str, set[str]]) -> None:
    page = (repository / "docs" / "architecture.md").read_text()
    assert page == picture.with_generated(page, graph), "docs/architecture.md is old; type make docs"
    assert picture.generated(graph) in page


def test_every_room_is_in_the_picture(modules: dict[str, Path]) -> None:
    described = {name for contents in picture.LAYERS.values() for name in contents}
    assert {room(name) for name in modules} - {"libra"} <= described


def test_arrows_are_drawn_once_and_the_foundation_is_one_box() -> None:
    graph = {
        "libra": set(),
        "libra.driver.a": {"libra.graph.b", "libra.worker.c", "libra.types"},
        "libra.graph.b": {"libra.worker.c"},
        "libra.worker.c": {"libra.types"},
        "libra.types": set(),
    }
    drawn = picture.mermaid(graph)
    assert "room_driver --> room_graph" in drawn and "room_graph --> room_worker" in drawn
    assert "room_driver --> room_worker" not in drawn and "--> room_types" not in drawn
