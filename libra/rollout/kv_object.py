"""The KV cache of one trajectory between two turns, as an object that can be kept in host memory and sent to another engine.

Invariants
1. An object names the trajectory, the weights that computed it, and the tokens it belongs to, by number and digest.
2. `KVObject.check` allows its use by an engine with the same weights and layout, for a context that begins with these tokens.
3. `KVObject.received` accepts only the bytes that were exported: size and checksum must be right.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.errors import KVRefused


def digest_of(token_ids: NDArray[Any]) -> str:
    """Name of a sequence of tokens: 128 bits of SHA-256, in hexadecimal."""
    return hashlib.sha256(np.ascontiguousarray(token_ids, np.int64).tobytes()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class KVObject:
    """Keys and values of a trajectory's first ``num_tokens`` tokens, all layers and all KV heads.

    Attributes
    ----------
    trajectory_id : str
    version : int
        Weights that computed all of it; of several, the oldest.
    num_tokens : int
    digest : str
        `digest_of` these tokens.
    layout : str
        Engines of the same layout store the same numbers in the same order, whatever their TP degree.
    crc32 : int
        Of ``data``.
    data : numpy.ndarray
        The bytes (n,), uint8.
    """

    trajectory_id: str
    version: int
    num_tokens: int
    digest: str
    layout: str
    crc32: int
    data: NDArray[np.uint8]

    @classmethod
    def of(
        cls, trajectory_id: str, version: int, token_ids: NDArray[Any], layout: str, data: NDArray[np.uint8]
    ) -> KVObject:
        """The KV of exactly these tokens (n,)."""
        return cls(trajectory_id, version, len(token_ids), digest_of(token_ids), layout, zlib.crc32(data.data), data)

    @property
    def num_bytes(self) -> int:
        """Size of ``data``."""
        return self.data.nbytes

    def header(self) -> dict[str, Any]:
        """All but the data, as JSON-able fields; `received` reads them."""
        own = {name: getattr(self, name) for name in ("trajectory_id", "version", "num_tokens", "digest", "layout")}
        return own | {"crc32": self.crc32, "num_bytes": self.num_bytes}

    @classmethod
    def received(cls, header: Mapping[str, Any], data: NDArray[np.uint8]) -> KVObject:
        """The object of a header and of bytes that arrived; KVRefused if they are not the ones it was exported with."""
        try:
            found = cls(
                str(header["trajectory_id"]), int(header["version"]), int(header["num_tokens"]), str(header["digest"]),
                str(header["layout"]), int(header["crc32"]), data,
            )  # fmt: skip
            num_bytes = int(header["num_bytes"])
        except (KeyError, TypeError, ValueError) as error:
            raise KVRefused(f"KV object: its header is malformed: {error!r}; its context is computed again") from error
        if data.nbytes != num_bytes:
            raise KVRefused(
                f"KV of {found.trajectory_id}: {data.nbytes} bytes arrived of {num_bytes}; its context is computed again"
            )
        if (crc32 := zlib.crc32(data.data)) != found.crc32:
            raise KVRefused(
                f"KV of {found.trajectory_id}: the checksum of its {num_bytes} bytes is {crc32:#010x}, it was exported with "
                f"{found.crc32:#010x}; its context is computed again"
            )
        return found

    def check(self, version: int, layout: str, context_ids: NDArray[Any]) -> None:
        """KVRefused unless an engine of this layout that serves ``version`` may continue this context from it."""
        for what, own, wanted in (("weights of version", self.version, version), ("layout", self.layout, layout)):
            if own != wanted:
                raise KVRefused(f"KV of {self.trajectory_id}: it has {what} {own}, and the engine has {wanted}")
        if len(context_ids) < self.num_tokens or digest_of(context_ids[: self.num_tokens]) != self.digest:
            raise KVRefused(
                f"KV of {self.trajectory_id}: its {self.num_tokens} tokens are not the beginning of the context of "
                f"{len(context_ids)} tokens"
            )
