"""Copies weight versions between workers without a shared disk: a version's files as raw bytes.

`WeightServer` offers the versions of a `WeightStore`; `fetch` takes a version from the first server
that has it. One connection (`libra.transport`) serves any number of requests::

    client -> {"version", "file", "offset"}
    server -> {"size": bytes of the whole file, "sha256": of a small file} or {"error"},
              then the file from ``offset`` on

Invariants
----------
1. A fetched version is whole or absent: it is filled under a temporary name, and renamed once the
   tensors have the manifest's digest, which is the announced one. A failed fetch is deleted.
2. No size that a server names is trusted: small files have at most `MAX_SMALL_BYTES`, the tensors
   at most the sum of the manifest's shapes and a header.
3. A failing server is replaced by the next one, even during a file, and tensors are continued if
   the manifests are equal. When no server remains, WeightsError lists the error of each.
4. Only files of a version are served.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from libra.errors import WeightsError, disk_refusal
from libra.tensor_files import CHECK_FILE, MANIFEST_FILE, TENSORS_FILE
from libra.transport import SILENCE_S, Address, Channel, Server, connect
from libra.weights.weight_store import Manifest, WeightStore, WeightVersion, load_tensors, parse_manifest

logger = logging.getLogger(__name__)

PURPOSE = "weights"
SMALL_FILES = (MANIFEST_FILE, CHECK_FILE)
MAX_SMALL_BYTES = 64 * 2**20
WINDOW_BYTES = 2**20
"""Bytes received, and written to the file, at once."""


class WeightServer:
    """Offers a store's versions at ``address`` to workers that share ``secret``."""

    def __init__(self, store: WeightStore, secret: str, host: str, port: int = 0) -> None:
        self._store = store
        self._server = Server(self._serve, secret=secret, purpose=PURPOSE, host=host, port=port, silence_s=SILENCE_S)
        self.address = self._server.address

    def close(self) -> None:
        self._server.close()

    def _serve(self, channel: Channel, client: str) -> None:
        while (request := channel.recv_frame()) is not None:
            version, name, offset = int(request["version"]), str(request["file"]), int(request["offset"])
            if name not in (TENSORS_FILE, *SMALL_FILES):
                channel.send_frame(error=f"{name!r} is not a file of a version")
                continue
            path = self._store.directory(version) / name
            try:
                file = path.open("rb")
            except OSError:
                channel.send_frame(error=f"version {version} has no {name} here", absent=path.parent.is_dir())
                continue
            with file:
                size = os.fstat(file.fileno()).st_size
                if not 0 <= offset <= size:
                    channel.send_frame(error=f"{name} has {size} bytes, none from {offset} on")
                    continue
                channel.send_frame(size=size, sha256=_sha256(path) if name in SMALL_FILES else None)
                channel.send_file(file, offset, size - offset)


def fetch(
    version: int, servers: Sequence[Address], directory: str | Path, *, secret: str, content: str | None = None
) -> WeightVersion:
    """Fetch ``version`` into ``directory`` from the first of ``servers`` that has it whole.

    ``servers``: nearest first. ``content``: the announced digest. Raises WeightsError if no server
    provides the whole version, or the digest differs.
    """
    store = WeightStore(directory)
    if version in store.numbers():
        found = store.get(version)
        _check_announced(found.digest, content, found.directory, version)
        return found
    temporary = store.temporary()
    errors: list[str] = []
    try:
        temporary.mkdir()
        for host, port in servers:
            try:
                with contextlib.closing(connect((host, port), secret, purpose=PURPOSE, silence_s=SILENCE_S)) as channel:
                    manifest = _fetch_version(channel, version, temporary, content)
                return store.adopt(temporary, version, manifest.digest)
            except (OSError, ValueError, LookupError, TypeError, WeightsError) as error:
                errors.append(f"{host}:{port}: {error}")
                logger.warning("weights: version %d is not available from %s", version, errors[-1])
    except OSError as error:
        raise WeightsError(f"weights: {disk_refusal(temporary, error)}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    answers = "; ".join(errors) or "no server is known"
    raise WeightsError(f"weights: version {version} could not be fetched to {store.root}: {answers}")


def _fetch_version(channel: Channel, version: int, directory: Path, content: str | None) -> Manifest:
    """Fill ``directory``, which may have part of the tensors; returns the matching manifest."""
    tensors, manifest_path = directory / TENSORS_FILE, directory / MANIFEST_FILE
    before = manifest_path.read_bytes() if manifest_path.exists() else None
    for name in SMALL_FILES:
        (directory / name).unlink(missing_ok=True)
        _fetch_file(channel, version, directory / name, MAX_SMALL_BYTES)
    text = manifest_path.read_bytes()
    manifest = parse_manifest(text, version, MANIFEST_FILE)
    _check_announced(manifest.digest, content, MANIFEST_FILE, version)
    if before != text:
        tensors.unlink(missing_ok=True)
    is_continued = tensors.exists()
    _fetch_file(channel, version, tensors, _max_bytes(manifest))
    try:
        load_tensors(tensors, manifest.digest)
    except WeightsError:
        tensors.unlink()
        if not is_continued:
            raise
        _fetch_file(channel, version, tensors, _max_bytes(manifest))  # the partial file was another server's
        load_tensors(tensors, manifest.digest)
    return manifest


def _fetch_file(channel: Channel, version: int, path: Path, max_bytes: int) -> None:
    name, offset = path.name, path.stat().st_size if path.exists() else 0
    channel.send_frame(version=version, file=name, offset=offset)
    answer = channel.recv_frame() or {"error": "the server closed the connection"}
    if answer.get("absent") and name == CHECK_FILE:
        return
    if "error" in answer:
        raise WeightsError(str(answer["error"]))
    size, sha256 = int(answer["size"]), answer.get("sha256")
    if not offset <= size <= max_bytes:
        raise WeightsError(f"{name}: got a size of {size} bytes, {offset} to {max_bytes} are allowed by the manifest")
    buffer = memoryview(bytearray(min(WINDOW_BYTES, size - offset)))
    with path.open("ab") as file:
        while (left := size - file.tell()) > 0:
            got = channel.recv_some(buffer[:left])
            file.write(buffer[:got])
        file.flush()
        os.fsync(file.fileno())
    if name in SMALL_FILES and (found := _sha256(path)) != sha256:
        raise WeightsError(f"{name}: sha256 {found}, announced was {sha256}")


def _max_bytes(manifest: Manifest) -> int:
    """Maximum bytes of a safetensors file of these tensors: elements, and a JSON entry for each."""
    num_bytes = entries = 0
    for name, facts in manifest.tensors.items():
        dtype = getattr(torch, facts.dtype, None)
        if not isinstance(dtype, torch.dtype) or min(facts.shape, default=0) < 0:
            raise WeightsError(f"{MANIFEST_FILE}: {name} has dtype {facts.dtype!r} and shape {facts.shape}")
        num_bytes += math.prod(facts.shape) * dtype.itemsize
        entries += 6 * len(name) + 24 * len(facts.shape) + 128
    if num_bytes != manifest.num_bytes:
        raise WeightsError(f"{MANIFEST_FILE}: got num_bytes {manifest.num_bytes}, but its tensors have {num_bytes}")
    return num_bytes + entries + 4096


def _check_announced(found: str, content: str | None, where: object, version: int) -> None:
    if content is not None and found != content:
        raise WeightsError(f"weights: {where} has digest {found}, but version {version} was announced as {content}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
