"""Stores of other schemas: refused by number, brought up by upgrades, and as good as new ones after it."""

import pytest
import zarr

from libra.errors import StoreError
from libra.seals import sealed_text, unseal
from libra.store import zarr_layout
from libra.store.row_digests import digests_path, upgrade_record
from libra.store.store_check import store_faults
from libra.store.trajectories import TrajectoryStore, upgrade
from libra.store.zarr_layout import COLUMNS, LEVELS, array_path

FURTHER = ("score", "route", *(f"trajectory/{column.name}" for column in COLUMNS["trajectory"][-5:]))
"""What schema 4 added."""


@pytest.mark.parametrize("number", [5, 0])
def test_another_schema_is_refused_by_number(store, number):
    store.close()
    zarr.open_group(store.path, mode="r+").update_attributes({"schema": number})
    for mode in ("r", "a"):
        with pytest.raises(StoreError, match=f"schema {number}"):
            TrajectoryStore.open(store.path, mode)
    with pytest.raises(StoreError, match=f"schema {number}"):
        upgrade(store.path)


def test_a_store_of_schema_1_is_brought_up_and_goes_on(store, make_trajectory, assert_same):
    old = [make_trajectory(0, 0, sample) for sample in range(3)]
    store.append(old, batch=0)
    store.close()
    group = zarr.open_group(store.path, mode="r+")
    for name in ("trajectory/attempt", "trajectory/retried", "turn/sequence_start", *FURTHER):
        del group[name]
    del group.attrs["row_digests"]
    group.create_array("trajectory/attempt", shape=(0,), dtype="int32")  # of an upgrade that was cut short
    group.update_attributes({"schema": 1})
    with pytest.raises(StoreError, match=r"type libra\.store\.trajectories\.upgrade"):
        TrajectoryStore.open(store.path)
    assert upgrade(store.path) == 1
    new = make_trajectory(1, 0, 0, retried="engine,tool")
    with TrajectoryStore.open(store.path, "a") as heir:
        heir.append([new], batch=1)
    reader = TrajectoryStore.open(store.path)
    for index, expected in enumerate([*old, new]):
        assert_same(reader.trajectory(index), expected)
    columns = zarr.open_group(store.path, mode="r")["trajectory"]
    assert columns["attempt"][:].tolist() == [0, 0, 0, 2]
    assert columns["retried"][:].tolist() == ["", "", "", "engine,tool"]


@pytest.mark.parametrize("cut_short", [False, True])
def test_a_store_of_schema_3_is_brought_up_with_its_digests_and_goes_on(store, make_trajectory, assert_same, cut_short):
    old = [make_trajectory(0, 0, sample) for sample in range(3)]
    store.append(old[:2], batch=0)
    store.append(old[2:], batch=1)
    store.close()
    _as_schema_3(store.path)
    assert store_faults(store.path) == []  # which is no damage
    for mode in ("r", "a"):
        with pytest.raises(StoreError, match="schema 3"):
            TrajectoryStore.open(store.path, mode)
    if cut_short:
        zarr_layout.UPGRADES[3](zarr.open_group(store.path, mode="r+"))
        upgrade_record(store.path, 4)  # and killed before the schema was written
    assert upgrade(store.path) == 3
    assert store_faults(store.path) == []
    new = make_trajectory(1, 0, 0, scored="top_k", experts=(2, 3))
    with TrajectoryStore.open(store.path, "a") as heir:
        heir.append([new], batch=2)
    reader = TrajectoryStore.open(store.path)
    for index, expected in enumerate([*old, new]):
        assert_same(reader.trajectory(index), expected)
    assert store_faults(store.path) == []
    zarr.open_array(store.path / "score" / "logp", mode="r+")[1] = 0.125
    assert [fault.name for fault in store_faults(store.path)] == ["trajectories.zarr/score/logp/c/0"]


def _as_schema_3(path):
    """Take away what schema 4 added: from the store, and from its digests."""
    group = zarr.open_group(path, mode="r+")
    names = [array_path(level, column.name) for level in LEVELS for column in COLUMNS[level]]
    kept = [name for name in names if name not in FURTHER and name.partition("/")[0] not in FURTHER]
    for name in FURTHER:
        del group[name]
    counts = {name: group.attrs["committed"][name] for name in ("tokens", "turns", "trajectories")}
    group.update_attributes({"schema": 3, "committed": counts})
    header, *lines = (unseal(line) for line in digests_path(path).read_bytes().splitlines())
    header["attributes"]["schema"] = 3
    header["metadata"] = {name: header["metadata"][name] for name in (*kept, "turn", "trajectory")}
    for line in lines:
        line["first"], line["stop"] = line["first"][:3], line["stop"][:3]
        line["digests"] = [digest for name, digest in zip(names, line["digests"], strict=True) if name in kept]
    digests_path(path).write_text("".join(f"{sealed_text(line)}\n" for line in (header, *lines)))
