"""Versions from process to process: whole or absent, from whoever has them, and only to who knows the secret."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from libra.errors import WeightsError
from libra.weights import WeightStore
from libra.weights.transfer import CHALLENGE_BYTES, Holder, WeightServer, _fetch_file, fetch

SECRET = "a secret of one run"
SERVE = """
import sys
from libra.weights import WeightStore
from libra.weights.transfer import WeightServer
server = WeightServer(WeightStore(sys.argv[1]), sys.argv[2], "127.0.0.1")
print(server.holder.port, flush=True)
sys.stdin.read()
"""


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(500, 64, generator=generator)
    return {"embed.weight": table, "head.weight": table, "norm.weight": torch.ones(64, dtype=torch.bfloat16)}


@contextlib.contextmanager
def serving(store: WeightStore, secret: str = SECRET) -> Iterator[Holder]:
    server = WeightServer(store, secret, "127.0.0.1")
    try:
        yield server.holder
    finally:
        server.close()


@contextlib.contextmanager
def scripted(*conversations) -> Iterator[Holder]:
    """A holder that says what the test wants: each conversation is a function of (socket, what was asked)."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        for conversation in conversations:
            line, _ = listener.accept()
            with line, line.makefile("rb") as asked:
                line.sendall(bytes(CHALLENGE_BYTES))
                conversation(line, json.loads(asked.readline()))
        listener.close()  # whoever asks for more is refused at once

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield Holder("127.0.0.1", listener.getsockname()[1])
    finally:
        listener.close()
        thread.join()


def closed_port() -> Holder:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return Holder("127.0.0.1", listener.getsockname()[1])


def test_a_version_comes_whole_from_another_process_with_a_directory_of_its_own(tmp_path):
    published = WeightStore(tmp_path / "trainer").publish(7, tensors(), check=lambda content: f'"check of {content}"')
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(tmp_path / "trainer"), SECRET], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        holder = Holder("127.0.0.1", int(process.stdout.readline()))
        found = fetch(7, [closed_port(), holder], tmp_path / "worker", secret=SECRET, content=published.digest)
    finally:
        process.communicate(b"")
    assert found.directory.parent == tmp_path / "worker"
    assert (found.number, found.digest, found.num_bytes) == (7, published.digest, published.num_bytes)
    own = WeightStore(tmp_path / "worker")
    assert own.check_text(7) == f'"check of {published.digest}"\n'
    assert all(torch.equal(tensor, tensors()[name]) for name, tensor in own.read(7).items())
    # Whoever has fetched it can give it on, and asks nobody for what it has.
    with serving(own) as second:
        assert fetch(7, [second], tmp_path / "third", secret=SECRET).digest == published.digest
    assert fetch(7, [], tmp_path / "third", secret=SECRET).digest == published.digest


def test_a_version_without_a_check_comes_without_one(tmp_path):
    store = WeightStore(tmp_path / "a")
    store.publish(0, tensors())
    with serving(store) as holder:
        fetch(0, [holder], tmp_path / "b", secret=SECRET)
    assert WeightStore(tmp_path / "b").check_text(0) is None


def test_who_does_not_know_the_secret_gets_nothing(tmp_path):
    store = WeightStore(tmp_path / "a")
    store.publish(0, tensors())
    with serving(store) as holder, pytest.raises(WeightsError, match="secret is not this run's"):
        fetch(0, [holder], tmp_path / "b", secret="another")
    assert WeightStore(tmp_path / "b").numbers() == []
    assert not any((tmp_path / "b").iterdir())


@pytest.mark.parametrize("name", ["../../etc/passwd", "model.safetensors/..", "events.jsonl", ""])
def test_only_files_of_a_version_can_be_asked_for(tmp_path, name):
    store = WeightStore(tmp_path / "a")
    store.publish(0, tensors())
    (tmp_path / "a" / "00000000" / "events.jsonl").write_text("not for others")
    with serving(store) as holder, pytest.raises(WeightsError, match="no file of a version"):
        _fetch_file(0, name, holder, tmp_path / "got", SECRET)
    assert not (tmp_path / "got").exists()


def test_a_holder_that_dies_in_the_middle_of_a_file_is_left_and_the_next_goes_on_from_there(tmp_path):
    store = WeightStore(tmp_path / "a")
    published = store.publish(0, tensors())
    data = published.path.read_bytes()
    facts = json.dumps({"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}).encode()
    asked_from = []

    def dies(line, asked) -> None:
        line.sendall(facts + b"\n" + data[:1000])

    def goes_on(line, asked) -> None:
        asked_from.append(asked["offset"])
        line.sendall(facts + b"\n" + data[asked["offset"] :])

    with scripted(dies) as first, pytest.raises(WeightsError, match=r"ended after 1000 of \d+ bytes"):
        fetch(0, [first], tmp_path / "alone", secret=SECRET)
    with scripted(dies) as first, scripted(goes_on) as second, serving(store) as third:
        # The second has the tensors only; the rest comes from the third.
        assert fetch(0, [first, second, third], tmp_path / "b", secret=SECRET).digest == published.digest
    assert asked_from == [1000]
    assert (tmp_path / "b" / "00000000" / "model.safetensors").read_bytes() == data


def test_altered_bytes_are_refused(tmp_path):
    store = WeightStore(tmp_path / "a")
    data = bytearray(store.publish(0, tensors()).path.read_bytes())
    sha256 = hashlib.sha256(data).hexdigest()
    data[-1] ^= 1

    def lies(line, asked) -> None:
        line.sendall(json.dumps({"size": len(data), "sha256": sha256}).encode() + b"\n" + bytes(data))

    with scripted(lies) as liar, pytest.raises(WeightsError, match="sha256"):
        fetch(0, [liar], tmp_path / "b", secret=SECRET)
    with scripted(lies) as liar, serving(store) as holder:
        assert fetch(0, [liar, holder], tmp_path / "b", secret=SECRET).number == 0
    assert torch.equal(WeightStore(tmp_path / "b").read(0)["head.weight"], tensors()["head.weight"])


def test_another_content_than_announced_is_refused(tmp_path):
    store = WeightStore(tmp_path / "a")
    store.publish(0, tensors(1))
    with serving(store) as holder, pytest.raises(WeightsError, match="was announced as abc"):
        fetch(0, [holder], tmp_path / "b", secret=SECRET, content="abc")


def test_without_a_holder_the_error_says_so(tmp_path):
    with pytest.raises(WeightsError, match="no holder is known"):
        fetch(0, [], tmp_path / "b", secret=SECRET)
