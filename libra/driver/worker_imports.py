"""Checks that workers can unpickle what a run sends them, and import the parts that it names, before the run depends on it."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import cloudpickle

from libra import keys
from libra.config import RunConfig
from libra.errors import ConfigError
from libra.named_parts import is_named, named_part
from libra.worker.run_spec import RunSpec

if TYPE_CHECKING:
    from distributed import Client, Worker


def loading_error(data: bytes, dask_worker: Worker | None = None) -> tuple[str, str] | None:
    """What a worker cannot load, ("environment" or a setting, why), None if it can load all; runs on a worker."""
    try:
        spec: RunSpec = pickle.loads(data)
    except Exception as error:  # noqa: BLE001  the boundary to a user's modules: importing them may raise anything
        return "environment", f"{type(error).__name__}: {error}"
    generates = dask_worker is None or keys.ROLLOUT in dask_worker.state.total_resources
    for field, name in worker_parts(spec.config, generates=generates):
        try:
            named_part(field, name)
        except ConfigError as error:
            return field, str(error)
    return None


def worker_parts(config: RunConfig, *, generates: bool = True) -> list[tuple[str, str]]:
    """Parts of the user's own that a worker imports, as (setting, name); the engine only if it ``generates``."""
    trainer = config.trainer
    named = [
        ("model.loader", config.model.loader or ""),
        ("trainer.loss", trainer.loss),
        ("trainer.advantage", trainer.advantage),
        ("trainer.lr_schedule", trainer.lr_schedule),
        *([("rollout.engine", config.rollout.engine)] if generates else []),
        *(("services.named", entry.function) for entry in config.services.named.values()),
    ]
    return [(field, name) for field, name in named if is_named(name)]


def check_loadable(client: Client, spec: RunSpec) -> None:
    """ConfigError if a worker cannot: it would be closed while it unpickles the environment, and the run would wait for ever."""
    try:
        data = cloudpickle.dumps(spec)
    except Exception as error:  # the boundary to a user's objects: pickling them may raise anything
        raise ConfigError(
            f"environment: it cannot be sent to workers ({type(error).__name__}: {error}); make what it holds (files, "
            "clients, locks) in its setup(), or in the function that uses it"
        ) from error
    for address, found in client.run(loading_error, data).items():
        if found is None:
            continue
        field, reason = found
        if field != "environment":
            raise ConfigError(
                f"{reason} on worker {address}; put the module where workers find it (install it, or set PYTHONPATH before they "
                "start)"
            )
        raise ConfigError(
            f"environment: worker {address} cannot load it ({reason}); put the module where workers find it (install it, "
            "or set PYTHONPATH before they start), or define function and class in the script that you run"
        )
