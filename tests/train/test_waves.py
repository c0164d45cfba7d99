from dataclasses import replace as changed

import numpy as np
import pytest
import torch

from libra.config.algorithms import ALGORITHMS, GROUP_ADVANTAGES
from libra.errors import TrainError
from libra.train.advantages import GroupRewards, batch_advantages
from libra.types import FailureClass

STREAMED = [name for name, algorithm in ALGORITHMS.items() if algorithm.preset.advantage in GROUP_ADVANTAGES]
WAVES = [[7, 2], [4], [], [0, 1, 3], [6, 5]]
SETTINGS = {
    **{name: {"algorithm": name} for name in STREAMED}, "dr_grpo": {"algorithm": "dr_grpo", "loss_divisor": 64.0},
    "entropy, LoRA": {"entropy_coef": 0.1, "lora_rank": 2}, "scored alone": {"exact_logprobs": True},
}  # fmt: skip


@pytest.fixture
def double(replica):
    """Maker of float64 replicas, each with the list of the gradients it applied, before they are clipped."""

    def make(**settings):
        one = replica(torch.float64, **settings)
        applied = []
        apply = one.apply_gradient

        def record(step, tally):
            applied.append(torch.cat([p.grad.flatten() for p in one.optimized().values() if p.grad is not None]))
            apply(step, tally)

        one.apply_gradient = record
        return one, applied

    return make


@pytest.fixture
def mixed(batch):
    batch[4].advantage = 0.0
    batch[5].failure = FailureClass.WORKER
    return batch


def in_waves(replica, batch, waves, step=0):
    for number, wave in enumerate(waves):
        assert replica.accumulate([batch[index] for index in wave], step) == number + 1
    return replica.close(step)


@pytest.mark.parametrize("name", SETTINGS)
def test_waves_give_the_gradient_and_the_weights_of_the_whole_batch(double, mixed, name):
    settings = {"max_row_tokens": 40, "micro_batch_tokens": 120, **SETTINGS[name]}
    (whole, at_once), (streamed, added) = double(**settings), double(**settings)
    report, of_waves = whole.step(mixed, 0), in_waves(streamed, mixed, WAVES)
    assert len(at_once) == len(added) == 1
    assert torch.linalg.norm(at_once[0]) > 1e-6
    assert torch.linalg.norm(added[0] - at_once[0]) <= 1e-12 * torch.linalg.norm(at_once[0])
    for key, weight in whole.weights().items():
        assert torch.allclose(streamed.weights()[key], weight, rtol=1e-9, atol=1e-9)  # AdamW divides by small numbers
    ours, theirs = of_waves.as_dict(), report.as_dict()
    for key in ("sequences", "excluded_sequences", "action_tokens", "forwarded_sequences", "mismatch_tokens"):
        assert ours[key] == theirs[key]
    assert ours["optimizer_steps"] == theirs["optimizer_steps"]
    for key in ("loss", "grad_norm", "lr", "entropy", "ratio_mean", "mismatch_mean_abs", "kl_reference"):
        assert ours[key] == pytest.approx(theirs[key], rel=1e-11, abs=1e-13), key


def test_the_same_waves_give_the_same_bits_and_the_next_step_begins_empty(double, mixed):
    (one, applied), (two, again) = double(), double()
    digests = [[in_waves(each, mixed, WAVES, step).digest for step in (0, 1)] for each in (one, two)]
    assert digests[0] == digests[1]
    assert all(torch.equal(mine, other) for mine, other in zip(applied, again, strict=True))
    assert one.open_step is None
    assert all(parameter.grad is None for parameter in one.optimized().values())


def test_a_wave_that_fails_drops_those_before_it_and_all_can_be_added_again(double, mixed):
    (one, applied), (other, expected) = double(), double()
    one.accumulate(mixed[:5], 0)
    broken = changed(mixed[6], advantage=float("inf"))
    with pytest.raises(TrainError):
        one.accumulate([broken], 0)
    assert one.open_step is None and one.steps_done == 0
    in_waves(one, mixed, WAVES), in_waves(other, mixed, WAVES)
    assert torch.equal(applied[0], expected[0])


def test_a_slice_that_was_counted_twice_is_found_when_the_step_is_closed(double, mixed):
    one, applied = double()
    one.accumulate(mixed[:6], 0)
    one.open_step.merged += 3
    one.accumulate(mixed[6:], 0)
    with pytest.raises(TrainError):
        one.close(0)
    assert applied == [] and one.steps_done == 0 and one.open_step is None
    one.step(mixed, 0)
    with pytest.raises(TrainError):
        one.accumulate(mixed[:6], 0)


@pytest.mark.parametrize("estimator", GROUP_ADVANTAGES)
def test_the_advantages_of_a_group_alone_are_those_within_its_batch(estimator):
    """Bit for bit, which is what lets a wave have them before the batch is complete."""
    rng = np.random.default_rng(3)
    groups = [
        GroupRewards(
            np.round(rng.normal(size=size), 1), rng.random(size) < 0.8, rng.integers(1, 90, size),
            rng.random(size) < 0.7,
        )
        for size in (1, 4, 7, 4, 2, 8)
    ]  # fmt: skip
    options = {"drop_uniform_groups": True, "drop_truncated": True}
    together = batch_advantages(groups, estimator, **options)
    alone = [batch_advantages([group], estimator, **options) for group in groups]
    for index, (advantages, trains) in enumerate(alone):
        assert np.array_equal(advantages[0], together[0][index])
        assert np.array_equal(trains[0], together[1][index])
