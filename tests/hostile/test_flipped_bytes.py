"""A flipped byte in any kind of file of a run is found, or changes nothing that is read."""

import random

import pytest
from safetensors.numpy import load_file

from damaged_run import BATCH, CHECKPOINT, GROUP, VERSION, ZARR, columns
from libra.seals import unseal
from libra.store.run_files import check_run
from libra.store.run_records import read_batch_facts, read_group
from libra.store.start_records import read_starts
from libra.store.trajectory_journal import Journal

FLIPS = 6


def journal(run):
    names = sorted({path.name.split(".")[0] for path in (run / "journal").glob("*.rec")})
    return [Journal(run / "journal").read(name) for name in names]


def rows(run):
    return [(name, values.tolist()) for name, values in sorted(columns(run).items())]


KINDS = {
    f"{VERSION}/model.safetensors": lambda run: load_file(run / VERSION / "model.safetensors"),
    f"{VERSION}/check.json": lambda run: unseal((run / VERSION / "check.json").read_bytes()),
    f"{CHECKPOINT}/optimizer.safetensors": lambda run: load_file(run / CHECKPOINT / "optimizer.safetensors"),
    f"{CHECKPOINT}/trainer.json": lambda run: unseal((run / CHECKPOINT / "trainer.json").read_bytes()),
    GROUP: lambda run: read_group(run / GROUP),
    "journal/train-3-1-0.0002.rec": journal,
    BATCH: lambda run: read_batch_facts(run / "batches", 1),
    "starts.jsonl": read_starts,
    "config.resolved.yaml": lambda run: (run / "config.resolved.yaml").read_bytes(),
    f"{ZARR}/token_ids/c/0": rows,
    f"{ZARR}/turn/generate_s/c/0": rows,
    f"{ZARR}/turn/tool/zarr.json": rows,
    f"{ZARR}.digests": rows,
}


@pytest.mark.parametrize("name", KINDS)
def test_a_flipped_byte_is_found_or_changes_nothing(name, run):
    path, rng, read = run / name, random.Random(name), KINDS[name]
    whole, before = path.read_bytes(), repr(read(run))
    found = 0
    for _ in range(FLIPS):
        data = bytearray(whole)
        data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
        path.write_bytes(data)
        if check_run(run).damages:
            found += 1
        else:
            assert repr(read(run)) == before
    assert found or name.endswith("generate_s/c/0")  # of which most is space for rows to come
