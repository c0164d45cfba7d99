"""Environment of local worker processes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from libra.processes.child_environment import loopback_direct

if TYPE_CHECKING:
    from libra.config import RunConfig

WORKER_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "DASK_LOGGING__DISTRIBUTED": "warning",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # the worker's log; standard output is the terminal
    # Dask's nanny makes glibc return memory after every large tensor, which costs training two fifths of its CPU time.
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_MMAP_THRESHOLD_": str(2**25),  # the most glibc accepts; it ignores a larger one, and maps every tensor
    "MALLOC_ARENA_MAX": "1",  # steps run on any thread of a pool, and each would keep and fault in its own memory
    # Waiting torch threads must leave the cores to scheduler and engine soon; without any spinning an engine's small products
    # lose a third of their speed.
    "GOMP_SPINCOUNT": "20000",
}
"""Environment of every local worker process, set before torch is loaded; a variable of the driver with that name wins."""
LOG_VARIABLE = "LIBRA_WORKER_LOG"
"""The file for a worker's standard error: logs and tracebacks, its own and those of libraries. Not set: that of the driver."""
HASH_SEED = "6640"
"""What Dask's nannies give workers that have none."""


def worker_environment(config: RunConfig) -> dict[str, str]:
    """`WORKER_ENVIRONMENT`, and the threads of numerical libraries by ``cluster.threads``."""
    threads = config.cluster.threads or os.cpu_count() or 1
    return {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")} | WORKER_ENVIRONMENT


def inherited_environment(config: RunConfig) -> dict[str, str]:
    """All variables of a local worker, as those of this process and `worker_environment` make them."""
    found = {**worker_environment(config), **os.environ}
    if found.get("PYTHONHASHSEED") in (None, "0"):
        found["PYTHONHASHSEED"] = HASH_SEED
    return found | loopback_direct(found)
