"""Two training workers in one group take the steps of one; a rank that is killed in the midst of one costs nothing else."""

import os
import signal
from functools import partial

import pytest
from whole_run import WIDE, address_of, dies_in_a_wave, events_of, keep_groups, named

from libra.driver.run_session import Session
from libra.weights import WeightStore

pytestmark = pytest.mark.timeout(600)

TRAINER = {"group_size": 3, "normalize_std": False}
SAME = ("loss", "grad_norm", "action_tokens", "entropy", "ratio_mean")


def check_steps_of_one(session, rows):
    """A replica alone takes the same steps on the batches of the run, up to the rounding of sums."""
    from libra.worker.run_spec import RunSpec
    from libra.worker.training.checkpoint_writer import CheckpointWriter
    from libra.worker.training.worker_trainer import make_replica, recover

    config, directory = session.spec.config, session.directory
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"train_workers": 1})})
    spec = RunSpec("run", 0, directory, str(config.model.path), config)
    checkpoints = CheckpointWriter(make_replica(spec, spec.model_dir, None), directory / "none", config)
    (directory / "checkpoints").rename(directory / "checkpoints aside")
    taken = recover(checkpoints, spec, WeightStore(directory / "no weights"), len(rows))
    assert [row["replicas"] for row in rows] == [2] * len(rows)
    for row, other in zip(rows, taken, strict=True):
        for name in SAME:
            assert row[name] == pytest.approx(other[name], rel=1e-3, abs=1e-6), (name, row["iteration"])


def dies_in_the_reduction(run, dask_worker):
    """From now on this rank is killed when it has computed its slice and the others wait for it."""
    group = dask_worker.plugins[f"libra-{run}"].gang.group
    group.sum_ = lambda tensors: os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("trainer", "victim", "dies"),
    [
        ({"layout": "ddp"}, "train-0", dies_in_the_reduction),
        ({"layout": "fsdp2", "streaming": "on"}, "train-1", partial(dies_in_a_wave, wave=1, step=1)),
    ],
    ids=["ddp, in the reduction", "fsdp2, in a wave"],
)
def test_a_killed_rank_costs_a_step_at_most(make_config, client_wide, monkeypatch, trainer, victim, dies):
    keep_groups(monkeypatch)
    sections = {"run": {"iterations": 3}, "checkpoint": {"every": 1}, "rollout": {"max_turns": 2}}
    config = make_config(**sections, trainer=TRAINER | trainer, cluster=WIDE)
    with Session(config, client=client_wide) as session:
        iterations = session.iterations()
        rows = [next(iterations)]
        address = address_of(client_wide, victim)
        client_wide.run(dies, run="demo", workers=[address])
        rows += iterations
    assert session.checkpoints.newest is not None and session.checkpoints.newest.name == "step-000003"
    events = events_of(session.directory)
    (lost,) = named(events, "gang_lost")
    assert (lost["worker"], lost["gang"]) == (victim, 0) and address in lost["detail"]
    first, second = named(events, "gang_formed")
    assert first["members"] == ["train-0", "train-1"] and (first["gang"], second["gang"]) == (0, 1)
    assert second["steps"] >= 1  # it goes on from the last step that was taken
    # A step whose result was lost with the worker may be told twice; it was taken once, or the numbers would not agree.
    assert list(dict.fromkeys(event["step"] for event in named(events, "step_finished"))) == [0, 1, 2]
    if "streaming" in trainer:
        assert [row["waves"] for row in rows] == [2, 2, 2]
        opened = {(event["batch"], event["wave"]) for event in named(events, "wave_opened")}
        assert opened == {(k, j) for k in range(3) for j in range(2)}
    check_steps_of_one(session, rows)
