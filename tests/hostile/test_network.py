"""Everybody else on the network and on this machine, against a run that goes on: it ends as if nobody had been there.

The servers that are attacked are all that listen in the run's processes, found in /proc, so that none is forgotten. The cluster is
the one that other tests share, and its deadlines are the real ones.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import os
import resource
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import zarr
from distributed import Client

import factories
from libra.cluster.connection import present_workers
from libra.config import config_from_dict
from libra.driver.run_session import Session
from libra.scheduler.plugin import LibraPlugin
from libra.store.event_log import read_events
from libra.transport import Server
from libra.weights import WeightStore
from libra.weights.transfer import PURPOSE

CONNECTIONS = 1000
ITERATIONS = 2
OTHER_UID = 61_234


def client_hello():
    outgoing = ssl.MemoryBIO()
    wrapped = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="libra")
    with contextlib.suppress(ssl.SSLWantReadError):
        wrapped.do_handshake()
    return outgoing.read()


HELLO = client_hello()
ATTACKS = (
    b"",  # silent
    bytes(range(256)) * 16,  # garbage
    HELLO[: len(HELLO) // 2],  # half messages
    HELLO,
    b"GET /libra HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ",
    b"\xff" * 64,  # huge lengths
    b"\x16\x03\x03\xff\xff" + bytes(100),
    b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 999999999999\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: evil.example\r\nOrigin: http://evil.example\r\nUpgrade: websocket\r\n\r\n",
)


def listening(pids):
    """Ports on which these processes listen, and the address of each."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
    found = {}
    for line in itertools.chain(*(Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6"))):
        columns = line.split()
        if columns[3] == "0A" and columns[9] in inodes:
            address, port = columns[1].split(":")
            found[int(port, 16)] = address
    return found


@dataclass
class Attacker:
    """Holds `CONNECTIONS` connections that say `ATTACKS`, and makes new ones for each that is closed."""

    ports: list[int]
    made: int = 0

    def __post_init__(self):
        self._held = []
        self._stop = threading.Event()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < CONNECTIONS + 1000 <= hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (CONNECTIONS + 1000, hard))
        self._number = min(CONNECTIONS, max(0, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 800))
        self._said = itertools.cycle(itertools.product(ATTACKS, self.ports))

    def __enter__(self):
        while len(self._held) < self._number:
            self._one()
        self._thread = threading.Thread(target=self._on_and_on)
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._stop.set()
        self._thread.join()
        for each in self._held:
            each.close()

    def _one(self):
        what, port = next(self._said)
        with contextlib.suppress(ConnectionError):  # closed at once
            connection = socket.create_connection(("127.0.0.1", port), timeout=30)
            self._held.append(connection)
            connection.sendall(what)
        self.made += 1

    def _on_and_on(self):
        while not self._stop.wait(0.01):
            self._held.pop(0).close()
            self._one()


Lie = Callable[[str, bytes], tuple[int, bytes]]


def altered(name, content):
    return len(content), (content[:-8] + bytes(8) if name.endswith(".safetensors") else content)


def oversize(name, content):
    return (2**50 if name.endswith(".safetensors") else len(content)), content


def of_another_version(name, content):
    if name == "version.json":
        content = json.dumps({**json.loads(content), "number": 77}).encode()
    return len(content), content


LIES = (altered, oversize, of_another_version)


class RogueHolders:
    """Weight servers that know the run's secret, and that the scheduler names first; each tells another lie."""

    def __init__(self, session):
        self.asked = set()
        self._directory = session.spec.weights_dir
        self._servers = [
            Server(functools.partial(self._serve, lie), secret=session.spec.secret, purpose=PURPOSE, host="127.0.0.1")
            for lie in LIES
        ]
        scheduler = session.client.cluster.scheduler
        holders = scheduler.plugins[LibraPlugin.name].runs[session.spec.run].workers.holders
        for number, server in enumerate(self._servers, 1):
            holders.offers(f"tls://127.0.0.1:{number}", server.address)
            for version in range(1, ITERATIONS + 1):
                holders.has(f"tls://127.0.0.1:{number}", version)

    def close(self):
        for server in self._servers:
            server.close()

    def _serve(self, lie, channel, client):
        while (request := channel.recv_frame()) is not None:
            version, name = request["version"], request["file"]
            try:
                content = (WeightStore(self._directory).directory(version) / name).read_bytes()
            except OSError:
                channel.send_frame(error="none", absent=True)
                continue
            self.asked.add((lie.__name__, version))
            size, sent = lie(name, content)
            channel.send_frame(size=size, sha256=hashlib.sha256(sent).hexdigest() if name.endswith(".json") else None)
            channel.send_bytes([memoryview(sent)[request["offset"] :]])


def digest_of(directory):
    """Of all tokens and rewards of a run, and of the version that each token is of.

    Tokens of the second iteration follow from the weights after the first. Log-probabilities are left out: their last bit, and with
    it that of the weights, depends on how the engine's passes fall.
    """
    group = zarr.open_group(directory / "trajectories.zarr", mode="r")
    trajectories = {name: array[:] for name, array in group["trajectory"].arrays()}
    order = np.lexsort([trajectories[name] for name in ("sample", "group", "iteration")])
    found = hashlib.sha256()
    for row in order:
        span = slice(trajectories["offset"][row], trajectories["offset"][row] + trajectories["length"][row])
        for name in ("token_ids", "is_action", "weight_version"):
            found.update(group[name][span].tobytes())
        found.update(trajectories["reward"][row].tobytes())
    assert len(order) == ITERATIONS * 4
    return found.hexdigest()


def published(directory):
    return [e["digest"] for e in read_events(directory / "events.jsonl").events if e["name"] == "version_published"]


def config_of(directory, model, name):
    sections = {"run": {"name": name, "iterations": ITERATIONS}, "evaluation": {"prompts": 0}}
    sections |= {"trainer": {"dispatch": "peer"}, "weights": {"transfer": "peer"}}
    return config_from_dict(factories.run_settings(directory, model, **sections))


def stores(run, dask_worker):
    """Digests of the versions that a worker keeps for itself; runs on a worker."""
    from libra.weights import WeightStore

    found = []
    for root in Path(dask_worker.local_directory).glob(f"libra-weights-{run}-e*"):
        store = WeightStore(root)
        found += [store.get(number).digest for number in store.numbers()]
        found += [path.name for path in root.iterdir() if not path.name.isdecimal()]
    return found


@pytest.fixture(name="undergone", scope="module")
def _undergone(client, random_model, tmp_path_factory):
    runs = tmp_path_factory.mktemp("network")
    with Session(config_of(runs, random_model, "alone"), client=client) as alone:
        list(alone.iterations())
    undisturbed = digest_of(alone.directory)
    with Session(config_of(runs, random_model, "attacked"), client=client) as session:
        workers = present_workers(client)
        pids = set(client.run(os.getpid).values())
        addresses = listening({os.getpid(), *pids})
        # The scheduler and its page; a nanny, a worker and a page each; rows and weights.
        assert len(addresses) >= 2 + 3 * len(workers) + 2
        seen = seen_by_another(session, {os.getpid(), *pids}, workers)
        with contextlib.closing(RogueHolders(session)) as rogues, Attacker(sorted(addresses)) as attacker:
            for _ in session.iterations():
                with Client(client.cluster, set_as_default=False) as other:
                    assert other.submit(lambda: "still served", pure=False).result() == "still served"
        kept = client.run(stores, "attacked")
    return SimpleNamespace(
        directory=session.directory, undisturbed=undisturbed, connections=attacker.made, addresses=addresses,
        asked_rogues=rogues.asked, kept=kept, seen_by_another=seen,
    )  # fmt: skip


def test_nobody_changes_a_run_without_its_key(undergone):
    assert digest_of(undergone.directory) == undergone.undisturbed
    assert undergone.connections >= min(CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 800)
    assert set(undergone.addresses.values()) == {"0100007F"}, "every server of a local run is on 127.0.0.1 alone"

    # What the rogue holders gave was deleted, and what the engine's worker keeps is what the trainer published.
    assert undergone.asked_rogues >= {(lie.__name__, 1) for lie in LIES}, "each was asked"
    kept = [digest for found in undergone.kept.values() for digest in found]
    assert kept and set(kept) <= set(published(undergone.directory))


@pytest.mark.skipif(os.getuid() != 0, reason="type sudo: only root may start a process of another user")
def test_another_user_of_the_machine_reads_no_secret(undergone):
    assert undergone.seen_by_another, "command lines are open to all"
    assert [path for path, has_secret in undergone.seen_by_another.items() if has_secret] == []


AS_ANOTHER = """
import json, os, sys
from pathlib import Path

asked = json.loads(sys.stdin.read())
os.setgroups([]); os.setgid(asked["uid"]); os.setuid(asked["uid"])
paths = [Path(f"/proc/{pid}/{name}") for pid in asked["pids"] for name in ("environ", "maps", "cmdline")]
paths += [path for root in asked["roots"] for path in Path(root).rglob("*") if path.is_file()]
read = {}
for path in paths:
    try:
        content = path.read_bytes()
    except OSError:
        continue
    private = path.name in ("environ", "maps", "scheduler.json")
    read[str(path)] = private or any(secret.encode() in content for secret in asked["secrets"])
print(json.dumps(read))
"""


def seen_by_another(session, pids, workers):
    """The files that a process of another user can read, and whether a secret is in one; none where no test may start it."""
    if os.getuid() != 0:
        return {}
    # Tests are under a directory that is private to their user; a run's is usually not.
    for parent in session.directory.parents:
        if parent.is_relative_to(tempfile.gettempdir()) and parent != Path(tempfile.gettempdir()):
            parent.chmod(0o755)
    key = session.client.security.get_tls_config_for_role("client")["key"]
    asked = {
        "uid": OTHER_UID,
        "secrets": [session.spec.secret, key, key.splitlines()[1], json.dumps(key)[1:-1]],
        "pids": sorted(pids),
        "roots": [str(session.directory), *{worker["local_directory"] for worker in workers.values()}],
    }
    command = [sys.executable, "-c", AS_ANOTHER]
    found = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-2000:]
    return dict(json.loads(found.stdout))
