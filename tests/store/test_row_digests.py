"""A store that is not what its committer wrote is noticed, by column and append; one that was killed is not."""

import json
import shutil

import numpy as np
import pytest
import zarr

from libra.errors import StoreError
from libra.seals import sealed_text, unseal
from libra.store.row_digests import column_digest, digests_path, read_record, store_faults
from libra.store.trajectory_store import TrajectoryStore
from libra.store.zarr_layout import COUNTS


@pytest.fixture
def store(tmp_path, make_trajectory):
    """Two appends of two trajectories each."""
    path = tmp_path / "trajectories.zarr"
    with TrajectoryStore.create(path, {"run": "demo"}) as made:
        for batch in range(2):
            made.append([make_trajectory(batch, 0, sample) for sample in range(2)], batch=batch)
    return path


def test_a_whole_store_has_no_faults_and_a_line_for_each_append(store):
    assert store_faults(store) == []
    record = read_record(store)
    assert [append.batch for append in record.appends] == [0, 1]
    assert record.attributes["run"] == "demo"
    assert store_faults(store, limit_bytes=1) == []
    with TrajectoryStore.open(store, mode="a") as opened:
        opened.note_isolation("bubblewrap")  # as each start does
    assert store_faults(store) == [] and "isolation" not in read_record(store).attributes
    texts = np.dtypes.StringDType()
    assert column_digest(np.array(["ab", "c"], texts)) != column_digest(np.array(["a", "bc"], texts))


def test_an_append_that_was_not_committed_is_no_fault_and_is_cut_off(store, make_trajectory):
    copy = store.with_name("copy.zarr")
    shutil.copytree(store, copy)
    shutil.copy(digests_path(store), digests_path(copy))
    root = json.loads((copy / "zarr.json").read_bytes())
    first = read_record(copy).appends[0].stop
    root["attributes"]["committed"] = {name: first[level] for level, name in COUNTS.items()}
    (copy / "zarr.json").write_text(json.dumps(root))  # as when it was killed before the commit of the second append
    assert store_faults(copy) == []
    with TrajectoryStore.open(copy, mode="a") as opened:
        assert opened.num_trajectories == 2
        opened.append([make_trajectory(1, 0, sample) for sample in range(2)], batch=1)
    assert store_faults(copy) == [] and len(read_record(copy).appends) == 2


def test_a_changed_value_is_found_by_column_and_append(store):
    zarr.open_array(store / "trajectory" / "advantage", mode="r+")[3] = 0.125
    assert [fault.name for fault in store_faults(store)] == ["trajectories.zarr/trajectory/advantage/c/0"]


def test_a_chunk_that_is_gone_is_found_though_zarr_reads_fill_values(store):
    (store / "token_ids" / "c" / "0").unlink()
    assert {fault.name for fault in store_faults(store)} == {"trajectories.zarr/token_ids/c/0"}


def test_digests_that_are_torn_or_gone_are_named_and_no_append_follows(store):
    path = digests_path(store)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"batch": 0', b'"batch": 7'))
    assert "altered" in store_faults(store)[0].what
    with pytest.raises(StoreError):
        TrajectoryStore.open(store, mode="a")
    path.unlink()
    assert store_faults(store)[0].name == "trajectories.zarr.digests"


def test_a_seal_notices_a_value_a_key_and_a_cut():
    text = sealed_text({"a": 1, "b": [0.1, None], "3": {"x": "y"}})
    assert unseal(text) == {"a": 1, "b": [0.1, None], "3": {"x": "y"}}
    assert unseal(text.replace(" ", "  ")) == unseal(text)
    edited = text.replace("0.1", "0.2"), text.replace('"a"', '"c"'), text[:-1]
    for changed in (*edited, '{"a": 1}', "[1]", "{" * 100_000):
        with pytest.raises(ValueError):
            unseal(changed)
