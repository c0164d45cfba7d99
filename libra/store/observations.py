"""Large tool returns: a return above `REFERENCE_BYTES` is a file of its own.

A record has only the reference and the text that the model read, so journals and messages stay
small.

1. A file is created once, whole; its name has the digest of its bytes, which `read_observation`
   checks.
2. A reference is relative to the run directory, so a run may be moved.
3. A return of more than `MOST_BYTES` is not kept and has no reference; the log has a warning.

Layout: ``observations/<trajectory>/<draw>-<turn>-<call>-<sha256>.txt``.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from libra.errors import RecordExists, StoreError
from libra.store.exclusive_files import create_exclusive
from libra.store.run_records import runs_here
from libra.types import ToolReturn

logger = logging.getLogger(__name__)

REFERENCE_BYTES = 1 << 20
"""A return of more bytes of UTF-8 is kept by reference."""
MOST_BYTES = 64 << 20
DIRECTORY = "observations"
_NAME = re.compile(r"(?P<draw>\d+)-(?P<turn>\d+)-(?P<call>\d+)-(?P<digest>[0-9a-f]{64})\.txt")
_REFERENCE = re.compile(rf"{DIRECTORY}/[A-Za-z0-9][A-Za-z0-9_.\-]{{0,127}}/{_NAME.pattern}")


@dataclass(frozen=True, slots=True)
class StoredObservation:
    """One file; ``sound`` is whether its bytes match the digest in its name."""

    reference: str
    turn: int
    call: int
    num_bytes: int
    sound: bool


def keep_observation(run_dir: Path, trajectory: str, draw: int, turn: int, call: int, text: str) -> str:
    """Write a large return; its reference, or "" if it is not kept. StoreError if that fails."""
    if 4 * len(text) <= REFERENCE_BYTES:
        return ""
    data = text.encode(errors="surrogatepass")
    if len(data) <= REFERENCE_BYTES:
        return ""
    if len(data) > MOST_BYTES:
        logger.warning(
            "observation of %s, turn %d: %d bytes are not kept, allowed are %d", trajectory, turn, len(data), MOST_BYTES
        )
        return ""
    reference = f"{DIRECTORY}/{trajectory}/{draw}-{turn}-{call}-{hashlib.sha256(data).hexdigest()}.txt"
    with contextlib.suppress(RecordExists):  # the action ran before, and its worker died before the record
        create_exclusive(f"{run_dir}/{reference}", data)
    return reference


def read_observation(run_dir: Path, reference: str) -> str:
    """The whole text; StoreError if the reference is invalid, or the file damaged."""
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise StoreError(f"observation {reference!r:.200}: no reference of a run; ToolReturn.reference has one")
    path = run_dir / reference
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path}: this observation cannot be read: {error.strerror}") from error
    if hashlib.sha256(data).hexdigest() != match["digest"]:
        raise StoreError(f"{path}: torn or altered, {len(data)} bytes have another digest than its name")
    return data.decode(errors="surrogatepass")


def observation(returned: ToolReturn, run: str | Path | None = None) -> str:
    """The full output of a tool, read from its file if the record has only a reference. ``run`` is
    the run directory, None for the runs of this process. Raises StoreError as `read_observation`,
    or if no run has the file."""
    if not returned.reference:
        return returned.content
    places = runs_here() if run is None else [Path(run)]
    found = [place for place in places if (place / returned.reference).exists()] or places
    if not found:
        raise StoreError(
            f"observation {returned.reference}: this process works for no run; type libra.observation(returned, run=RUN_DIRECTORY)"
        )
    return read_observation(found[0], returned.reference)


def observations_of(run_dir: Path, trajectory: str) -> Iterator[StoredObservation]:
    """The files of one trajectory, by draw, turn and call."""
    for path in sorted((run_dir / DIRECTORY / trajectory).glob("*.txt")):
        if match := _NAME.fullmatch(path.name):
            reference = f"{DIRECTORY}/{trajectory}/{path.name}"
            yield StoredObservation(
                reference, int(match["turn"]), int(match["call"]), path.stat().st_size, observation_fault(path) is None
            )


def observation_fault(path: Path) -> str | None:
    """The damage of an observation's file, None if it is sound."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        return "no file of Libra's"
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    return None if found == match["digest"] else "torn or altered: it has another digest than its name"
