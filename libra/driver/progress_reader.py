"""What of a run's iteration is done, asked of its scheduler once a second for the driver's display."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from distributed import Client

    from libra.worker.run_spec import RunSpec

READ_S = 1.0


class ProgressReader:
    """Polls on the client's event loop; a context manager.

    Parameters
    ----------
    client : distributed.Client
    spec : RunSpec
    counted : callable
        Called with the trajectories that have ended and the tokens that were generated, both since this start of the run, and
        with the work that nobody does and with what training does, each "" if there is none.
    """

    def __init__(self, client: Client, spec: RunSpec, counted: Callable[[int, int, str, str], None]) -> None:
        self._client, self._spec, self._counted = client, spec, counted
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        async def begin() -> None:
            self._task = asyncio.ensure_future(self._read())

        self._client.sync(begin)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop = self._client.loop
        if self._task is not None and loop is not None and self._client.status != "closed":
            loop.add_callback(self._task.cancel)

    async def _read(self) -> None:
        rpc: Any = self._client.scheduler
        while self._client.status == "running":
            try:
                counts = await rpc.libra_progress(run=self._spec.run, epoch=self._spec.epoch)
            except OSError:  # the scheduler has ended, or hangs: others say so
                return
            self._counted(*counts)
            await asyncio.sleep(READ_S)
