"""Every damage to the files of a run is found, named and answered with what to type; what can be rebuilt is, and nothing is lost.

One small run is made, and set back to the moment at which its last batch was committed and its step not taken. Each case damages a
copy of that. `libra doctor` and `libra resume` must name it with exit code 2, `libra repair` must bring it back, and a resumed
run must come to what the undamaged one came to.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from distributed import Client
from safetensors.numpy import load_file

from damaged_run import (
    BATCH,
    CASES,
    CHECKPOINT,
    GROUP,
    ITERATIONS,
    ZARR,
    Case,
    assert_same_rows,
    content,
    cut,
    flip,
    flip_record,
    typed,
)
from libra.cli.run_files import ready_to_resume
from libra.config import config_from_dict
from libra.config.resume_changes import load_resumed
from libra.driver.damage import RunCheck, check_run, refuse_damaged
from libra.driver.repair import repair_run
from libra.driver.resume import prune_groups
from libra.driver.run_lock import lock_run
from libra.driver.session import run as run_graphs
from libra.errors import DamagedRun, RunDirectoryError, StoreError
from libra.store import batch_membership
from libra.store.committer_lock import CommitterLock, Holder, lock_holder
from libra.store.event_log import EventLog
from libra.store.wave_records import commit_wave, in_waves, read_waves, wave_path
from libra.tensor_files import checkpoint_fault
from libra.worker.run_spec import RunSpec


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_damage_is_named_with_what_to_type_and_repaired(
    case: Case, run: Path, stopped: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    case.damage(run)
    for command in ("doctor", "resume"):
        code, out, err = typed(capfd, command, str(run))
        lines = err.strip().splitlines()
        assert (code, out) == (2, "") and len(lines) <= 3, err
        assert lines[0].startswith(f"libra: {run}/{case.named}"), err
        advised = case.cure.format(run=run)
        assert lines[-1].startswith(
            f"Type: libra {advised}" if case.cure != "repair" else f"Type: libra repair {run}"
        ), err
    code, out, err = typed(capfd, "repair", str(run))
    assert code == 0, out + err
    assert case.named.split("/")[0] in out and err == ""
    if case.rebuilt:
        assert content(run) == content(stopped)
        assert_same_rows(run, stopped)


def test_a_closed_part_of_the_event_log_is_read_by_the_doctor_and_not_needed_to_go_on(
    run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("libra.store.event_log.SEGMENT_BYTES", 1)
    with EventLog(run / "events.jsonl") as log:
        log.rotate()
        log.write_line('{"name": "x"}')
        log.rotate()
    first, second = sorted((run / "events").iterdir())
    assert typed(capfd, "doctor", str(run))[0] == 0
    for part, damage, what in (
        (first, flip(f"events/{first.name}", 0.9995), "this part of a log is damaged"),
        (first, cut(f"events/{first.name}"), "this part of a log is damaged"),
        (second, lambda run: second.write_bytes(gzip.compress(b"{\n")), "is no JSON object of this log"),
    ):
        whole = part.read_bytes()
        damage(run)
        code, _, err = typed(capfd, "doctor", str(run))
        assert code == 2 and err.startswith(f"libra: {part}: ") and what in err, err
        assert err.splitlines()[-1].startswith(f"Type: libra resume {run}   # which does not need them"), err
        refuse_damaged(run)
        code, out, _ = typed(capfd, "repair", str(run))
        assert code == 2 and f"events/{part.name}: cannot be repaired: nothing else has its lines" in out
        part.write_bytes(whole)
    first.unlink()
    code, _, err = typed(capfd, "doctor", str(run))
    assert code == 2 and err.startswith(f"libra: {run}/events: lines 1 to ") and "are missing" in err, err


def test_a_damaged_wave_is_set_aside_with_those_after_it_and_whole_ones_rebuild_their_batch(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = batch_membership.read_batch_facts(run / "batches", 0)["groups"]
    for batch in (0, ITERATIONS):  # a committed one, and one whose step is not taken
        commit_wave(run / "waves", batch, 0, rows[:1])
        commit_wave(run / "waves", batch, 1, rows[1:])
    cut(f"waves/{wave_path('', ITERATIONS, 0).name}")(run)
    code, _, err = typed(capfd, "doctor", str(run))
    assert code == 2 and f"{run}/waves/wave-{ITERATIONS:06d}-00.json: torn or altered" in err, err
    batch_membership.batch_path(run / "batches", 0).unlink()
    code, out, _ = typed(capfd, "repair", str(run))
    assert code == 0, out
    assert all(f"waves/wave-{ITERATIONS:06d}-{wave:02d}.json: set aside as damaged/" in out for wave in (0, 1)), out
    assert read_waves(run / "waves", ITERATIONS) == []
    again = batch_membership.read_batch_facts(run / "batches", 0)["groups"]
    assert in_waves(again) == read_waves(run / "waves", 0) and len(in_waves(again)) == 2
    prune_groups(RunSpec("run", 0, run, "", config_from_dict({})), 0, 1)
    assert not list((run / "waves").glob("wave-*"))


def test_an_event_log_that_lost_its_end_is_said_by_the_doctor(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = run / "events.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    first = next(number for number, line in enumerate(lines) if b'"name":"iteration_finished"' in line)
    log.write_bytes(b"".join(lines[:first]))
    code, _, err = typed(capfd, "doctor", str(run))
    assert code == 2 and err.startswith(f"libra: {run}/events: the event log ends before the first iteration did"), err
    assert "metrics.jsonl has 2: lines at its end are missing" in err
    refuse_damaged(run)
    log.unlink()
    log.mkdir()
    code, _, err = typed(capfd, "doctor", str(run))
    assert code == 2 and err.startswith(f"libra: {log}: cannot be read"), err
    assert "Traceback" not in err


def test_a_batch_is_read_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    load = batch_membership._load

    def counted(root: str | Path, batch: int) -> Mapping[str, Any]:
        read.append(batch)
        return load(root, batch)

    monkeypatch.setattr(batch_membership, "_load", counted)
    assert check_run(run).damages == []
    assert read == list(range(ITERATIONS))
    shutil.copy(run / "batches" / "batch-000002.json", run / BATCH)
    (damage,) = check_run(run).damages
    assert (damage.name, damage.what) == (BATCH, "it is of another batch")


def test_a_whole_run_is_whole(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = typed(capfd, "doctor", str(run))
    assert code == 0 and "every file is whole; 4 batches, 2 checkpoints" in out and err == ""
    code, out, _ = typed(capfd, "doctor", str(run), "--json")
    assert (code, json.loads(out)) == (0, [])
    code, out, _ = typed(capfd, "repair", str(run))
    assert code == 0 and "nothing to repair" in out and not (run / "damaged").exists()


# ------------------------------------------------------------------------------------------------ resumed after a repair


def resumed(run: Path, client: Client, step: int | None = None) -> None:
    """What `libra resume` does, on the cluster of these tests."""
    ready_to_resume(run, step)
    run_graphs(load_resumed(run), client=client, resume=True)
    assert check_run(run).damages == []


def check_finished(run: Path, finished: Path) -> None:
    """Nothing lost, nothing twice, and the weights of the undamaged run."""
    assert_same_rows(run, finished, generated_again=2)  # the last evaluation
    weights = [
        load_file(each / "checkpoints" / f"step-{ITERATIONS:06d}" / "model.safetensors") for each in (run, finished)
    ]
    for name, values in weights[1].items():
        np.testing.assert_array_equal(weights[0][name], values, err_msg=name)
    steps = [
        json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines() if '"reward"' in line
    ]
    assert sorted(steps) == list(range(ITERATIONS))


def test_a_run_goes_on_after_many_damages_at_once(
    run: Path, finished: Path, client: Client, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in (
        "group_cut",
        "store_gone",
        "epochs_gone",
        "config_edited",
        "weights_flipped",
        "batch_altered",
        "metrics_line",
    ):
        next(case for case in CASES if case.name == name).damage(run)
    code, _, err = typed(capfd, "resume", str(run))
    assert code == 2 and len(err.strip().splitlines()) == 3 and " more: " in err
    code, out, err = typed(capfd, "repair", str(run))
    assert code == 0, out + err
    code, out, _ = typed(capfd, "repair", str(run))
    assert code == 0 and "nothing to repair" in out
    resumed(run, client)
    check_finished(run, finished)
    assert sorted(path.name for path in (run / "epochs").iterdir()) == ["0000", "0001"]


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(
    run: Path, finished: Path, client: Client, capfd: pytest.CaptureFixture[str]
) -> None:
    cut(f"{CHECKPOINT}/model.safetensors")(run)
    code, _, err = typed(capfd, "resume", str(run), "--from-checkpoint", "3")
    assert code == 2 and "allowed are 2, 0" in err
    resumed(run, client, 2)
    check_finished(run, finished)
    assert checkpoint_fault(run / CHECKPOINT) is None and (run / "damaged" / CHECKPOINT).is_dir()


def test_nothing_is_set_aside_to_go_back_where_the_scores_are_damaged_too(
    run: Path, finished: Path, client: Client, capfd: pytest.CaptureFixture[str]
) -> None:
    cut(f"{CHECKPOINT}/model.safetensors")(run)
    cut("checkpoints/scores.json")(run)
    code, _, err = typed(capfd, "resume", str(run), "--from-checkpoint", "2")
    assert code == 2 and err.splitlines()[0].startswith(f"libra: {run}/checkpoints/scores.json: torn or altered"), err
    assert err.splitlines()[-1].startswith(f"Type: libra repair {run}")
    assert (run / CHECKPOINT).is_dir() and not (run / "damaged").exists()
    assert typed(capfd, "repair", str(run))[0] == 0
    resumed(run, client)
    check_finished(run, finished)


def test_a_trajectory_whose_journal_is_cut_generates_the_same_again(
    run: Path, finished: Path, client: Client, capfd: pytest.CaptureFixture[str]
) -> None:
    (run / "batches" / "batch-000003.json").unlink()  # batch 3 is not committed, and one of its groups is not
    (run / "groups" / "train-000003-000001.group").unlink()
    flip_record(run)
    assert typed(capfd, "resume", str(run))[0] == 2
    assert typed(capfd, "repair", str(run))[0] == 0
    resumed(run, client)
    assert_same_rows(run, finished, generated_again=6)


# ------------------------------------------------------------------------------------------------ group records that were removed


@pytest.fixture
def pruned(run: Path) -> Path:
    """A run without the group records before its oldest checkpoint, as runs are."""
    prune_groups(RunSpec("demo", 0, run, "", config_from_dict({})), 0, 1)
    shutil.rmtree(run / "journal")
    assert check_run(run).damages == []
    return run


def test_removed_records_are_no_damage_however_long_the_logs_are(pruned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("libra.driver.damage.LOG_LIMIT_BYTES", 0)
    assert check_run(pruned, limit_bytes=2**28).damages == []


def test_without_any_checkpoint_removed_records_come_from_the_store(
    pruned: Path, stopped: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for path in (pruned / "checkpoints").glob("step-*"):
        cut(f"checkpoints/{path.name}/model.safetensors")(pruned)
    code, _, err = typed(capfd, "resume", str(pruned))
    assert code == 2 and f"Type: libra repair {pruned}" in err
    code, out, _ = typed(capfd, "repair", str(pruned))
    assert code == 0 and "train-000000-000001.group: made again from the store" in out
    names = {f"train-000000-{group:06d}.group" for group in (0, 1)}
    expected = content(stopped)
    assert {name: content(pruned)[name] for name in names} == {name: expected[name] for name in names}


def test_what_nothing_else_has_is_said_and_left_as_it_is(pruned: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cut(f"{ZARR}/token_ids/c/0")(pruned)
    damaged = (pruned / ZARR / "token_ids" / "c" / "0").read_bytes()
    code, out, err = typed(capfd, "repair", str(pruned))
    assert code == 2 and "Traceback" not in err
    assert "trajectories.zarr: cannot be repaired" in out and "the evaluation of version 0" in out
    assert (pruned / ZARR / "token_ids" / "c" / "0").read_bytes() == damaged


# ------------------------------------------------------------------------------------------------ epochs and locks


def test_an_epoch_is_never_taken_twice(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Without ``epochs/``, and without one after the other of its other traces."""
    from libra.driver.start_records import newest_logged
    from libra.store.epochs import take_epoch

    (run / "epochs" / "0001").touch()
    (run / "epochs" / "0002").touch()
    shutil.rmtree(run / "epochs")
    (run / "starts.jsonl").unlink()  # beside epochs/ and this, only records say what was taken
    assert check_run(run).epoch == 0
    assert typed(capfd, "repair", str(run))[0] == 0
    assert take_epoch(run / "epochs", above=newest_logged(run)).number == 2  # one for a start without a record
    for name in ("groups", "journal", "trajectories.zarr"):
        shutil.rmtree(run / name)
    shutil.rmtree(run / "epochs")
    assert check_run(run).epoch == 0  # by the event log


HOLDER = """
import sys
from pathlib import Path
from libra.driver.run_lock import lock_run
lock = lock_run(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.readline()
"""


def test_a_run_with_a_driver_is_not_repaired(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cut(GROUP)(run)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        code, _, err = typed(capfd, "repair", str(run))
        assert code == 2 and "another driver has this run" in err and not (run / "damaged").exists()
    finally:
        holder.communicate("\n")
    assert typed(capfd, "repair", str(run))[0] == 0


def test_a_repair_reads_the_run_only_under_its_locks(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut(GROUP)(run)
    reads = []

    def check(directory: Path) -> RunCheck:
        with pytest.raises(RunDirectoryError, match="another driver has this run"):
            lock_run(run)
        assert lock_holder(run / ZARR) == Holder(os.getpid(), socket.gethostname())
        reads.append(directory)
        return check_run(directory)

    monkeypatch.setattr("libra.driver.repair.check_run", check)
    assert repair_run(run, lambda line: None).num_repaired == 1
    assert len(reads) >= 2 and lock_holder(run / ZARR) is None


def test_a_store_that_a_worker_still_has_is_awaited_and_then_said_with_what_to_type(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(GROUP)(run)
    said: list[str] = []
    held = CommitterLock(run / ZARR)
    monkeypatch.setattr("libra.driver.repair.STORE_WAIT_S", 0.0)
    with pytest.raises(
        StoreError, match=rf"Type kill {os.getpid()} on {socket.gethostname()} .*libra repair {run} again"
    ):
        repair_run(run, said.append)
    assert said == [] and not (run / "damaged").exists()

    def say(line: str) -> None:
        said.append(line)
        if line.startswith("waiting until"):
            held.release()

    monkeypatch.setattr("libra.driver.repair.STORE_WAIT_S", 60.0)
    assert repair_run(run, say).num_repaired == 1
    assert said[0].startswith(f"waiting until a worker of an earlier start has closed the store (process {os.getpid()}")


def test_a_file_that_a_worker_still_writes_is_no_damage(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = (run / GROUP).read_bytes()
    cut(GROUP)(run)
    held = CommitterLock(run / ZARR)
    looks: list[float] = []

    def later(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            held.release()
            (run / GROUP).write_bytes(whole)

    monkeypatch.setattr("libra.driver.damage.time", SimpleNamespace(sleep=later, monotonic=lambda: 0.0))
    refuse_damaged(run)
    assert len(looks) == 2
    cut(GROUP)(run)
    with pytest.raises(DamagedRun, match=GROUP):
        refuse_damaged(run)
    assert len(looks) == 3


def test_a_repair_that_was_killed_while_it_exchanged_stores_is_continued(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (run / ZARR).rename(run / f"{ZARR}.repaired")
    (run / f"{ZARR}.digests").rename(run / f"{ZARR}.repaired.digests")
    code, out, _ = typed(capfd, "repair", str(run))
    assert code == 0 and "written again" in out


@pytest.mark.parametrize(
    ("name", "command"), [("chunk_flipped", "doctor"), ("config_edited", "resume"), ("group_flipped", "repair")]
)
def test_in_a_process_of_its_own(name: str, command: str, run: Path) -> None:
    case = next(case for case in CASES if case.name == name)
    case.damage(run)
    done = subprocess.run(
        [sys.executable, "-m", "libra", command, str(run)], capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stdout + done.stderr
    assert done.returncode == (0 if command == "repair" else 2) and case.named in done.stdout + done.stderr


def test_a_directory_without_a_run_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for command in ("doctor", "resume", "repair"):
        code, _, err = typed(capfd, command, str(tmp_path))
        assert code == 2 and "no run here" in err
    with pytest.raises(RunDirectoryError):
        check_run(tmp_path)


# ------------------------------------------------------------------------------------------------ logs that are gone


def test_an_event_log_that_is_gone_is_said_by_the_doctor_and_not_needed_to_go_on(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log, config = run / "events.jsonl", run / "config.resolved.yaml"
    for content_of_log in (None, b"", b"[]\n", b'{"name": "torn'):
        log.unlink()
        if content_of_log is not None:
            log.write_bytes(content_of_log)
        assert [damage.name for damage in check_run(run).damages][-1:] == ["events"]
        log.touch()
    log.unlink()
    code, _, err = typed(capfd, "doctor", str(run))
    assert code == 2 and err.startswith(f"libra: {run}/events: the event log is gone: events.jsonl is missing"), err
    assert err.splitlines()[-1].startswith(f"Type: libra resume {run}   # which does not need them"), err
    refuse_damaged(run)
    config.write_text(config.read_text().replace("event_log: true", "event_log: false"))
    assert "events" not in {damage.name for damage in check_run(run).damages}


def test_metrics_that_are_gone_are_what_is_named(pruned: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (pruned / "metrics.jsonl").unlink()
    code, _, err = typed(capfd, "doctor", str(pruned))
    assert code == 2 and "it is gone, and metrics.jsonl has lost step 0, which is made again from it" in err, err
    assert typed(capfd, "repair", str(pruned))[0] == 0
