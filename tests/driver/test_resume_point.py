"""What of a run directory is consumed, committed, started or untouched, in any state that a stopped run leaves behind."""

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import factories
from libra.config import config_from_dict
from libra.driver.run_start import read_point
from libra.store.quantum_records import FailureRecord, GenerationRecord
from libra.store.run_records import commit_batch, write_group
from libra.store.trajectory_journal import Journal
from libra.types import FailureClass, StopReason, TrajectoryId
from libra.worker.run_spec import RunSpec

FATES = st.one_of(
    st.sampled_from(["consumed", "committed", "untouched"]),
    st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=3),  # versions in each record of its journal
)


def generated(versions):
    found = np.array(versions, np.int32)
    columns = dict.fromkeys(("token_ids", "logprobs", "weight_versions", "kv_versions"), found)
    return GenerationRecord(turn=0, **columns, stop_reason=StopReason.STOP)


@given(st.lists(st.lists(FATES, min_size=1, max_size=2), max_size=3), st.booleans())
def test_each_group_is_consumed_or_committed_or_started_or_none(fates, leftovers):
    with tempfile.TemporaryDirectory() as name:
        spec = RunSpec("run", 0, Path(name), "none", config_from_dict({}))
        journal = Journal(spec.journal_dir)
        spec.groups_dir.mkdir()
        consumed, committed, started, batches = set(), set(), {}, []
        for k, iteration in enumerate(fates):
            batch = []
            for g, fate in enumerate(iteration):
                if fate == "consumed":
                    batch.append((k, g))
                elif fate == "committed":
                    member = factories.trajectory(TrajectoryId(k, g, 0), version=g + 3)
                    write_group(spec.groups_dir, k, g, [member])
                    committed.add(("train", k, g))
                    started[(k, g)] = g + 3  # by its record: no batch may leave it behind before it reports again
                elif not isinstance(fate, str):
                    for quantum, versions in enumerate(fate):
                        record = generated(versions)
                        journal.append(f"train-{k}-{g}-0", quantum, record)
                    if known := [version for versions in fate for version in versions]:
                        started[(k, g)] = min(known)
            if batch:
                members = [TrajectoryId(*group, sample) for group in batch for sample in (0, 1)]
                commit_batch(spec.batches_dir, len(batches), members)
                batches.append(tuple(batch))
                consumed |= set(batch)
        if leftovers:  # none of these is an answer to anything
            commit_batch(spec.batches_dir, len(batches) + 1, [TrajectoryId(99, 0, 0)])  # after a gap
            (spec.groups_dir / ".train-000000-000000.group.ab.tmp").touch()
            journal.append("eval-0-0-0", 0, generated([0]))
            for k, g in consumed:  # the journal of a group goes after its store
                journal.append(f"train-{k}-{g}-1", 0, generated([0]))
        point = read_point(spec)
        assert point.members == batches and point.batches == len(batches)
        assert point.consumed == consumed and point.committed == committed and point.started == started
        for k, iteration in enumerate(fates):
            expected = [g for g, fate in enumerate(iteration) if fate != "consumed"]
            assert point.left(k, len(iteration)) == expected


def test_the_oldest_version_of_all_samples_counts(tmp_path):
    spec = RunSpec("run", 0, tmp_path, "none", config_from_dict({}))
    point = read_point(spec)
    assert (point.batches, point.members, point.committed, point.started) == (0, [], frozenset(), {})
    journal = Journal(spec.journal_dir)
    for sample, versions in ((0, [4, 3]), (1, [2]), (10, [5])):
        journal.append(f"train-1-0-{sample}", 0, FailureRecord(failure=FailureClass.ENGINE))
        journal.append(f"train-1-0-{sample}", 1, generated(versions))
    assert read_point(spec).started == {(1, 0): 2}
