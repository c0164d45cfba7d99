"""Dask's settings as Libra needs them, why, and what differs from them.

Each was chosen from a measurement or a failure; the reason stands beside it. The driver sets them for a local cluster. A
scheduler and workers that somebody else starts read them from a file: ``libra doctor --settings > libra-dask.yaml``, then
``DASK_CONFIG=libra-dask.yaml`` in their environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from libra.config import yaml_text

if TYPE_CHECKING:
    from distributed import Client

Process = Literal["scheduler", "worker"]


@dataclass(frozen=True, slots=True)
class Setting:
    """One Dask setting.

    Attributes
    ----------
    key : str
        Dotted key in Dask's configuration.
    value : object
        What Libra sets.
    process : "scheduler" or "worker"
        The process that reads it; "worker" includes the nanny.
    breaks : bool
        Whether a run with another value hangs, fails or gives wrong order (else it is only slower or less robust).
    reason : str
        What another value does.
    """

    key: str
    value: Any
    process: Process
    breaks: bool
    reason: str


MIN_WORKER_TTL_S = 30.0
"""A worker that computes without giving way for longer than its time-to-live is taken for dead."""

SETTINGS: tuple[Setting, ...] = (
    Setting(
        "distributed.scheduler.work-stealing",
        False,
        "scheduler",
        True,
        "stealing moves quanta away from their KV cache and ignores their priority",
    ),
    Setting(
        "distributed.scheduler.no-workers-timeout",
        None,
        "scheduler",
        True,
        "a parked task waits for a resource that no worker has, and would be failed for it",
    ),
    Setting(
        "distributed.scheduler.worker-ttl",
        "120s",
        "scheduler",
        True,
        "a worker that is silent for longer, e.g. while a model loads, is taken for dead",
    ),
    Setting(
        "distributed.scheduler.worker-saturation",
        1.0,
        "scheduler",
        False,
        "above 1, workers are sent more tasks than they can run, out of reach of later priorities",
    ),
    Setting(
        "distributed.scheduler.allowed-failures",
        3,
        "scheduler",
        False,
        "fewer, and two lost workers end a task for good",
    ),
    Setting(
        "distributed.worker.daemon",
        False,
        "worker",
        True,
        "a daemonic worker may start no process: engines and sandboxes fail",
    ),
    Setting(
        "distributed.worker.memory.target",
        False,
        "worker",
        True,
        "results are small; spilling them to disk would only hide a mistake",
    ),
    Setting(
        "distributed.worker.memory.spill",
        False,
        "worker",
        True,
        "results are small; spilling them to disk would only hide a mistake",
    ),
    Setting(
        "distributed.worker.memory.pause",
        False,
        "worker",
        True,
        "weights fill a worker's memory for good, and a paused worker never starts another task",
    ),
    Setting(
        "distributed.worker.memory.terminate",
        False,
        "worker",
        True,
        "the nanny would kill a worker for the memory its weights need",
    ),
)

DASK_SETTINGS: dict[str, Any] = {setting.key: setting.value for setting in SETTINGS}
"""For ``dask.config.set``."""


@dataclass(frozen=True, slots=True)
class SettingProblem:
    """A setting in force that is not as Libra needs it; ``got`` is its value there."""

    setting: Setting
    got: Any

    @property
    def message(self) -> str:
        """What differs, what that does, and what to type."""
        setting = self.setting
        return (
            f"{setting.key} is {_shown(self.got)} in the {setting.process}, not {_shown(setting.value)}: {setting.reason}; "
            "type libra doctor --settings > libra-dask.yaml, and start it with DASK_CONFIG=libra-dask.yaml"
        )


def check_settings(in_force: Mapping[str, Any], process: Process) -> tuple[SettingProblem, ...]:
    """What differs from `SETTINGS` in a process.

    Parameters
    ----------
    in_force : mapping
        Its configuration: ``dask.config.config`` there, or the value of ``dask.config.get("distributed")`` under that name.
    process : "scheduler" or "worker"
        Which settings matter there.
    """
    problems = []
    for setting in SETTINGS:
        if setting.process == process:
            got = _lookup(in_force, setting.key)
            if not _fits(setting, got):
                problems.append(SettingProblem(setting, got))
    return tuple(problems)


def cluster_setting_problems(client: Client) -> tuple[SettingProblem, ...]:
    """What differs from `SETTINGS` in the scheduler and the workers a synchronous client is connected to, each once."""
    import dask.config

    found = list(check_settings({"distributed": client.run_on_scheduler(dask.config.get, "distributed")}, "scheduler"))
    for in_force in client.run(dask.config.get, "distributed").values():
        found += [p for p in check_settings({"distributed": in_force}, "worker") if p not in found]
    return tuple(found)


def settings_yaml() -> str:
    """`SETTINGS` as a Dask configuration file."""
    tree: dict[str, Any] = {}
    for setting in SETTINGS:
        *sections, last = setting.key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = setting.value
    head = "# Dask as Libra needs it, for a scheduler and workers you start yourself: DASK_CONFIG=libra-dask.yaml\n"
    return head + yaml_text.write(tree)


def _lookup(tree: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key, whose parts may be spelled with '-' or '_'; KeyError text where there is none."""
    node: Any = tree
    for part in key.split("."):
        names = {name.replace("_", "-"): name for name in node} if isinstance(node, Mapping) else {}
        if part not in names:
            return "not set"
        node = node[names[part]]
    return node


def _fits(setting: Setting, got: Any) -> bool:
    if setting.key.endswith("worker-ttl"):
        return got is None or _seconds(got) >= MIN_WORKER_TTL_S
    if setting.key.endswith("worker-saturation"):
        return isinstance(got, int | float) and got <= 1.0
    if setting.key.endswith("allowed-failures"):
        return isinstance(got, int) and got >= setting.value
    if setting.value is False:
        return got is False
    return bool(got == setting.value)


def _seconds(got: Any) -> float:
    from dask.utils import parse_timedelta

    try:
        return float(parse_timedelta(got))
    except (ValueError, TypeError, KeyError):
        return 0.0


def _shown(value: Any) -> str:
    return yaml_text.write(value).removesuffix("\n").removesuffix("\n...")
