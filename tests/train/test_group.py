"""Replicas in real processes: a group of cores, hybrids that come and go, and deaths in the midst of a gradient."""

from __future__ import annotations

import importlib.util
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from libra.errors import TrainError, TransferError
from libra.train.aggregation import AGGREGATIONS
from libra.train.wire import connect

STEPS = 9
CASES: dict[str, dict[str, Any]] = {
    **{mode: {"aggregation": mode, "loss_divisor": 37.0} for mode in AGGREGATIONS},
    "two minibatches, proximal, KL": {"minibatches": 2, "old_logp": "proximal", "kl_coef": 0.1},
    "fsdp2": {"layout": "fsdp2"},
    "teacher": {"distil": {"divergence": "forward", "reward_coef": 0.5}},
    "teacher, fsdp2": {"distil": {"divergence": "reverse"}, "layout": "fsdp2"},
}
ADAPTERS = {"lora_rank": 2, "lora_alpha": 8.0, "lora_targets": ("q_proj", "down_proj")}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def process():
    """The module that the processes run."""
    spec = importlib.util.spec_from_file_location("group_process", Path(__file__).with_name("group_process.py"))
    assert spec is not None and spec.loader is not None
    module = sys.modules["group_process"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def start(process, model_dir, tmp_path_factory):
    """Starts a process; all are killed in the end."""
    running: list[Any] = []

    def one() -> Any:
        running.append(process.Process(model_dir, tmp_path_factory.mktemp("gradients")))
        return running[-1]

    yield one
    for each in running:
        each.close()


@pytest.fixture(scope="module")
def cast(start):
    """Two cores in one group, and a third process that will be a hybrid."""
    first, second, third = start(), start(), start()
    port = free_port()
    for rank, each in enumerate((first, second)):
        each.tell("join", port=port, rank=rank, size=2)
    assert first.answer() is second.answer() is None
    return first, second, third


def together(cores: tuple[Any, Any], k: int, waves: list[list[int]] | None = None) -> Any:
    """Both ranks take a step; their reports agree."""
    for core in cores:
        core.tell("step", k=k, waves=waves)
    mine, other = (core.answer() for core in cores)
    assert "report" in mine, mine
    assert (mine["report"]["step"], mine["report"]["digest"]) == (other["report"]["step"], other["report"]["digest"])
    assert mine["report"]["loss"] == other["report"]["loss"]
    return mine


def same(answer: Any, static: tuple[dict[str, Any], list[np.ndarray]]) -> None:
    """Merged gradient and clip norm are those of the static run, to 1e-12."""
    report, gradients = static
    got = np.load(answer["gradients"])
    assert len(got) == len(gradients) == report["optimizer_steps"]
    for ours, theirs in zip(got, gradients, strict=True):
        assert np.linalg.norm(ours - theirs) <= 1e-12 * np.linalg.norm(theirs)
        assert np.linalg.norm(theirs) > 1e-3
    for name in ("grad_norm", "loss"):
        assert answer["report"][name] == pytest.approx(report[name], rel=1e-12, abs=1e-14)
    for name in ("sequences", "action_tokens", "forwarded_sequences", "mismatch_tokens"):
        assert answer["report"][name] == report[name]
    for name in ("mismatch_mean_abs", "ratio_mean", "ratio_max", "entropy"):
        assert answer["report"][name] == pytest.approx(report[name], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("old_logp", ["version", "ewma"])
@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_old_policies_and_m2po_over_a_group_are_those_of_one_replica(cast, process, model_dir, layout, old_logp):
    settings = {"old_logp": old_logp, "correction": "truncate", "minibatches": 2, "m2po_threshold": 1.0}
    alone = process.Recorded(str(model_dir), settings)
    cores = cast[:2]
    for core in cores:
        core.tell("new", settings=settings | {"layout": layout})
    assert [core.answer() for core in cores] == [None, None]
    for k in range(3):
        static = alone.step(k)
        answer = together(cores, k)
        same(answer, static)
        assert answer["report"]["exact_old_frac"] == static[0]["exact_old_frac"] == (old_logp == "version")
        assert answer["report"]["rejected_frac"] == static[0]["rejected_frac"] > 0


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_a_kl_penalty_in_the_reward_over_a_group_is_that_of_one_replica(cast, process, model_dir, layout):
    settings = {"advantage": "rloo", "kl_coef": 0.5, "kl_in_reward": True, "kl_target": 0.01, "kl_horizon": 20.0}
    alone = process.Recorded(str(model_dir), settings)
    cores = cast[:2]
    for core in cores:
        core.tell("new", settings=settings | {"layout": layout})
    assert [core.answer() for core in cores] == [None, None]
    for k in range(2):
        static, answer = alone.step(k), together(cores, k)
        same(answer, static)
        for name in ("kl_reference", "kl_coef"):
            assert answer["report"][name] == pytest.approx(static[0][name], rel=1e-12)
    assert static[0]["kl_coef"] != 0.5


def test_adapters_over_shards_are_those_over_whole_models_and_their_checkpoint_goes_on(
    cast, process, model_dir, tmp_path
):
    cores = cast[:2]
    alone = process.Recorded(str(model_dir), ADAPTERS)
    static = [alone.step(k) for k in range(3)]
    kept: dict[str, dict[str, torch.Tensor]] = {}
    for layout in ("ddp", "fsdp2"):
        settings = ADAPTERS | {"layout": layout}
        for core in cores:
            core.tell("new", settings=settings)
        assert [core.answer() for core in cores] == [None, None]
        for k in range(2):
            same(together(cores, k), static[k])
        for core in cores:  # the shards' rows are gathered: a collective
            core.tell("save", directory=str(tmp_path / f"{layout}-{cores.index(core)}" / "step-000002"))
        assert [core.answer() for core in cores] == [None, None]
        same(together(cores, 2), static[2])
        for rank, core in enumerate(cores):
            core.tell("keep", path=str(tmp_path / f"{layout}-{rank}.pt"))
        assert [core.answer() for core in cores] == [None, None]
        kept |= {f"{layout}-{rank}": torch.load(tmp_path / f"{layout}-{rank}.pt") for rank in range(2)}
    one, *others = kept.values()
    own = {f"optimized/{name}": tensor.detach() for name, tensor in alone.replica.optimized().items()}
    assert own.keys() < one.keys() and any("lora_B" in name and tensor.any() for name, tensor in own.items())
    for other in (*others, own):
        assert all((one[name] - tensor).abs().max() <= 1e-9 for name, tensor in other.items())

    for core in cores:
        core.tell("new", settings=ADAPTERS | {"layout": "fsdp2"})
    assert [core.answer() for core in cores] == [None, None]
    for core in cores:
        core.tell("load", directory=str(tmp_path / "ddp-0" / "step-000002"))
    assert [core.answer() for core in cores] == [None, None]
    same(together(cores, 2), static[2])


@pytest.mark.parametrize("case", CASES)
def test_every_cast_merges_the_gradient_of_the_static_run(cast, process, model_dir, case):
    settings = CASES[case]
    first, second, third = cast
    cores = (first, second)
    alone = process.Recorded(str(model_dir), settings)
    static = [alone.step(k) for k in range(STEPS)]

    for core in cores:  # two cores and nobody else
        core.tell("new", settings=settings)
    assert first.answer() is second.answer() is None
    for k in range(3):
        same(together(cores, k), static[k])

    with_one = process.Recorded(str(model_dir), settings)  # one core and one hybrid
    pool = with_one.listen()
    third.ask("serve", settings=settings, address=pool.address)
    for k in range(3):
        if k:
            assert pool.wait_for(1)
        report, gradients = with_one.step(k)
        np.save(path := Path(model_dir).parent / "one.npy", np.stack(gradients))
        same({"report": report, "gradients": path}, static[k])
        assert report["hybrids"] + report["hybrids_joining"] == 1 or k == 0
        if report["hybrids"]:
            assert report["hybrid_received_bytes"] > 8 * gradients[0].size
    assert third.ask("leave") >= 2 * settings.get("minibatches", 1)
    pool.close()

    second.tell("new", settings=settings)  # two cores, and a hybrid from step 3 to step 6
    address = first.ask("new", settings=settings, listen=True)
    assert second.answer() is None
    for k in range(STEPS):
        if k == 2:  # a joiner without its state: it is there, and nobody waits for it
            stranger = connect((address[0], address[1]), process.TOKEN)
            stranger.send("hello", {"name": "slow", "description": alone.replica.description()})
            assert first.ask("wait_for", members=1, joining=True)
        if k == 3:
            stranger.close()
            assert first.ask("wait_for", members=0)
            third.ask("serve", settings=settings, address=address)
            assert first.ask("wait_for", members=1)
        if k == 7:
            assert third.ask("leave") == 4 * settings.get("minibatches", 1)
            assert first.ask("wait_for", members=0)
        answer = together(cores, k)
        same(answer, static[k])
        assert answer["report"]["hybrids"] == (3 <= k < 7)
        assert answer["report"]["hybrids_joining"] == (k == 2)
        assert answer["report"]["replicas"] == 2


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_waves_of_two_cores_and_hybrids_merge_the_gradient_of_the_static_run(cast, start, process, model_dir, layout):
    """The second wave is one trajectory for two cores and a hybrid, the third has no gradient at all."""
    settings, waves = {"layout": layout}, [[3, 0, 7], [5], [4], [8, 1, 2, 6]]
    first, second, third = cast
    alone = process.Recorded(str(model_dir), settings)
    static = [alone.step(k) for k in range(4)]
    second.tell("new", settings=settings)
    address = first.ask("new", settings=settings, listen=True)
    assert second.answer() is None
    mortal, lost = start(), 0
    mortal.tell("serve", settings=settings, address=address, die_at=0)
    third.ask("serve", settings=settings, address=address)
    assert mortal.answer() is None
    assert first.ask("wait_for", members=2, joining=True)  # in step 0, between two waves, they may get their state
    for k in range(3):
        answer = together((first, second), k, waves)
        same(answer, static[k])
        lost += answer["report"]["hybrids_lost"]
        assert first.ask("wait_for", members=1 if lost else 2)
    assert lost == 1 and mortal.popen.wait() < 0
    same(together((first, second), 3), static[3])  # and the step after them whole
    assert third.ask("leave") >= 2 * 3  # of a wave without a gradient there are no slices


def test_the_slice_of_a_hybrid_that_is_killed_is_computed_by_the_core(cast, start, process, model_dir):
    first, second, third = cast
    alone = process.Recorded(str(model_dir), {})
    second.ask("new", settings={})
    address = first.ask("new", settings={}, listen=True)
    mortal = start()
    together((first, second), 0)
    mortal.tell("serve", settings={}, address=address, die_at=1)
    third.ask("serve", settings={}, address=address)
    assert mortal.answer() is None
    static = [alone.step(k) for k in range(4)]
    lost = 0
    for k in range(1, 4):
        if not lost:
            assert first.ask("wait_for", members=2)
        answer = together((first, second), k)
        same(answer, static[k])
        lost += answer["report"]["hybrids_lost"]
    assert lost == 1 and mortal.popen.wait() < 0
    assert third.ask("leave") == 3


def test_a_core_killed_in_the_reduction_ends_the_epoch_and_no_weight_moves(start, process, model_dir, tmp_path):
    first, second, replacement = start(), start(), start()

    def group(cores: tuple[Any, Any], epoch: int) -> None:
        port = free_port()
        for rank, core in enumerate(cores):
            core.tell("join", port=port, rank=rank, size=2, epoch=epoch)
        assert cores[0].answer() is cores[1].answer() is None

    alone = process.Recorded(str(model_dir), {})
    static = [alone.step(k) for k in range(3)]
    group((first, second), 0)
    for core in (first, second):
        core.ask("new", settings={})
    same(together((first, second), 0), static[0])
    second.ask("die_in_reduction")
    first.tell("step", k=1)
    second.tell("step", k=1)
    failed = first.answer()
    assert (failed["error"], failed["done"]) == ("GroupLost", 1)
    assert "a new group repeats the step" in failed["text"]
    assert second.popen.wait() < 0
    first.ask("save", directory=str(tmp_path / "step-000001"))
    replacement.ask("new", settings={})
    group((first, replacement), 1)
    replacement.ask("load", directory=str(tmp_path / "step-000001"))
    for k in (1, 2):
        same(together((first, replacement), k), static[k])


def test_a_hybrid_of_another_configuration_or_without_the_token_is_refused(process, model_dir):
    core = process.Recorded(str(model_dir), {})
    pool = core.listen()
    other = process.Recorded(str(model_dir), {"clip_high": 0.5, "micro_batch_tokens": 200})
    hybrid = process.HybridReplica(other.replica, pool.address, process.TOKEN)
    with pytest.raises(TrainError, match=r"core refuses it: trainer\.clip_high is 0\.5 there and 0\.28 in the core"):
        hybrid.run()
    with pytest.raises(TransferError, match=r"handshake|token"):
        process.HybridReplica(other.replica, pool.address, "of another run")
    assert not pool.connected
    pool.close()
