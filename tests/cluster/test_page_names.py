"""Which web pages may use the dashboard."""

from __future__ import annotations

import pytest

from libra.cluster.page_names import refusal

MACHINE, ADDED = frozenset({"localhost", "node7", "node7.cluster"}), frozenset({"gateway.example"})


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("127.0.0.1:8787", None),
        ("127.0.0.1:8787", "http://127.0.0.1:8787"),
        ("localhost:9999", "http://localhost:9999"),  # ssh -L 9999:127.0.0.1:8787
        ("[::1]:8787", "http://[::1]:8787"),
        ("10.0.0.7:8787", None),
        ("node7:8787", "http://node7:8787"),
        ("NODE7.cluster.:8787", "http://node7.cluster.:8787"),
        ("run.localhost:8787", None),
        ("gateway.example", "https://gateway.example"),
        ("127.0.0.1:8787", "https://gateway.example"),  # a proxy that changes Host
        ("localhost", "http://localhost:80"),
    ],
)
def test_a_page_of_this_machine_is_allowed(host: str, origin: str | None) -> None:
    assert refusal(host, origin, MACHINE, ADDED) is None


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("evil.example:8787", None),  # rebound to 127.0.0.1
        ("evil.example:8787", "http://evil.example:8787"),
        ("node7.evil.example", None),
        ("localhost.evil.example", None),
        ("127.0.0.1.evil.example", None),
        ("", None),
        ("[", None),
        ("127.0.0.1:8787", "http://evil.example"),
        ("127.0.0.1:8787", "http://127.0.0.1:9000"),  # another server of this machine
        ("127.0.0.1:8787", "http://127.0.0.1"),
        ("127.0.0.1:8787", "null"),
        ("127.0.0.1:8787", ""),
        ("127.0.0.1:8787", "http://127.0.0.1:8787.evil.example"),
        ("localhost:8787", "http://localhost:x"),
    ],
)
def test_another_page_is_refused(host: str, origin: str | None) -> None:
    assert refusal(host, origin, MACHINE, ADDED) is not None
