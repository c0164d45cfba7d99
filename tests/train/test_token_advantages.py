from dataclasses import replace

import numpy as np
import pytest
import torch

from libra.config import config_from_dict
from libra.errors import TrainError
from libra.train import Replica, TrainSettings, kl_estimate, sample_of
from libra.train.advantages import reinforce_pp, rloo
from libra.train.step_report import Tally
from libra.types import TrajectoryId

RLOO = {"mismatch_action": "warn", "algorithm": "rloo", "kl_coef": 0.2, "kl_args": {"in_reward": True}, "group_size": 4}


def of_run(**trainer):
    return TrainSettings.of_run(config_from_dict({"trainer": trainer}))


def aimed_at(target):
    return of_run(**RLOO | {"kl_args": {"in_reward": True, "target": target}}).model_copy(update={"kl_horizon": 60.0})


def groups_of(batch, size):
    rng = np.random.default_rng(0)
    for index, one in enumerate(batch):
        one.trajectory_id = TrajectoryId(0, index // size, index % size)
        one.reward = float(rng.integers(0, 2))
    return batch


@pytest.mark.parametrize(("algorithm", "estimator"), [("rloo", "k1"), ("reinforce_pp", "k3")])
def test_a_penalty_in_the_reward_is_that_of_the_library(model_dir, batch, score, algorithm, estimator):
    changes = {"algorithm": algorithm, "kl_args": {"in_reward": True, "estimator": estimator}, "gamma": 0.95}
    model = Replica(model_dir, of_run(**RLOO | changes), dtype=torch.float64)
    samples = [sample_of(one, 0) for one in groups_of(batch, 4)]
    reference = score(model, samples)
    with torch.no_grad():
        model.model.model.norm.weight.add_(0.05)  # away from the reference
    tally = Tally()
    found = model._samples(batch, 0, tally)
    kl = [
        kl_estimate(torch.as_tensor(s.behaviour_logp).double(), ref, estimator, bound=10.0)
        for s, ref in zip(samples, reference, strict=True)
    ]
    rows = torch.nn.utils.rnn.pad_sequence([-0.2 * each for each in kl], batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in kl], batch_first=True)
    for row, one in enumerate(batch):
        rows[row, samples[row].num_actions - 1] += one.reward
    if algorithm == "rloo":
        advantage_S = rloo(rows.sum(-1), torch.arange(len(batch)) // 4)
        expected = advantage_S[:, None].expand(rows.shape)
    else:
        expected = reinforce_pp(rows, mask, gamma=0.95)[0]
    for row, sample in enumerate(found):
        wanted = expected[row, : sample.num_actions].numpy()
        np.testing.assert_allclose(sample.token_advantage, wanted, rtol=0, atol=1e-9)
    mean = sum(float(each.sum()) for each in kl) / sum(len(each) for each in kl)
    assert tally.mean("kl_reward", "kl_reward_tokens") == pytest.approx(mean)


def test_groups_of_equal_rewards_learn_from_the_penalty_and_the_loss_has_no_second_one(model_dir, batch):
    for one in groups_of(batch, 4):
        one.reward, one.advantage = 1.0, 0.0
    without = RLOO | {"kl_args": {"in_reward": False}, "kl_coef": 0.0}
    with_penalty, without = (Replica(model_dir, of_run(**each), dtype=torch.float64) for each in (RLOO, without))
    report = with_penalty.step(batch, 0)
    assert report.optimizer_steps == 1 and report.kl_reference > 0 and report.kl_coef == 0.2
    assert without.step(batch, 0).optimizer_steps == 0
    doubled = Replica(model_dir, of_run(**{**RLOO, "kl_coef": 0.4}), dtype=torch.float64)
    assert doubled.step(batch, 0).grad_norm == pytest.approx(2 * report.grad_norm)  # all of it is the penalty's


def test_the_coefficient_follows_its_target_and_a_checkpoint(model_dir, batch, tmp_path):
    settings = aimed_at(1e-3)
    model = Replica(model_dir, settings, dtype=torch.float64)
    groups_of(batch, 4)
    seen = [model.step(batch, step).kl_coef for step in range(3)]
    grown = 1 + 0.2 * len(batch) / 60  # the KL of random log-probabilities is far above the target
    assert seen == pytest.approx([0.2, 0.2 * grown, 0.2 * grown**2])
    model.save(tmp_path / "step-000003")
    before = model.gradient.kl.value
    bad = replace(batch[0], behaviour_logprob=np.full_like(batch[0].behaviour_logprob, np.nan))
    with pytest.raises(TrainError):
        model.step([bad, *batch[1:]], 3)
    assert model.gradient.kl.value == before
    other = Replica(model_dir, settings, dtype=torch.float64)
    other.load(tmp_path / "step-000003")
    ours, theirs = model.step(batch, 3), other.step(batch, 3)
    assert ours.kl_coef == theirs.kl_coef == pytest.approx(0.2 * grown**3)
    assert ours.digest == theirs.digest and model.gradient.kl.value == other.gradient.kl.value
    low = Replica(model_dir, aimed_at(100.0), dtype=torch.float64)
    low.step(batch, 0)
    assert low.gradient.kl.value == pytest.approx(0.2 * (1 - 0.2 * len(batch) / 60))


def test_waves_of_whole_groups_have_the_penalty_of_the_batch(model_dir, batch):
    groups_of(batch, 4)
    settings = of_run(**RLOO | {"kl_args": {"in_reward": True, "target": 1e-3}})
    whole, waves = (Replica(model_dir, settings, dtype=torch.float64) for _ in range(2))
    report = whole.step(batch, 0)
    for part in (batch[:4], batch[4:]):
        waves.accumulate(part, 0)
    done = waves.close(0)
    assert done.grad_norm == pytest.approx(report.grad_norm, rel=1e-12)
    assert (waves.gradient.kl.value, done.kl_reference) == pytest.approx((whole.gradient.kl.value, report.kl_reference))
