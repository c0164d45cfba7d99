"""A scheduler with its workers, to be killed: ``python own_scheduler.py CONFIG SECURITY`` prints its address."""

import pickle
import sys
import threading
from pathlib import Path

from libra.cluster.local import local_cluster
from libra.config import load_config

if __name__ == "__main__":
    config, security = sys.argv[1:]
    with local_cluster(load_config(config)) as cluster:
        Path(security).write_bytes(pickle.dumps(cluster.security))
        sys.stdout.write(f"{cluster.scheduler_address}\n")
        sys.stdout.flush()
        threading.Event().wait()
