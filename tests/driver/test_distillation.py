"""Runs with a teacher: it is loaded once on a worker of its own, its scores are committed, and the student comes nearer to it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zarr
from distributed import Client
from whole_run import address_of

import factories
from damaged_run import cut, flip, set_committed
from killed_runs import killed_in_step
from libra.cluster.connection import present_workers
from libra.cluster.local import local_cluster
from libra.config import RunConfig, config_from_dict, dump_config
from libra.driver.damage import refuse_damaged
from libra.driver.model_checks import check_teacher, checked_model
from libra.driver.repair import repair_run
from libra.driver.run_session import Session
from libra.errors import ConfigError, DamagedRun, ModelError
from libra.facts import GroupScored, ServiceAnswered, from_dict
from libra.sim.run_record import RunRecord
from libra.store.event_log import EventReader
from libra.store.run_files import check_run
from libra.store.run_records import batch_path, group_path, read_batch_facts, read_group, read_scores, scores_path
from libra.types import TrajectoryId
from libra.weights import WeightStore
from libra.worker.run_spec import RunSpec

Config = Callable[..., RunConfig]


@pytest.fixture(scope="module")
def teacher(random_model, tmp_path_factory):
    """A model with the tokenizer of the random one, other weights, and clear opinions."""
    directory = tmp_path_factory.mktemp("teacher")
    return factories.save_chat_model(directory, seed=7, matrix_std=0.2)


def distilling(make_config, teacher, distil, **sections):
    trainer = {"algorithm": "opd", "prompts": 2, "group_size": 4, "lr": 1e-2} | sections.pop("trainer", {})
    return make_config(trainer=trainer, distil={"teacher": str(teacher)} | distil, **sections)


@pytest.fixture(scope="module")
def teacher_client(random_model, teacher, tmp_path_factory):
    """A client of a cluster with a worker for a teacher, which the shared ones have not."""
    settings = factories.run_settings(tmp_path_factory.mktemp("cluster"), random_model)
    config = config_from_dict(settings | {"trainer": {"algorithm": "opd"}, "distil": {"teacher": str(teacher)}})
    with local_cluster(config) as started, Client(started) as connected:
        yield connected


def taken_again(spec, steps, checkpoint=""):
    """The numbers of the steps that a replica takes again, from the checkpoint before ``checkpoint``, which is removed."""
    from libra.worker.training.checkpoint_writer import CheckpointWriter
    from libra.worker.training.worker_trainer import make_replica, recover

    if checkpoint:
        shutil.rmtree(spec.checkpoints_dir / checkpoint)
    writer = CheckpointWriter(make_replica(spec, Path(spec.model_dir), None), spec.checkpoints_dir, spec.config)
    return recover(writer, spec, WeightStore(spec.weights_dir), steps)


def check_scored(session, rows, width):
    """The student came nearer, and every group was scored in time; events of the log."""
    log = [from_dict(values).fact for _, values in EventReader(session.directory / "events.jsonl")]
    scored = RunRecord.read(session.directory).scores()  # for `libra simulate --from-run`
    assert scored.keys() >= {(k, g) for k in range(len(rows)) for g in range(2)}
    assert all(s > 0 for _, s in scored.values())
    waits = [event.waited_s for event in log if isinstance(event, GroupScored)]
    assert len(waits) >= len(scored) and min(waits) >= 0
    first, last = (float(np.mean([row["kl_teacher"] for row in part])) for part in (rows[:2], rows[-2:]))
    assert last < 0.8 * first, [row["kl_teacher"] for row in rows]
    assert all(row["taught_frac"] == 1 and row["late_taught"] == 0 and not row["no_signal"] for row in rows)
    assert all(row["entropy"] > 0 and row["optimizer_steps"] == 1 for row in rows)
    (record, *_) = sorted(session.spec.groups_dir.glob("train-*.group"))
    for member, taught in zip(read_group(record), read_scores(scores_path(record)), strict=True):
        assert taught is not None and taught.logp.shape == (member.num_action_tokens, width)
        if taught.old_logp is not None:
            assert taught.old_logp[:, 0].tolist() == member.behaviour_logprob[member.is_action].tolist()
    return log


@pytest.mark.live
def test_the_student_comes_nearer_to_a_teacher_on_a_worker_of_its_own(make_config, teacher, teacher_client):
    trainer = {"streaming": "on", "dispatch": "peer"}
    run, every = {"iterations": 8, "eta": 1}, {"every": 3}
    config = distilling(make_config, teacher, {"tokens": 16}, run=run, trainer=trainer, checkpoint=every)
    with Session(config, client=teacher_client) as session:
        rows = list(session.iterations())
    check_scored(session, rows, 16)
    assert all(0 < row["top_k_student_frac"] < 1 for row in rows)
    assert "teacher-0" in {worker["name"] for worker in present_workers(teacher_client).values()}


@pytest.mark.live
def test_the_student_comes_nearer_to_a_teacher_that_is_a_service(make_config, teacher):
    distil = {"estimator": "sampled", "tokens": 32, "divergence": "reverse", "teacher": {"service": "oracle"}}
    services = {"named": {"oracle": {"model": str(teacher), "function": "teach", "max_batch": 2}}}
    trainer, run, every = {"group_size": 8}, {"iterations": 8, "eta": 1}, {"every": 3}
    config = distilling(make_config, teacher, distil, run=run, trainer=trainer, checkpoint=every, services=services)
    with Session(config) as session:  # a cluster of its own: a tool worker that teaches
        rows = list(session.iterations())
    log = check_scored(session, rows, 32)
    answered = [event for event in log if isinstance(event, ServiceAnswered)]
    assert [(event.service, event.restored) for event in answered] == [("oracle", n == 0) for n in range(len(answered))]
    scored = RunRecord.read(session.directory).scores()
    assert sum(event.requests for event in answered) >= len(scored)
    # of groups that were scored together none counts the others' seconds
    assert sum(s for _, s in scored.values()) <= sum(event.ran_s for event in answered)


@pytest.mark.live
def test_a_killed_run_keeps_its_scores_and_makes_damaged_ones_again(
    make_config, teacher, tmp_path, repository, monkeypatch
):
    monkeypatch.setattr("libra.driver.damage.RECHECK_S", 0.0)
    config = distilling(make_config, teacher, {"tokens": 8}, run={"iterations": 3}, checkpoint={"every": 2})
    file, run = tmp_path / "config.yaml", tmp_path / "demo"
    file.write_text(dump_config(config))
    paths = [str(repository), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    killed_in_step(file, 1)  # driver, trainer and teacher are killed in the midst of it
    assert batch_path(run / "batches", 1).exists()
    written = {path.name: path.stat().st_mtime_ns for path in (run / "teacher").glob("*.scores")}
    assert len(written) >= 4
    command = [sys.executable, "-m", "libra", "resume", str(run)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    kept = {path.name for path in (run / "teacher").glob("*.scores")}
    assert kept == {scores_path(path).name for path in (run / "groups").glob("train-*.group")}
    assert all((run / "teacher" / name).stat().st_mtime_ns == written[name] for name in kept & written.keys())

    spec = RunSpec("demo", 9, run, config.model.path, config)
    paths = [scores_path(group_path(spec.groups_dir, 2, number)) for number in (0, 1)]
    names, whole = [f"teacher/{path.name}" for path in paths], [path.read_bytes() for path in paths]
    before = read_scores(paths[0])
    assert check_run(run).damages == []
    for path, number in zip(paths, (0, 1), strict=True):
        for sample, taught in enumerate(read_scores(path)):
            _assert_stored(run, TrajectoryId(2, number, sample), taught)
    stranger = paths[0].with_name("train-000007-000000.scores")
    cut(names[0])(run)
    paths[1].unlink()
    shutil.copy(group_path(spec.groups_dir, 2, 0), stranger)
    assert {damage.name for damage in check_run(run).damages} == {*names, f"teacher/{stranger.name}"}
    with pytest.raises(DamagedRun, match="libra repair"):
        refuse_damaged(run)
    said = []
    assert repair_run(run, said.append).check.damages == []
    assert [path.read_bytes() for path in paths] == whole, "made again from the store"

    flip(names[0])(run)  # and a store that was not given the batch yet: the teacher is asked again
    set_committed(run, 1)
    assert {damage.name for damage in check_run(run).damages} == {names[0]}
    said.clear()
    assert repair_run(run, said.append).check.damages == []
    assert "was asked again" in said[0], said
    for again, taught in zip(read_scores(paths[0]), before, strict=True):
        assert again is not None and taught is not None
        assert again.token_ids.tolist() == taught.token_ids.tolist()
        np.testing.assert_allclose(again.logp, taught.logp, rtol=1e-5)
    # The last step again, from the checkpoint before it and without a teacher: the same weights.
    paths[0].write_bytes(whole[0])
    (again,) = taken_again(spec, 3, "step-000003")
    assert again["digest"] == WeightStore(spec.weights_dir).get(3).digest and again["kl_teacher"] > 0


def _assert_stored(run, trajectory, taught):
    """A trajectory's scores by plain zarr, as docs/distillation.md reads them."""
    group = zarr.open_group(run / "trajectories.zarr", mode="r")
    columns = {name: array[:] for name, array in group["trajectory"].arrays()}
    same = [columns[name] == getattr(trajectory, name) for name in ("iteration", "group", "sample")]
    (row,) = np.flatnonzero(np.logical_and.reduce(same))
    first, length, width = (int(columns[name][row]) for name in ("offset", "length", "scores_per_token"))
    num_tokens, at = int(group["is_action"][first : first + length].sum()), int(columns["score_offset"][row])
    scores = [group[f"score/{name}"][at : at + num_tokens * width] for name in ("token_id", "logp")]
    token_id, logp = (values.reshape(num_tokens, width) for values in scores)
    assert taught is not None and taught.rest_logp is not None
    assert token_id[:, 1:-1].tolist() == taught.token_ids.tolist()
    assert logp[:, 0].tolist() == taught.own_logp.tolist()
    assert logp[:, 1:].tolist() == np.c_[taught.logp, taught.rest_logp].tolist()


@pytest.mark.live
def test_a_batch_trains_without_scores_that_come_late_and_so_does_its_repetition(make_config, teacher, teacher_client):
    """The teacher is stopped until the first batch is trained, which waits for its time; later batches have their scores."""
    distil = {"tokens": 8, "reward_coef": 1.0, "wait_s": 3.0}
    config = distilling(make_config, teacher, distil, run={"iterations": 3}, checkpoint={"every": 0})
    with Session(config, client=teacher_client) as session:
        worker, spec = address_of(teacher_client, "teacher-0"), session.spec
        teacher_client.run(_holds_back, "demo", workers=[worker])
        iterations = session.iterations()
        first = next(iterations)
        teacher_client.run(_goes_on, "demo", workers=[worker])
        second = next(iterations)
        facts = [read_batch_facts(spec.batches_dir, batch)["groups"] for batch in (0, 1)]
        assert (first["late_taught"], first["taught_frac"], first["kl_teacher"]) == (2, 0.0, 0.0)
        assert [row["taught"] for row in facts[0]] == [False, False] and all(any(row["trains"]) for row in facts[0])
        assert [row["taught"] for row in facts[1]] == [True, True] and second["late_taught"] == 0
        # The scores came, and the steps are repeated as they were: the first without, the second with them.
        assert all(scores_path(group_path(spec.groups_dir, 0, number)).exists() for number in (0, 1))
        store = WeightStore(spec.weights_dir)
        assert [step["digest"] for step in taken_again(spec, 2)] == [store.get(number).digest for number in (1, 2)]
        list(iterations)


def _holds_back(run, dask_worker):
    import threading

    service = dask_worker.plugins[f"libra-{run}"].teacher
    gate, score = threading.Event(), service.score
    service.gate = gate
    service.score = lambda *given: (gate.wait(), score(*given))[1]


def _goes_on(run, dask_worker):
    dask_worker.plugins[f"libra-{run}"].teacher.gate.set()


def test_a_teacher_that_does_not_fit_is_refused_with_what_to_type(make_config, random_model, teacher, tmp_path):
    student, another = checked_model(str(random_model)), Path(shutil.copytree(teacher, tmp_path / "another"))

    def check(distil, **sections):
        check_teacher(distilling(make_config, another, distil, **sections), student)

    check({"tokens": 259})
    with pytest.raises(ConfigError, match=r"distil\.tokens=259"):
        check({"tokens": 260})
    with pytest.raises(ConfigError, match=r"rollout\.max_context_tokens"):
        check({}, rollout={"max_context_tokens": 2000})
    with pytest.raises(ModelError, match=r"distil\.teacher"):
        check({"teacher": "no/such/teacher"})
    tokenizer = another / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"<|im_end|>"', '"<|end|>"'))
    with pytest.raises(ConfigError, match="tokenizer"):
        check({})
    (another / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json"):
        check({})
