"""Dask keys and resource names: this module builds and parses all of them.

A key is ``<node>-<indices>-e<epoch>-<run>``, so two runs on a scheduler, or two starts of a run,
never share a result. Nodes: gate, prompts, trajectory, group, batch, store, step (or wave,
accumulate, close), update, publish, summary.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from libra.errors import ConfigError

PARK = "LIBRA_PARK"
"""Resource that no worker supplies: a task that needs it waits until the plugin releases it."""
GANG = "LIBRA_GANG"
"""As `PARK`, for gang tasks: all ranks run at once or none (`libra.scheduler.gangs`)."""
ROLLOUT, TOOL, TRAIN, GRADE, COMMIT = "ROLLOUT", "TOOL", "TRAIN", "GRADE", "COMMIT"
"""Supplied: engine slots, concurrent actions, training replicas, graders, the one committer."""
TEACHER = "TEACHER"
"""The worker that holds the teacher (``distil.teacher``), which scores a group at a time."""
TOOL_CORES, TOOL_MIB, TOOL_GPUS = "TOOL_CORES", "TOOL_MIB", "TOOL_GPUS"
"""Resources of a tool worker that actions lease if tools declare any: cores, MiB, GPUs."""
TP, THREADS = "TP", "THREADS"
"""Engine properties as resources no task takes: tensor-parallel degree, torch threads per rank."""
PASS_US = "PASS_US"  # the same: minimum microseconds of each of its passes

HYBRID = "HYBRID"
"""Property: the worker can change roles during the run (`libra.scheduler.worker_roles`)."""

QUANTUM = "libra_quantum"
"""Annotation of a dispatched trajectory: its next quantum; 0 if the journal must tell."""

_KEY = re.compile(r"(?P<node>[a-z_]+)-(?P<split>train|eval)(?P<indices>(?:-\d+)*)-e(?P<epoch>\d+)-(?P<run>.+)")
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.]{0,62}")


class Key(NamedTuple):
    """A parsed key; ``indices``: iteration, then group or rank, and sample; or (wave, rank)."""

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
    """The parts of a Libra key; None for any other key. Cached, as each quantum parses again."""
    match = _KEY.fullmatch(key) if isinstance(key, str) else None
    if match is None:
        return None
    indices = tuple(int(part) for part in match["indices"].split("-") if part)
    return Key(match["node"], match["split"], indices, int(match["epoch"]), match["run"])


def host_name(run: str) -> str:
    """Name of a run's worker plugin."""
    return f"libra-{run}"


def check_run_name(run: str) -> str:
    """``run``, or ConfigError if it cannot be part of a key."""
    if not _RUN.fullmatch(run):
        raise ConfigError(
            f"run.name: got {run!r}; a run's name is 1-63 letters, digits, '_' or '.', beginning with a letter or digit; "
            "type e.g. run.name=my_run"
        )
    return run
