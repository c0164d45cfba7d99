"""The event log of a run: one of `libra.facts` per line, in order of writing.

The store is the truth, and this log explains it: events since the last `flush` may be lost with the process. The newest lines are
in ``events.jsonl``, the older ones in compressed segments beside it (`libra.store.log_segments`); readers here read both as one.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from libra.errors import StoreError
from libra.facts import Fact, Line, PolicySnapshot, name_of, to_json
from libra.store.line_log import LineLog, LineReader
from libra.store.log_segments import Segment, check_whole, close_segment, remove_partial, same_file, segments_of

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 1 << 20
"""Least size of a segment, uncompressed. A run closes one before a snapshot (every 10,000 events, or 2.5 MB) and at its end."""
_SNAPSHOT = f'"name":"{name_of(PolicySnapshot)}"'.encode()
_LOOKS = 100
"""How often a reader looks again while a writer closes segments."""
_COMPRESSORS: dict[Path, threading.Thread] = {}
"""The newest thread of this process that compresses segments of a log, by the log's path."""


class EventLog(LineLog):
    """A buffered appender of events to ``path``; its directory is made where missing.

    It also compresses the segments that a writer before it left uncompressed. Opening takes long where that one died while it
    closed a large segment: its lines are counted.

    Raises StoreError if the file cannot be opened or written; a full disk is named as such.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._compressor: threading.Thread | None = None
        before = _COMPRESSORS.get(self.path.absolute())
        if before is None or not before.is_alive():  # else its file is not left over
            remove_partial(self.path)
        left = [segment for segment in segments_of(self.path) if segment.plain.exists()]
        if left and same_file(left[-1].plain, self.path):  # its writer died while it closed this segment
            self._close_segment()
        self._compress(left)

    def write(self, line: Line) -> None:
        """Add one line. It reaches the file with the next `flush`, or some hundreds later."""
        self.write_line(to_json(line))

    def rotate(self) -> None:
        """Close a segment if the file is large enough for one; it is compressed in a thread.

        Lines that are read again should begin there: see `from_last_snapshot`.
        """
        self.flush()
        mine, now = os.fstat(self._descriptor), _stat(self.path)
        if mine.st_size < SEGMENT_BYTES or now is None or not os.path.samestat(mine, now):
            return  # too small; or a later start of the run has taken the log over
        segment = self._close_segment()
        if segment is not None:
            self._compress([segment])

    def close(self, *, wait: bool = True) -> None:
        """Flush and close; ``wait`` for the compression, too, which takes 20 s for a gigabyte. A second call does nothing."""
        super().close()
        if wait:
            self.wait_compressed()

    @property
    def compresses(self) -> bool:
        """Whether segments are being compressed."""
        return self._compressor is not None and self._compressor.is_alive()

    def wait_compressed(self) -> None:
        """Return when every closed segment is compressed."""
        if self._compressor is not None:
            self._compressor.join()

    def _close_segment(self) -> Segment | None:
        try:
            segment = close_segment(self.path)
        except (OSError, StoreError) as error:
            logger.warning("%s: goes on without a new segment: %s", self.path, error)
            return None
        self._reopen()
        return segment

    def _compress(self, segments: list[Segment]) -> None:
        """Compress in a thread, after what it compresses already."""
        if not segments:
            return
        path = self.path.absolute()
        before = _COMPRESSORS.get(path)

        def work() -> None:
            if before is not None:
                before.join()
            for segment in segments:
                try:
                    segment.compress()
                except (OSError, StoreError) as error:
                    logger.warning("%s: stays uncompressed: %s", segment.plain, error)
            if _COMPRESSORS.get(path) is threading.current_thread():
                del _COMPRESSORS[path]

        self._compressor = _COMPRESSORS[path] = threading.Thread(target=work, name="libra-log-segments")
        self._compressor.start()


def open_large(path: Path) -> EventLog:
    """A log whose older lines, of any number, are in a segment already, so that it is never the scheduler that counts them.

    May take seconds: gigabytes are counted, where an older Libra kept one file. Call it off the event loop.
    """
    log = EventLog(path)
    log.rotate()
    return log


def _finite(text: str) -> float:
    """A number in JSON; ValueError if it is none, or too large."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


class EventReader(LineReader):
    """The events of a log as dicts, one at a time, those in segments included: iterating gives (line number from 1, dict).

    Parameters
    ----------
    line : int
        The line to begin with. Lines before it are not parsed, and segments before it are not opened.

    Raises
    ------
    StoreError
        While iterating, with the line's number: the file or a segment is missing or damaged, or a line but the last is not a
        JSON object.
    """

    def _value(self, line: bytes) -> Any:
        """As it was written: a number that is not finite is no JSON, unlike in Python's ``json``."""
        try:
            return msgspec.json.decode(line)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
        except msgspec.DecodeError as error:
            if b"\\ud" not in line:
                raise ValueError(str(error)) from error
        try:  # half a surrogate pair, which a model may write and only Python's ``json`` reads
            return json.loads(line, parse_constant=_finite, parse_float=_finite)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error

    def raw(self) -> Iterator[tuple[int, bytes]]:
        """Number and bytes of each whole line."""
        segments, file = _opened(self.path)
        with file:
            yield from self._raw(segments, file)

    def _raw(self, segments: list[Segment], file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        if segments and self.line < segments[-1].first:
            check_whole(self.path, segments)
        for segment in segments:
            if segment.last >= self.line:
                yield from enumerate(segment.lines(self.line), max(self.line, segment.first))
        begin = segments[-1].last + 1 if segments else 1
        yield from self.whole_lines(file, begin)


class LoggedEvents(NamedTuple):
    """The events of a log as dicts, and its torn last line (None: the log ends cleanly)."""

    events: list[dict[str, Any]]
    torn: str | None


def read_events(path: str | Path) -> LoggedEvents:
    """All events of a log in order; `libra.facts.from_dict` makes typed values of them.

    Raises StoreError, with the line's number, where the file is missing or a line but the last is not a JSON object.
    """
    reader = EventReader(path)
    found = [value for _, value in reader]
    reader.warn_if_torn()
    return LoggedEvents(found, reader.torn)


def from_last_snapshot(path: str | Path) -> EventReader | None:
    """A reader that begins at the last whole ``policy_snapshot`` of a log; None if there is none.

    Segments are searched from the newest on, and lines before the snapshot are not parsed. Raises StoreError if the file is
    missing.
    """
    segments, file = _opened(Path(path))
    begin = segments[-1].last + 1 if segments else 1
    with file:
        found = _last_snapshot(enumerate(file, begin))
    while found is None and segments:
        segment = segments.pop()
        found = _last_snapshot(enumerate(segment.lines(), segment.first))
    return None if found is None else EventReader(path, line=found)


def lines_of(path: str | Path, kind: type[Fact]) -> Iterator[bytes]:
    """The lines of events of one kind, unparsed, of a log that may be damaged: what cannot be read is left out."""
    word = f'"name":"{name_of(kind)}"'.encode()
    if not Path(path).is_file():
        return
    segments, file = _opened(Path(path))
    with file:
        for part in (*(segment.lines() for segment in segments), iter(file)):
            try:
                yield from (line for line in part if word in line[:80])
            except (OSError, StoreError) as error:
                logger.warning("%s: a part is left out: %s", path, error)


def _last_snapshot(lines: Iterator[tuple[int, bytes]]) -> int | None:
    numbers = (number for number, line in lines if _SNAPSHOT in line[:64] and line.endswith(b"\n"))
    return max(numbers, default=None)


def _opened(path: Path) -> tuple[list[Segment], BinaryIO]:
    """The segments of a log, and its open file with the lines that follow them."""
    for _ in range(_LOOKS):
        try:
            file = path.open("rb")
        except OSError as error:
            raise StoreError(f"{path}: cannot read this log: {error.strerror}") from error
        try:
            segments, mine = segments_of(path), os.fstat(file.fileno())
            if segments and (now := _stat(segments[-1].plain)) is not None and os.path.samestat(now, mine):
                segments.pop()  # it is being closed: this file has its lines
            now = _stat(path)
        except BaseException:
            file.close()
            raise
        if now is not None and os.path.samestat(now, mine):
            return segments, file
        file.close()
    raise StoreError(f"{path}: a writer closes its parts faster than they can be listed; try again")


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None
