"""A driver in a process of its own, on the scheduler of somebody else: ``python own_driver.py CONFIG ADDRESS SECURITY``."""

import pickle
import sys
from pathlib import Path

from distributed import Client

from libra.config import load_config
from libra.driver.run_session import run

if __name__ == "__main__":
    config, address, security = sys.argv[1:]
    with Client(address, security=pickle.loads(Path(security).read_bytes())) as client:
        run(load_config(config), client=client)
