"""Clients of a run at its scheduler: engines, roles, notices and progress."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from libra.errors import ClusterError
from libra.facts import BoundariesSet, boundaries_of, pack

if TYPE_CHECKING:
    from distributed import Client

    from libra.worker.run_spec import RunSpec

logger = logging.getLogger(__name__)


READ_S = 1.0
SILENT_S = 6.0
"""Seconds without an answer after which a scheduler is reported as silent: it has stopped, hangs, or cannot be reached."""


class EngineClient:
    """The engines of one start of a run.

    Parameters
    ----------
    client : distributed.Client
    run : str
    epoch : int
    """

    def __init__(self, client: Client, run: str, epoch: int) -> None:
        self._client = client
        self._run: dict[str, Any] = {"run": run, "epoch": epoch}

    def rows(self) -> list[dict[str, Any]]:
        """Each engine's worker, slots and declared capacity; see `libra.scheduler.worker_supply.Concurrency.rows`."""
        return list(self._call("libra_engines", **self._run))

    def limit_slots(self, slots: Mapping[str, int | Mapping[str, int]], reason: str = "requested") -> None:
        """Limit how many trajectories engines generate for at once, by worker, without a restart.

        ``{"rollout-0": 4}``, or ``{"rollout-0": {"tp": 2, "slots": 4}}`` for an engine that a role change is to build. Where
        fewer slots remain than trajectories generate, these end their turns first.

        Raises
        ------
        ClusterError
            More slots than an engine was started with, fewer than 1, or a worker without an engine; nothing changes then.
        """
        wanted = {worker: {"slots": has} if isinstance(has, int) else dict(has) for worker, has in slots.items()}
        answer = self._call("libra_set_slots", **self._run, slots=wanted, reason=reason)
        if "error" in answer:
            raise ClusterError(f"slots: {answer['error']}")

    def set_boundaries(self, tokens: Mapping[str, float], reason: str = "requested") -> None:
        """Set the bucket boundaries: the token counts up to which each degree's engines are preferred (as
        `policy.boundaries_tokens`); empty: none."""
        self._call("libra_told", **self._run, packed=pack([BoundariesSet(boundaries_of(tokens), reason)]))

    def _call(self, name: str, **arguments: Any) -> Any:
        return self._client.sync(getattr(self._client.scheduler, name), **arguments)


class RoleClient:
    """The roles of the workers of one start of a run, which has ``cluster.hybrid_workers``.

    Parameters
    ----------
    client : distributed.Client
        Of the run's scheduler.
    run : str
    epoch : int
    """

    def __init__(self, client: Client, run: str, epoch: int) -> None:
        self._client, self._run = client, {"run": run, "epoch": epoch}

    def rows(self) -> list[dict[str, Any]]:
        """Each hybrid worker's role, TP degree, stage and last change; see `libra.scheduler.worker_roles.WorkerRoles.roles`."""
        return list(self._call("libra_roles"))

    def change(self, assignments: Mapping[str, str | Mapping[str, Any]]) -> int:
        """Begin one change of the workers named, to ``"rollout"``, ``"train"`` or ``{"role": ..., "tp": ...}``; its generation.

        ClusterError if it is refused; the message has the reason.
        """
        wanted = {name: {"role": has} if isinstance(has, str) else dict(has) for name, has in assignments.items()}
        return int(self._answered("libra_set_roles", assignments=wanted)["generation"])

    def cancel(self, generation: int) -> int:
        """Undo a change that has not ended; the generation of the change back. ClusterError if it has ended."""
        return int(self._answered("libra_cancel_roles", generation=generation)["generation"])

    def wait(self, generation: int) -> bool:
        """Wait until a change has ended; True if it was carried out, False if it was undone."""
        return bool(self._answered("libra_wait_roles", generation=generation)["changed"])

    def _answered(self, name: str, **arguments: Any) -> Any:
        answer = self._call(name, **arguments)
        if "error" in answer:
            raise ClusterError(f"roles: {answer['error']}")
        return answer

    def _call(self, name: str, **arguments: Any) -> Any:
        return self._client.sync(getattr(self._client.scheduler, name), **self._run, **arguments)


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


@contextmanager
def progress_read(client: Client, spec: RunSpec, counted: Callable[[int, int, str, str], None]) -> Iterator[None]:
    """Within it, ``counted`` is called once a second, on the event loop of the client, with the progress of the run.

    Its arguments are the trajectories that have ended and the tokens that were generated, both since
    this start of the run, the work that nobody does, and what training does; each text may be empty.
    """

    async def read() -> None:
        rpc: Any = client.scheduler
        while client.status == "running":
            try:
                counts = await rpc.libra_progress(run=spec.run, epoch=spec.epoch)
            except OSError:  # the scheduler has ended, or hangs: others say so
                return
            counted(*counts)
            await asyncio.sleep(READ_S)

    async def begin() -> asyncio.Task[None]:
        return asyncio.ensure_future(read())

    task = client.sync(begin)
    try:
        yield
    finally:
        loop = client.loop
        if loop is not None and client.status != "closed":
            loop.add_callback(task.cancel)
