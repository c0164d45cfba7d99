"""The files of weight versions and checkpoints, read without torch, whose import is slow.

`tensors_digest` of files is `libra.tensors.digest` of their tensors: 40 hexadecimal digits of the
SHA-256 over labels and the SHA-256 of every `CHUNK_BYTES`, which threads hash in parallel.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from libra.seals import unseal

TENSORS_FILE, MANIFEST_FILE, CHECK_FILE = "model.safetensors", "version.json", "check.json"
FACTS_FILE, OPTIMIZER_FILE, WEIGHTS_PATTERN = "trainer.json", "optimizer.safetensors", "model*.safetensors"
"""Files of a checkpoint."""

CHUNK_BYTES = 2**22
"""Bytes hashed by one thread at a time."""
_HELD_CHUNKS = 32  # hashed concurrently at most, so that tensors copied from a GPU do not pile up
_SMALL_BYTES = 2**15  # smaller chunks are hashed at once: a thread would take longer

_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32",
    "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
"""By the name in a safetensors file, the name in torch."""


class _Tensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    path: Path
    begin: int
    end: int


def hash_parts(parts: Iterable[tuple[str, memoryview]]) -> str:
    """The digest of labels and elements (bytes), in this order."""
    state, waiting = hashlib.sha256(), deque[bytes | Future[bytes]]()

    def settle(kept: int) -> None:
        while len(waiting) > kept:
            each = waiting.popleft()
            state.update(each if isinstance(each, bytes) else each.result())

    with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as threads:
        for label, elements in parts:
            waiting.append(label.encode())
            for at in range(0, len(elements), CHUNK_BYTES):
                chunk = elements[at : at + CHUNK_BYTES]
                waiting.append(_sha256(chunk) if len(chunk) < _SMALL_BYTES else threads.submit(_sha256, chunk))
                settle(_HELD_CHUNKS)
        settle(0)
    return state.hexdigest()[:40]


def _sha256(chunk: memoryview) -> bytes:
    return hashlib.sha256(chunk).digest()


def tensors_digest(paths: Iterable[Path]) -> str:
    """`hash_parts` of all tensors of files; OSError or ValueError if a file is missing or torn."""
    tensors = {name: tensor for path in paths for name, tensor in _header(path).items()}
    maps: dict[Path, mmap.mmap] = {}

    def parts() -> Iterator[tuple[str, memoryview]]:
        for name in sorted(tensors):
            tensor = tensors[name]
            if tensor.path not in maps:
                with tensor.path.open("rb") as file:
                    maps[tensor.path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            elements = memoryview(maps[tensor.path])[tensor.begin : tensor.end]
            yield f"{name}:torch.{tensor.dtype}:{tensor.shape};", elements

    try:
        return hash_parts(parts())
    finally:
        for each in maps.values():
            each.close()


def version_fault(directory: Path, *, contents: bool = True) -> str | None:
    """The damage of a published version, if any; of headers and sizes without ``contents``."""
    try:
        manifest = unseal((directory / MANIFEST_FILE).read_bytes())
        announced = manifest["digest"]
        if manifest["number"] != int(directory.name):
            return f"{MANIFEST_FILE}: it is of version {manifest['number']}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST_FILE}: {_text(error)}"
    try:
        if (directory / CHECK_FILE).exists():
            unseal((directory / CHECK_FILE).read_bytes())
    except (OSError, ValueError) as error:
        return f"{CHECK_FILE}: {_text(error)}"
    return _digest_fault([directory / TENSORS_FILE], announced if contents else None, TENSORS_FILE)


def checkpoint_fault(directory: Path, *, contents: bool = True) -> str | None:
    """The damage of a checkpoint, as `version_fault`."""
    try:
        facts = unseal((directory / FACTS_FILE).read_bytes())
        weights, optimizer = facts["digest"], facts["optimizer_digest"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{FACTS_FILE}: {_text(error)}"
    try:
        for name in altered_files(directory, facts):
            return f"{name}: it was altered or is gone"
    except OSError as error:
        return _text(error)
    files = sorted(directory.glob(WEIGHTS_PATTERN))
    names = ", ".join(path.name for path in files) or TENSORS_FILE
    return _digest_fault(files, weights if contents else None, names) or (
        _digest_fault([directory / OPTIMIZER_FILE], optimizer if contents else None, OPTIMIZER_FILE)
    )


def small_files(directory: Path) -> dict[str, str]:
    """Digests, by name, of a checkpoint's files without tensors, such as ``config.json``."""
    return {
        path.name: _file_digest(path)
        for path in sorted(directory.iterdir())
        if path.is_file() and path.suffix != ".safetensors" and path.name != FACTS_FILE
    }


def altered_files(directory: Path, facts: Mapping[str, Any]) -> list[str]:
    """Files of a checkpoint that are missing or differ from their digests in ``trainer.json``."""
    known: Mapping[str, str] = facts.get("files", {})
    paths = {directory / name: content for name, content in known.items()}
    return [path.name for path, content in paths.items() if not path.is_file() or _file_digest(path) != content]


def _file_digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()


def _digest_fault(paths: list[Path], announced: str | None, name: str) -> str | None:
    try:
        if announced is None:
            for path in paths:
                _header(path)
            return None
        found = tensors_digest(paths)
    except (OSError, ValueError) as error:
        return f"{name}: {_text(error)}"
    return None if found == announced else f"{name}: its digest is {found}, announced was {announced}; it was altered"


def _header(path: Path) -> dict[str, _Tensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"torn: {size} bytes, its header alone announces {length}")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    if header.pop("__metadata__", None) not in (None, {"format": "pt"}):
        raise ValueError("its header was altered")
    tensors, last = {}, 0
    try:
        for name, facts in header.items():
            begin, end = facts["data_offsets"]
            tensors[name] = _Tensor(
                _DTYPES[facts["dtype"]], tuple(facts["shape"]), path, 8 + length + begin, 8 + length + end
            )
            last = max(last, end)
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(f"its header was altered ({error!r})") from error
    if 8 + length + last != size:
        raise ValueError(f"torn: {size} bytes, announced were {8 + length + last}")
    return tensors


def _text(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "it is gone"
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror}"
    return f"altered or torn ({error})" if isinstance(error, ValueError) else f"altered ({error!r})"


def sync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
