"""A small run that was stopped, damages to its files, and what the files say: for the tests of damaged runs."""

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import zarr

from libra.cli.main import main
from libra.seals import unseal
from libra.store.row_digests import COMMITTED, read_record
from libra.store.run_records import read_batch, read_batch_facts, read_group
from libra.store.start_records import read_given, read_starts
from libra.store.trajectory_store import TrajectoryStore
from libra.store.zarr_layout import COUNTS
from libra.worker.run_spec import RunDirectory

ITERATIONS = 4
MEASURED = {"generate_s", "queued_s", "tool_s", "worker", "epoch", "cached_tokens"}
"""Columns of what is generated again that need not be the same."""


def columns(run):
    """Every column of the store by path, committed rows only, by plain zarr."""
    group = zarr.open_group(run / "trajectories.zarr", mode="r")
    counts = group.attrs["committed"]
    found = {}
    for level, name in COUNTS.items():
        path = "" if level == "token" else level
        arrays = (group[path] if path else group).arrays()
        found |= {f"{path}/{array_name}": array[: counts[name]] for array_name, array in arrays}
    return found


def assert_same_rows(got, expected, generated_again=0):
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


def copy_of(run, target):
    """A copy with the hard links that a journal is made of."""
    target.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-a", str(run), str(target)], check=True)
    return target


def set_committed(run, batch):
    """Take the commits after the append of ``batch`` back, as if the committer had been killed before them."""
    root = json.loads((run / "trajectories.zarr" / "zarr.json").read_bytes())
    stop = next(each.stop for each in read_record(run / "trajectories.zarr").appends if each.batch == batch)
    root["attributes"][COMMITTED] = {name: stop[level] for level, name in COUNTS.items()}
    (run / "trajectories.zarr" / "zarr.json").write_text(json.dumps(root))
    TrajectoryStore.open(run / "trajectories.zarr", mode="a").close()  # which cuts off what was not committed


def cut(name):
    def damage(run):
        path = run / name
        path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])

    return damage


def flip(name, at=0.6):
    def damage(run):
        data = bytearray((run / name).read_bytes())
        data[int(len(data) * at)] ^= 0x55
        (run / name).write_bytes(data)

    return damage


def gone(name):
    def damage(run):
        shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()

    return damage


def replace(name, old, new):
    def damage(run):
        text = (run / name).read_text()
        assert old in text, text
        (run / name).write_text(text.replace(old, new, 1))

    return damage


def cut_record(run):
    """Cut one record of a journal: its log, which is the same file under the names of all records before it."""
    path = run / "journal" / "train-3-1-0.0002.rec"
    data = path.read_bytes()
    at = data.index(path.name.encode())
    path.unlink()
    path.write_bytes(data[: at + len(path.name) + 20])


def flip_record(run):
    path = run / "journal" / "train-3-1-0.0002.rec"
    data = bytearray(path.read_bytes())
    data[data.index(path.name.encode()) + len(path.name) + 60] ^= 1
    path.unlink()  # the others keep their log
    path.write_bytes(data)


@dataclass(frozen=True)
class Case:
    """A damage, the file that must be named, and the cure that must be advised."""

    name: str
    damage: Callable[[Path], None]
    named: str
    cure: str = "repair"
    rebuilt: bool = True

    def __str__(self):
        return self.name


CHECKPOINT, VERSION, GROUP = "checkpoints/step-000003", "weights/00000003", "groups/train-000003-000000.group"
BATCH, ZARR = "batches/batch-000001.json", "trajectories.zarr"
GO_BACK = "resume {run} --from-checkpoint 2"
CASES = [
    Case("checkpoint_cut", cut(f"{CHECKPOINT}/model.safetensors"), f"{CHECKPOINT}/model.safetensors", GO_BACK, False),
    Case("checkpoint_facts_cut", cut(f"{CHECKPOINT}/trainer.json"), f"{CHECKPOINT}/trainer.json", GO_BACK, False),
    Case("weights_flipped", flip(f"{VERSION}/model.safetensors"), f"{VERSION}/model.safetensors", rebuilt=False),
    Case("group_cut", cut(GROUP), GROUP),
    Case("group_gone", gone(GROUP), GROUP),
    Case("stored_group_flipped", flip("groups/train-000002-000001.group"), "groups/train-000002-000001.group"),
    Case("chunk_flipped", flip(f"{ZARR}/token_ids/c/0"), f"{ZARR}/token_ids/c/0"),
    Case("array_metadata_cut", cut(f"{ZARR}/turn/tool/zarr.json"), f"{ZARR}/turn/tool/zarr.json"),
    Case("root_metadata_cut", cut(f"{ZARR}/zarr.json"), f"{ZARR}/zarr.json"),
    Case("committed_altered", replace(f"{ZARR}/zarr.json", '"trajectories": 16', '"trajectories": 15'), f"{ZARR}/zarr"),
    Case("digests_cut", flip(f"{ZARR}.digests"), f"{ZARR}.digests"),
    Case("store_gone", gone(ZARR), ZARR),
    Case("epochs_gone", gone("epochs"), "epochs"),
    Case("record_cut", cut_record, "journal/train-3-1-0.0002.rec", rebuilt=False),
    Case("record_gone", gone("journal/train-3-1-0.0001.rec"), "journal/train-3-1-0.0001.rec", rebuilt=False),
    Case("given_gone", gone("given.json"), "given.json"),
    Case("config_edited", replace("config.resolved.yaml", "lr: 0.001", "lr: 0.01"), "config.resolved.yaml"),
    Case("starts_altered", replace("starts.jsonl", '"epoch": 0', '"epoch": 7'), "starts.jsonl"),
    Case("batch_altered", replace(BATCH, "true", "false"), BATCH),
    Case("evaluation_altered", replace("evaluations/version-000002.json", '"num": 2', '"num": 3'), "evaluations/"),
    Case("evaluation_group_gone", gone("groups/eval-000002-000001.group"), "groups/eval-000002-000001.group"),
    Case("scores_altered", flip("checkpoints/scores.json"), "checkpoints/scores.json"),
    Case("step_altered", flip("steps/step-000001.json"), "steps/step-000001.json", rebuilt=False),
    Case("metrics_line", replace("metrics.jsonl", '{"step": 1', '{"step: 1'), "metrics.jsonl", rebuilt=False),
]


def said_of(member):
    """What a group record says of a trajectory."""
    facts = ("trajectory_id", "reward", "epoch", "retried", "end_reason", "failure", "prompt")
    arrays = ("token_ids", "behaviour_logprob", "weight_version", "kv_version", "is_action")
    return [getattr(member, name) for name in facts] + [getattr(member, name).tolist() for name in arrays]


def content(run):
    """What the files of a run say, without times of their own, by kind; a file that is to be rebuilt comes to the same."""
    files = RunDirectory(run)
    said = {"given": read_given(run), "starts": read_starts(run), "config": (run / "config.resolved.yaml").read_text()}
    said["epochs"] = sorted(path.name for path in files.epochs_dir.iterdir())
    for path in sorted(files.groups_dir.glob("*.group")):
        said[path.name] = [said_of(member) for member in read_group(path)]
    for number in range(ITERATIONS):
        facts = read_batch_facts(files.batches_dir, number)["groups"]
        said[f"batch {number}"] = read_batch(files.batches_dir, number), [row | {"path": ""} for row in facts]
    for path in sorted(files.evaluations_dir.iterdir()):
        said[path.name] = unseal(path.read_bytes())
    scores = unseal((files.checkpoints_dir / "scores.json").read_bytes())
    said["scores"] = {name: score for name, score in scores.items() if name < "step-000004"}
    return {name: repr(value) for name, value in said.items()}


def typed(capfd, *arguments):
    """Exit code, standard output and standard error of a command in this process."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([*arguments])
    out, err = capfd.readouterr()
    return int(ended.value.code or 0), out, err
