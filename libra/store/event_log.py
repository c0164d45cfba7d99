"""The event log of a run: `libra.events`, one a line, in the order in which they were written.

The store is the truth and this log explains it: events since the last `flush` may be lost with the process, and a torn
last line is tolerated and reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from libra.events import Event, PolicySnapshot, to_json
from libra.store.line_log import LineLog, LineReader, read_lines

_SNAPSHOT = f'"name":"{PolicySnapshot.name}"'.encode()


class EventLog(LineLog):
    """A buffered appender of events to ``path``; its directory is made where missing.

    Raises StoreError where the file cannot be opened or written; a full disk is named as such.
    """

    def write(self, event: Event | Mapping[str, Any]) -> None:
        """Add one event, or a dict that stands for one. It reaches the file with the next `flush`, or some hundreds later."""
        self.write_line(to_json(event))


class LoggedEvents(NamedTuple):
    """What `read_events` found: the events as dicts, and the torn last line (None: the log ends cleanly)."""

    events: list[dict[str, Any]]
    torn: str | None


def read_events(path: str | Path) -> LoggedEvents:
    """All events of a log in order; `libra.events.from_dict` makes typed values of them.

    Raises StoreError, with the line's number, where the file is missing or a line but the last is not a JSON object.
    """
    return LoggedEvents(*read_lines(path))


def from_last_snapshot(path: str | Path) -> LineReader | None:
    """A reader that begins at the last whole ``policy_snapshot`` of a log; None where there is none.

    Lines before it are not parsed. Raises StoreError where the file is missing.
    """
    found = None
    for number, offset, line in LineReader(path).raw():
        if _SNAPSHOT in line[:64]:
            found = LineReader(path, offset=offset, line=number)
    return found
