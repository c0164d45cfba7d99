"""No module imports itself through others, in functions and under TYPE_CHECKING included; nor does any room."""

from __future__ import annotations

from import_graph import circles, describe, room_graph


def test_no_modules_import_each_other(graph: dict[str, set[str]]) -> None:
    found = circles(graph)
    assert not found, "\n\n".join(describe(graph, members) for members in found)


def test_no_rooms_import_each_other(graph: dict[str, set[str]]) -> None:
    rooms = room_graph(graph)
    found = circles(rooms)
    assert not found, "\n\n".join(describe(rooms, members) for members in found)


def test_a_circle_is_found_through_a_third_module() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert circles(graph) == [["a", "b", "c"]]
    assert describe(graph, ["a", "b", "c"]) == "  a -> b\n  b -> c\n  c -> a"
