"""Weights from one worker to another where they share no disk: files of a version, as raw bytes over a socket.

`WeightServer` offers the versions of a `WeightStore`; `fetch` takes one from the first holder that has it and puts it into a
store of its own. The conversation, for one file::

    holder  -> 32 random bytes
    asker   -> one line of JSON: version, file, offset, and the HMAC-SHA256 of all three and those bytes by the run's secret
    holder  -> one line of JSON: {"size": bytes of the whole file, "sha256": of the whole file} or {"error": text}
    holder  -> the file from ``offset`` on

Nothing is unpickled, the secret does not cross the wire, and only files of a version (`registry.FILES`) can be asked for.

Invariants
1. A version is whole or absent in the directory fetched to: files are filled under a temporary name, compared with their
   sha256, and renamed as one directory. The digest of the tensors is that of the announcement, where there is one.
2. A holder that fails, in the middle of a file too, is left for the next; what has arrived is kept where the next one's file
   has the same sha256. WeightsError, which names what each one said, comes only when none is left.
3. Serving holds up nobody: a thread per asker, reading files that never change.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import secrets
import shutil
import socket
import socketserver
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from libra.errors import WeightsError
from libra.weights.registry import CHECK_FILE, FILES, WeightStore, WeightVersion

logger = logging.getLogger(__name__)

CHUNK_BYTES = 4 * 2**20
"""Bytes read at once by whoever fetches."""
LINE_BYTES = 64 * 1024
"""Longest line of either side."""
TIMEOUT_S = 30.0
"""Silence after which a holder, or an asker, is taken for dead."""
CHALLENGE_BYTES = 32


@dataclass(frozen=True, slots=True)
class Holder:
    """Somebody who has versions: address and port of its `WeightServer`."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def new_secret() -> str:
    """A secret for the workers of one run: 256 random bits in hexadecimal."""
    return secrets.token_hex(32)


class WeightServer:
    """Offers the versions of a store from a thread of its own.

    Parameters
    ----------
    store : WeightStore
    secret : str
        Only who knows it is given anything.
    host : str
        Address to listen at.
    port : int
        0: any free one.
    """

    def __init__(self, store: WeightStore, secret: str, host: str, port: int = 0) -> None:
        self._server = _Server((host, port), _Conversation)
        self._server.store, self._server.secret = store, secret
        self.holder = Holder(host, self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="libra-weights", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; conversations under way end by themselves."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def fetch(
    version: int, holders: Sequence[Holder], directory: str | Path, *, secret: str, content: str | None = None
) -> WeightVersion:
    """Get ``version`` from the first of ``holders`` that gives it whole, into the store at ``directory``.

    Parameters
    ----------
    holders : sequence of Holder
        Nearest first.
    content : str, optional
        Digest that the version was announced with.

    Raises
    ------
    WeightsError
        No holder gave it whole, or it is not the content announced.
    """
    store = WeightStore(directory)
    if version in store.numbers():
        return _announced(store.get(version), content)
    temporary = store.root / f".tmp.{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex}"
    temporary.mkdir()
    said: list[str] = []
    try:
        for holder in holders:
            try:
                for name in FILES:
                    _fetch_file(version, name, holder, temporary / name, secret)
            except (OSError, ValueError, WeightsError) as fault:
                said.append(f"{holder}: {fault}")
                logger.warning("weights: %s does not give version %d, the next is asked: %s", holder, version, fault)
                continue
            _take(temporary, store, version)
            return _announced(store.get(version), content)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    answers = "; ".join(said) or "nobody was asked: no holder is known"
    raise WeightsError(f"weights: version {version} could not be fetched to {store.root}: {answers}")


def _take(temporary: Path, store: WeightStore, version: int) -> None:
    """Rename what was fetched; where somebody else of this machine was first, that one stays."""
    target = store.root / f"{version:08d}"
    try:
        temporary.rename(target)
    except OSError:
        if not target.exists():
            raise


def _announced(found: WeightVersion, content: str | None) -> WeightVersion:
    if content is not None and found.digest != content:
        raise WeightsError(
            f"weights: {found.directory} says digest {found.digest}, but version {found.number} was announced as {content}"
        )
    return found


def _fetch_file(version: int, name: str, holder: Holder, path: Path, secret: str) -> None:
    """Get one file, going on after what ``path`` holds of it already; a version may have no check."""
    offset = path.stat().st_size if path.exists() else 0
    with socket.create_connection((holder.host, holder.port), timeout=TIMEOUT_S) as line, line.makefile("rb") as answer:
        challenge = answer.read(CHALLENGE_BYTES)
        asked = {"version": version, "file": name, "offset": offset}
        line.sendall(json.dumps({**asked, "mac": _mac(secret, challenge, asked)}).encode() + b"\n")
        facts = json.loads(answer.readline(LINE_BYTES) or b'{"error": "it said nothing"}')
        if facts.get("absent") and name == CHECK_FILE:
            return
        if "error" in facts:
            raise WeightsError(facts["error"])
        size, sha256 = int(facts["size"]), str(facts["sha256"])
        with path.open("ab") as file:
            while chunk := answer.read(min(CHUNK_BYTES, size - file.tell())):
                file.write(chunk)
            got = file.tell()
            file.flush()
            os.fsync(file.fileno())
    if got != size:
        raise WeightsError(f"{name}: it ended after {got} of {size} bytes")
    if (found := _sha256(path)) != sha256:
        path.unlink()
        if offset == 0:
            raise WeightsError(f"{name}: sha256 {found}, announced was {sha256}")
        _fetch_file(
            version, name, holder, path, secret
        )  # what was there came from another holder, and was not the same


def _mac(secret: str, challenge: bytes, asked: dict[str, Any]) -> str:
    text = f"{asked['version']}/{asked['file']}/{asked['offset']}".encode()
    return hmac.new(secret.encode(), challenge + text, hashlib.sha256).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _Server(socketserver.ThreadingTCPServer):
    """One thread per conversation; remembers the sha256 of files, which never change."""

    daemon_threads = True
    allow_reuse_address = True
    store: WeightStore
    secret: str

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._hashes: dict[Path, str] = {}

    def sha256(self, path: Path) -> str:
        """Of a version's file, computed once."""
        if path not in self._hashes:
            self._hashes[path] = _sha256(path)
        return self._hashes[path]


class _Conversation(socketserver.StreamRequestHandler):
    """One file asked for."""

    timeout = TIMEOUT_S

    def handle(self) -> None:
        server = cast(_Server, self.server)
        challenge = secrets.token_bytes(CHALLENGE_BYTES)
        try:
            self.wfile.write(challenge)
            asked = json.loads(self.rfile.readline(LINE_BYTES))
            if not hmac.compare_digest(str(asked.get("mac", "")), _mac(server.secret, challenge, asked)):
                return self._say(error="the secret is not this run's")
            version, name, offset = int(asked["version"]), str(asked["file"]), int(asked["offset"])
            path = server.store.root / f"{version:08d}" / name
            if name not in FILES:
                return self._say(error=f"{name!r} is no file of a version")
            if not path.is_file():
                return self._say(error=f"version {version} has no {name} here", absent=path.parent.is_dir())
            with path.open("rb") as file:
                self._say(size=path.stat().st_size, sha256=server.sha256(path))
                self._send(file, offset)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as fault:
            logger.warning("weights: a conversation with %s ended early: %s", self.client_address, fault)

    def _say(self, **facts: Any) -> None:
        self.wfile.write(json.dumps(facts).encode() + b"\n")

    def _send(self, file: BinaryIO, offset: int) -> None:
        self.connection.sendfile(file, offset)
