"""Dask keys and resource names: this module builds and parses all of them.

A key is ``<node>-<indices>-e<epoch>-<run>``, so two runs on one scheduler, or two starts of one
run, never share a result. Nodes: gate, prompts, trajectory, group, batch, store, step (or wave,
accumulate, close), update, publish, summary.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from libra.errors import ConfigError

PARK = "LIBRA_PARK"
"""Resource that no worker supplies: a task that requires it waits in the scheduler until the plugin releases it."""
GANG = "LIBRA_GANG"
"""The same for gang tasks, which run on all ranks of a training group at once or on none (`libra.scheduler.gangs`)."""
ROLLOUT, TOOL, TRAIN, GRADE, COMMIT = "ROLLOUT", "TOOL", "TRAIN", "GRADE", "COMMIT"
"""Resources that workers supply: slots of an engine, concurrent actions, replicas, concurrent graders, and the one committer."""
TEACHER = "TEACHER"
"""The same, in runs with a teacher (``distil.teacher``): the worker that holds it, which scores a group at a time."""
TOOL_CORES, TOOL_MIB, TOOL_GPUS = "TOOL_CORES", "TOOL_MIB", "TOOL_GPUS"
"""Resources of a tool worker that actions lease if tools declare any: cores, MiB of memory, GPUs."""
TP, THREADS = "TP", "THREADS"
"""Properties of a rollout worker's engine, as resources that no task takes: tensor-parallel degree, torch threads per rank."""
PASS_US = "PASS_US"  # the same: minimum microseconds of each of its passes

HYBRID = "HYBRID"
"""The same: the worker can change roles during the run (`libra.scheduler.worker_roles`)."""

QUANTUM = "libra_quantum"
"""Annotation of a dispatched trajectory: the number of its next quantum, 0 where the worker has to look in the journal."""

_KEY = re.compile(r"(?P<node>[a-z_]+)-(?P<split>train|eval)(?P<indices>(?:-\d+)*)-e(?P<epoch>\d+)-(?P<run>.+)")
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.]{0,62}")


class Key(NamedTuple):
    """A parsed key; ``indices``: iteration, then group or rank, and sample; of waves wave and rank."""

    node: str
    split: str
    indices: tuple[int, ...]
    epoch: int
    run: str


def make(node: str, indices: tuple[int, ...], *, epoch: int, run: str, split: str = "train") -> str:
    """Key of one node, e.g. ``trajectory-train-3-0-7-e0-demo``."""
    return "-".join((node, split, *map(str, indices), f"e{epoch}", run))


@lru_cache(maxsize=4096)
def parse(key: object) -> Key | None:
    """The parts of a Libra key; None for any other key. Each quantum asks for the same keys again."""
    match = _KEY.fullmatch(key) if isinstance(key, str) else None
    if match is None:
        return None
    indices = tuple(int(part) for part in match["indices"].split("-") if part)
    return Key(match["node"], match["split"], indices, int(match["epoch"]), match["run"])


def host_name(run: str) -> str:
    """Name of a run's worker plugin."""
    return f"libra-{run}"


def check_run_name(run: str) -> str:
    """``run`` if it can be part of a key, else ConfigError."""
    if not _RUN.fullmatch(run):
        raise ConfigError(
            f"run.name: got {run!r}; a run's name is 1-63 letters, digits, '_' or '.', beginning with a letter or digit; "
            "type e.g. run.name=my_run"
        )
    return run
