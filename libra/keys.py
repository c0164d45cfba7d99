"""Every Dask key and resource name, made and read in this one module.

A key is ``<node>-<indices>-e<epoch>-<run>``: run and epoch are in it, so two runs on one scheduler, or two starts of one
run, never share a result. Nodes: gate, prompts, trajectory, group, batch, store, step, update, publish, summary.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from libra.errors import ConfigError

PARK = "LIBRA_PARK"
"""Resource that no worker supplies: a task that asks for it waits in the scheduler until the plugin releases it."""
GANG = "LIBRA_GANG"
"""Another one, for tasks that run on all ranks of a training group at once or on none; see `libra.scheduler.gang_plugin`."""
ROLLOUT, TOOL, TRAIN, GRADE, COMMIT = "ROLLOUT", "TOOL", "TRAIN", "GRADE", "COMMIT"
"""Resources that workers supply: slots of an engine, actions at once, replicas, graders at once, and the one committer."""
TP, THREADS = "TP", "THREADS"
"""What a rollout worker says of its engine, as resources that no task takes: tensor-parallel degree, and torch threads per rank."""
PASS_US = "PASS_US"
"""Another one: microseconds that each of its passes takes at least."""

HYBRID = "HYBRID"
"""What a rollout worker says that can change roles in mid-run, as a resource that no task takes; see
`libra.scheduler.role_plugin`."""

_KEY = re.compile(r"(?P<node>[a-z_]+)-(?P<split>train|eval)(?P<indices>(?:-\d+)*)-e(?P<epoch>\d+)-(?P<run>.+)")
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.]{0,62}")


class Key(NamedTuple):
    """A parsed key. ``indices`` is (iteration,), (iteration, group), (iteration, group, sample) or (iteration, rank)."""

    node: str
    split: str
    indices: tuple[int, ...]
    epoch: int
    run: str


def make(node: str, indices: tuple[int, ...], *, epoch: int, run: str, split: str = "train") -> str:
    """Key of one node, e.g. ``trajectory-train-3-0-7-e0-demo``."""
    return "-".join((node, split, *map(str, indices), f"e{epoch}", run))


def parse(key: object) -> Key | None:
    """The parts of a Libra key, or None where the key is not one of ours."""
    match = _KEY.fullmatch(key) if isinstance(key, str) else None
    if match is None:
        return None
    indices = tuple(int(part) for part in match["indices"].split("-") if part)
    return Key(match["node"], match["split"], indices, int(match["epoch"]), match["run"])


def host_name(run: str) -> str:
    """Name of the plugin by which workers take part in a run."""
    return f"libra-{run}"


def check_run_name(run: str) -> str:
    """``run`` itself where it can stand in a key, else ConfigError."""
    if not _RUN.fullmatch(run):
        raise ConfigError(
            f"run.name: got {run!r}; a run's name is 1-63 letters, digits, '_' or '.', beginning with a letter or digit; "
            "type e.g. run.name=my_run"
        )
    return run
