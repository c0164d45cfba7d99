"""A flipped byte in any kind of file of a run is found, or changes nothing that is read."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from damaged_run import BATCH, CHECKPOINT, GROUP, VERSION, ZARR, columns
from libra.driver.damage import journal_faults
from libra.driver.start_records import read_given, read_starts
from libra.errors import StoreError
from libra.seals import unseal
from libra.store.batch_membership import read_batch_facts
from libra.store.group_records import read_group
from libra.store.store_check import committed_rows, store_faults
from libra.store.trajectory_journal import Journal
from libra.tensor_files import checkpoint_fault, version_fault
from libra.worker.run_spec import RunDirectory

FLIPS = 50


def sealed_json(path: Path) -> Any:
    return unseal(path.read_bytes())


def read_journal(run: Path) -> str:
    journal = Journal(run / "journal")
    names = sorted({path.name.split(".")[0] for path in (run / "journal").glob("*.rec")})
    return repr([(name, journal.read(name)) for name in names])


def journal_is_damaged(run: Path) -> bool:
    return bool(list(journal_faults(run / "journal")))


def start_is_damaged(run: Path) -> bool:
    return bool({damage.name for damage in _start(run)})


def _start(run: Path) -> Iterator[Any]:
    from libra.driver.damage import RunCheck, _check_start

    check = RunCheck(RunDirectory(run), None)
    _check_start(check)
    yield from check.damages


def batch_is_damaged(run: Path) -> bool:
    return raises(lambda: read_batch_facts(run / "batches", 1))


def raises(call: Callable[[], Any]) -> bool:
    try:
        call()
    except (StoreError, ValueError):
        return True
    return False


def store_content(run: Path) -> str:
    found = {name: values.tolist() for name, values in sorted(columns(run).items())}
    return repr((found, committed_rows(run / ZARR)))


KINDS: dict[str, tuple[str, Callable[[Path], bool], Callable[[Path], Any]]] = {
    "weights": (
        f"{VERSION}/model.safetensors",
        lambda run: version_fault(run / VERSION) is not None,
        lambda run: repr(load_file(run / VERSION / "model.safetensors")),
    ),
    "manifest": (
        f"{VERSION}/version.json",
        lambda run: version_fault(run / VERSION) is not None,
        lambda run: sealed_json(run / VERSION / "version.json"),
    ),
    "version check": (
        f"{VERSION}/check.json",
        lambda run: version_fault(run / VERSION) is not None,
        lambda run: sealed_json(run / VERSION / "check.json"),
    ),
    "checkpoint": (
        f"{CHECKPOINT}/model.safetensors",
        lambda run: checkpoint_fault(run / CHECKPOINT) is not None,
        lambda run: repr(load_file(run / CHECKPOINT / "model.safetensors")),
    ),
    "optimizer": (
        f"{CHECKPOINT}/optimizer.safetensors",
        lambda run: checkpoint_fault(run / CHECKPOINT) is not None,
        lambda run: repr(load_file(run / CHECKPOINT / "optimizer.safetensors")),
    ),
    "checkpoint facts": (
        f"{CHECKPOINT}/trainer.json",
        lambda run: checkpoint_fault(run / CHECKPOINT) is not None,
        lambda run: sealed_json(run / CHECKPOINT / "trainer.json"),
    ),
    "group": (GROUP, lambda run: raises(lambda: read_group(run / GROUP)), lambda run: repr(read_group(run / GROUP))),
    "journal": ("journal/train-3-1-0.0002.rec", journal_is_damaged, read_journal),
    "batch": (BATCH, batch_is_damaged, lambda run: read_batch_facts(run / "batches", 1)),
    "given": ("given.json", start_is_damaged, read_given),
    "starts": ("starts.jsonl", start_is_damaged, read_starts),
    "config": ("config.resolved.yaml", start_is_damaged, lambda run: (run / "config.resolved.yaml").read_bytes()),
    "chunk": (f"{ZARR}/token_ids/c/0", lambda run: bool(store_faults(run / ZARR)), store_content),
    "plain chunk": (f"{ZARR}/turn/generate_s/c/0", lambda run: bool(store_faults(run / ZARR)), store_content),
    "root metadata": (f"{ZARR}/zarr.json", lambda run: bool(store_faults(run / ZARR)), store_content),
    "array metadata": (f"{ZARR}/turn/tool/zarr.json", lambda run: bool(store_faults(run / ZARR)), store_content),
    "digests": (f"{ZARR}.digests", lambda run: bool(store_faults(run / ZARR)), store_content),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_byte_is_found_or_changes_nothing(kind: str, run: Path) -> None:
    name, is_damaged, read = KINDS[kind]
    path, rng = run / name, random.Random(kind)
    before = read(run)
    assert not is_damaged(run)
    whole = path.read_bytes()
    found = 0
    for _ in range(FLIPS):
        data = bytearray(whole)
        data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
        path.write_bytes(data)
        if is_damaged(run):
            found += 1
        else:
            assert read(run) == before
    assert found or kind == "plain chunk"  # of which most is space for rows to come
