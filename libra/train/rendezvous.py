"""Where the members of a training group meet: a key-value store for torch.distributed that only they can read and write.

torch's own store listens on every network of a machine and believes whoever connects, e.g. about where the members are. Here rank 0
keeps the values, and members reach it by `libra.transport`, with the group's token.

Invariants
----------
1. A value is set whole; who waits for a key gets it as soon as it is set.
2. A request without its key raises RuntimeError after the store's timeout, as torch's stores do.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from libra.errors import TransportError
from libra.transport import Address, Channel, Server, connect

PURPOSE = "rendezvous"
RETRY_S = 0.05


class Rendezvous:
    """The values, on rank 0; ``address`` is where members connect. Port 0 is any free one."""

    def __init__(self, token: str, host: str, port: int = 0) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._server = Server(self._serve, secret=token, purpose=PURPOSE, host=host, port=port, silence_s=None)
        self.address: Address = self._server.address

    def close(self) -> None:
        """End the connections of all members; their requests fail."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._server.close()

    def _serve(self, channel: Channel, client: str) -> None:
        while (request := channel.recv_frame()) is not None:
            channel.send_frame(**self._answer(**request))

    def _answer(
        self, do: str, keys: list[str], value: str = "", number: int = 0, timeout_s: float = 0
    ) -> dict[str, Any]:
        with self._changed:
            match do:
                case "set":
                    self._values[keys[0]] = base64.b64decode(value)
                case "add":
                    found = int(self._values.get(keys[0], b"0")) + number
                    self._values[keys[0]] = b"%d" % found
                    self._changed.notify_all()
                    return {"number": found}
                case "delete":
                    return {"number": int(self._values.pop(keys[0], None) is not None)}
                case "count":
                    return {"number": len(self._values)}
                case "check":
                    return {"number": int(all(key in self._values for key in keys))}
                case "get":
                    there = lambda: self._closed or all(key in self._values for key in keys)  # noqa: E731
                    if not self._changed.wait_for(there, timeout_s) or self._closed:
                        missing = [key for key in keys if key not in self._values]
                        return {"error": f"waited {timeout_s:g} s for {', '.join(missing)}"}
                    return {"values": [base64.b64encode(self._values[key]).decode() for key in keys]}
                case _:
                    return {"error": f"unknown request {do!r}"}
            self._changed.notify_all()
            return {}


class MemberStore(dist.Store):
    """A member's end of a `Rendezvous`, for ``torch.distributed.init_process_group``."""

    def __init__(self, address: Address, token: str, timeout_s: float) -> None:
        """TransportError where nobody with the token listens at ``address`` within ``timeout_s``."""
        super().__init__()
        self._lock = threading.Lock()
        self._timeout_s = timeout_s
        until_s = time.monotonic() + timeout_s
        while True:
            try:
                self._channel = connect(address, token, purpose=PURPOSE, silence_s=None)
                return
            except TransportError:
                if time.monotonic() > until_s:
                    raise
                time.sleep(RETRY_S)  # rank 0 may listen only later

    def close(self) -> None:
        """Leave; requests that wait fail."""
        with contextlib.suppress(OSError):
            self._channel.close()

    def set(self, key: str, value: str | bytes) -> None:
        """Give a key its value."""
        content = value.encode() if isinstance(value, str) else bytes(value)
        self._ask("set", [key], value=base64.b64encode(content).decode())

    def get(self, key: str) -> bytes:
        """The value of a key, as soon as it has one."""
        return base64.b64decode(self._wait([key], self._timeout_s)["values"][0])

    def add(self, key: str, number: int) -> int:
        """Add to a number, which is 0 at first; the sum."""
        return int(self._ask("add", [key], number=number)["number"])

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Return when all keys have values."""
        self._wait(list(keys), self._timeout_s if timeout is None else timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys have values."""
        return bool(self._ask("check", list(keys))["number"])

    def delete_key(self, key: str) -> bool:
        """Forget a key; whether it had a value."""
        return bool(self._ask("delete", [key])["number"])

    def num_keys(self) -> int:
        """Number of keys with a value."""
        return int(self._ask("count", [])["number"])

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Change how long `get` waits."""
        self._timeout_s = timeout.total_seconds()

    deleteKey, getNumKeys = delete_key, num_keys
    """What torch's C++ calls them."""

    def _wait(self, keys: list[str], timeout_s: float) -> dict[str, Any]:
        return self._ask("get", keys, timeout_s=timeout_s)

    def _ask(self, do: str, keys: list[str], **arguments: Any) -> dict[str, Any]:
        try:
            with self._lock:
                self._channel.send_frame(do=do, keys=keys, **arguments)
                answer = self._channel.recv_frame()
        except TransportError as error:
            raise RuntimeError(f"the rendezvous of the group is gone: {error}") from error
        if answer is None or "error" in answer:
            raise RuntimeError(str((answer or {}).get("error", "rank 0 has closed the rendezvous")))
        return answer
