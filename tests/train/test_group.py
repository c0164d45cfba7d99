"""Replicas in real processes: a group of cores, hybrids that come and go, and deaths in the midst of a gradient."""

import socket
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from libra.errors import TrainError, TransferError
from libra.train.hybrid_pool import connect

sys.path.insert(0, str(Path(__file__).parent))
import group_process as process

pytestmark = pytest.mark.live
STEPS = 9
CASES = {
    "two minibatches, proximal, KL": {
        "aggregation": "seq-mean-token-mean", "minibatches": 2, "old_logp": "proximal", "kl_coef": 0.1,
    },
    "teacher, fsdp2": {"distil": {"divergence": "reverse", "reward_coef": 0.5}, "layout": "fsdp2"},
}  # fmt: skip
OF_TWO_CORES = {
    "old weights, fsdp2": {"old_logp": "version", "layout": "fsdp2"},
    "moving average": {"old_logp": "ewma"},
    "KL in the reward, fsdp2": {
        "advantage": "rloo", "kl_coef": 0.5, "kl_args": {"in_reward": True, "target": 0.01}, "kl_horizon": 20.0, "layout": "fsdp2",
    },
}  # fmt: skip
ADAPTERS = {"lora_rank": 2, "lora_args": {"alpha": 8.0, "targets": ("q_proj", "down_proj")}}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask_all(processes, what, **arguments):
    for each in processes:
        each.tell(what, **arguments)
    return [each.answer() for each in processes]


def join(cores, epoch=0):
    port = free_port()
    for rank, core in enumerate(cores):
        core.tell("join", port=port, rank=rank, size=2, epoch=epoch)
    assert [core.answer() for core in cores] == [None, None]


@pytest.fixture(scope="module")
def start(model_dir, tmp_path_factory):
    running = []

    def one():
        running.append(process.Process(model_dir, tmp_path_factory.mktemp("gradients")))
        return running[-1]

    yield one
    for each in running:
        each.close()


@pytest.fixture(scope="module")
def cast(start):
    """Two cores in one group, and a third process that will be a hybrid."""
    first, second, third = start(), start(), start()
    join((first, second))
    return first, second, third


def together(cores, k, waves=None):
    mine, other = ask_all(cores, "step", k=k, waves=waves)
    assert "report" in mine, mine
    assert [mine["report"][name] == other["report"][name] for name in ("step", "digest", "loss")] == [True] * 3
    return mine


def same(answer, static):
    """Merged gradient and clip norm are those of the static run, to 1e-12."""
    report, gradients = static
    got = np.load(answer["gradients"])
    assert len(got) == len(gradients) == report["optimizer_steps"]
    for ours, theirs in zip(got, gradients, strict=True):
        assert np.linalg.norm(ours - theirs) <= 1e-12 * np.linalg.norm(theirs)
        assert np.linalg.norm(theirs) > 1e-3
    for name in ("grad_norm", "loss", "exact_old_frac", "rejected_frac", "kl_reference", "kl_coef"):
        assert answer["report"][name] == pytest.approx(report[name], rel=1e-12, abs=1e-14), name
    for name in ("sequences", "action_tokens", "forwarded_sequences", "mismatch_tokens"):
        assert answer["report"][name] == report[name]
    for name in ("mismatch_mean_abs", "ratio_mean", "ratio_max", "entropy"):
        assert answer["report"][name] == pytest.approx(report[name], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("case", OF_TWO_CORES)
def test_what_a_step_needs_from_all_of_its_batch_is_that_of_one_replica(cast, model_dir, case):
    """Old policies, the mask over a minibatch, the baseline of a group and the adapted coefficient."""
    settings = OF_TWO_CORES[case]
    if "old_logp" in settings:
        settings = settings | {"correction": "truncate", "minibatches": 2, "reject_args": {"m2po": 1.0}}
    alone = process.Recorded(str(model_dir), settings | {"layout": "ddp"})
    assert ask_all(cast[:2], "new", settings=settings) == [None, None]
    for k in range(3):
        static = alone.step(k)
        same(together(cast[:2], k), static)
    if "old_logp" in settings:
        assert static[0]["exact_old_frac"] == (settings["old_logp"] == "version") and static[0]["rejected_frac"] > 0
    else:
        assert static[0]["kl_coef"] != 0.5


def test_adapters_over_shards_are_those_over_whole_models_and_their_checkpoint_goes_on(cast, model_dir, tmp_path):
    cores = cast[:2]
    alone = process.Recorded(str(model_dir), ADAPTERS)
    static = [alone.step(k) for k in range(3)]
    kept = {}
    for layout in ("ddp", "fsdp2"):
        ask_all(cores, "new", settings=ADAPTERS | {"layout": layout})
        for k in range(2):
            same(together(cores, k), static[k])
        for rank, core in enumerate(cores):  # the shards' rows are gathered: a collective
            core.tell("save", directory=str(tmp_path / f"{layout}-{rank}" / "step-000002"))
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
    ask_all(cores, "new", settings=ADAPTERS | {"layout": "fsdp2"})
    ask_all(cores, "load", directory=str(tmp_path / "ddp-0" / "step-000002"))
    same(together(cores, 2), static[2])


@pytest.mark.parametrize("case", CASES)
def test_every_cast_merges_the_gradient_of_the_static_run(cast, model_dir, case):
    """One core and a hybrid; then two cores, a hybrid that never gets its state, one from step 3 to step 6, and none."""
    settings = CASES[case]
    first, second, third = cast
    alone = process.Recorded(str(model_dir), settings)
    static = [alone.step(k) for k in range(STEPS)]

    with_one = process.Recorded(str(model_dir), settings)
    pool = with_one.listen()
    third.ask("serve", settings=settings, address=pool.address)
    for k in range(3):
        assert not k or pool.wait_for(1)
        report, gradients = with_one.step(k)
        np.save(path := Path(model_dir).parent / "one.npy", np.stack(gradients))
        same({"report": report, "gradients": path}, static[k])
        assert report["hybrids"] + report["hybrids_joining"] == 1 or k == 0
        if report["hybrids"]:
            assert report["hybrid_received_bytes"] > 8 * gradients[0].size
    assert third.ask("leave") >= 2 * settings.get("minibatches", 1)
    pool.close()

    second.tell("new", settings=settings)
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
        answer = together((first, second), k)
        same(answer, static[k])
        found = [answer["report"][name] for name in ("hybrids", "hybrids_joining", "replicas")]
        assert found == [3 <= k < 7, k == 2, 2]


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_waves_of_two_cores_and_hybrids_merge_the_gradient_of_the_static_run(cast, start, model_dir, layout):
    """The second wave is one trajectory for two cores and a hybrid, the third has no gradient at all; one hybrid is killed
    in the midst of its slice, which the core computes."""
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


def test_a_core_killed_in_the_reduction_ends_the_epoch_and_no_weight_moves(start, model_dir, tmp_path):
    first, second, replacement = start(), start(), start()
    alone = process.Recorded(str(model_dir), {})
    static = [alone.step(k) for k in range(3)]
    join((first, second))
    ask_all((first, second), "new", settings={})
    same(together((first, second), 0), static[0])
    second.ask("die_in_reduction")
    second.tell("step", k=1)
    failed = first.ask("step", k=1)
    assert (failed["error"], failed["done"]) == ("GroupLost", 1)
    assert second.popen.wait() < 0
    first.ask("save", directory=str(tmp_path / "step-000001"))
    replacement.ask("new", settings={})
    join((first, replacement), epoch=1)
    replacement.ask("load", directory=str(tmp_path / "step-000001"))
    for k in (1, 2):
        same(together((first, replacement), k), static[k])


def test_a_hybrid_of_another_configuration_or_without_the_token_is_refused(model_dir):
    core = process.Recorded(str(model_dir), {})
    pool = core.listen()
    other = process.Recorded(str(model_dir), {"loss_args": {"clip_high": 0.5}, "micro_batch_tokens": 200})
    hybrid = process.HybridReplica(other.replica, pool.address, process.TOKEN)
    with pytest.raises(TrainError, match="loss_args"):
        hybrid.run()
    with pytest.raises(TransferError):
        process.HybridReplica(other.replica, pool.address, "of another run")
    assert not pool.connected
    pool.close()
