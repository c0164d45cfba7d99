"""The input of a run and its starts, kept twice, so that either copy can be checked and rebuilt from the other.

``config.resolved.yaml`` is the configuration, ``given.json`` has its text and which Python objects were given with it, and
``starts.jsonl`` has a line for each start: its epoch, the same facts and the digest of the configuration, and ``iterations`` where
a resumed run has others than the configuration. Each is written by the driver before anything else of that start.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from libra.errors import StoreError
from libra.seals import sealed_text, unseal
from libra.store.line_log import LineLog

CONFIG_FILE, GIVEN_FILE, STARTS_FILE = "config.resolved.yaml", "given.json", "starts.jsonl"


def config_digest(text: str | bytes) -> str:
    """Hexadecimal blake2b-64 of the text of a configuration."""
    return hashlib.blake2b(text.encode() if isinstance(text, str) else text, digest_size=8).hexdigest()


def write_given(directory: Path, config: str, *, environment: bool, score: bool) -> None:
    """Write ``given.json``: the text of the configuration, and whether an environment or a score node was given as an object."""
    values = {"environment": environment, "score": score, "config": config}
    (directory / GIVEN_FILE).write_text(sealed_text(values) + "\n")


def read_given(directory: Path) -> dict[str, Any]:
    """The content of ``given.json``; StoreError if it is gone, torn or altered. Of an older Libra it has no ``config``."""
    path = directory / GIVEN_FILE
    try:
        given = unseal(path.read_bytes())
        return {"environment": bool(given["environment"]), "score": bool(given["score"]), "config": given.get("config")}
    except OSError as error:
        raise StoreError(f"{path}: {'it is gone' if not path.exists() else error.strerror}") from error
    except (ValueError, KeyError) as error:
        raise StoreError(f"{path}: torn or altered ({error})") from error


def log_start(directory: Path, epoch: int, iterations: int | None = None) -> None:
    """Add the line of a start; ``iterations``: None where they are those of the configuration."""
    facts = {**read_given(directory), "config": config_digest((directory / CONFIG_FILE).read_bytes()), "epoch": epoch}
    with LineLog(directory / STARTS_FILE, buffer_lines=1) as log:
        log.write_line(sealed_text(facts if iterations is None else {**facts, "iterations": iterations}))


def read_starts(directory: Path) -> list[dict[str, Any]]:
    """Every start on record; none if the file is gone. StoreError if a line is altered; a torn last one is left out."""
    path = directory / STARTS_FILE
    try:
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        return [unseal(line) for line in lines if line.endswith(b"\n")]
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: altered ({error})") from error


def newest_logged(directory: Path) -> int:
    """The highest epoch on record beside ``epochs/``, -1 if there is none. StoreError as `read_starts`."""
    return max((int(start.get("epoch", -1)) for start in read_starts(directory)), default=-1)
