"""The process that has scheduler and nannies of a soak case; prints the scheduler's address and waits to be killed."""

from __future__ import annotations

import sys
import threading

from libra.cluster.local import local_cluster
from libra.config import load_config


def main() -> None:
    """``python tests/soak/cluster.py CONFIG``"""
    with local_cluster(load_config(sys.argv[1])) as cluster:
        print(cluster.scheduler_address, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
