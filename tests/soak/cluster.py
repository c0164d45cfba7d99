"""The process that has scheduler and nannies of a soak case; prints the path of its cluster.json and waits to be killed."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from pathlib import Path

from libra.cluster.certificates import CERTIFICATE_FILE, KEY_FILE, shown_by, write_private
from libra.cluster.local import local_cluster
from libra.cluster.scheduler_address import Contact
from libra.config import load_config


def main() -> None:
    """``python tests/soak/cluster.py CONFIG``"""
    directory = Path(sys.argv[1]).parent / "cluster"
    directory.mkdir(mode=0o700, exist_ok=True)
    certificate, key, path = directory / CERTIFICATE_FILE, directory / KEY_FILE, directory / "cluster.json"
    with local_cluster(load_config(sys.argv[1])) as cluster:
        for file, text in zip((certificate, key), shown_by(cluster.security), strict=False):
            write_private(file, text)
        address, process = cluster.scheduler_address, os.getpid()
        Contact(address, "", str(certificate), str(key), socket.gethostname(), process, time.time()).write(path)
        print(path, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
