"""Two training workers in one group take the steps of one; a rank that is killed in the midst of one costs nothing else."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from libra.cluster.present_workers import present_workers
from libra.config import RunConfig, config_from_dict
from libra.driver.session import Session
from libra.store.event_log import read_events

pytestmark = pytest.mark.timeout(600)  # each of them starts four or five processes that load torch

SAME = ("loss", "grad_norm", "reward", "action_tokens", "sequences", "lr", "entropy", "ratio_mean", "mismatch_tokens")


@pytest.fixture(scope="module")
def config(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RunConfig]:
    """Three iterations of a small run, on so many training workers."""

    def make(name: str, train_workers: int, **trainer: Any) -> RunConfig:
        return config_from_dict(
            {
                "run": {"name": name, "dir": str(tmp_path_factory.mktemp(name)), "iterations": 3},
                "model": {"path": str(random_model)},
                "environment": {"name": "libra.testing:FixedTurns"},
                "rollout": {"max_new_tokens": 4, "max_turns": 3, "ignore_eos": True, "slots": 8},
                "trainer": {"prompts": 2, "group_size": 3, "lr": 1e-3, "normalize_std": False, **trainer},
                "checkpoint": {"every": 1},
                "cluster": {"threads": 1, "dashboard_port": 0, "train_workers": train_workers},
                "observe": {"progress": False, "tensorboard": False},
            }
        )

    return make


@pytest.fixture(scope="module")
def alone(config: Callable[..., RunConfig]) -> list[dict[str, Any]]:
    """The iterations of the same run on one training worker."""
    with Session(config("one", 1)) as session:
        return list(session.iterations())


def events(session: Session, name: str) -> list[dict[str, Any]]:
    return [event for event in read_events(session.directory / "events.jsonl").events if event["name"] == name]


def agree(rows: list[dict[str, Any]], alone: list[dict[str, Any]]) -> None:
    assert [row["replicas"] for row in rows] == [2] * len(alone)
    for row, other in zip(rows, alone, strict=True):
        for name in SAME:
            assert row[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), (name, row["iteration"])


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_two_training_workers_take_the_steps_of_one(
    config: Callable[..., RunConfig], alone: list[dict[str, Any]], layout: str
) -> None:
    with Session(config(layout, 2, layout=layout)) as session:
        agree(list(session.iterations()), alone)
    assert events(session, "gang_formed")[0]["members"] == ["train-0", "train-1"]
    assert not events(session, "gang_lost")
    assert session.checkpoints.newest is not None and session.checkpoints.newest.name == "step-000003"


def test_adapters_over_shards_are_published_merged_and_proved_by_the_engines(
    config: Callable[..., RunConfig], random_model: Path
) -> None:
    lora = {"lora_rank": 2, "lora_alpha": 4.0, "lr": 1e-2}
    with Session(config("adapters", 2, layout="fsdp2", **lora)) as session:
        rows = list(session.iterations())
    assert [row["replicas"] for row in rows] == [2, 2, 2]
    assert {event["version"] for event in events(session, "version_checked")} >= {0, 1, 2, 3}
    newest = session.checkpoints.newest
    assert newest is not None and newest.name == "step-000003"
    base, merged = (load_file(directory / "model.safetensors") for directory in (random_model, newest))
    adapters = load_file(newest / "adapter" / "adapter_model.safetensors")
    for layer in ("model.layers.0.self_attn.v_proj", "model.layers.1.mlp.down_proj"):
        a, b = (adapters[f"base_model.model.{layer}.lora_{ab}.weight"] for ab in "AB")
        assert b.any()
        assert (merged[f"{layer}.weight"] - base[f"{layer}.weight"]).sub(2.0 * (b @ a)).abs().max() < 1e-6


def dies_in_the_reduction(run: str, dask_worker: Any) -> None:
    """From now on this rank is killed when it has computed its slice and the others wait for it."""
    group = dask_worker.plugins[f"libra-{run}"].gang.group
    group.sum_ = lambda tensors: os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("victim", ["train-1", "train-0"])
def test_a_rank_killed_in_the_reduction_is_named_and_its_step_taken_again(
    config: Callable[..., RunConfig], alone: list[dict[str, Any]], victim: str
) -> None:
    with Session(config(f"without_{victim[-1]}", 2)) as session:
        iterations = session.iterations()
        rows = [next(iterations)]
        workers = present_workers(session.client)
        (address,) = (address for address, worker in workers.items() if worker["name"] == victim)
        session.client.run(dies_in_the_reduction, run=session.spec.run, workers=[address])
        agree([*rows, *iterations], alone)
    (lost,) = events(session, "gang_lost")
    assert (lost["worker"], lost["gang"]) == (victim, 0)
    assert address in lost["detail"]
    formed = events(session, "gang_formed")
    assert [event["gang"] for event in formed] == [0, 1]
    assert formed[1]["steps"] >= 1  # it goes on from the last step that was taken
    # A step whose result was lost with the worker may be told twice; it was taken once, or the numbers would not agree.
    assert list(dict.fromkeys(event["step"] for event in events(session, "step_finished"))) == [0, 1, 2]


def dies_in_the_second_wave(run: str, dask_worker: Any) -> None:
    """From now on this rank is killed in the midst of the second wave of a step that is not the first."""
    replica = dask_worker.plugins[f"libra-{run}"].trainer.replica
    loss = replica.gradient.micro_batch_loss

    def deadly(*arguments: Any) -> Any:
        if replica.open_step.step >= 1 and replica.open_step.waves == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss(*arguments)

    replica.gradient.micro_batch_loss = deadly


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_a_rank_killed_in_a_wave_costs_the_waves_before_it_and_the_new_group_adds_them_again(
    config: Callable[..., RunConfig], alone: list[dict[str, Any]], layout: str
) -> None:
    with Session(config(f"streamed_{layout}", 2, layout=layout, streaming="on")) as session:
        iterations = session.iterations()
        rows = [next(iterations)]
        workers = present_workers(session.client)
        (address,) = (address for address, worker in workers.items() if worker["name"] == "train-1")
        session.client.run(dies_in_the_second_wave, run=session.spec.run, workers=[address])
        rows += iterations
    agree(rows, alone)
    assert [row["waves"] for row in rows] == [2, 2, 2]
    assert [event["worker"] for event in events(session, "gang_lost")] == ["train-1"]
    opened = [(event["batch"], event["wave"]) for event in events(session, "wave_opened")]
    assert sorted(set(opened)) == [(k, j) for k in range(3) for j in range(2)]
    assert list(dict.fromkeys(event["step"] for event in events(session, "step_finished"))) == [0, 1, 2]
