import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.train.checkpoint import FACTS_FILE, checkpoint_name, complete
from libra.train.checkpoint_directory import BEST, KeptCheckpoints

SCORES = st.lists(st.none() | st.sampled_from([0.0, 0.5, 1.0, float("nan")]), min_size=1, max_size=12)


def make(directory, step):
    """A directory with the name and the last file of a checkpoint: what is kept is decided by these."""
    path = directory / checkpoint_name(step)
    path.mkdir(parents=True)
    (path / FACTS_FILE).write_text("{}")
    return path


def names(directory):
    return [path.name for path in complete(directory)]


@given(scores=SCORES, keep=st.integers(1, 4), restarts=st.sets(st.integers(0, 11)))
def test_the_last_and_the_best_stay_and_nothing_else(scores, keep, restarts, tmp_path_factory):
    directory = tmp_path_factory.mktemp("run") / "checkpoints"
    kept = KeptCheckpoints(directory, keep=keep)
    best = None
    for step, reward in enumerate(scores, start=1):
        if step in restarts:
            kept = KeptCheckpoints(directory, keep=keep)
        make(directory, step)
        if reward is not None:
            kept.score(step, reward)
            if reward == reward and (best is None or reward >= best[0]):
                best = (reward, step)
        kept.tidy()
        expected = set(range(max(1, step - keep + 1), step + 1)) | ({best[1]} if best else set())
        assert names(directory) == [checkpoint_name(s) for s in sorted(expected)]
        link = directory / BEST
        assert link.is_symlink() == bool(best)
        if link.is_symlink():
            assert link.readlink() == Path(checkpoint_name(best[1]))  # relative, not dangling
        assert kept.tidy() == []
    shutil.rmtree(directory.parent)


@pytest.mark.parametrize("dies_at", ["rename", "replace", "rmtree"])
def test_what_a_killed_process_left_is_finished_by_the_next(tmp_path, monkeypatch, dies_at):
    class Killed(BaseException):
        """Stands for SIGKILL: nothing catches it, and what comes after does not happen."""

    def die(*_, **__):
        raise Killed

    kept = KeptCheckpoints(tmp_path, keep=1)
    for step, reward in ((1, 0.1), (2, 0.9), (3, 0.2), (4, 0.3)):
        make(tmp_path, step)
        kept.score(step, reward)
    with monkeypatch.context() as patch:
        patch.setattr(*((shutil, "rmtree") if dies_at == "rmtree" else (Path, dies_at)), die)
        with pytest.raises(Killed):
            kept.tidy()
    assert {"step-000002", "step-000004"} <= set(names(tmp_path))
    heir = KeptCheckpoints(tmp_path, keep=1)
    heir.tidy()
    assert names(tmp_path) == ["step-000002", "step-000004"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [BEST, "scores.json", "step-000002", "step-000004"]
    assert (tmp_path / BEST / FACTS_FILE).is_file()


def test_what_is_being_written_is_left_alone_and_no_directory_is_in_order(tmp_path):
    for step in (1, 2):
        make(tmp_path, step)
    (tmp_path / ".step-000003.abc.tmp").mkdir()
    KeptCheckpoints(tmp_path, keep=1).tidy()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".step-000003.abc.tmp", "scores.json", "step-000002"]
    kept = KeptCheckpoints(tmp_path / "nothing", keep=1)
    assert kept.tidy() == [] and kept.best() is None and not (tmp_path / "nothing").exists()
