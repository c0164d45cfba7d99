"""Checks that workers can unpickle what a run sends them, before the run depends on it."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import cloudpickle

from libra.errors import ConfigError
from libra.worker.run_spec import RunSpec

if TYPE_CHECKING:
    from distributed import Client


def loading_error(data: bytes) -> str | None:
    """Why a worker cannot load a pickled `RunSpec`, None if it can; runs on a worker."""
    try:
        pickle.loads(data)
    except Exception as error:  # noqa: BLE001  the boundary to a user's modules: importing them may raise anything
        return f"{type(error).__name__}: {error}"
    return None


def check_loadable(client: Client, spec: RunSpec) -> None:
    """ConfigError if a worker cannot: it would be closed while it unpickles the environment, and the run would wait for ever."""
    try:
        data = cloudpickle.dumps(spec)
    except Exception as error:  # the boundary to a user's objects: pickling them may raise anything
        raise ConfigError(
            f"environment: it cannot be sent to workers ({type(error).__name__}: {error}); make what it holds (files, "
            "clients, locks) in its setup(), or in the function that uses it"
        ) from error
    for address, reason in client.run(loading_error, data).items():
        if reason is not None:
            raise ConfigError(
                f"environment: worker {address} cannot load it ({reason}); put the module where workers find it (install it, "
                "or set PYTHONPATH before they start), or define function and class in the script that you run"
            )
