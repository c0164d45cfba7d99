"""A lock per device among the processes of a machine, for services and for tools with GPUs.

A device has a file. A waiter takes the file's next number and locks the byte of that number. The
waiter holds the device once it can lock all bytes up to its own, because then all earlier waiters
have gone.

Invariants
----------
1. A device has one holder at a time among all processes that use the same directory. By default
   each user of a machine has a directory; ``LIBRA_DEVICE_LOCKS`` names another directory.
2. Processes get a device in the order of their numbers; within a process, one waiter at a time has
   a number.
3. Locks and places in the queue end with their process: they are POSIX record locks, which the
   kernel releases and no child inherits.
4. Waiting does not block the event loop, leaves nothing behind if cancelled, and is bounded. The
   log names waiter and holder.
5. If the file was removed, as cleaners of /tmp do, waiters make a new file and take new numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import stat
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from libra.cluster.hardware_inventory import VisibleGpu
from libra.errors import ClusterError, ToolFault

logger = logging.getLogger(__name__)

DIRECTORY_VARIABLE = "LIBRA_DEVICE_LOCKS"
PAUSE_S, MOST_PAUSE_S, LONGER = 0.001, 0.02, 1.5
"""Pauses between two polls: first, longest, and growth factor."""
SAY_AFTER_S = 10.0
"""Seconds after which the log names waiter and holder; doubles with each line."""
_NUMBER_BYTES, _TEXT_BYTES = 8, 256
_TAKING, _NUMBERS = 0, 1
"""Locked bytes: byte 0 while a number is taken, and byte 1 + n for number n."""


class DeviceLock:
    """The lock of the device ``name``; ``directory`` is `lock_directory` by default. ClusterError
    if the lock cannot be opened."""

    def __init__(self, name: str, directory: Path | None = None) -> None:
        self.name = name
        plain = "".join(c if c.isalnum() or c in "-_" else "_" for c in name)
        path = (directory or lock_directory()) / plain
        if path not in _FILES:
            _FILES[path] = _DeviceFile(path)
        self._file = _FILES[path]

    async def taken(self, who: str, limit_s: float) -> Turn:
        """Wait for the device; the caller holds it until `Turn.release`. ``who`` names the caller
        in the log. ToolFault, with the holder's name, after ``limit_s``."""
        file, me = self._file, object()
        number: int | None = None
        began_s, say_s, pause_s = time.monotonic(), SAY_AFTER_S, PAUSE_S
        file.waiting.append(me)
        try:
            while True:
                if file.waiting[0] is me:
                    number = file.number() if number is None else number
                    if number is not None and file.entered(number):
                        if file.is_there():
                            file.tell(who)
                            return Turn(file, number, time.monotonic() - began_s)
                        file.reopen()
                        number = None
                        continue
                waited_s = time.monotonic() - began_s
                if waited_s >= limit_s:
                    raise ToolFault(f"{who}: device {self.name} was not free within {limit_s:g} s; {file.holder()}")
                if waited_s >= say_s:
                    logger.info("%s waits for device %s for %.0f s; %s", who, self.name, waited_s, file.holder())
                    say_s *= 2
                await asyncio.sleep(min(pause_s, limit_s - waited_s))
                pause_s = min(MOST_PAUSE_S, pause_s * LONGER)
        except BaseException:
            file.leave(number)
            file.waiting.remove(me)
            raise


@dataclass(frozen=True, slots=True)
class Turn:
    """A held device, after a wait of ``waited_s``."""

    _file: _DeviceFile
    _number: int
    waited_s: float

    @property
    def others_came(self) -> bool:
        """Whether another process has queued for the device since."""
        return self._file.newest() != self._number

    def release(self) -> None:
        """Release the device. Call once."""
        self._file.tell("")
        self._file.leave(self._number)
        self._file.waiting.popleft()


class GpuTurns:
    """The GPUs of one worker for calls of tools; each call has its GPUs alone on this machine."""

    def __init__(self, gpus: Sequence[VisibleGpu], directory: Path | None = None) -> None:
        self._locks = {gpu: DeviceLock(gpu.name, directory) for gpu in gpus}
        self._used: set[VisibleGpu] = set()

    async def taken(self, count: int, who: str, limit_s: float) -> GpuTurn:
        """``count`` GPUs, the worker's free ones first. ToolFault if the worker has fewer GPUs, or
        a GPU is not free within ``limit_s``."""
        chosen = sorted(self._locks, key=lambda gpu: gpu in self._used)[:count]
        if len(chosen) < count:
            raise ToolFault(f"{who}: it takes {count} GPUs, and its worker sees {len(chosen)}")
        with contextlib.ExitStack() as held:
            self._used.update(chosen)
            held.callback(self._used.difference_update, chosen)
            for gpu in sorted(chosen, key=lambda gpu: gpu.name):  # in one order everywhere: no two wait for each other
                held.callback((await self._locks[gpu].taken(who, limit_s)).release)
            kept = held.pop_all()
        return GpuTurn(tuple(gpu.entry for gpu in chosen), kept)


@dataclass(frozen=True, slots=True)
class GpuTurn:
    """Held GPUs; ``entries`` are values of CUDA_VISIBLE_DEVICES."""

    entries: tuple[str, ...]
    _held: contextlib.ExitStack

    def release(self) -> None:
        """Release the GPUs. Call once."""
        self._held.close()


def lock_directory() -> Path:
    """The directory of the devices' files: ``LIBRA_DEVICE_LOCKS``, or this user's in /tmp.

    ClusterError if the directory cannot be made, or other users might write to it. TMPDIR is not
    used, because processes of one user may have different values.
    """
    given = os.environ.get(DIRECTORY_VARIABLE)
    path = Path(given) if given else Path(f"/tmp/libra-devices-{os.geteuid()}")
    advice = f"type {DIRECTORY_VARIABLE}=DIR, a directory on this machine's disk that all processes with its GPUs see"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        facts = path.lstat()
    except OSError as error:
        raise ClusterError(f"{path}: locks of GPUs cannot be kept there ({error.strerror}); {advice}") from error
    if not given and (not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o022):
        raise ClusterError(
            f"{path}: others can write to it, or it belongs to another user, so others could delay whoever waits for a GPU; "
            f"remove it, or {advice}"
        )
    return path


class _DeviceFile:
    """A device's file, opened once per process: closing any descriptor would release all locks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting: deque[object] = deque()
        """Waiters of this process; only the first has or takes a number."""
        self._descriptor = self._opened()

    def _opened(self) -> int:
        try:
            with contextlib.suppress(
                FileNotFoundError
            ):  # O_CREAT is refused for another user's file in a sticky directory
                return os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with contextlib.suppress(PermissionError):  # another user has made it
                os.fchmod(descriptor, self.path.parent.stat().st_mode & 0o666)
        except OSError as error:
            raise ClusterError(f"{self.path}: the lock of a GPU cannot be opened: {error.strerror}") from error
        return descriptor

    def reopen(self) -> None:
        """Open the file that has this name now."""
        os.close(self._descriptor)
        self._descriptor = self._opened()

    def is_there(self) -> bool:
        """Whether the open file still has its name."""
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def number(self) -> int | None:
        """Take the next number and lock its byte; None while another process takes a number."""
        if not self._lock(_TAKING, 1):
            return None
        try:
            number = self.newest() + 1
            os.pwrite(self._descriptor, number.to_bytes(_NUMBER_BYTES, "big"), 0)
            return number if self._lock(_NUMBERS + number, 1) else None
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, _TAKING)

    def newest(self) -> int:
        """The last number taken."""
        return int.from_bytes(os.pread(self._descriptor, _NUMBER_BYTES, 0), "big")

    def entered(self, number: int) -> bool:
        """Lock all bytes up to ``number``; success means that ``number`` holds the device."""
        return self._lock(_NUMBERS, number + 1)

    def leave(self, number: int | None) -> None:
        """Unlock the byte of ``number`` and all before it."""
        if number is not None:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, number + 1, _NUMBERS)

    def tell(self, who: str) -> None:
        """Record the holder's name in the file."""
        said = f"process {os.getpid()}, {who}".encode() if who else b""
        os.pwrite(self._descriptor, said[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0"), _NUMBER_BYTES)

    def holder(self) -> str:
        """The holder of the device, in words."""
        said = os.pread(self._descriptor, _TEXT_BYTES, _NUMBER_BYTES).rstrip(b"\0").decode(errors="replace")
        return f"it is held by {said or 'a process that has not written that down'}"

    def _lock(self, start: int, length: int) -> bool:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ClusterError(
                f"{self.path}: it cannot be locked ({error.strerror}); type {DIRECTORY_VARIABLE}=DIR, a directory on this "
                "machine's disk"
            ) from error
        return True


_FILES: dict[Path, _DeviceFile] = {}
os.register_at_fork(after_in_child=_FILES.clear)
