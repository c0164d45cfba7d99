"""Records as bytes: for each a header with magic, schema number, length and crc32, then msgpack with numpy arrays.

1. `unpack` inverts `pack`, but tuples become lists and numpy scalars plain numbers. Any str is kept, lone surrogates included.
2. Bytes that were cut, extended or changed never decode: `unpack` raises StoreError with the source's name.
3. An unknown schema number is refused.
4. `joined` records are written and read as one; a header says how many follow its own.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import numpy as np

from libra.errors import StoreError, Unstorable

SCHEMA = 1
"""Layout of a record; a change that old code cannot read takes the next number."""

_MAGIC = b"LBRR"
_HEADER = struct.Struct("<4sHHII")  # magic, schema, records that follow, body length, crc32 of the body
_FOLLOW, _FOLLOW_AT = struct.Struct("<H"), 6
_ARRAY = 1  # msgpack extension code of a numpy array: (dtype, shape, bytes)
_ARRAYS = msgpack.Packer()
"""Kept: a packer of its own for each array, within that of the record, made and returned two buffers of a quarter of a megabyte per
array, which took two thirds of `pack`. It calls no Python code, so that threads take turns."""
_TEXT_ERRORS = (
    "surrogatepass"  # a lone surrogate, of a file name that is not UTF-8 for one, is no reason to lose a record
)


_ARRAY_PARTS = msgspec.msgpack.Decoder(tuple[str, list[int], bytes])
_dtype = lru_cache(maxsize=64)(np.dtype)


def _encode_object(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise TypeError(f"an array of dtype {value.dtype} (only fixed-size numbers can be stored)")
        return msgpack.ExtType(_ARRAY, _ARRAYS.pack((value.dtype.str, value.shape, value.tobytes())))
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a value of type {type(value).__name__}")


def _decode_extension(code: int, data: bytes | memoryview) -> Any:
    if code != _ARRAY:
        return msgpack.ExtType(code, bytes(data))
    dtype, shape, raw = _ARRAY_PARTS.decode(data)
    array = np.frombuffer(bytearray(raw), dtype=_dtype(dtype))
    return array if shape == [array.size] else array.reshape(shape)


_QUICK = msgspec.msgpack.Decoder(ext_hook=_decode_extension)
"""Takes two thirds of msgpack's time, but no text that is not UTF-8."""


def pack(record: Mapping[str, Any], *, source: str) -> bytes:
    """``record`` as bytes; Unstorable names ``source`` if a value is of a kind that cannot be stored."""
    try:
        body: bytes = msgpack.packb(record, default=_encode_object, unicode_errors=_TEXT_ERRORS)
    except (TypeError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise Unstorable(
            f"{source}: cannot store {error}; allowed are None, bool, int (64 bit), float, str, bytes, list, dict and "
            "numeric arrays"
        ) from error
    return _HEADER.pack(_MAGIC, SCHEMA, 0, len(body), zlib.crc32(body)) + body


def joined(records: Sequence[bytes]) -> bytes:
    """Packed records as one piece of bytes, which `unpack_all` reads whole or not at all."""
    if len(records) == 1:
        return records[0]
    left = range(len(records) - 1, -1, -1)
    return b"".join(
        one[:_FOLLOW_AT] + _FOLLOW.pack(follow) + one[_FOLLOW_AT + _FOLLOW.size :]
        for one, follow in zip(records, left, strict=True)
    )


def unpack_all(data: bytes, *, source: str | Path) -> list[dict[str, Any]]:
    """All records in ``data``; errors as of `unpack`."""
    if len(data) < _HEADER.size:
        return [unpack(data, source=source)]  # which raises
    (follow,) = _FOLLOW.unpack_from(data, _FOLLOW_AT)
    if not follow:
        return [unpack(data, source=source)]
    length = _HEADER.unpack_from(data)[3]
    end = min(_HEADER.size + length, len(data))
    first = unpack(data[:end], source=source)
    rest = unpack_all(data[end:], source=source)
    if len(rest) != follow:
        raise StoreError(f"{source}: torn or corrupt record, {len(rest)} records where {follow} were announced")
    return [first, *rest]


def unpack(data: bytes, *, source: str | Path) -> dict[str, Any]:
    """The record in ``data``. Arrays are writable copies.

    Raises
    ------
    StoreError
        The bytes are torn, corrupt, not a record, or of another schema; the message names ``source``.
    """
    if len(data) < _HEADER.size or data[:4] != _MAGIC:
        raise StoreError(
            f"{source}: not a Libra record ({len(data)} bytes); it was cut, or is another file. "
            "Delete it to go on without it"
        )
    _, schema, _, length, crc = _HEADER.unpack_from(data)
    if schema != SCHEMA:
        raise StoreError(f"{source}: record schema {schema}, this Libra reads {SCHEMA}; use the Libra that wrote it")
    body = memoryview(data)[_HEADER.size :]
    if len(body) != length or zlib.crc32(body) != crc:
        raise StoreError(
            f"{source}: torn or corrupt record, {len(body)} bytes where {length} were announced"
            f"{'' if len(body) != length else ', checksum differs'}. Delete it to go on without it"
        )
    try:
        return _QUICK.decode(body)  # type: ignore[no-any-return]
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):  # a lone surrogate
        return msgpack.unpackb(  # type: ignore[no-any-return]
            body, ext_hook=_decode_extension, strict_map_key=False, unicode_errors=_TEXT_ERRORS
        )
