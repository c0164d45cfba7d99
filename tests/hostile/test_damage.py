"""Every damage to the files of a run is found, named and answered with what to type; what can be rebuilt is, and nothing is lost.

One small run is made, and set back to the moment at which its last batch was committed and its step not taken. Each case damages a
copy of that. `libra doctor` and `libra resume` must name it with exit code 2, `libra repair` must bring it back, and a resumed
run must come to what the undamaged one came to.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client
from safetensors.numpy import load_file

import libra.driver.run_checkpoints
from libra.cli.main import main
from libra.cli.run_files import ready_to_resume
from libra.config import config_from_dict
from libra.config.resume_changes import load_resumed
from libra.driver.damage import check_run, journal_faults
from libra.driver.resume import prune_groups
from libra.driver.session import run as run_graphs
from libra.driver.start_records import read_given, read_starts
from libra.errors import RunDirectoryError, StoreError
from libra.seals import unseal
from libra.store.batch_membership import read_batch, read_batch_facts
from libra.store.group_records import read_group
from libra.store.row_digests import COMMITTED, read_record
from libra.store.store_check import committed_rows, store_faults
from libra.store.trajectories import TrajectoryStore
from libra.store.trajectory_journal import Journal
from libra.tensor_files import checkpoint_fault, version_fault
from libra.types import Trajectory
from libra.worker.run_spec import RunDirectory, RunSpec

ITERATIONS = 4
MEASURED = {"generate_s", "queued_s", "tool_s", "worker", "epoch", "cached_tokens"}
"""Columns of what is generated again that need not be the same."""


def columns(run: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Every column of the store by path, committed rows only, by plain zarr."""
    group = zarr.open_group(run / "trajectories.zarr", mode="r")
    counts = group.attrs["committed"]
    found = {}
    for level, name in (("", "tokens"), ("turn", "turns"), ("trajectory", "trajectories")):
        arrays = (group[level] if level else group).arrays()
        found |= {f"{level}/{array_name}": array[: counts[name]] for array_name, array in arrays}
    return found


def assert_same_rows(got: Path, expected: Path, generated_again: int = 0) -> None:
    """The stores have the same rows.

    The last ``generated_again`` trajectories may have taken other times, and log-probabilities of another rounding: who is
    computed in one pass with whom depends on time.
    """
    got_columns, expected_columns = columns(got), columns(expected)
    assert got_columns.keys() == expected_columns.keys()
    first = len(expected_columns["trajectory/num_turns"]) - generated_again
    turns, tokens = (int(expected_columns[f"trajectory/{name}"][first:].sum()) for name in ("num_turns", "length"))
    for name, values in expected_columns.items():
        now = got_columns[name]
        assert len(now) == len(values), name
        if name.rpartition("/")[2] in MEASURED:
            same = len(values) - (turns if name.startswith("turn/") else generated_again)
            now, values = now[:same], values[:same]
        elif name == "/behaviour_logprob":
            same = len(values) - tokens
            np.testing.assert_allclose(now[same:], values[same:], rtol=1e-5)
            now, values = now[:same], values[:same]
        np.testing.assert_array_equal(now, values, err_msg=name)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, random_model: Path, cluster_client: Client) -> Path:
    """A finished run that kept its journals and every group record."""
    directory = tmp_path_factory.mktemp("damage")
    config = config_from_dict(
        {
            "run": {"name": "demo", "dir": str(directory / "finished"), "iterations": ITERATIONS},
            "model": {"path": str(random_model)},
            "environment": {"name": "libra.testing:FixedTurns"},
            "rollout": {"max_new_tokens": 4, "max_turns": 3, "ignore_eos": True, "slots": 8},
            "trainer": {"prompts": 2, "group_size": 2, "lr": 1e-3},
            "evaluation": {"prompts": 2, "every": 2},
            "checkpoint": {"every": 1, "keep": 3},
            "store": {"keep_journals": True},
            "cluster": {"threads": 1, "dashboard_port": 0},
            "observe": {"progress": False, "tensorboard": False},
        }
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(libra.driver.run_checkpoints, "prune_groups", lambda spec, first, before: before)
        run_graphs(config, client=cluster_client)
    return directory / "finished" / "demo"


def copy_of(run: Path, target: Path) -> Path:
    """A copy with the hard links that a journal is made of."""
    target.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-a", str(run), str(target)], check=True)
    return target


def set_committed(run: Path, batch: int) -> None:
    """Take the commits after the append of ``batch`` back, as if the committer had been killed before them."""
    root = json.loads((run / "trajectories.zarr" / "zarr.json").read_bytes())
    stop = next(each.stop for each in read_record(run / "trajectories.zarr").appends if each.batch == batch)
    names = {"tokens": "token", "turns": "turn", "trajectories": "trajectory"}
    root["attributes"][COMMITTED] = {name: stop[level] for name, level in names.items()}  # type: ignore[index]
    (run / "trajectories.zarr" / "zarr.json").write_text(json.dumps(root))
    TrajectoryStore.open(run / "trajectories.zarr", mode="a").close()  # which cuts off what was not committed


@pytest.fixture(scope="module")
def stopped(finished: Path) -> Path:
    """The run when batch 3 was committed, its step not taken, and nothing of it stored."""
    run = copy_of(finished, finished.parent.parent / "stopped" / "demo")
    last = ITERATIONS - 1
    set_committed(run, last - 1)
    for name in (f"checkpoints/step-{ITERATIONS:06d}", f"weights/{ITERATIONS:08d}"):
        shutil.rmtree(run / name)
    for name in ("evaluations", "groups", "journal", "steps"):
        for path in (run / name).iterdir():
            if path.name.startswith((f"version-{ITERATIONS:06d}", f"eval-{ITERATIONS:06d}", f"eval-{ITERATIONS}-")):
                path.unlink()
    (run / "steps" / f"step-{last:06d}.json").unlink()
    best = run / "checkpoints" / "best"
    if best.is_symlink() and not best.exists():
        best.unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] < last))
    assert check_run(run).damages == []
    return run


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> Path:
    """A copy of the stopped run, to damage."""
    return copy_of(stopped, tmp_path / "demo")


# ------------------------------------------------------------------------------------------------ damages


def cut(name: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        path = run / name
        path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])

    return damage


def flip(name: str, at: float = 0.6) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        data = bytearray((run / name).read_bytes())
        data[int(len(data) * at)] ^= 0x55
        (run / name).write_bytes(data)

    return damage


def gone(name: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()

    return damage


def replace(name: str, old: str, new: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        text = (run / name).read_text()
        assert old in text, text
        (run / name).write_text(text.replace(old, new, 1))

    return damage


def cut_record(run: Path) -> None:
    """Cut one record of a journal: its log, which is the same file under the names of all records before it."""
    path = run / "journal" / "train-3-1-0.0002.rec"
    data = path.read_bytes()
    at = data.index(path.name.encode())
    path.unlink()
    path.write_bytes(data[: at + len(path.name) + 20])


def flip_record(run: Path) -> None:
    path = run / "journal" / "train-3-1-0.0002.rec"
    data = bytearray(path.read_bytes())
    data[data.index(path.name.encode()) + len(path.name) + 60] ^= 1
    path.unlink()  # the others keep their log
    path.write_bytes(data)


def epochs_are_a_file(run: Path) -> None:
    shutil.rmtree(run / "epochs")
    (run / "epochs").write_text("")


@dataclass(frozen=True)
class Case:
    """A damage, the file that must be named, and the cure that must be advised."""

    name: str
    damage: Callable[[Path], None]
    named: str
    cure: str = "repair"
    rebuilt: bool = True

    def __str__(self) -> str:
        return self.name


CHECKPOINT, VERSION, GROUP = "checkpoints/step-000003", "weights/00000003", "groups/train-000003-000000.group"
BATCH, ZARR = "batches/batch-000001.json", "trajectories.zarr"
GO_BACK = "resume {run} --from-checkpoint 2"
CASES = [
    Case("checkpoint_cut", cut(f"{CHECKPOINT}/model.safetensors"), f"{CHECKPOINT}/model.safetensors", GO_BACK, False),
    Case("optimizer_flipped", flip(f"{CHECKPOINT}/optimizer.safetensors"), f"{CHECKPOINT}/opt", GO_BACK, False),
    Case("checkpoint_facts_cut", cut(f"{CHECKPOINT}/trainer.json"), f"{CHECKPOINT}/trainer.json", GO_BACK, False),
    Case("checkpoint_config", flip(f"{CHECKPOINT}/config.json"), f"{CHECKPOINT}/config.json", GO_BACK, False),
    Case("weights_flipped", flip(f"{VERSION}/model.safetensors"), f"{VERSION}/model.safetensors", rebuilt=False),
    Case("manifest_cut", cut(f"{VERSION}/version.json"), f"{VERSION}/version.json", rebuilt=False),
    Case("version_check_flipped", flip(f"{VERSION}/check.json"), f"{VERSION}/check.json", rebuilt=False),
    Case("group_cut", cut(GROUP), GROUP),
    Case("group_flipped", flip(GROUP), GROUP),
    Case("group_gone", gone(GROUP), GROUP),
    Case("stored_group_flipped", flip("groups/train-000002-000001.group"), "groups/train-000002-000001.group"),
    Case("chunk_flipped", flip(f"{ZARR}/token_ids/c/0"), f"{ZARR}/token_ids/c/0"),
    Case("plain_chunk_flipped", flip(f"{ZARR}/trajectory/advantage/c/0", 0.003), f"{ZARR}/trajectory/advantage/c/0"),
    Case("chunk_gone", gone(f"{ZARR}/trajectory/prompt_json/c/0"), f"{ZARR}/trajectory/prompt_json/c/0"),
    Case("array_metadata_cut", cut(f"{ZARR}/turn/tool/zarr.json"), f"{ZARR}/turn/tool/zarr.json"),
    Case("level_metadata_gone", gone(f"{ZARR}/turn/zarr.json"), f"{ZARR}/turn/zarr.json"),
    Case("root_metadata_cut", cut(f"{ZARR}/zarr.json"), f"{ZARR}/zarr.json"),
    Case("committed_altered", replace(f"{ZARR}/zarr.json", '"trajectories": 16', '"trajectories": 15'), f"{ZARR}/zarr"),
    Case("digests_cut", flip(f"{ZARR}.digests"), f"{ZARR}.digests"),
    Case("store_gone", gone(ZARR), ZARR),
    Case("epochs_gone", gone("epochs"), "epochs"),
    Case("epochs_a_file", epochs_are_a_file, "epochs"),
    Case("record_cut", cut_record, "journal/train-3-1-0.0002.rec", rebuilt=False),
    Case("record_flipped", flip_record, "journal/train-3-1-0.0002.rec", rebuilt=False),
    Case("record_gone", gone("journal/train-3-1-0.0001.rec"), "journal/train-3-1-0.0001.rec", rebuilt=False),
    Case("given_cut", cut("given.json"), "given.json"),
    Case("given_gone", gone("given.json"), "given.json"),
    Case("config_edited", replace("config.resolved.yaml", "lr: 0.001", "lr: 0.01"), "config.resolved.yaml"),
    Case("config_gone", gone("config.resolved.yaml"), "config.resolved.yaml"),
    Case("starts_altered", replace("starts.jsonl", '"epoch": 0', '"epoch": 7'), "starts.jsonl"),
    Case("batch_altered", replace(BATCH, "true", "false"), BATCH),
    Case("batch_gone", gone(BATCH), BATCH),
    Case(
        "evaluation_altered", replace("evaluations/version-000002.json", '"num": 2', '"num": 3'), "evaluations/version-"
    ),
    Case("scores_altered", flip("checkpoints/scores.json"), "checkpoints/scores.json"),
    Case("step_altered", flip("steps/step-000001.json"), "steps/step-000001.json", rebuilt=False),
    Case("metrics_line", replace("metrics.jsonl", '{"step": 1', '{"step: 1'), "metrics.jsonl", rebuilt=False),
]


def said_of(member: Trajectory) -> list[Any]:
    """What a group record says of a trajectory."""
    facts = ("trajectory_id", "reward", "epoch", "retried", "end_reason", "failure", "prompt")
    arrays = ("token_ids", "behaviour_logprob", "weight_version", "kv_version", "is_action")
    return [getattr(member, name) for name in facts] + [getattr(member, name).tolist() for name in arrays]


def content(run: Path) -> dict[str, str]:
    """What the files of a run say, without times of their own, by kind; a file that is to be rebuilt comes to the same."""
    files = RunDirectory(run)
    said: dict[str, Any] = {
        "given": read_given(run),
        "starts": read_starts(run),
        "config": (run / "config.resolved.yaml").read_text(),
    }
    said["epochs"] = sorted(path.name for path in files.epochs_dir.iterdir())
    for path in sorted(files.groups_dir.glob("*.group")):
        said[path.name] = [said_of(member) for member in read_group(path)]
    for number in range(ITERATIONS):
        facts = read_batch_facts(files.batches_dir, number)["groups"]
        said[f"batch {number}"] = read_batch(files.batches_dir, number), [row | {"path": ""} for row in facts]
    for path in sorted(files.evaluations_dir.iterdir()):
        said[path.name] = unseal(path.read_bytes())
    said["scores"] = {
        k: v for k, v in unseal((files.checkpoints_dir / "scores.json").read_bytes()).items() if k < "step-000004"
    }
    return {name: repr(value) for name, value in said.items()}


def typed(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command in this process."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([*arguments])
    out, err = capfd.readouterr()
    return int(ended.value.code or 0), out, err


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
    run: Path, finished: Path, cluster_client: Client, capfd: pytest.CaptureFixture[str]
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
    resumed(run, cluster_client)
    check_finished(run, finished)
    assert sorted(path.name for path in (run / "epochs").iterdir()) == ["0000", "0001"]


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(
    run: Path, finished: Path, cluster_client: Client, capfd: pytest.CaptureFixture[str]
) -> None:
    cut(f"{CHECKPOINT}/model.safetensors")(run)
    code, _, err = typed(capfd, "resume", str(run), "--from-checkpoint", "3")
    assert code == 2 and "allowed are 2, 0" in err
    resumed(run, cluster_client, 2)
    check_finished(run, finished)
    assert checkpoint_fault(run / CHECKPOINT) is None and (run / "damaged" / CHECKPOINT).is_dir()


def test_a_trajectory_whose_journal_is_cut_generates_the_same_again(
    run: Path, finished: Path, cluster_client: Client, capfd: pytest.CaptureFixture[str]
) -> None:
    (run / "batches" / "batch-000003.json").unlink()  # batch 3 is not committed, and one of its groups is not
    (run / "groups" / "train-000003-000001.group").unlink()
    flip_record(run)
    assert typed(capfd, "resume", str(run))[0] == 2
    assert typed(capfd, "repair", str(run))[0] == 0
    resumed(run, cluster_client)
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


# ------------------------------------------------------------------------------------------------ flipped bytes

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
