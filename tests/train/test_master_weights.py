import pytest
import torch

from libra.train import Replica, TrainSettings, pack, sample_of
from libra.train.step_report import Tally

LR = 1e-6


@pytest.fixture
def narrow(model_dir):
    """Maker of a bfloat16 replica, with float32 master weights unless told."""

    def make(master_dtype="float32", **settings):
        settings = {"lr": LR, **settings}
        return Replica(model_dir, TrainSettings(**settings), dtype="bfloat16", master_dtype=master_dtype, threads=1)

    return make


def wide(replica):
    return {name: tensor.detach().double().clone() for name, tensor in replica.optimized().items()}


def test_an_update_of_one_millionth_is_not_lost(narrow, batch):
    replica = narrow()
    before = wide(replica)
    replica.step(batch, 0)
    for name, tensor in wide(replica).items():
        moved = (tensor - before[name]).abs()
        seen = moved > 0
        assert seen.any(), name
        # AdamW's first step moves every weight that has a gradient by the learning rate.
        assert float(moved.max()) < 3 * LR and float(moved[seen].median()) > LR / 3


def test_gradients_of_micro_batches_are_summed_in_float32(narrow, batch):
    replica = narrow()
    samples = [sample_of(trajectory, 0) for trajectory in batch]
    parts = []
    micro_batches = pack(samples, logp_dtype=torch.float32, max_row_tokens=1, micro_batch_tokens=40)
    for micro in micro_batches:
        replica.optimizer.zero_grad()
        replica.gradient.micro_batch_loss(micro, Tally()).backward()
        assert all(parameter.grad is None for parameter in replica.parameters().values())
        parts.append({name: p.grad.clone() for name, p in replica.optimized().items() if p.grad is not None})
    replica.optimizer.zero_grad()
    for micro in micro_batches:
        replica.gradient.micro_batch_loss(micro, Tally()).backward()
    assert len(parts) > 2
    for name, tensor in replica.optimized().items():
        assert tensor.grad.dtype == torch.float32
        torch.testing.assert_close(tensor.grad, sum(part[name] for part in parts), rtol=1e-6, atol=1e-7)


def test_a_checkpoint_goes_on_from_the_same_master_weights(narrow, batch, tmp_path):
    straight, stopped = narrow(), narrow()
    for step in range(3):
        straight.step(batch, step)
    stopped.step(batch, 0)
    stopped.save(tmp_path / "step-000001")
    resumed = narrow()
    resumed.load(tmp_path / "step-000001")
    assert all(torch.equal(tensor, resumed.optimized()[name]) for name, tensor in stopped.optimized().items())
    for step in (1, 2):
        resumed.step(batch, step)
    for name, tensor in straight.optimized().items():
        assert torch.equal(tensor, resumed.optimized()[name]), name


def test_a_failed_step_leaves_the_master_weights(narrow, batch, monkeypatch):
    replica = narrow(minibatches=2, lr=1e-3)
    before, apply, calls = wide(replica), Replica.apply_gradient, []

    def second_fails(self, step, tally):
        calls.append(step)
        if len(calls) == 2:
            raise RuntimeError("injected")
        apply(self, step, tally)

    monkeypatch.setattr(Replica, "apply_gradient", second_fails)
    with pytest.raises(RuntimeError, match="injected"):
        replica.step(batch, 0)
    assert len(calls) == 2
    for name, tensor in wide(replica).items():
        assert torch.equal(tensor, before[name])
        assert torch.equal(replica.parameters()[name].double(), before[name].to(torch.bfloat16).double())


def test_taken_weights_replace_the_master_weights_and_a_wide_model_needs_none(narrow, batch, model_dir):
    other, replica = narrow(lr=1e-2), narrow()
    other.step(batch, 0)
    replica.take_weights(other.weights())
    for name, tensor in replica.optimized().items():
        assert torch.equal(tensor, other.parameters()[name].float())
        assert torch.equal(other.parameters()[name], other.optimized()[name].to(torch.bfloat16))
    assert {tensor.dtype for tensor in other.weights().values()} == {torch.bfloat16}
    wide_one = Replica(model_dir, TrainSettings(), dtype="float32", master_dtype="float32", threads=1)
    assert all(wide_one.optimized()[name] is parameter for name, parameter in wide_one.parameters().items())
