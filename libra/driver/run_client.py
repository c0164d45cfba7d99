"""The scheduler's client for a run: connection, registration, calls, notices, and loss."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
from distributed import Client
from distributed.client import FutureCancelledError
from distributed.comm import CommClosedError

from libra.cluster.connection import RunContact, connect, forget, shown_by
from libra.cluster.local import local_cluster
from libra.cluster.readiness import check_cluster
from libra.config import RunConfig
from libra.driver.early_checks import no_scheduler
from libra.driver.launch_layout import check_workers, layout_fact
from libra.driver.part_checks import check_loadable, needs_of
from libra.envs import has_steps
from libra.envs.retries import TOTAL_S
from libra.errors import ClusterError, ConfigError, LibraError, StoreError, shell_path
from libra.facts import BoundariesSet, Fact, boundaries_of, from_dict, pack
from libra.keys import host_name
from libra.planner.arrangements import Seat
from libra.policy import Admission, Waves, staleness_of
from libra.policy.log_replay import learned
from libra.policy.stall import FLOOR_S
from libra.scheduler import LibraPlugin, RunRegistration
from libra.scheduler.run_state import process_name
from libra.store.event_log import from_last_snapshot
from libra.types import EngineCapacity, Phase
from libra.user_orderings import ordering_of
from libra.worker.run_spec import RunSpec, forget_secret, sendable_spec
from libra.worker.runtime import WorkerRuntime
from libra.worker.trajectory.graded_members import GRADE_TIMEOUT_S

if TYPE_CHECKING:
    from distributed import SpecCluster

    from libra.driver.run_start import RunStart

logger = logging.getLogger(__name__)

POLL_S = 1.0
SILENT_S = 6.0
"""Seconds without an answer after which a scheduler is reported as silent: stopped, hanging or unreachable."""


class RunClient:
    """Calls the scheduler for one start of a run. Raises `ClusterError` if refused."""

    def __init__(self, client: Client, run: str, epoch: int) -> None:
        self.client, self._start = client, {"run": run, "epoch": epoch}
        self._rpc: Any = client.scheduler

    def register(self, start: RunStart, *, local: bool) -> str:
        """Register the run; returns the scheduler's process name.

        ``local``: whether this driver started the cluster.
        """
        spec, config = start.spec, start.config
        self.client.register_plugin(LibraPlugin())
        registration = RunRegistration(
            run=spec.run,
            epoch=spec.epoch,
            directory=str(spec.directory),
            config=config.model_dump(mode="json"),
            tools=needs_of(start.environment),
            watchdog_floors_s=_watchdog_floors_s(start),
            restored=_admission(start) if start.resumed else None,
            learned=learned_before(spec.directory) if start.resumed else None,
            local=local,
            client=self.client.id,
        )
        answer = self.client.sync(self._rpc.libra_register_run, registration=msgspec.to_builtins(registration))
        if "policy" in answer:
            raise ConfigError(answer["policy"])
        if "error" in answer:
            raise ClusterError(f"run.name: {answer['error']}; type run.name=ANOTHER_NAME")
        return str(answer["process"])

    def register_workers(self, config: RunConfig) -> None:
        """Register the training group, if any, and the workers that can switch roles."""
        cluster, wait = config.cluster, "; wait for it, or type cluster"
        if cluster.train_workers > 1:
            name, advice = "libra_register_gang", f"{wait}.train_workers=1"
            self._accepted("cluster.train_workers", name, advice, size=cluster.train_workers)
        if cluster.hybrid_workers:
            self._accepted("cluster.hybrid_workers", "libra_register_roles", f"{wait}.hybrid_workers=0")

    def end(self) -> None:
        self._call("libra_end_run")

    def tell(self, *facts: Fact) -> None:
        """Send facts to the scheduler, for the event log and the policies."""
        self._call("libra_told", packed=pack(facts))

    def numbers(self) -> dict[str, float]:
        return dict(self.client.sync(self._rpc.libra_numbers, run=self._start["run"]))

    def engines(self) -> list[dict[str, Any]]:
        """Each engine's worker, slots and declared capacity; see `Concurrency.rows`."""
        return list(self._call("libra_engines"))

    def limit_slots(self, slots: Mapping[str, int | Mapping[str, int]], reason: str = "requested") -> None:
        """Limit, by worker, how many trajectories an engine generates at once, without a restart.

        ``{"rollout-0": 4}``, or ``{"rollout-0": {"tp": 2, "slots": 4}}`` for an engine that a role
        switch will build. Trajectories beyond the limit finish their turns first. Raises
        `ClusterError`, and changes nothing, for more slots than an engine started with, fewer than
        1, or a worker without an engine.
        """
        wanted = {worker: {"slots": has} if isinstance(has, int) else dict(has) for worker, has in slots.items()}
        self._accepted("slots", "libra_set_slots", slots=wanted, reason=reason)

    def set_boundaries(self, tokens: Mapping[str, float], reason: str = "requested") -> None:
        """Set, per tensor-parallel degree, up to how many tokens its engines are preferred."""
        self.tell(BoundariesSet(boundaries_of(tokens), reason))

    def roles(self) -> list[dict[str, Any]]:
        """Role, TP degree, stage and last switch of each worker that can switch roles."""
        return list(self._call("libra_roles"))

    def change_roles(self, assignments: Mapping[str, str | Mapping[str, Any]]) -> int:
        """Start one role switch of the named workers; returns its generation.

        A worker becomes ``"rollout"``, ``"train"`` or ``{"role": ..., "tp": ...}``.
        """
        wanted = {name: {"role": has} if isinstance(has, str) else dict(has) for name, has in assignments.items()}
        return int(self._accepted("roles", "libra_set_roles", assignments=wanted)["generation"])

    def cancel_roles(self, generation: int) -> int:
        """Undo an unfinished role switch; returns the generation of the reverse switch."""
        return int(self._accepted("roles", "libra_cancel_roles", generation=generation)["generation"])

    def wait_for_roles(self, generation: int) -> bool:
        """Wait for the end of a role switch; returns False if it was undone."""
        return bool(self._accepted("roles", "libra_wait_roles", generation=generation)["changed"])

    def seats(self) -> list[Seat]:
        changing = {str(row["worker"]): row for row in self.roles()}
        pairs = ((row, changing.get(str(row["worker"]))) for row in self.engines())
        return [
            Seat(
                str(row["worker"]),
                urlsplit(row["address"]).hostname or str(row["address"]),
                str(row["engine"]),
                str(row["bucket"]),
                int(row["base_tp"]),
                int(row["base_slots"]),
                role is not None,
                "rollout" if role is None else str(role["role"]),
                frozenset() if role is None else frozenset(role["shares_with"]),
                int(row["residents"]),
                {int(tp): int(slots) for tp, slots in row["limits"].items()},
                {int(tp): EngineCapacity.from_declaration(declared) for tp, declared in row["declared"].items()},
            )
            for row, role in pairs
            if (row["supplies"] > 0 if role is None else role["stage"] not in ("lost", "failed"))
        ]

    def _accepted(self, subject: str, name: str, advice: str = "", **arguments: Any) -> Any:
        answer = self._call(name, **arguments)
        if "error" in answer:
            raise ClusterError(f"{subject}: {answer['error']}{advice}")
        return answer

    def _call(self, name: str, **arguments: Any) -> Any:
        return self.client.sync(getattr(self._rpc, name), **self._start, **arguments)


@contextmanager
def polled(client: Client, read: Callable[[], Any], last: Callable[[], Any] | None = None) -> Iterator[None]:
    """Context in which ``read`` is awaited every `POLL_S` seconds on the client's event loop.

    ``last`` is called at the end if the client still runs; a hanging scheduler cannot block Ctrl-C.
    """

    async def poll() -> None:
        while client.status == "running":
            await read()
            await asyncio.sleep(POLL_S)
        if last is not None and client.status == "connecting":
            logger.warning("the connection to the scheduler is lost; the run ends")

    async def start() -> asyncio.Task[None]:
        return asyncio.ensure_future(poll())

    async def end() -> None:
        task.cancel()
        if last is not None and client.status == "running":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(last(), SILENT_S)

    task = client.sync(start)
    try:
        yield
    finally:
        if client.status != "closed":
            client.sync(end)


def progress_read(client: Client, spec: RunSpec, counted: Callable[[int, int, str, str], None]) -> Any:
    """Context in which ``counted`` receives a run's progress every second, on the client's loop.

    Its arguments: trajectories ended and tokens generated in this start, work that no worker does,
    and the state of training; both texts may be empty.
    """

    async def read() -> None:
        rpc: Any = client.scheduler
        with contextlib.suppress(OSError):  # the scheduler has ended or hangs: the notices report that
            counted(*await rpc.libra_progress(run=spec.run, epoch=spec.epoch))

    return polled(client, read)


def notices_logged(client: Client, spec: RunSpec) -> Any:
    """Context in which the scheduler's notices and silences are logged here."""
    first = 0

    async def read() -> None:
        nonlocal first
        rpc: Any = client.scheduler
        asked_s = time.monotonic()
        asking = asyncio.ensure_future(rpc.libra_notices(run=spec.run, epoch=spec.epoch, first=first))
        try:
            done, _ = await asyncio.wait({asking}, timeout=SILENT_S)
            if not done:
                logger.warning(
                    "run %s: its scheduler at %s has not answered for %.0f s: it hangs, has been stopped, or cannot be reached; "
                    "the run waits for it. If it does not come back, type Ctrl-C and libra resume %s",
                    spec.run, rpc.address, SILENT_S, spec.directory,
                )  # fmt: skip
            notices = await asking
            if not done:
                silent_s = time.monotonic() - asked_s
                logger.warning("run %s: its scheduler answers again, after %.0f s", spec.run, silent_s)
        except OSError:  # the scheduler has ended
            return
        except asyncio.CancelledError:
            asking.cancel()
            raise
        for number, text in notices:
            logger.warning("%s", text)
            first = number + 1

    return polled(client, read, read)


def _watchdog_floors_s(start: RunStart) -> dict[str, float]:
    refused_s = TOTAL_S if start.config.environment.retries else 0.0  # while an API refuses calls
    floors_s = {"group": (GRADE_TIMEOUT_S + refused_s) * (start.config.trainer.resample + 1) + FLOOR_S}
    tools = [tool.timeout_s for tool in start.environment.tools]
    if has_steps(start.environment):
        tools.append(start.environment.step_timeout_s)
    if start.config.agent.given:
        tools.append(start.config.agent.idle_s)
    return floors_s | ({f"trajectory, {Phase.TOOL}": max(tools) + refused_s + FLOOR_S} if tools else {})


def _admission(start: RunStart) -> dict[str, Any]:
    config = start.config
    waves = Waves.of(config)
    waves.take_over({start.point.batches: start.point.waves} if start.point.waves else {})
    return Admission.resumed(
        staleness_of(config),
        config.trainer.prompts,
        version=-1,  # this epoch has published nothing yet
        opened=dict(enumerate(start.point.members)),
        committed=(),  # group nodes report these again
        started=start.point.started,
        waves=waves,
        first_come=config.trainer.batches == "first_come",
    ).snapshot()


def learned_before(directory: Path) -> str | None:
    """The policy's learned state at the end of a run's event log (JSON); None if unreadable."""
    log = directory / "events.jsonl"
    try:
        reader = from_last_snapshot(log) if log.exists() else None
        facts = ((line, from_dict(values).fact) for line, values in reader or ())
        order = learned(facts, ordering_of) if reader is not None else None
    except StoreError as error:
        logger.warning("%s: what its policy had learned is unreadable, and it learns again: %s", directory, error)
        return None
    return None if order is None else json.dumps(order)


def connect_run(
    config: RunConfig, given: Client | None, logs: Path, exits: ExitStack
) -> tuple[Client, SpecCluster | None]:
    """A client of a suitable cluster, and the cluster if it was started for the run.

    Local workers log to ``logs``. ``exits`` closes what is opened here, not a ``given`` client.
    """
    client, cluster = (given, None) if given is not None else _connected(config, logs, exits)
    check_cluster(client, config)
    if cluster is None:
        check_workers(config, client)
    return client, cluster


def _connected(config: RunConfig, logs: Path, exits: ExitStack) -> tuple[Client, SpecCluster | None]:
    address = config.cluster.scheduler
    if address is None:
        cluster = local_cluster(config, logs)
        exits.callback(cluster.close)
        client = Client(cluster)
    else:
        cluster = None
        try:
            client = connect(address)
        except ClusterError as error:
            raise ClusterError(f"cluster.scheduler: {error}") from error
        except (OSError, TimeoutError, ValueError) as error:
            raise no_scheduler(address, error) from error
    exits.callback(_close, client)
    return client, cluster


def _close(client: Client) -> None:
    with contextlib.suppress(ValueError):  # of tornado 6.6.1, while the client tries to reconnect
        client.close()


def register_run(scheduler: RunClient, start: RunStart, cluster: SpecCluster | None, exits: ExitStack) -> None:
    """Register the run, and set up its part on every worker; ``exits`` undoes both."""
    client, spec, config = scheduler.client, start.spec, start.config
    hosted = False

    def end() -> None:
        if client.status != "running":
            return
        forget(spec.directory)
        forget_secret(spec.directory)
        scheduler.end()
        if hosted and cluster is None:  # the run's own cluster stops with its workers
            try:
                client.unregister_worker_plugin(host_name(spec.run))
            except (KeyError, ValueError) as error:  # its setup had failed there, or the scheduler had removed it
                logger.debug("there was no part of the run to remove: %s", error)

    process = scheduler.register(start, local=cluster is not None)
    exits.callback(end)
    if process != process_name():
        exits.enter_context(notices_logged(client, spec))
    scheduler.register_workers(config)
    check_loadable(client, spec)
    hosted = True
    client.register_plugin(WorkerRuntime(*sendable_spec(spec, str(client.scheduler.address))))  # type: ignore[union-attr]
    typed = config.cluster.scheduler
    if typed is None or (("://" not in typed) and Path(typed).is_file()):
        typed = str(Path(typed).absolute()) if typed else str(client.scheduler_info(n_workers=0)["address"])
    contact = RunContact(spec.run, spec.epoch, typed, config.cluster.hybrid_workers, *shown_by(client.security))
    contact.write(spec.directory)
    if config.planner.planned is not None:
        scheduler.tell(layout_fact(config.planner.planned))


@contextmanager
def scheduler_loss_named(client: Callable[[], Client | None], directory: Path, address: str | None) -> Iterator[None]:
    """Context that raises ClusterError if the scheduler at ``address`` is lost.

    ``client`` returns the client, None before it is connected.
    """
    try:
        yield
    except LibraError:
        raise
    except (OSError, CancelledError) as error:
        connected = client()
        lost = isinstance(error, CommClosedError)
        lost |= isinstance(error, FutureCancelledError) and error.reason == "scheduler-connection-lost"
        if connected is None or (connected.status == "running" and not lost):
            raise
        logging.getLogger("distributed.client").addFilter(_is_no_cancellation)
        at, option = ("", "") if address is None else (f" at {address}", f" --scheduler {address}")
        raise ClusterError(
            f"the connection to the scheduler{at} is lost, and with it the tasks that ran; what is committed is kept. Start "
            f"scheduler and workers again where they are gone, then type libra resume {shell_path(directory)}{option}"
        ) from error


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    cancelled = record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError)
    return not cancelled and not record.getMessage().startswith("Failed to reconnect to scheduler")
