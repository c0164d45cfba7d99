"""Records as bytes: a header (magic, schema number, length, crc32), then msgpack with numpy arrays.

1. `unpack` inverts `pack`, but tuples become lists and numpy scalars become plain numbers. A
   mapping keeps every str, lone surrogates included; a struct with a lone surrogate is
   `Unstorable`.
2. Bytes that were cut, extended or changed never decode: `unpack` raises StoreError with the
   source's name.
3. An unknown schema number is refused.
4. `joined` records are read all or none; each header has the number of records that follow.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import numpy as np

from libra.errors import StoreError, Unstorable

SCHEMA = 1
"""Version of the layout of a record."""

_MAGIC = b"LBRR"
_HEADER = struct.Struct("<4sHHII")  # magic, schema, records that follow, body length, crc32 of the body
_FOLLOW, _FOLLOW_AT = struct.Struct("<H"), 6
_ARRAY = 1  # msgpack extension code of a numpy array: (dtype, shape, bytes)
_ARRAYS = msgspec.msgpack.Encoder()
_ARRAY_PARTS = msgspec.msgpack.Decoder(tuple[str, list[int], bytes])
_TEXT_ERRORS = "surrogatepass"
_dtype = lru_cache(maxsize=64)(np.dtype)


def _plain(extension: Callable[[int, bytes], Any]) -> Callable[[Any], Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            if value.dtype.hasobject:
                raise TypeError(f"an array of dtype {value.dtype} (only fixed-size numbers can be stored)")
            return extension(_ARRAY, _ARRAYS.encode((value.dtype.str, value.shape, value.tobytes())))
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(f"a value of type {type(value).__name__}")

    return plain


def _decode_extension(code: int, data: bytes | memoryview) -> Any:
    if code != _ARRAY:
        return msgpack.ExtType(code, bytes(data))
    dtype, shape, raw = _ARRAY_PARTS.decode(data)
    array = np.frombuffer(bytearray(raw), dtype=_dtype(dtype))
    return array if shape == [array.size] else array.reshape(shape)


_STRUCTS = msgspec.msgpack.Encoder(enc_hook=_plain(msgspec.msgpack.Ext))
_FOR_MSGPACK = _plain(msgpack.ExtType)
_MAPPINGS = msgspec.msgpack.Decoder(ext_hook=_decode_extension)
"""Decodes in two thirds of msgpack's time, but only valid UTF-8."""


def struct_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """A decoder for `unpack_all` of one `msgspec.Struct`, or of a union of tagged structs."""
    return msgspec.msgpack.Decoder(kind, ext_hook=_decode_extension)


def pack(record: Mapping[str, Any] | msgspec.Struct, *, source: str) -> bytes:
    """``record`` as bytes; Unstorable names ``source`` if a value's type cannot be stored."""
    try:
        if isinstance(record, msgspec.Struct):
            body = _STRUCTS.encode(record)
        else:
            body = msgpack.packb(record, default=_FOR_MSGPACK, unicode_errors=_TEXT_ERRORS)
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


def unpack_all(data: bytes, decoder: msgspec.msgpack.Decoder[Any], *, source: str | Path) -> list[Any]:
    """All records in ``data``, decoded by a `struct_decoder`. Raises as `unpack`."""
    records: list[Any] = []
    expected = 0
    while True:
        whole = len(data) >= _HEADER.size
        follow = _FOLLOW.unpack_from(data, _FOLLOW_AT)[0] if whole else 0
        end = _HEADER.size + _HEADER.unpack_from(data)[3] if follow else len(data)
        body = _checked(data[:end], source)
        if records and follow != expected - 1:
            raise StoreError(
                f"{source}: torn or corrupt record, {follow} records follow where {expected - 1} were announced"
            )
        try:
            records.append(decoder.decode(body))
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
            raise StoreError(f"{source}: not a record of a quantum ({error}). Delete it to go on without it") from error
        if not follow:
            return records
        data, expected = data[end:], follow


def unpack(data: bytes, *, source: str | Path) -> dict[str, Any]:
    """The mapping in ``data``; arrays are writable copies. Raises StoreError, which names
    ``source``, if the bytes are torn, corrupt, not a record, or of another schema."""
    body = _checked(data, source)
    try:
        return _MAPPINGS.decode(body)  # type: ignore[no-any-return]
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):  # a lone surrogate
        return msgpack.unpackb(  # type: ignore[no-any-return]
            body, ext_hook=_decode_extension, strict_map_key=False, unicode_errors=_TEXT_ERRORS
        )


def _checked(data: bytes, source: str | Path) -> memoryview:
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
    return body
