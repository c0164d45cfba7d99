"""Every damage to the files of a run is found, named and answered with what to type; what can be rebuilt is, and nothing is lost.

One small run is made, and set back to the moment at which its last batch was committed and its step not taken. Each case damages a
copy of that. `libra doctor` and `libra resume` must name it with exit code 2, `libra repair` must bring it back, and a resumed
run must come to what the undamaged one came to.
"""

import json
import os
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from damaged_run import (
    CASES,
    CHECKPOINT,
    GROUP,
    ITERATIONS,
    ZARR,
    assert_same_rows,
    columns,
    content,
    cut,
    flip,
    flip_record,
    said_of,
    typed,
)
from libra.cli.run import ready_to_resume
from libra.config import config_from_dict
from libra.config.load import load_resumed
from libra.driver.damage import refuse_damaged
from libra.driver.repair import repair_run
from libra.driver.run_session import run as run_graphs
from libra.driver.rundir import lock_run
from libra.driver.submitted_graphs import prune_groups
from libra.errors import DamagedRun, RunDirectoryError, StoreError
from libra.store.exclusive_files import CommitterLock
from libra.store.run_files import check_run
from libra.store.run_records import WAVES, batch_path, commit_wave, in_waves, read_batch_facts, read_group, read_waves
from libra.store.start_records import newest_logged, take_epoch
from libra.tensor_files import checkpoint_fault
from libra.worker.run_spec import RunSpec


@pytest.mark.core
def test_a_damaged_record_is_refused_and_repaired_without_loss(make_config, client, capfd, monkeypatch):
    monkeypatch.setattr("libra.driver.damage.RECHECK_S", 0.0)
    directory = run_graphs(make_config(checkpoint={"every": 1, "keep": 2}), client=client).directory
    (record, *_) = sorted((directory / "groups").glob("train-*.group"), reverse=True)
    members, rows = [said_of(member) for member in read_group(record)], columns(directory)
    flip(f"groups/{record.name}")(directory)
    with pytest.raises(DamagedRun, match=record.name):
        refuse_damaged(directory)
    with pytest.raises(StoreError):
        read_group(record)
    assert typed(capfd, "repair", str(directory))[0] == 0
    refuse_damaged(directory)
    assert [said_of(member) for member in read_group(record)] == members
    assert all(np.array_equal(values, columns(directory)[name]) for name, values in rows.items())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_damage_is_named_with_what_to_type_and_repaired(case, run, stopped, capfd):
    case.damage(run)
    for command in ("doctor", "resume"):
        code, out, err = typed(capfd, command, str(run))
        lines = err.strip().splitlines()
        assert code == 2 and len(out.splitlines()) == (command == "resume") and len(lines) <= 3, err
        assert lines[0].startswith(f"libra: {run}/{case.named}"), err
        advised = f"repair {run}" if case.cure == "repair" else case.cure.format(run=run)
        assert lines[-1].startswith(f"Type: libra {advised}"), err
    code, out, err = typed(capfd, "repair", str(run))
    assert code == 0, out + err
    assert case.named.split("/")[0] in out and err == ""
    if case.rebuilt:
        assert content(run) == content(stopped)
        assert_same_rows(run, stopped)


def test_a_damaged_wave_is_set_aside_with_those_after_it_and_whole_ones_rebuild_their_batch(run, capfd):
    rows = read_batch_facts(run / "batches", 0)["groups"]
    for batch in (0, ITERATIONS):  # a committed one, and one whose step is not taken
        commit_wave(run / "waves", batch, 0, rows[:1])
        commit_wave(run / "waves", batch, 1, rows[1:])
    cut(f"waves/{WAVES.path('', ITERATIONS, 0).name}")(run)
    code, _, err = typed(capfd, "doctor", str(run))
    assert code == 2 and f"{run}/waves/wave-{ITERATIONS:06d}-00.json: torn or altered" in err, err
    batch_path(run / "batches", 0).unlink()
    code, out, _ = typed(capfd, "repair", str(run))
    assert code == 0, out
    assert all(f"waves/wave-{ITERATIONS:06d}-{wave:02d}.json: moved to damaged/" in out for wave in (0, 1)), out
    assert read_waves(run / "waves", ITERATIONS) == []
    again = read_batch_facts(run / "batches", 0)["groups"]
    assert in_waves(again) == read_waves(run / "waves", 0) and len(in_waves(again)) == 2
    prune_groups(RunSpec("run", 0, run, "", config_from_dict({})), 0, 1)
    assert not list((run / "waves").glob("wave-*"))


def test_a_whole_run_is_whole(run, capfd):
    assert typed(capfd, "doctor", str(run))[0] == 0
    code, out, _ = typed(capfd, "doctor", str(run), "--json")
    assert (code, json.loads(out)) == (0, [])
    assert typed(capfd, "repair", str(run))[0] == 0 and not (run / "damaged").exists()


def resumed(run, client, step=None):
    """What `libra resume` does, on the cluster of these tests."""
    ready_to_resume(run, step)
    run_graphs(load_resumed(run), client=client, resume=True)
    assert check_run(run).damages == []


def check_finished(run, finished):
    """Nothing lost, nothing twice, and the weights of the undamaged run."""
    assert_same_rows(run, finished, generated_again=2)  # the last evaluation
    name = f"checkpoints/step-{ITERATIONS:06d}/model.safetensors"
    got, expected = (load_file(each / name) for each in (run, finished))
    for name, values in expected.items():
        np.testing.assert_array_equal(got[name], values, err_msg=name)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["step"] for line in lines if '"reward"' in line) == list(range(ITERATIONS))


def test_a_run_goes_on_after_many_damages_at_once(run, finished, client, capfd):
    many = "group_cut", "store_gone", "epochs_gone", "config_edited", "weights_flipped", "batch_altered", "metrics_line"
    for case in CASES:
        if case.name in many:
            case.damage(run)
    code, _, err = typed(capfd, "resume", str(run))
    assert code == 2 and len(err.strip().splitlines()) == 3 and " more: " in err
    code, out, err = typed(capfd, "repair", str(run))
    assert code == 0, out + err
    code, out, _ = typed(capfd, "repair", str(run))
    assert code == 0 and "nothing to repair" in out
    resumed(run, client)
    check_finished(run, finished)
    assert sorted(path.name for path in (run / "epochs").iterdir()) == ["0000", "0001"]


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(run, finished, client, capfd):
    cut(f"{CHECKPOINT}/model.safetensors")(run)
    code, _, err = typed(capfd, "resume", str(run), "--from-checkpoint", "3")
    assert code == 2 and "allowed are 2, 0" in err
    resumed(run, client, 2)
    check_finished(run, finished)
    assert checkpoint_fault(run / CHECKPOINT) is None and (run / "damaged" / CHECKPOINT).is_dir()


def test_a_trajectory_whose_journal_is_cut_generates_the_same_again(run, finished, client, capfd):
    (run / "batches" / "batch-000003.json").unlink()  # batch 3 is not committed, and one of its groups is not
    (run / "groups" / "train-000003-000001.group").unlink()
    flip_record(run)
    assert typed(capfd, "resume", str(run))[0] == 2
    assert typed(capfd, "repair", str(run))[0] == 0
    resumed(run, client)
    assert_same_rows(run, finished, generated_again=6)


@pytest.fixture
def pruned(run):
    """A run without the group records before its oldest checkpoint, as runs are."""
    prune_groups(RunSpec("demo", 0, run, "", config_from_dict({})), 0, 1)
    shutil.rmtree(run / "journal")
    assert check_run(run).damages == []
    return run


def test_without_any_checkpoint_removed_records_come_from_the_store(pruned, stopped, capfd):
    for path in (pruned / "checkpoints").glob("step-*"):
        cut(f"checkpoints/{path.name}/model.safetensors")(pruned)
    code, _, err = typed(capfd, "resume", str(pruned))
    assert code == 2 and f"Type: libra repair {pruned}" in err
    code, out, _ = typed(capfd, "repair", str(pruned))
    assert code == 0 and "train-000000-000001.group: made again from the store" in out
    names = {f"train-000000-{group:06d}.group" for group in (0, 1)}
    expected = content(stopped)
    assert {name: content(pruned)[name] for name in names} == {name: expected[name] for name in names}


def test_what_nothing_else_has_is_said_and_left_as_it_is(pruned, capfd):
    cut(f"{ZARR}/token_ids/c/0")(pruned)
    damaged = (pruned / ZARR / "token_ids" / "c" / "0").read_bytes()
    code, out, err = typed(capfd, "repair", str(pruned))
    assert code == 2 and "Traceback" not in err
    assert "trajectories.zarr: cannot be repaired" in out and "the evaluation of version 0" in out
    assert (pruned / ZARR / "token_ids" / "c" / "0").read_bytes() == damaged


def test_an_epoch_is_never_taken_twice(run, capfd):
    """Without ``epochs/``, and without one after the other of its other traces."""
    (run / "epochs" / "0001").touch()
    (run / "epochs" / "0002").touch()
    shutil.rmtree(run / "epochs")
    (run / "starts.jsonl").unlink()  # beside epochs/ and this, only records say what was taken
    assert check_run(run).epoch == 0
    assert typed(capfd, "repair", str(run))[0] == 0
    assert take_epoch(run / "epochs", above=newest_logged(run)).number == 2  # one for a start without a record


def test_a_repair_that_was_killed_while_it_exchanged_stores_is_continued(run, capfd):
    (run / ZARR).rename(run / f"{ZARR}.repaired")
    (run / f"{ZARR}.digests").rename(run / f"{ZARR}.repaired.digests")
    code, out, _ = typed(capfd, "repair", str(run))
    assert code == 0 and "written again" in out


def test_a_run_whose_driver_or_store_is_held_is_not_repaired(run, capfd, monkeypatch):
    cut(GROUP)(run)
    monkeypatch.setattr("libra.driver.repair.STORE_WAIT_S", 0.0)
    for held, fault in ((lock_run(run), RunDirectoryError), (CommitterLock(run / ZARR), StoreError)):
        with pytest.raises(fault, match=str(os.getpid())):
            repair_run(run, lambda line: None)
        assert typed(capfd, "repair", str(run))[0] == 2 and not (run / "damaged").exists()
        held.release()
    assert repair_run(run, lambda line: None).num_repaired == 1


def test_an_event_log_that_is_gone_is_named_and_not_needed_to_go_on(run):
    for content_of_log in (None, b"", b"[]\n", b'{"name": "torn'):
        (run / "events.jsonl").unlink(missing_ok=True)
        if content_of_log is not None:
            (run / "events.jsonl").write_bytes(content_of_log)
        assert [damage.name for damage in check_run(run).damages][-1:] == ["events"]
        refuse_damaged(run)
