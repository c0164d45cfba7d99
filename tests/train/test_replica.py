import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from libra.errors import ModelError, TrainError
from libra.tensors import digest
from libra.train import Replica, TrainSettings, sample_of
from libra.types import FailureClass


def copies(replica):
    return {name: tensor.clone() for name, tensor in replica.weights().items()}


def optimizer_state(replica):
    return [value.clone() for entry in replica.optimizer.state.values() for value in entry.values()]


def test_a_step_raises_good_tokens_and_lowers_bad_ones(replica, trajectory, score):
    model = replica(lr=3e-3)
    batch = [trajectory(index, 1.0 if index % 2 else -1.0) for index in range(8)]
    samples = [sample_of(one, 0) for one in batch]
    before = score(model, samples)
    for one, logp in zip(batch, before, strict=True):
        one.behaviour_logprob[one.is_action] = logp.numpy()
    report = model.step(batch, 0)
    for one, old, new in zip(batch, before, score(model, samples), strict=True):
        assert (float(new.sum()) - float(old.sum())) * one.advantage > 0
    assert report.ratio_mean == pytest.approx(1, abs=1e-5)
    assert report.mismatch_max_abs < 1e-5
    assert report.mismatch_tokens == report.action_tokens == sum(one.num_action_tokens for one in batch)


def test_several_minibatches_and_epochs_move_off_the_behaviour_policy(replica, batch, score):
    model = replica(lr=3e-3, epochs=2, minibatches=3)
    for one, logp in zip(batch, score(model, [sample_of(one, 0) for one in batch]), strict=True):
        one.behaviour_logprob[one.is_action] = logp.numpy()
    report = model.step(batch, 0)
    assert report.optimizer_steps == 6
    assert report.forwarded_sequences == 2 * len(batch)
    assert report.kl_behaviour > 1e-6
    assert report.mismatch_tokens < report.action_tokens  # only before the first update
    assert report.mismatch_max_abs < 1e-5


def test_same_seed_same_weights(replica, trajectory):
    equal = [trajectory(index, 1.0 - index) for index in range(6)]  # of unequal ones lengths decide what is together
    first, again, other = (replica(minibatches=3, seed=seed).step(equal, 0).digest for seed in (5, 5, 7))
    assert first == again != other


def test_lr_zero_leaves_weights_bit_identical_and_what_was_recorded_is_never_written(replica, batch):
    model, recorded = replica(lr=0.0), [one.behaviour_logprob.tobytes() for one in batch]
    before = digest(model.weights())
    report = model.step(batch, 0)
    assert report.digest == digest(model.weights()) == before
    assert report.optimizer_steps == 1 and report.grad_norm > 0
    assert [one.behaviour_logprob.tobytes() for one in batch] == recorded


def test_steps_are_taken_in_order_and_once(replica, batch):
    model = replica()
    with pytest.raises(TrainError):
        model.step(batch, 1)
    first = model.step(batch, 0)
    weights = digest(model.weights())
    assert model.step(batch, 0) is first
    assert digest(model.weights()) == weights
    second = model.step(batch, 1)
    assert second.step == 1
    assert model.step([], 1) is second
    with pytest.raises(TrainError):
        model.step(batch, 0)


def test_excluded_trajectories_have_no_part(replica, batch, trajectory):
    clean = replica().step(batch, 0)
    failed = trajectory(50, 0.0, failure=FailureClass.ENGINE, failure_detail="lost")
    failed.behaviour_logprob[:] = np.nan
    silent = trajectory(51, 0.0, lengths=(4,), failure=FailureClass.POLICY)
    report = replica().step([*batch, failed, silent], 0)
    assert report.digest == clean.digest
    assert report.action_tokens == clean.action_tokens
    assert (report.sequences, report.excluded_sequences) == (len(batch), 2)


def test_trajectories_without_advantage_count_but_need_no_forward_pass(replica, batch, trajectory):
    idle = [trajectory(60 + index, 0.0) for index in range(3)]
    model, exact = replica(torch.float64), replica(torch.float64, entropy_coef=1e-12)  # which forwards all
    report, whole = model.step([*batch, *idle], 0), exact.step([*batch, *idle], 0)
    assert (report.forwarded_sequences, whole.forwarded_sequences) == (len(batch), len(batch) + 3)
    assert report.sequences == len(batch) + 3
    assert report.grad_norm == pytest.approx(whole.grad_norm, rel=1e-9)


def test_a_batch_without_advantage_changes_nothing_and_counts(replica, batch):
    model = replica()
    model.step(batch, 0)
    state, before = optimizer_state(model), digest(model.weights())
    report = model.step([replace(one, advantage=0.0) for one in batch], 1)
    assert (report.loss, report.optimizer_steps, report.digest) == (0, 0, before)
    assert all(torch.equal(old, new) for old, new in zip(state, optimizer_state(model), strict=True))
    assert model.step([], 2).digest == before
    assert model.steps_done == 3
    json.dumps(report.as_dict(), allow_nan=False)


def test_a_gradient_that_is_not_finite_is_refused_and_undone(replica, batch):
    model = replica(minibatches=3)
    model.step(batch, 0)
    before, lowest = copies(model), optimizer_state(model)
    calls = []

    def poison(grad):
        calls.append(1)
        return grad * float("nan") if len(calls) >= 3 else grad

    handle = model.model.model.norm.weight.register_hook(poison)
    with pytest.raises(TrainError, match="norm"):
        model.step(batch, 1)
    handle.remove()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.weights().items())
    assert all(torch.equal(old, new) for old, new in zip(lowest, optimizer_state(model), strict=True))
    assert model.steps_done == 1
    assert model.step(batch, 1).optimizer_steps == 3


def test_gradients_are_clipped_before_the_optimizer(replica, batch):
    model = replica(adam_args={"max_grad_norm": 1e-3})
    seen = []
    model.optimizer.register_step_pre_hook(
        lambda *_: seen.append(torch.sqrt(sum(p.grad.square().sum() for p in model.parameters().values())))
    )
    assert model.step(batch, 0).grad_norm > 1e-2
    assert float(seen[0]) == pytest.approx(1e-3, rel=1e-3)


def test_warm_up_rises_to_the_learning_rate(replica, batch):
    model = replica(lr=1e-3, warmup_steps=4)
    assert [model.step(batch, step).lr for step in range(6)] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3])


def test_divergence_from_the_reference_starts_at_zero_and_holds_back(replica, batch):
    free, held = replica(lr=3e-3, kl_coef=1e-9), replica(lr=3e-3, kl_coef=10.0)
    reports = [[model.step(batch, step).kl_reference for step in range(4)] for model in (free, held)]
    assert reports[0][0] == reports[1][0] == 0
    assert reports[1][3] < reports[0][3]


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(ModelError):
        Replica(tmp_path, TrainSettings())
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}', encoding="utf-8")
    with pytest.raises(ModelError):
        Replica(tmp_path, TrainSettings())


def test_gradient_checkpointing_recomputes_layers_and_changes_no_result(replica, batch):
    plain, saving = replica(), replica(gradient_checkpointing=True)
    calls = []
    for model in (plain, saving):
        mlp = model.model.model.layers[0].mlp
        mlp.register_forward_pre_hook(lambda *_, owner=model: calls.append(owner) if torch.is_grad_enabled() else None)
    reports = [model.step(batch, 0) for model in (plain, saving)]
    assert reports[0].digest == reports[1].digest
    assert calls.count(plain) == reports[0].micro_batches
    assert calls.count(saving) == 2 * reports[1].micro_batches  # forward, and again for the backward pass
