"""The driver's calls of the scheduler's plugins, for one start of a run.

`libra.scheduler.plugin` answers for the run, its engines and its log, `gangs` and `worker_roles` for training groups and
changing roles, if the run has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from libra.driver.part_checks import needs_of
from libra.driver.resume import learned_before
from libra.driver.run_clients import EngineClient, RoleClient
from libra.envs import has_steps
from libra.envs.retries import TOTAL_S
from libra.errors import ClusterError, ConfigError
from libra.facts import Fact, pack, prompts_named
from libra.planner.arrangements import Seat
from libra.policy import Admission, Waves, staleness_of
from libra.policy.stall import FLOOR_S
from libra.scheduler import LibraPlugin, RunRegistration
from libra.types import EngineCapacity, Phase
from libra.worker.run_spec import RunSpec
from libra.worker.trajectory.graded_members import GRADE_TIMEOUT_S

if TYPE_CHECKING:
    from distributed import Client

    from libra.driver.run_start import RunStart


class SchedulerCalls:
    """The run's handlers on its scheduler.

    Parameters
    ----------
    client : distributed.Client
    spec : RunSpec

    Attributes
    ----------
    engines : EngineClient
        Slots of engines, and bucket boundaries.
    """

    def __init__(self, client: Client, spec: RunSpec) -> None:
        self.client, self.spec = client, spec
        self.engines = EngineClient(client, spec.run, spec.epoch)

    @property
    def roles(self) -> RoleClient:
        """Roles of workers; ClusterError if no worker of the run can change its role."""
        if not self.spec.config.cluster.hybrid_workers:
            raise ClusterError(
                f"roles: no worker of run {self.spec.run!r} can change its role; type cluster.hybrid_workers=1 or more"
            )
        return RoleClient(self.client, self.spec.run, self.spec.epoch)

    # ---------------------------------------------------------------- the run

    def register(self, start: RunStart, *, local: bool) -> str:
        """Register the run with the scheduler, and return the name of its process; ClusterError if it is registered
        already.

        ``local``: whether the driver started this cluster.
        """
        config = start.config
        self.client.register_plugin(LibraPlugin())
        registration = RunRegistration(
            run=self.spec.run,
            epoch=self.spec.epoch,
            directory=str(self.spec.directory),
            config=config.model_dump(mode="json"),
            tools=needs_of(start.environment),
            watchdog_floors_s=_watchdog_floors_s(start),
            restored=_admission(start) if start.resumed else None,
            learned=learned_before(self.spec.directory) if start.resumed else None,
            local=local,
            client=self.client.id,
        )
        rpc: Any = self.client.scheduler
        answer = self.client.sync(rpc.libra_register_run, registration=registration.as_message())
        if "policy" in answer:
            raise ConfigError(answer["policy"])
        if "error" in answer:
            raise ClusterError(f"run.name: {answer['error']}; type run.name=ANOTHER_NAME")
        return str(answer["process"])

    def register_gang_and_roles(self) -> None:
        """Register the training group and the changing roles of a run that has them; ClusterError where refused."""
        cluster, epoch = self.spec.config.cluster, self.spec.epoch
        if cluster.train_workers > 1:
            answer = self._call("libra_register_gang", epoch=epoch, size=cluster.train_workers)
            if "error" in answer:
                raise ClusterError(
                    f"cluster.train_workers: {answer['error']}; wait for it, or type cluster.train_workers=1"
                )
        if cluster.hybrid_workers:
            answer = self._call("libra_register_roles", epoch=epoch)
            if "error" in answer:
                raise ClusterError(
                    f"cluster.hybrid_workers: {answer['error']}; wait for it, or type cluster.hybrid_workers=0"
                )

    def end(self) -> None:
        """Unregister the run."""
        self._call("libra_end_run", epoch=self.spec.epoch)

    # ---------------------------------------------------------------- while it runs

    def tell(self, *facts: Fact) -> None:
        """Send facts to the scheduler, for the run's event log and its policies."""
        self._call("libra_told", epoch=self.spec.epoch, packed=pack(facts))

    def name_prompts(self, iteration: int, names: list[str]) -> None:
        """Report the ids of an iteration's prompts, so that later occurrences are recognised; called before it is
        submitted."""
        self.tell(prompts_named("train", iteration, names))

    def numbers(self) -> dict[str, float]:
        """Metrics of the policy's forecasts and of sessions, if there are any."""
        return dict(self._call("libra_numbers"))

    def seats(self) -> list[Seat]:
        """The present rollout workers."""
        return seats_of(self.engines.rows(), self.role_rows())

    def role_rows(self) -> list[dict[str, Any]]:
        """Workers that can change roles; none if the run has none."""
        return self.roles.rows() if self.spec.config.cluster.hybrid_workers else []

    def _call(self, name: str, **arguments: Any) -> Any:
        return self.client.sync(getattr(self.client.scheduler, name), run=self.spec.run, **arguments)


def _watchdog_floors_s(start: RunStart) -> dict[str, float]:
    """Least limits of the watchdog for tasks that end by a time-out of their own: those of the tools, and of graders."""
    refused_s = TOTAL_S if start.config.environment.retries else 0.0  # while an API refuses calls
    floors_s = {"group": (GRADE_TIMEOUT_S + refused_s) * (start.config.trainer.resample + 1) + FLOOR_S}
    tools = [tool.timeout_s for tool in start.environment.tools]
    if has_steps(start.environment):
        tools.append(start.environment.step_timeout_s)
    if start.config.agent.given:
        tools.append(start.config.agent.idle_s)
    return floors_s | ({f"trajectory, {Phase.TOOL}": max(tools) + refused_s + FLOOR_S} if tools else {})


def _admission(start: RunStart) -> dict[str, Any]:
    """Admission as earlier starts of the run left it."""
    config = start.config
    waves = Waves.of(config)
    waves.take_over({start.point.batches: start.point.waves} if start.point.waves else {})
    return Admission.resumed(
        staleness_of(config),
        config.trainer.prompts,
        version=-1,  # this epoch has published nothing yet
        opened=dict(enumerate(start.point.members)),
        committed=(),  # their group nodes report again
        started=start.point.started,
        waves=waves,
        first_come=config.trainer.batches == "first_come",
    ).snapshot()


def seats_of(engines: Iterable[Mapping[str, Any]], roles: Iterable[Mapping[str, Any]]) -> list[Seat]:
    """The present rollout workers as the planner's seats.

    Parameters
    ----------
    engines : iterable of mapping
        `libra.scheduler.worker_supply.Concurrency.rows`.
    roles : iterable of mapping
        `libra.scheduler.worker_roles.WorkerRoles.roles`; empty if no worker can change roles.
    """
    changing = {str(row["worker"]): row for row in roles}
    pairs = [(row, changing.get(str(row["worker"]))) for row in engines]
    return [
        _seat(row, role)
        for row, role in pairs
        if (row["supplies"] > 0 if role is None else role["stage"] not in ("lost", "failed"))
    ]


def _seat(row: Mapping[str, Any], role: Mapping[str, Any] | None) -> Seat:
    """One seat; ``role`` None: the worker cannot change its role."""
    return Seat(
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
