import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from libra.errors import WeightsError
from libra.tensor_files import CHUNK_BYTES, tensors_digest
from libra.tensors import digest, untied
from libra.weights import WeightStore, WeightVersion

PUBLISH_AND_DIE = """
import os, signal, sys, torch
import libra.weights.weight_store as registry

calls = 0
def dying(path, sync=registry.sync):
    global calls
    calls += 1
    if calls > int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    sync(path)

registry.sync = dying
registry.WeightStore(sys.argv[1]).publish(7, {"w": torch.arange(1000.0)})
"""
DTYPES = (torch.float16, torch.int64, torch.bool, torch.uint8, torch.float64)
TENSORS = {
    "b": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "a": torch.randn(5, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0)), "scalar": torch.tensor(3.0),
    "empty": torch.zeros(0, 4), **{str(dtype): torch.arange(3).to(dtype) for dtype in DTYPES},
}  # fmt: skip


def tensors(seed=0, tied=False):
    generator = torch.Generator().manual_seed(seed)
    made = {
        "embed.weight": torch.randn(16, 4, generator=generator),
        "norm.weight": torch.randn(4, generator=generator).to(torch.bfloat16),
        "steps": torch.tensor(seed),
    }
    return {**made, "lm_head.weight": made["embed.weight"]} if tied else made


def check_invariants(store):
    """Every version under the root is whole, and has the content its facts announce."""
    for number in store.numbers():
        version = store.get(number)
        assert digest(store.read(version)) == version.digest
        assert version.path.stat().st_size >= version.num_bytes
        assert sorted(path.name for path in version.directory.iterdir()) == ["model.safetensors", "version.json"]


def test_what_was_published_is_read(tmp_path):
    store = WeightStore(tmp_path / "weights")
    assert store.latest() is None
    live = tensors()
    published = store.publish(3, live)
    live["embed.weight"].zero_()  # which does not reach the version
    assert published == store.get(3) == store.latest()
    assert published.num_bytes == 16 * 4 * 4 + 4 * 2 + 8
    got = store.read(3)
    assert got.keys() == tensors().keys()
    assert all(torch.equal(got[name], tensor) and got[name].dtype == tensor.dtype for name, tensor in tensors().items())
    check_invariants(store)
    with pytest.raises(WeightsError, match="version 5"):
        store.read(5)


def test_tied_tensors_are_written_once_and_read_as_one(tmp_path):
    store = WeightStore(tmp_path)
    version = store.publish(0, tensors(tied=True))
    assert version.digest == digest(tensors()) == digest(tensors(tied=True))
    assert version.num_bytes == store.publish(1, tensors()).num_bytes
    got = store.read(0)
    assert got["lm_head.weight"] is got["embed.weight"]
    base = torch.arange(6.0)
    kept, aliases = untied({"a": base, "same": base, "part": base[:3], "later": base[3:]})
    assert (list(kept), aliases) == (["a", "part", "later"], {"same": "a"})
    assert json.loads((version.directory / "version.json").read_text())["tied"] == {"lm_head.weight": "embed.weight"}


def test_a_number_never_changes_content(tmp_path):
    store = WeightStore(tmp_path)
    first = store.publish(1, tensors(0))
    assert store.publish(1, tensors(0)) == first
    with pytest.raises(WeightsError, match="exists"):
        store.publish(1, tensors(1))
    assert torch.equal(store.read(1)["embed.weight"], tensors(0)["embed.weight"])
    with pytest.raises(WeightsError):
        store.publish(-1, tensors())


@given(st.data())
def test_a_torn_or_altered_file_is_never_read_as_whole(tmp_path_factory, data):
    store = WeightStore(tmp_path_factory.mktemp("weights"))
    version = store.publish(0, tensors())
    content = version.path.read_bytes()
    if data.draw(st.booleans(), label="torn"):
        version.path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    else:
        at = data.draw(st.integers(len(content) - version.num_bytes, len(content) - 1))
        version.path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    with pytest.raises(WeightsError):
        store.read(version)


def test_content_other_than_announced_and_unreadable_facts_are_refused(tmp_path):
    store = WeightStore(tmp_path)
    version = store.publish(0, tensors())
    announced = WeightVersion(0, "0" * 32, version.directory, version.num_bytes)
    with pytest.raises(WeightsError, match=version.digest):
        store.read(announced, verify=False)
    facts = {"schema": 2, "number": 0, "digest": "", "num_bytes": 0, "tensors": {}, "tied": {}}
    for text in ("{", '{"schema": 2, "number": 0}', json.dumps(facts)):
        (version.directory / "version.json").write_text(text)
        with pytest.raises(WeightsError):
            store.get(0)


@pytest.mark.live
@pytest.mark.parametrize("survived", [1, 3])
def test_killing_a_publisher_leaves_a_whole_version_or_none(tmp_path, survived, repository):
    command = [sys.executable, "-c", PUBLISH_AND_DIE, str(tmp_path), str(survived)]
    child = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(repository)}, check=False)
    assert child.returncode == -signal.SIGKILL
    store = WeightStore(tmp_path)
    check_invariants(store)
    # the last sync is that of the root, after the rename
    assert store.numbers() == ([7] if survived == 3 else [])
    assert len(list(tmp_path.glob(".tmp.*"))) == (0 if survived == 3 else 1)
    version = store.publish(7, {"w": torch.arange(1000.0)})
    assert version == store.latest()
    store.drop(keep_last=1)
    assert [path.name for path in tmp_path.iterdir()] == [version.directory.name]


@pytest.mark.parametrize("contents", [(0, 0), (0, 1, 2)])
def test_of_racing_publishers_one_creates_the_version(tmp_path, monkeypatch, contents):
    store = WeightStore(tmp_path)
    barrier = threading.Barrier(len(contents))
    rename = Path.rename

    def together(path, target):
        barrier.wait()  # all have written everything and found no version
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", together)

    def publish(seed):
        try:
            return store.publish(1, tensors(seed))
        except WeightsError as error:
            return error

    with ThreadPoolExecutor(len(contents)) as pool:
        results = list(pool.map(publish, contents))
    winners = [result for result in results if isinstance(result, WeightVersion)]
    assert len(winners) == contents.count(contents[0])
    assert len({winner.digest for winner in winners}) == 1
    check_invariants(store)
    assert [path.name for path in tmp_path.iterdir()] == ["00000001"]


@given(st.sets(st.integers(0, 30), min_size=1, max_size=6), st.integers(1, 4), st.sets(st.integers(0, 30), max_size=3))
def test_drop_keeps_the_last_and_the_pinned(tmp_path_factory, numbers, keep_last, pinned):
    store = WeightStore(tmp_path_factory.mktemp("weights"))
    for number in sorted(numbers):
        store.publish(number, tensors(number))
    held = store.read(min(numbers), verify=False)
    dropped = store.drop(keep_last, pinned)
    assert torch.equal(held["embed.weight"], tensors(min(numbers))["embed.weight"])  # readable to whoever has it
    kept = set(sorted(numbers)[-keep_last:]) | (numbers & pinned)
    assert set(store.numbers()) == kept
    assert dropped == sorted(numbers - kept)
    check_invariants(store)


def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path, monkeypatch):
    store = WeightStore(tmp_path)

    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("libra.weights.weight_store.sync", full)
    with pytest.raises(WeightsError, match="disk full"):
        store.publish(0, tensors())
    assert list(tmp_path.iterdir()) == []


def test_digest_sees_names_shapes_dtypes_and_elements():
    one = {"a": torch.zeros(4)}
    shaped = [torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32), torch.tensor([0.0, 0, 0, 1])]
    others = [{"b": torch.zeros(4)}, *({"a": tensor} for tensor in shaped), one | {"b": torch.zeros(4)}]
    assert len({digest(case) for case in [one, *others]}) == 6
    two = {"a": torch.ones(2), "b": torch.zeros(2)}
    assert digest(two) == digest(dict(reversed(two.items())))
    strided = torch.arange(6.0).view(2, 3).t()
    assert digest({"a": strided}) == digest({"a": strided.contiguous()})


def test_files_have_the_digest_of_their_tensors(tmp_path):
    save_file(TENSORS, tmp_path / "one.safetensors", metadata={"format": "pt"})
    assert tensors_digest([tmp_path / "one.safetensors"]) == digest(TENSORS)
    halves = ({name: TENSORS[name] for name in ("a", "b")}, {name: TENSORS[name] for name in ("scalar", "empty")})
    for number, half in enumerate(halves):
        save_file(half, tmp_path / f"half{number}.safetensors")
    paths = [tmp_path / "half0.safetensors", tmp_path / "half1.safetensors"]
    assert tensors_digest(paths) == digest(halves[0] | halves[1])


@pytest.mark.parametrize("cut", [0, 40, -1])
def test_a_torn_file_is_a_value_error(tmp_path, cut):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ValueError):
        tensors_digest([path])


def test_every_byte_of_a_tensor_of_several_chunks_counts():
    size = 2 * CHUNK_BYTES + 5
    tensor = torch.arange(size, dtype=torch.int64).remainder(251).to(torch.uint8)
    found = {digest({"a": tensor})}
    for place in (CHUNK_BYTES - 1, CHUNK_BYTES, size - 1):
        other = tensor.clone()
        other[place] += 1
        found.add(digest({"a": other}))
    found.add(digest({"a": torch.cat([tensor[CHUNK_BYTES : 2 * CHUNK_BYTES], tensor[:CHUNK_BYTES], tensor[-5:]])}))
    assert len(found) == 5
