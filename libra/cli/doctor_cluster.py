"""Checks of a running Dask cluster: its scheduler answers, versions agree, settings fit, and every role has workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from libra.cli.doctor_machine import Check
from libra.cluster.connection import connect, present_workers
from libra.cluster.readiness import NEEDED, engine_problems, resource_problems
from libra.cluster.settings import cluster_setting_problems
from libra.config import RunConfig, config_from_dict
from libra.errors import ClusterError

if TYPE_CHECKING:
    from distributed import Client

START = "libra cluster tls DIR && DASK_CONFIG=DIR/dask.yaml dask scheduler --port 8786"
PACKAGES = ("libra-rl", "torch", "transformers", "safetensors", "pydantic", "zarr")
"""Compared in addition to those that Dask compares itself, because one process reads files that another wrote."""


def cluster_checks(address: str, config: RunConfig | None = None) -> Iterator[Check]:
    """Every check of the cluster whose scheduler is at ``address``, for a run of ``config`` or of the defaults."""
    try:
        client = connect(address, set_as_default=False)
    except (OSError, TimeoutError, ValueError, ClusterError) as error:
        yield Check("scheduler", "fail", f"no answer from {address}: {error}", START)
        return
    with client:
        yield Check("scheduler", "ok", f"{address}; dashboard {client.dashboard_link}")
        yield encryption_check(str(client.scheduler.address))  # type: ignore[union-attr]
        yield from version_checks(client.get_versions(packages=PACKAGES))
        yield from setting_checks(client)
        yield from role_checks(present_workers(client), address, config)


def encryption_check(address: str) -> Check:
    """Whether the scheduler accepts only clients that have its key."""
    if address.startswith(("tls://", "inproc://")):
        return Check("encryption", "ok", "only clients with the cluster's key can connect")
    detail = f"{address} is open: anyone who reaches this port can run code on every worker, and read what it receives"
    return Check("encryption", "warn", detail, f"{START} (and the workers, with the same DASK_CONFIG)")


def version_checks(found: Any) -> Iterator[Check]:
    """Client, scheduler and workers run the same versions; ``found`` is from ``Client.get_versions(packages=PACKAGES)``."""
    places = {"client": found["client"], "scheduler": found["scheduler"], **found["workers"]}
    differing = False
    for package in ("python", "dask", "distributed", "msgpack", "cloudpickle", "numpy", *PACKAGES):
        by_version: dict[str, list[str]] = defaultdict(list)
        for place, versions in places.items():
            by_version[str(versions["packages"].get(package))].append(place)
        if len(by_version) > 1:
            differing = True
            shown = "; ".join(f"{version} on {', '.join(where)}" for version, where in by_version.items())
            advice = "pip install -c constraints.txt -e . on every machine"
            yield Check(f"versions of {package}", "fail", shown, advice)
    if not differing:
        yield Check("versions", "ok", f"the same on client, scheduler and {len(found['workers'])} workers")


def setting_checks(client: Client) -> Iterator[Check]:
    """The cluster's Dask settings are those that Libra needs."""
    problems = cluster_setting_problems(client)
    for problem in problems:
        detail, _, advice = problem.message.partition("; type ")
        yield Check(problem.setting.key, "fail" if problem.setting.breaks else "warn", detail, advice)
    if not problems:
        yield Check("Dask settings", "ok", "as Libra needs them")


def role_checks(
    workers: Mapping[str, Mapping[str, Any]], address: str, config: RunConfig | None = None
) -> Iterator[Check]:
    """Every resource has workers, one worker commits, replicas and engines are as configured, and every slot has a thread.

    ``workers``: `libra.cluster.connection.present_workers`. ``config``: by default the defaults.
    """
    config = config or config_from_dict({})
    cluster = config.cluster
    problems = resource_problems(
        workers, address, train_workers=cluster.train_workers, hybrid_workers=cluster.hybrid_workers
    )
    problems += engine_problems(workers, address, config)
    for problem in problems:
        detail, _, advice = problem.partition("; type: ")
        yield Check("workers", "fail", detail, advice)
    if not problems:
        supply = (
            f"{resource} {sum(w['resources'].get(resource, 0) for w in workers.values()):g}" for resource in NEEDED
        )
        yield Check("workers", "ok", f"{len(workers)} with {', '.join(supply)}")
