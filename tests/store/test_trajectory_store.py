"""The store against a trivially right model, read back by itself, by plain zarr and by xarray; and killed in mid-append."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from libra.errors import StoreError
from libra.store import zarr_layout
from libra.store.exclusive_files import lock_holder
from libra.store.trajectory_store import TrajectoryStore
from libra.store.zarr_layout import COLUMNS, LEVELS
from libra.types import EndReason, FailureClass, TrajectoryId


def test_every_field_comes_back(store, make_trajectory, assert_same):
    expected = [
        make_trajectory(0, 0, 0),
        make_trajectory(0, 0, 1, num_tokens=0, num_turns=0, end_reason=EndReason.FAILURE, failure=FailureClass.ENGINE),
        make_trajectory(0, 0, 1, "eval", reward=float("nan"), failure=FailureClass.REWARD, failure_detail="é\n\0x",
        retried="engine,reward",),
    ]  # fmt: skip
    assert store.append([]) == range(0)
    assert store.append(expected, batch=7) == range(3)
    assert store.append([make_trajectory(1, 0, 0)]) == range(3, 4)
    reader = TrajectoryStore.open(store.path)
    for source in (store, reader):
        for index, trajectory in enumerate([*expected, make_trajectory(1, 0, 0)]):
            assert_same(source.trajectory(index), trajectory)
    assert reader.columns()["batch"].tolist() == [7, 7, 7, -1]
    assert reader.attributes["run"] == "demo"
    for index in (-1, 4):
        with pytest.raises(StoreError):
            reader.trajectory(index)
    store.append([make_trajectory(2, turns=[{"turn": 0, "tool": None}])])
    (turn,) = store.trajectory(4).turns  # a field that is missing is unknown
    assert (turn["turn"], turn["tool"], turn["status"], turn["num_calls"]) == (0, "", "", -1)
    assert np.isnan(turn["tool_s"])


def test_the_same_trajectory_is_stored_once(store, make_trajectory):
    store.append([make_trajectory(0, 0, 0), make_trajectory(0, 0, 0, "eval")])
    for again in ([make_trajectory(0, 0, 0, seed=9)], [make_trajectory(0, 0, 2), make_trajectory(0, 0, 2)]):
        with pytest.raises(StoreError, match=r"each .* is stored once"):
            store.append(again)
    store.close()
    with TrajectoryStore.open(store.path, "a") as reopened, pytest.raises(StoreError, match="train-0-0-0"):
        reopened.append([make_trajectory(0, 0, 0)])
    assert TrajectoryStore.open(store.path).num_trajectories == 2


def test_malformed_trajectories_are_named_and_nothing_is_kept(store, make_trajectory):
    for bad, words in (
        (make_trajectory(weight_version=np.zeros(3, np.int32)), "weight_version is int32"),
        (make_trajectory(token_ids=np.zeros(20, np.float64)), "token_ids is float64"),
        (make_trajectory(turns=[{"turn": 0, "colour": "red"}]), "colour"),
        (make_trajectory(turns=[{"turn": "first"}]), "column turn"),
        (make_trajectory(turns=[{"turn": 4, "status": "success"}]), "status 'success'"),
    ):
        with pytest.raises(StoreError, match=words):
            store.append([make_trajectory(0, 0, 1), bad])
    assert store.append([make_trajectory(0, 0, 1)]) == range(1)


def test_plain_zarr_reads_it_without_a_warning(store, make_trajectory):
    expected = [make_trajectory(0, group, sample, num_tokens=5 + sample) for group in range(3) for sample in range(4)]
    store.append(expected[:8], batch=0)
    store.append(expected[8:], batch=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        group = zarr.open_group(store.path, mode="r")
        assert group.attrs["schema"] == 4
        counts = {"trajectories": 12, "turns": 24, "tokens": sum(map(_length, expected)), "scores": 0, "routes": 0}
        assert group.attrs["committed"] == counts
        assert group["trajectory/split"][:].tolist() == ["train"] * 12
        assert group["trajectory/batch"][:].tolist() == [0] * 8 + [1] * 4
        offset, length = group["trajectory/offset"][:], group["trajectory/length"][:]
        for row, trajectory in enumerate(expected):
            tokens = slice(offset[row], offset[row] + length[row])
            assert group["token_ids"][tokens].tolist() == trajectory.token_ids.tolist()
            assert group["is_action"][tokens].tolist() == trajectory.is_action.tolist()
        for level in LEVELS:
            for column in COLUMNS[level]:
                array = group[zarr_layout.array_path(level, column.name)]
                assert (array.metadata.dimension_names, array.attrs["meaning"]) == ((level,), column.meaning)
        assert group["turn/trajectory"][:].tolist() == [row for row in range(12) for _ in range(2)]
        names = {path for path, member in group.members(max_depth=None) if isinstance(member, zarr.Array)}
    assert names == {zarr_layout.array_path(level, column.name) for level in LEVELS for column in COLUMNS[level]}


def test_a_reader_sees_appends_after_refresh_and_cannot_append(store, make_trajectory):
    reader = TrajectoryStore.open(store.path)
    store.append([make_trajectory()])
    assert reader.num_trajectories == 0
    reader.refresh()
    assert reader.columns()["sample"].tolist() == [0]
    with pytest.raises(StoreError, match="mode='a'"):
        reader.append([make_trajectory(1)])


def test_a_second_committer_is_told_who_the_first_is(store):
    with pytest.raises(StoreError, match=rf"another committer has it open .*{os.getpid()}"):
        TrajectoryStore.open(store.path, "a")
    store.close()
    TrajectoryStore.open(store.path, "a").close()


def test_a_store_that_is_closed_in_the_middle_of_an_append_is_free_after_it(store, make_trajectory, monkeypatch):
    """A run's part on a worker is cleared away while its last append goes on in a thread."""
    commit, reached, proceed = store._commit, threading.Event(), threading.Event()

    def waits(counts):
        reached.set()
        assert proceed.wait(60)
        commit(counts)

    monkeypatch.setattr(store, "_commit", waits)
    appending = threading.Thread(target=store.append, args=([make_trajectory(0, 0, 0)],))
    closing = threading.Thread(target=store.close)
    appending.start()
    assert reached.wait(60)
    closing.start()
    assert lock_holder(store.path) is not None
    proceed.set()
    appending.join()
    closing.join()
    assert lock_holder(store.path) is None
    with TrajectoryStore.open(store.path, "a") as heir:
        assert heir.num_trajectories == 1


def test_what_is_no_store_is_refused_with_what_to_do(tmp_path, store):
    with pytest.raises(StoreError, match="no trajectory store here"):
        TrajectoryStore.open(tmp_path / "nothing")
    with pytest.raises(StoreError, match="allowed are 'r'"):
        TrajectoryStore.open(store.path, "w")
    store.close()
    with pytest.raises(StoreError, match="exists; open it with"):
        TrajectoryStore.create(store.path)
    zarr.open_group(tmp_path / "other", mode="w")
    with pytest.raises(StoreError, match="schema None"):
        TrajectoryStore.open(tmp_path / "other")


@pytest.mark.parametrize("kind", ["top_k", "drawn by the teacher", "drawn by the student"])
def test_scores_of_a_teacher_and_experts_come_back_and_plain_zarr_reads_them(store, make_trajectory, assert_same, kind):
    expected = [
        make_trajectory(0, 0, 0), make_trajectory(0, 0, 1, scored=kind, experts=(2, 3)),
        make_trajectory(0, 0, 2, experts=(2, 3)), make_trajectory(0, 0, 3, scored=kind),
        make_trajectory(0, 0, 4, num_tokens=0, num_turns=0),
    ]  # fmt: skip
    store.append(expected[:2], batch=0)
    store.append(expected[2:], batch=1)
    for index, trajectory in enumerate(expected):
        assert_same(store.trajectory(index), trajectory)
        assert_same(TrajectoryStore.open(store.path).trajectory(index), trajectory)
    group, taught = zarr.open_group(store.path, mode="r"), expected[3].taught
    columns = {name: group[f"trajectory/{name}"][3].item() for name in ("score_offset", "scores_per_token")}
    num_tokens, width = expected[3].num_action_tokens, columns["scores_per_token"]
    assert width == 1 + taught.logp.shape[1] + (kind == "top_k")
    rows = slice(columns["score_offset"], columns["score_offset"] + num_tokens * width)
    scores = (group[f"score/{name}"][rows] for name in ("token_id", "logp", "student_logp"))
    token_id, logp, student = (each.reshape(num_tokens, width) for each in scores)
    assert token_id[:, 0].tolist() == expected[3].token_ids[expected[3].is_action].tolist()
    assert logp[:, 0].tolist() == taught.own_logp.tolist()
    assert student[:, 0].tolist() == expected[3].behaviour_logprob[expected[3].is_action].tolist()
    if kind == "top_k":
        np.testing.assert_allclose(np.exp(logp[:, 1:]).sum(1), 1, rtol=1e-5)
        assert (token_id[:, -1] == -1).all()
    names = ("route_offset", "route_layers", "experts_per_token")
    first, layers, each = (group[f"trajectory/{name}"][2].item() for name in names)
    experts = group["route/expert"][first : first + 20 * layers * each].reshape(20, layers, each)
    assert experts.tolist() == expected[2].routes.tolist()
    assert group.attrs["committed"]["routes"] == group["route/expert"].shape[0] == 2 * 20 * 6


def test_scores_and_experts_of_other_tokens_are_refused(store, make_trajectory):
    scored = make_trajectory(0, 0, 0, scored="top_k")
    scored.taught = scored.taught.only(np.arange(scored.num_action_tokens) > 0)
    with pytest.raises(StoreError, match="a teacher scored"):
        store.append([scored])
    with pytest.raises(StoreError, match="routes are"):
        store.append([make_trajectory(0, 0, 0, routes=np.zeros((3, 2, 2), np.int16))])
    assert store.append([make_trajectory(0, 0, 0)]) == range(1)


@pytest.mark.parametrize("failing_write", [0, 40, "the marker"])
def test_a_full_disk_commits_nothing(store, make_trajectory, assert_same, monkeypatch, failing_write):
    store.append([make_trajectory(0)])
    writes = iter(range(10**6))

    def full(real, target):
        if failing_write in (next(writes), {str(store.path / "zarr.json"): "the marker"}.get(str(target))):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real

    with monkeypatch.context() as patch:
        pwrite, replace = os.pwrite, os.replace
        patch.setattr(os, "pwrite", lambda *a: full(pwrite, "")(*a))
        patch.setattr(os, "replace", lambda source, target: full(replace, target)(source, target))
        with pytest.raises(StoreError, match="disk full"):
            store.append([make_trajectory(1)])
    assert TrajectoryStore.open(store.path).num_trajectories == store.num_trajectories == 1
    store.append([make_trajectory(1), make_trajectory(2)])
    for index in range(3):
        assert_same(TrajectoryStore.open(store.path).trajectory(index), make_trajectory(index))


_APPEND_AND_DIE = """
import os, pickle, signal, sys
from libra.store.trajectory_store import TrajectoryStore

pwrite, replace, writes = os.pwrite, os.replace, iter(range(10**6))

def die_or(real, target):
    if sys.argv[2] in (str(next(writes)), {sys.argv[1] + "/zarr.json": "the marker"}.get(str(target))):
        os.kill(os.getpid(), signal.SIGKILL)
    return real

store = TrajectoryStore.open(sys.argv[1], "a")
first, second = pickle.load(sys.stdin.buffer)
store.append(first, batch=0)
os.pwrite = lambda *a: die_or(pwrite, "")(*a)
os.replace = lambda source, target: die_or(replace, target)(source, target)
store.append(second, batch=1)
"""


@pytest.mark.live
@pytest.mark.parametrize("dies_at_write", [0, 40, "the marker"])
def test_a_committer_killed_in_mid_append_leaves_what_it_had(store, make_trajectory, assert_same, dies_at_write):
    store.close()
    first, second = [make_trajectory(0, 0, s) for s in range(3)], [make_trajectory(1, 0, s) for s in range(4)]
    command = [sys.executable, "-c", _APPEND_AND_DIE, str(store.path), str(dies_at_write)]
    child = subprocess.run(command, input=pickle.dumps((first, second)), capture_output=True, check=False)
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()
    reader = TrajectoryStore.open(store.path)
    assert reader.num_trajectories == 3
    with TrajectoryStore.open(store.path, "a") as heir:  # the dead committer's lock is gone with it
        group = zarr.open_group(store.path, mode="r")
        assert group["trajectory/sample"][:].tolist() == [0, 1, 2]  # plain zarr sees no uncommitted row any more
        assert group["token_ids"].shape == (heir.num_tokens,)
        assert not list(store.path.rglob("*.partial"))
        assert heir.append(second[::-1], batch=1) == range(3, 7)
    reader.refresh()
    for index, expected in enumerate([*first, *second[::-1]]):
        assert_same(reader.trajectory(index), expected)


def _length(trajectory):
    return len(trajectory.token_ids)


class StoreAgainstList(RuleBasedStateMachine):
    """The store under test beside a list of (trajectory, batch), which is trivially right."""

    make = staticmethod(lambda *_: None)
    same = staticmethod(lambda *_: None)

    @initialize()
    def create(self):
        self.directory = tempfile.mkdtemp()
        self.store = TrajectoryStore.create(Path(self.directory) / "s.zarr")
        self.model = []

    def teardown(self):
        self.store.close()
        shutil.rmtree(self.directory)

    def _built(self, identity, num_tokens):
        further = {"scored": "top_k" if num_tokens % 3 == 1 else None, "experts": (2, 2) if num_tokens % 2 else None}
        return self.make(*identity, num_tokens=num_tokens, num_turns=num_tokens % 4, **further)

    def _new(self, sizes):
        ids = [TrajectoryId(len(self.model) + n, 0, n, "eval" if n % 3 == 2 else "train") for n in range(len(sizes))]
        return list(zip(ids, sizes, strict=True))

    @rule(sizes=st.lists(st.integers(0, 40), max_size=5), batch=st.none() | st.integers(0, 9))
    def append(self, sizes, batch):
        new = self._new(sizes)
        got = self.store.append([self._built(*one) for one in new], batch=batch)
        assert got == range(len(self.model), len(self.model) + len(new))
        self.model += [(*one, -1 if batch is None else batch) for one in new]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def append_again(self, data):
        identity, size, _ = data.draw(st.sampled_from(self.model))
        with pytest.raises(StoreError, match="stored once"):
            self.store.append([*(self._built(*one) for one in self._new([3])), self._built(identity, size)])

    @rule(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=5))
    def append_and_fail_before_the_marker(self, sizes):
        def fail(_):
            raise OSError(errno.ENOSPC, "No space left on device")

        self.store._commit = fail
        with pytest.raises(StoreError, match="disk full"):
            self.store.append([self._built(*one) for one in self._new(sizes)])
        del self.store._commit

    @rule()
    def reopen(self):
        self.store.close()
        self.store = TrajectoryStore.open(self.store.path, "a")

    @invariant()
    def reads_like_the_list(self):
        assert (self.store.num_trajectories, self.store.num_tokens) == (len(self.model), sum(m[1] for m in self.model))
        reader = TrajectoryStore.open(self.store.path)
        columns = reader.columns()
        names = ("iteration", "group", "sample", "split")
        ids = [TrajectoryId(*key) for key in zip(*(columns[name].tolist() for name in names), strict=True)]
        assert ids == [identity for identity, _, _ in self.model]
        assert columns["batch"].tolist() == [batch for _, _, batch in self.model]
        for index in {0, len(self.model) // 2, len(self.model) - 1} if self.model else ():
            identity, size, _ = self.model[index]
            self.same(reader.trajectory(index), self._built(identity, size))


@pytest.mark.live
def test_any_sequence_of_appends_failures_and_reopenings_reads_like_a_list(make_trajectory, assert_same, monkeypatch):
    rows_of = {"token": 16, "turn": 5, "trajectory": 3, "score": 30, "route": 50}
    for level, rows in rows_of.items():  # appends end within chunks, and cross them
        monkeypatch.setitem(zarr_layout.CHUNK_ROWS, level, rows)
    StoreAgainstList.make, StoreAgainstList.same = staticmethod(make_trajectory), staticmethod(assert_same)
    few = settings(max_examples=5, stateful_step_count=7, suppress_health_check=list(HealthCheck), database=None)
    run_state_machine_as_test(StoreAgainstList, settings=few)


@pytest.mark.parametrize("number", [5, 0])
def test_another_schema_is_refused_by_number(store, number):
    store.close()
    zarr.open_group(store.path, mode="r+").update_attributes({"schema": number})
    for mode in ("r", "a"):
        with pytest.raises(StoreError, match=f"schema {number}"):
            TrajectoryStore.open(store.path, mode)
