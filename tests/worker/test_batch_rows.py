"""Rows of a batch from the workers that graded them, and from the run directory where those are gone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from libra.config import RunConfig, config_from_dict
from libra.driver.session import Session
from libra.errors import TransferError
from libra.store.group_records import group_path, write_group
from libra.types import EndReason, FailureClass, Prompt, Trajectory, TrajectoryId
from libra.worker.batch_rows import FETCHED, RowKeeper, SliceFetcher, lazy_batch, lengths, num_kept
from libra.worker.run_spec import RunSpec


def make_config(directory: Path, model: str, train_workers: int, **trainer: Any) -> RunConfig:
    return config_from_dict(
        {
            "run": {"name": "demo", "dir": str(directory), "iterations": 2},
            "model": {"path": model},
            "environment": {"name": "libra.testing:FixedTurns"},
            "rollout": {"max_new_tokens": 4, "max_turns": 3, "ignore_eos": True, "slots": 8},
            "trainer": {"prompts": 2, "group_size": 3, "lr": 1e-3, "dispatch": "peer", **trainer},
            "cluster": {"threads": 1, "dashboard_port": 0, "train_workers": train_workers},
            "observe": {"progress": False, "tensorboard": False},
        }
    )


@pytest.mark.timeout(300)
def test_training_ranks_fetch_their_slices_and_read_no_record(random_model: Path, tmp_path: Path) -> None:
    with Session(make_config(tmp_path, str(random_model), 2)) as session:
        rows = list(session.iterations())
    assert [row["sequences"] for row in rows] == [6, 6]
    for row in rows:  # both ranks together each row once: none of them had the whole batch
        assert (row["fetched_rows"], row["stored_rows"], row["replicas"]) == (6, 0, 2)
        assert row["fetched_bytes"] > 6 * row["tokens"] / 6


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    return RunSpec("demo", 0, tmp_path, "model", make_config(tmp_path, "model", 1), secret="known here")


def group_of(iteration: int, group: int, num: int = 3) -> list[Trajectory]:
    """The last one failed."""
    made = []
    for sample in range(num):
        is_action = np.array([False, True, True, False] + [True] * sample)
        versions = np.where(is_action, 0, -1).astype(np.int32)
        made.append(
            Trajectory(
                TrajectoryId(iteration, group, sample),
                Prompt("p", ()),
                np.arange(len(is_action), dtype=np.int32),
                is_action,
                np.where(is_action, -1.0, 0.0).astype(np.float32),
                versions,
                versions,
                [],
                EndReason.ANSWERED,
                failure=FailureClass.NONE if sample < num - 1 else FailureClass.ENGINE,
            )
        )
    return made


def facts_of(members: list[Trajectory], path: Path, block: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "path": str(path),
        "advantages": [1.0] * len(members),
        "trains": [bool(member.failure.trains) for member in members],
        "rows": [str(member.trajectory_id) for member in members],
        "lengths": lengths(members),
        "block": block,
    }


def keeper(spec: RunSpec) -> RowKeeper:
    worker: Any = SimpleNamespace(address="tcp://127.0.0.1:7")
    return RowKeeper(worker, spec)


def test_what_a_lost_holder_had_is_read_from_the_run_directory(spec: RunSpec) -> None:
    spec.groups_dir.mkdir()
    first, second = group_of(0, 0), group_of(0, 1)
    kept = keeper(spec)
    rows = []
    for number, members in enumerate((first, second)):
        write_group(spec.groups_dir, 0, number, members)
        rows.append(facts_of(members, group_path(spec.groups_dir, 0, number), kept.keep(0, number, members)))
    fetcher = SliceFetcher({"members": rows}, "me", spec)
    names = [*rows[0]["rows"], *rows[1]["rows"]]
    assert [str(t.trajectory_id) for t in fetcher(names)] == names
    assert [fetcher.numbers[name] for name in FETCHED] == [6, sum(map(sum, (r["block"]["num_bytes"] for r in rows))), 0]
    kept.close()
    again = fetcher(names[:4])
    assert [t.token_ids.tolist() for t in again] == [t.token_ids.tolist() for t in (*first, *second)][:4]
    assert fetcher.numbers["stored_rows"] == 4
    group_path(spec.groups_dir, 0, 1).unlink()
    with pytest.raises(TransferError, match="neither be fetched nor read"):
        fetcher(names)


def test_a_group_that_nobody_offers_is_read(spec: RunSpec) -> None:
    spec.groups_dir.mkdir()
    members = group_of(0, 0)
    write_group(spec.groups_dir, 0, 0, members)
    row = facts_of(members, group_path(spec.groups_dir, 0, 0), None)
    fetcher = SliceFetcher({"members": [row]}, "me", spec)
    assert len(fetcher(row["rows"][1:])) == 2
    assert fetcher.numbers == {"fetched_rows": 0, "fetched_bytes": 0, "stored_rows": 2}


def test_old_groups_are_let_go(spec: RunSpec) -> None:
    kept = keeper(spec)
    for group in range(num_kept(spec.config) + 1):
        kept.keep(0, group, group_of(0, group))
    kept.keep(0, 1, group_of(0, 1))  # graded again: offered again
    held = [name for name in (f"0-{group}" for group in range(num_kept(spec.config) + 1)) if name in kept.server]
    kept.close()
    assert held == [f"0-{group}" for group in range(1, num_kept(spec.config) + 1)]


def test_failures_and_what_a_filter_took_out_are_not_fetched() -> None:
    members = group_of(0, 0, num=4)
    row = facts_of(members, Path("g"), None)
    row["trains"][0] = False
    batch = lazy_batch({"members": [row]}, None)  # type: ignore[arg-type]
    assert [fact.row for fact in batch.facts] == row["rows"][1:3]
    assert [(fact.num_tokens, fact.num_actions) for fact in batch.facts] == [(4, 3), (5, 4)]
    assert len(batch) == 3  # the failure is counted, what the filter took out is not
