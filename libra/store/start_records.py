"""The starts of a run: its input, a line per start, and the epochs that fence off older starts.

The input is kept twice, so that either copy can be rebuilt from the other:
``config.resolved.yaml`` is the configuration, and ``given.json`` has its text and which Python
objects were given. ``starts.jsonl`` has for each start its epoch, the same facts, the digest of the
configuration, and ``iterations`` if a resumed run changed that number.

1. A process is *fenced off* as soon as the next epoch exists: its next `Epoch.check` raises.
2. Every writer of a run calls `Epoch.check` before it writes. The check is not a lock: a later
   write either creates the record, with the writer's epoch, or is refused because the record
   exists.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from libra.errors import FencedOff, RecordExists, StoreError
from libra.seals import sealed_text, unseal
from libra.store.exclusive_files import create_exclusive
from libra.store.line_log import LineLog

CONFIG_FILE, GIVEN_FILE, STARTS_FILE = "config.resolved.yaml", "given.json", "starts.jsonl"


def config_digest(text: str | bytes) -> str:
    """Hexadecimal blake2b-64 of the text of a configuration."""
    return hashlib.blake2b(text.encode() if isinstance(text, str) else text, digest_size=8).hexdigest()


def write_given(directory: Path, config: str, *, environment: bool, score: bool) -> None:
    """Write ``given.json``: the configuration, and whether two Python objects were given."""
    values = {"environment": environment, "score": score, "config": config}
    (directory / GIVEN_FILE).write_text(sealed_text(values) + "\n")


def read_given(directory: Path) -> dict[str, Any]:
    """The content of ``given.json``; StoreError if it is missing, torn or altered."""
    path = directory / GIVEN_FILE
    try:
        given = unseal(path.read_bytes())
        return {"environment": given["environment"], "score": given["score"], "config": given["config"]}
    except OSError as error:
        raise StoreError(f"{path}: {'it is gone' if not path.exists() else error.strerror}") from error
    except (ValueError, KeyError) as error:
        raise StoreError(f"{path}: torn or altered ({error})") from error


def log_start(directory: Path, epoch: int, iterations: int | None = None) -> None:
    """Add the line of a start; give ``iterations`` only if they differ from the configuration."""
    facts = {**read_given(directory), "config": config_digest((directory / CONFIG_FILE).read_bytes()), "epoch": epoch}
    with LineLog(directory / STARTS_FILE, buffer_lines=1) as log:
        log.write_line(sealed_text(facts if iterations is None else {**facts, "iterations": iterations}))


def read_starts(directory: Path) -> list[dict[str, Any]]:
    """Every recorded start, without a torn last line; StoreError if a line is altered."""
    path = directory / STARTS_FILE
    try:
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        return [unseal(line) for line in lines if line.endswith(b"\n")]
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: altered ({error})") from error


def newest_logged(directory: Path) -> int:
    """The highest epoch in ``starts.jsonl``, -1 without a start. Raises as `read_starts`."""
    return max((int(start.get("epoch", -1)) for start in read_starts(directory)), default=-1)


class Epoch:
    """One start of a run, for workers and driver; ``directory`` is ``epochs/`` of the run."""

    def __init__(self, directory: Path, number: int) -> None:
        self.directory, self.number = directory, number
        self._next = os.fspath(directory / f"{number + 1:04d}")

    def check(self) -> None:
        """Raise FencedOff if a newer start of the run exists."""
        if os.access(self._next, os.F_OK):  # once a quantum; without an exception, unlike `exists`
            raise FencedOff(
                f"{self.directory.parent}: epoch {self.number} has ended, the run was started again as epoch "
                f"{newest_epoch(self.directory)}; this process stops and writes nothing more"
            )


def epochs_in(directory: Path) -> set[int]:
    """Numbers of the epochs that have a file."""
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    return {int(name) for name in names if name.isdigit()}


def newest_epoch(directory: Path) -> int:
    """Number of the last start, -1 without a start."""
    return max(epochs_in(directory), default=-1)


def take_epoch(directory: Path, *, above: int = -1) -> Epoch:
    """Take the next epoch, above ``above``, and so fence off every older epoch."""
    while True:
        number = max(newest_epoch(directory), above) + 1
        try:
            create_exclusive(directory / f"{number:04d}", b"", fsync=True)
        except RecordExists:
            continue  # another start took this number
        return Epoch(directory, number)
