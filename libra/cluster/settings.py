"""Dask settings that Libra needs, with reasons, and the check of a cluster's settings.

The driver sets them for a local cluster. A scheduler and workers that you start yourself get them
by ``libra cluster tls DIR``, then ``DASK_CONFIG=DIR/dask.yaml`` in their environment; that file
also names a key, without which anyone who reaches the scheduler's port may run code there.
``libra doctor --settings`` prints the settings alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import dask.config
from dask.utils import key_split, parse_timedelta

from libra.config import yaml_text
from libra.config.yaml_text import one_line_yaml

if TYPE_CHECKING:
    from distributed import Client

Process = Literal["scheduler", "worker"]


@dataclass(frozen=True, slots=True)
class Setting:
    """One Dask setting: reading process ("worker" includes the nanny), dotted key, Libra's value.

    ``breaks``: whether a run with another value hangs, fails or uses a wrong order; otherwise the
    run is only slower or less robust. ``reason``: the effect of another value.
    """

    process: Process
    key: str
    value: Any
    breaks: bool
    reason: str


KEPT_KEYS = 8_192
"""Keys above which `bound_key_cache` empties the cache; refilling takes microseconds per key."""
GUARD = "libra.cluster.connection_guard"
"""Module that schedulers, workers and nannies load when they start."""
MIN_WORKER_TTL_S = 30.0
"""Minimum time-to-live: the scheduler counts a worker as dead if it does not answer for longer."""

_SPILLS = "results are small; spilling them to disk would only hide a mistake"
_TABLE: tuple[tuple[Process, str, Any, bool, str], ...] = (  # the fields of Setting; keys without their start
    ("scheduler", "work-stealing", False, True, "stealing moves quanta away from their KV cache, against their priority"),
    ("scheduler", "no-workers-timeout", None, True, "it fails parked tasks, which wait for a resource that no worker has"),
    ("scheduler", "worker-ttl", "120s", True, "a worker that is silent for longer, e.g. loading a model, counts as dead"),
    ("scheduler", "worker-saturation", 1.0, False, "above 1, workers queue tasks out of reach of later priorities"),
    ("scheduler", "allowed-failures", 3, False, "with fewer, two lost workers end a task permanently"),
    ("scheduler", "dashboard.tasks.task-stream-length", 10_000, False, "a row of the task stream has 1.2 KB, in the scheduler"),
    ("scheduler", "admin.low-level-log-length", 100, False, "logs of messages keep them all: a driver's are graphs of 60 KB"),
    ("scheduler", "admin.system-monitor.log-length", 600, False, "each process keeps a sample of its machine every second"),
    ("scheduler", "admin.system-monitor.interval", "1s", False, "a sample takes 2 ms of each scheduler, worker and nanny"),
    ("scheduler", "admin.tick.interval", "100ms", False, "Dask's 20 ms wake every process 50 times a second: 5 % of a core"),
    ("worker", "profile.enabled", False, False, "Dask's profiler keeps samples of every thread: 100 KB a second in each process"),
    ("worker", "daemon", False, True, "a daemonic worker cannot start processes: engines and sandboxes fail"),
    ("worker", "memory.target", False, True, _SPILLS),
    ("worker", "memory.spill", False, True, _SPILLS),
    ("worker", "memory.pause", False, True, "weights fill a worker's memory, and a paused worker never starts another task"),
    ("worker", "memory.terminate", False, True, "the nanny would kill a worker for the memory of its weights"),
)  # fmt: skip

SETTINGS: tuple[Setting, ...] = tuple(
    Setting(process, f"distributed.{'' if key.startswith('admin.') else process + '.'}{key}", value, breaks, reason)
    for process, key, value, breaks, reason in _TABLE
)

DASK_SETTINGS: dict[str, Any] = {setting.key: setting.value for setting in SETTINGS}
"""`SETTINGS` for ``dask.config.set``."""

MESSAGE_LOG = "distributed.admin.low-level-log-length"
"""A key of `SETTINGS` that every process reads, clients included."""


@dataclass(frozen=True, slots=True)
class SettingProblem:
    """A setting whose value in force, ``got``, differs from Libra's."""

    setting: Setting
    got: Any

    @property
    def message(self) -> str:
        """The difference, its effect, and the text to type."""
        setting, wanted = self.setting, one_line_yaml(self.setting.value)
        return (
            f"{setting.key} is {one_line_yaml(self.got)} in the {setting.process}, not {wanted}: {setting.reason}; type libra "
            "doctor --settings > libra-dask.yaml, and start it with DASK_CONFIG=libra-dask.yaml"
        )


def check_settings(in_force: dict[Any, Any], process: Process) -> tuple[SettingProblem, ...]:
    """Differences from `SETTINGS` in a process, whose ``dask.config.config`` is ``in_force``."""
    found = ((s, dask.config.get(s.key, "not set", config=in_force)) for s in SETTINGS if s.process == process)
    return tuple(SettingProblem(setting, got) for setting, got in found if not _fits(setting, got))


def cluster_setting_problems(client: Client) -> tuple[SettingProblem, ...]:
    """Differences from `SETTINGS` in a client's scheduler and workers, each listed once."""
    found = list(check_settings({"distributed": client.run_on_scheduler(dask.config.get, "distributed")}, "scheduler"))
    for in_force in client.run(dask.config.get, "distributed").values():
        found += [p for p in check_settings({"distributed": in_force}, "worker") if p not in found]
    return tuple(found)


def settings_yaml(certificate: Path | None = None, key: Path | None = None) -> str:
    """`SETTINGS` as a Dask configuration file. With paths of a certificate and its key, every
    connection must show them."""
    values, name = dict(DASK_SETTINGS), "libra-dask.yaml"
    if certificate is not None:
        name = str(certificate.parent / "dask.yaml")
        files = {"cert": str(certificate), "key": str(key)}
        values |= {f"distributed.comm.tls.{role}": files for role in ("scheduler", "worker", "client")}
        values |= {
            "distributed.comm.tls.ca-file": str(certificate),
            "distributed.comm.tls.min-version": 1.3,
            "distributed.comm.require-encryption": True,
            "distributed.comm.default-scheme": "tls",
        }
        values |= {f"distributed.{process}.preload": [GUARD] for process in ("scheduler", "worker", "nanny")}
    tree: dict[str, Any] = {}
    dask.config.set(values, config=tree)
    head = f"# Dask as Libra needs it, for a scheduler and workers you start yourself: DASK_CONFIG={name}\n"
    return head + yaml_text.write(tree)


def _fits(setting: Setting, got: Any) -> bool:
    number = isinstance(got, int | float)
    match setting.key.rpartition(".")[2]:
        case "worker-ttl":
            return got is None or _seconds(got) >= MIN_WORKER_TTL_S
        case "interval":
            return _seconds(got) >= _seconds(setting.value)
        case "allowed-failures":
            return number and got >= setting.value
        case "worker-saturation":
            return number and got <= setting.value
        case name if name.endswith("-length"):
            return number and got <= setting.value
    return got is setting.value


def _seconds(got: Any) -> float:
    try:
        return float(parse_timedelta(got))
    except (ValueError, TypeError, KeyError):
        return 0.0


def bound_key_cache() -> None:
    """Empty Dask's cache ``dask.utils.key_split`` if it has over `KEPT_KEYS` keys. Otherwise each
    process keeps the last 100,000 keys, 300 bytes each, of forgotten tasks."""
    if key_split.cache_info().currsize > KEPT_KEYS:
        key_split.cache_clear()
