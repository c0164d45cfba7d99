"""Transfer of a run's secret to its workers: inside the spec over an encrypted connection, else through a file that only
its owner can read.

Dask sends pickled data, which over ``tcp://`` anyone on the network can read.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from libra.cluster.connection import write_private
from libra.errors import ClusterError
from libra.worker.run_spec import RunSpec

FILE = "secret"
ENCRYPTED = ("tls://", "inproc://")
"""Schemes of scheduler addresses whose traffic cannot be read by others."""


def sendable(spec: RunSpec, scheduler: str) -> tuple[RunSpec, Path | None]:
    """``spec`` as it may be sent by the scheduler at that address, and the file with the secret that it then lacks, if any.

    A run without connections between its workers needs no secret, and leaves no file.
    """
    if scheduler.startswith(ENCRYPTED):
        return spec, None
    config = spec.config
    path = None
    cluster, peers = config.cluster, (config.trainer.dispatch, config.weights.transfer)
    exchanges_kv = config.rollout.kv_host_gib is not None
    if "peer" in peers or exchanges_kv or cluster.hybrid_workers or cluster.train_workers > 1:
        path = spec.directory / FILE
        write_private(path, spec.secret)
    return replace(spec, secret=""), path


def with_secret(spec: RunSpec, path: Path | None) -> RunSpec:
    """The spec with its secret again, on a worker; ClusterError if the file cannot be read there."""
    if path is None:
        return spec
    try:
        return replace(spec, secret=path.read_text())
    except OSError as error:
        raise ClusterError(
            f"{path}: this worker cannot read the run's secret ({error.strerror}), which an open scheduler must not send; start "
            "scheduler and workers with a key: libra cluster tls DIR"
        ) from error


def forget(directory: Path) -> None:
    """Remove the file from the run directory, if there is one."""
    (directory / FILE).unlink(missing_ok=True)
