"""Runs with a teacher: it is loaded once on a worker of its own, its scores are committed, and the student comes nearer to it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.late_runs import killed_in_step
from libra.config import RunConfig, dump_config
from libra.driver.model_checks import checked_model
from libra.driver.session import Session
from libra.driver.teacher_checks import check_teacher
from libra.errors import ConfigError, ModelError
from libra.store.batch_membership import batch_path, read_batch_facts
from libra.store.group_records import group_path, read_group
from libra.store.teacher_scores import read_scores, scores_path
from libra.weights import WeightStore
from libra.worker.checkpoint_writer import CheckpointWriter
from libra.worker.replica_factory import make_replica
from libra.worker.run_spec import RunSpec
from libra.worker.trainer import recover

Config = Callable[..., RunConfig]


@pytest.fixture(scope="module")
def teacher(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the tokenizer of the random one, other weights, and clear opinions."""
    directory = tmp_path_factory.mktemp("teacher")
    model = AutoModelForCausalLM.from_pretrained(random_model)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.2)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(random_model).save_pretrained(directory)
    return directory


def distilling(make_config: Config, teacher: Path, distil: dict[str, Any], **sections: dict[str, Any]) -> RunConfig:
    trainer = {"algorithm": "opd", "prompts": 2, "group_size": 4, "lr": 1e-2} | sections.pop("trainer", {})
    return make_config(trainer=trainer, distil={"teacher": str(teacher)} | distil, **sections)


@pytest.mark.parametrize(
    ("distil", "trainer"),
    [
        ({"top_k": 16}, {"streaming": "on", "dispatch": "peer"}),
        ({"estimator": "sampled", "samples": 32, "divergence": "reverse"}, {"group_size": 8}),
    ],
    ids=["forward, streamed, from peers", "reverse, fresh advantages"],
)
def test_the_student_comes_nearer_to_its_teacher(
    make_config: Config, teacher: Path, distil: dict[str, Any], trainer: dict[str, Any]
) -> None:
    config = distilling(
        make_config, teacher, distil, run={"iterations": 10, "eta": 1}, trainer=trainer, checkpoint={"every": 4}
    )
    with Session(config) as session:
        rows = list(session.iterations())
    first, last = (float(np.mean([row["kl_teacher"] for row in part])) for part in (rows[:2], rows[-2:]))
    assert last < 0.8 * first, [row["kl_teacher"] for row in rows]
    assert all(row["taught_frac"] == 1 and row["late_taught"] == 0 and not row["no_signal"] for row in rows)
    assert all(row["entropy"] > 0 and row["optimizer_steps"] == 1 for row in rows)
    assert all((0 < row["top_k_student_frac"] < 1) == ("top_k" in distil) for row in rows)
    (record, *_) = sorted(session.spec.groups_dir.glob("train-*.group"))
    members, scores = read_group(record), read_scores(scores_path(record))
    for member, taught in zip(members, scores, strict=True):
        assert taught is not None and taught.logp.shape == (member.num_action_tokens, distil.get("samples", 16))
        assert (member.drawn is not None) == ("samples" in distil)
        if taught.old_logp is not None:
            assert taught.old_logp[:, 0].tolist() == member.behaviour_logprob[member.is_action].tolist()


def test_a_killed_run_goes_on_with_the_same_scores(
    make_config: Config, teacher: Path, tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = distilling(make_config, teacher, {"top_k": 8}, run={"iterations": 3}, checkpoint={"every": 2})
    file, directory = tmp_path / "config.yaml", tmp_path / "demo"
    file.write_text(dump_config(config))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(repository), *filter(None, [os.environ.get("PYTHONPATH")])]))
    killed_in_step(file, 1)  # driver, trainer and teacher are killed in the midst of it
    assert batch_path(directory / "batches", 1).exists()
    written = {path.name: path.read_bytes() for path in (directory / "teacher").glob("*.scores")}
    assert len(written) >= 4
    stamps = {name: (directory / "teacher" / name).stat().st_mtime_ns for name in written}
    command = [sys.executable, "-m", "libra", "resume", str(directory)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    kept = {path.name for path in (directory / "teacher").glob("*.scores")}
    assert kept == {scores_path(path).name for path in (directory / "groups").glob("train-*.group")}
    for name in kept & written.keys():
        assert (directory / "teacher" / name).stat().st_mtime_ns == stamps[name]
    # The last step again, from the checkpoint before it, without a teacher: the same weights.
    spec = RunSpec("demo", 9, directory, config.model.path, config)
    store = WeightStore(spec.weights_dir)
    shutil.rmtree(spec.checkpoints_dir / "step-000003")
    (again,) = recover(
        CheckpointWriter(make_replica(spec, Path(spec.model_dir), None), spec.checkpoints_dir, config), spec, store, 3
    )
    assert again["digest"] == store.get(3).digest and again["kl_teacher"] > 0


def test_a_batch_trains_without_scores_that_come_late_and_so_does_its_repetition(
    make_config: Config, teacher: Path
) -> None:
    """The teacher is stopped until the first batch is trained, which waits for its time; later batches have their scores."""
    config = distilling(
        make_config,
        teacher,
        {"top_k": 8, "reward_coef": 1.0, "wait_s": 3.0},
        run={"iterations": 3},
        checkpoint={"every": 0},
    )
    with Session(config) as session:
        worker = _teacher_of(session)
        session.client.run(_holds_back, "demo", workers=[worker])
        iterations = session.iterations()
        first = next(iterations)
        session.client.run(_goes_on, "demo", workers=[worker])
        second, spec = next(iterations), session.spec
        facts = [read_batch_facts(spec.batches_dir, batch)["groups"] for batch in (0, 1)]
        assert (first["late_taught"], first["taught_frac"], first["kl_teacher"]) == (2, 0.0, 0.0)
        assert [row["taught"] for row in facts[0]] == [False, False] and all(any(row["trains"]) for row in facts[0])
        assert [row["taught"] for row in facts[1]] == [True, True] and second["late_taught"] == 0
        # The scores came, and the steps are repeated as they were: the first without, the second with them.
        assert all(scores_path(group_path(spec.groups_dir, 0, number)).exists() for number in (0, 1))
        store = WeightStore(spec.weights_dir)
        replica = make_replica(spec, Path(spec.model_dir), None)
        again = recover(CheckpointWriter(replica, spec.checkpoints_dir, config), spec, store, 2)
        assert [step["digest"] for step in again] == [store.get(number).digest for number in (1, 2)]
        for _ in iterations:
            pass


def _teacher_of(session: Session) -> str:
    workers = session.client.scheduler_info(n_workers=-1)["workers"]
    (address,) = (each for each, worker in workers.items() if worker["name"] == "teacher-0")
    return str(address)


def _holds_back(run: str, dask_worker: Any) -> None:
    import threading

    service = dask_worker.plugins[f"libra-{run}"].teacher
    gate, score = threading.Event(), service.score
    service.gate = gate
    service.score = lambda members: (gate.wait(), score(members))[1]


def _goes_on(run: str, dask_worker: Any) -> None:
    dask_worker.plugins[f"libra-{run}"].teacher.gate.set()


def test_without_scores_and_rewards_there_is_no_step(make_config: Config, teacher: Path) -> None:
    config = distilling(make_config, teacher, {"late": "drop", "top_k": 8}, run={"iterations": 1})
    with Session(config) as session:
        worker = _teacher_of(session)
        session.client.run(_holds_back, "demo", workers=[worker])
        iterations = session.iterations()
        row = next(iterations)
        session.client.run(_goes_on, "demo", workers=[worker])
    assert row["optimizer_steps"] == 0 and row["sequences"] == 0 and row["late_taught"] == 2


@pytest.fixture
def another(teacher: Path, tmp_path: Path) -> Path:
    """A copy of the teacher, to be changed."""
    return Path(shutil.copytree(teacher, tmp_path / "another"))


def test_a_teacher_that_does_not_fit_is_refused_with_what_to_type(
    make_config: Config, random_model: Path, another: Path
) -> None:
    student = checked_model(str(random_model))

    def check(distil: dict[str, Any], **sections: Any) -> None:
        check_teacher(distilling(make_config, another, distil, **sections), student)

    check({"top_k": 259})
    with pytest.raises(
        ConfigError, match=r"distil.top_k: 260, and the teacher's vocabulary has 259 tokens.*type distil.top_k=259"
    ):
        check({"top_k": 260})
    with pytest.raises(ConfigError, match=r"distil.teacher: rollout.max_context_tokens: 2000"):
        check({}, rollout={"max_context_tokens": 2000})
    with pytest.raises(ModelError, match=r"distil.teacher: there is no directory 'no/such/teacher'"):
        check({"teacher": "no/such/teacher"})
    tokenizer = another / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"<|im_end|>"', '"<|end|>"'))
    with pytest.raises(
        ConfigError, match=r"another tokenizer than model.path=.*token '<\|end\|>' is not there in the student"
    ):
        check({})
    (another / "config.json").unlink()
    with pytest.raises(ModelError, match=r"distil.teacher: .* lacks config.json"):
        check({})
