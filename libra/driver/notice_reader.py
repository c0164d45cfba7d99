"""Notices of the scheduler's plugins about a run, written to the driver's terminal, and the check that the scheduler
answers.

Only for a scheduler in another process: one in the driver's own writes there itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed import Client

    from libra.worker.run_spec import RunSpec

logger = logging.getLogger(__name__)

READ_S = 1.0
SILENT_S = 6.0
"""Seconds without an answer after which a scheduler is reported as silent: it has stopped, hangs, or cannot be reached."""


class NoticeReader:
    """Polls once a second, on the client's event loop, from `start` to `stop`."""

    def __init__(self, client: Client, spec: RunSpec) -> None:
        self._client, self._spec = client, spec
        self._first = 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to poll."""

        async def begin() -> None:
            self._task = asyncio.ensure_future(self._read())

        self._client.sync(begin)

    def stop(self) -> None:
        """Write the remaining notices, and stop polling."""
        task, self._task = self._task, None
        if task is None or self._client.status == "closed":
            return

        async def end() -> None:
            task.cancel()
            if self._client.status == "running":
                with contextlib.suppress(TimeoutError):  # a scheduler that hangs holds up no Ctrl-C
                    await asyncio.wait_for(self._read_once(), SILENT_S)

        self._client.sync(end)

    async def _read(self) -> None:
        while self._client.status == "running":
            await self._read_once()
            await asyncio.sleep(READ_S)
        if self._client.status == "connecting":
            logger.warning("run %s: the connection to its scheduler is lost; the run ends", self._spec.run)

    async def _read_once(self) -> None:
        rpc: Any = self._client.scheduler
        asked_s = time.monotonic()
        asking = asyncio.ensure_future(rpc.libra_notices(run=self._spec.run, epoch=self._spec.epoch, first=self._first))
        try:
            done, _ = await asyncio.wait({asking}, timeout=SILENT_S)
            if not done:
                logger.warning(
                    "run %s: its scheduler at %s has not answered for %.0f s: it hangs, has been stopped, or cannot be reached; "
                    "the run waits for it. If it does not come back, type Ctrl-C and libra resume %s",
                    self._spec.run, rpc.address, SILENT_S, self._spec.directory,
                )  # fmt: skip
            notices = await asking
            if not done:
                logger.warning(
                    "run %s: its scheduler answers again, after %.0f s", self._spec.run, time.monotonic() - asked_s
                )
        except OSError:  # the scheduler has ended; the client notices it itself
            return
        except asyncio.CancelledError:
            asking.cancel()
            raise
        for number, text in notices:
            logger.warning("%s", text)
            self._first = number + 1
