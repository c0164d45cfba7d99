import contextlib
import hashlib
import socket
import subprocess
import sys

import pytest
import torch

from libra.errors import WeightsError
from libra.seals import sealed_text, unseal
from libra.transport import Server, connect
from libra.weights import WeightStore
from libra.weights.transfer import MAX_SMALL_BYTES, PURPOSE, WeightServer, fetch

SECRET = "a secret of one run"
SERVE = """
import sys
from libra.weights import WeightStore
from libra.weights.transfer import WeightServer
server = WeightServer(WeightStore(sys.argv[1]), sys.argv[2], "127.0.0.1")
print(server.address[1], flush=True)
sys.stdin.read()
"""


def tensors(seed=0):
    table = torch.randn(500, 64, generator=torch.Generator().manual_seed(seed))
    return {"embed.weight": table, "head.weight": table, "norm.weight": torch.ones(64, dtype=torch.bfloat16)}


@contextlib.contextmanager
def serving(store):
    with contextlib.closing(WeightServer(store, SECRET, "127.0.0.1")) as server:
        yield server.address


@contextlib.contextmanager
def rogue(store, requests=None, size=None, **changed):
    """A server that knows the secret and serves version 0 with the ``changed`` content of some files (model, version, check).

    A change maps content and offset to what is sent; the sha256 is that of what is sent. ``size`` is announced for the tensors.
    """

    def handle(channel, client):
        while (request := channel.recv_frame()) is not None:
            name, offset = request["file"], request["offset"]
            if requests is not None:
                requests.append((name, offset))
            path = store.directory(0) / name
            if not path.exists():
                channel.send_frame(error="none", absent=True)
                continue
            whole = path.read_bytes()
            sent = changed.get(name.partition(".")[0], lambda data, offset: data[offset:])(whole, offset)
            is_small = name.endswith(".json")
            announced = len(sent) if is_small else len(whole) if size is None else size
            channel.send_frame(size=announced, sha256=hashlib.sha256(sent).hexdigest() if is_small else None)
            channel.send_bytes([memoryview(sent)])
            if offset + len(sent) < announced:
                return

    with contextlib.closing(Server(handle, secret=SECRET, purpose=PURPOSE, host="127.0.0.1")) as server:
        yield server.address


def manifest_with(**fields):
    return lambda data, offset: sealed_text({**unseal(data), **fields}).encode()


def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return "127.0.0.1", listener.getsockname()[1]


def check_only(store, *numbers):
    assert sorted(path.name for path in store.root.iterdir()) == [f"{number:08d}" for number in numbers]
    for number in numbers:
        store.read(number)


@pytest.mark.live
def test_a_version_comes_whole_from_another_process_with_a_directory_of_its_own(tmp_path):
    published = WeightStore(tmp_path / "trainer").publish(7, tensors(), check=lambda content: f'"check of {content}"')
    command = [sys.executable, "-c", SERVE, str(tmp_path / "trainer"), SECRET]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        address = ("127.0.0.1", int(process.stdout.readline()))
        found = fetch(7, [closed_port(), address], tmp_path / "worker", secret=SECRET, content=published.digest)
    finally:
        process.communicate(b"")
    assert found.directory.parent == tmp_path / "worker"
    assert (found.number, found.digest, found.num_bytes) == (7, published.digest, published.num_bytes)
    own = WeightStore(tmp_path / "worker")
    assert own.check_text(7) == f'"check of {published.digest}"\n'
    assert all(torch.equal(tensor, tensors()[name]) for name, tensor in own.read(7).items())
    # A worker that has fetched it can pass it on, and requests nothing that it has.
    with serving(own) as second:
        assert fetch(7, [second], tmp_path / "third", secret=SECRET).digest == published.digest
    assert fetch(7, [], tmp_path / "third", secret=SECRET).digest == published.digest


@pytest.mark.parametrize("name", ["../../etc/passwd", "events.jsonl", ""])
def test_only_files_of_a_version_are_served(tmp_path, name):
    store = WeightStore(tmp_path / "a")
    store.publish(0, tensors())
    (tmp_path / "a" / "00000000" / "events.jsonl").write_text("not for others")
    with serving(store) as address, contextlib.closing(connect(address, SECRET, purpose=PURPOSE)) as channel:
        with pytest.raises(WeightsError):
            fetch(0, [address], tmp_path / "b", secret="another")
        check_only(WeightStore(tmp_path / "b"))
        for request, error in (
            ({"version": 0, "file": name, "offset": 0}, "is not a file of a version"),
            ({"version": 1, "file": "version.json", "offset": 0}, "version 1 has no version.json here"),
            ({"version": 0, "file": "version.json", "offset": -1}, "none from -1 on"),
        ):
            channel.send_frame(**request)
            assert error in channel.recv_frame()["error"]


def test_a_server_that_dies_during_a_file_is_left_and_the_next_continues(tmp_path):
    store = WeightStore(tmp_path / "a")
    published = store.publish(0, tensors())
    requests = []
    with rogue(store, model=lambda data, offset: data[offset:1000]) as first, pytest.raises(WeightsError):
        fetch(0, [first], tmp_path / "alone", secret=SECRET)
    check_only(WeightStore(tmp_path / "alone"))
    with rogue(store, model=lambda data, offset: data[offset:1000]) as first, rogue(store, requests) as second:
        assert fetch(0, [first, second], tmp_path / "b", secret=SECRET).digest == published.digest
    wrong = []  # what begins with wrong bytes is fetched again
    with rogue(store, model=lambda data, offset: b"wrong" * 100) as first, rogue(store, wrong) as second:
        assert fetch(0, [first, second], tmp_path / "c", secret=SECRET).digest == published.digest
    assert [offset for name, offset in wrong if name == "model.safetensors"] == [500, 0]
    assert requests == [("version.json", 0), ("check.json", 0), ("model.safetensors", 1000)]
    assert (tmp_path / "b" / "00000000" / "model.safetensors").read_bytes() == published.path.read_bytes()


def flipped(data, offset):
    return data[offset:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("lies", [
    {"model": flipped}, {"model": lambda data, offset: bytes(len(data))}, {"size": 2**50},
    {"version": lambda data, offset: bytes(MAX_SMALL_BYTES + 1)}, {"version": lambda data, offset: b"{}"},
    {"version": manifest_with(number=1)}, {"version": manifest_with(digest="abc")},
    {"version": manifest_with(num_bytes=2**50)},
    {"version": manifest_with(tensors={"w": {"shape": [-1], "dtype": "float32"}})},
    {"version": manifest_with(tensors={"w": {"shape": [1], "dtype": "nn"}})},
])  # fmt: skip
def test_what_a_rogue_server_gives_is_deleted_and_the_next_one_is_used(tmp_path, lies):
    store = WeightStore(tmp_path / "a")
    published = store.publish(0, tensors())
    own = WeightStore(tmp_path / "b")
    with rogue(store, **lies) as liar, serving(store) as honest:
        with pytest.raises(WeightsError):
            fetch(0, [liar], own.root, secret=SECRET, content=published.digest)
        check_only(own)
        assert fetch(0, [liar, honest], own.root, secret=SECRET, content=published.digest) == own.get(0)
    check_only(own, 0)


def test_a_version_of_another_content_than_announced_is_not_kept(tmp_path):
    store, own = WeightStore(tmp_path / "a"), WeightStore(tmp_path / "b")
    store.publish(0, tensors(1))
    with serving(store) as address:
        with pytest.raises(WeightsError):
            fetch(0, [address], own.root, secret=SECRET, content="abc")
        check_only(own)
        fetch(0, [address], own.root, secret=SECRET)
        fetch(0, [], own.root, secret=SECRET)
    with pytest.raises(WeightsError):
        fetch(0, [], own.root, secret=SECRET, content="abc")
    with pytest.raises(WeightsError, match="no server"):
        fetch(1, [], own.root, secret=SECRET)
    assert own.check_text(0) is None  # a version without a check comes without one
