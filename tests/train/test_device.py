"""A replica on another device than the host: `pretended_gpu`, which computes on the CPU and refuses mixtures."""

import sys

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from libra.errors import ConfigError
from libra.tensors import compute_device
from libra.train import Replica, TrainSettings
from libra.train.logprobs import load_model
from pretended_gpu import PretendedTensor, pretended_gpu

SETTINGS = {
    "dapo": ("bfloat16", {}),
    "old weights": ("float32", {"old_logp": "proximal", "minibatches": 2, "correction": "mask", "kl_coef": 0.04}),
    "gspo with entropy, checkpointing": ("bfloat16", {"loss": "gspo", "entropy_coef": 0.01, "gradient_checkpointing": True}),
    "exact, nothing shared": ("float32", {"exact_logprobs": True, "share_prompts": False}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _loads_outside(monkeypatch):
    """transformers loads models by way of torch's device ``meta``, whose name the pretended GPU has."""

    def load(*arguments):
        with _disable_current_modes():
            return load_model(*arguments)

    monkeypatch.setattr(sys.modules[Replica.__module__], "load_model", load)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_elsewhere_is_the_step_here(name, model_dir, batch):
    dtype, changes = SETTINGS[name]

    def stepped(device):
        settings = TrainSettings(**{"lr": 1e-3, "max_row_tokens": 64, "micro_batch_tokens": 128} | changes)
        replica = Replica(model_dir, settings, dtype=dtype, master_dtype="float32", device=device)
        return replica, [replica.step(batch[:4], step) for step in (0, 1)]

    here, expected = stepped("cpu")
    begun = Replica(model_dir, TrainSettings(), dtype=dtype).weights()
    with pretended_gpu() as device:
        there, got = stepped(device)
        assert all(isinstance(p, PretendedTensor) for p in there.optimized().values())
        assert all(isinstance(state["exp_avg"], PretendedTensor) for state in there.optimizer.state.values())
        weights = {name: tensor.cpu() for name, tensor in there.weights().items()}
    rounding = 1e-4 if dtype == "float32" else 0.05  # another attention kernel than that of CPUs
    for one, other in zip(got, expected, strict=True):
        assert one.optimizer_steps == other.optimizer_steps >= 1
        assert one.loss == pytest.approx(other.loss, rel=rounding, abs=rounding)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=rounding)
    moved = sum(float((tensor - begun[name]).float().abs().sum()) for name, tensor in here.weights().items())
    apart = sum(float((weights[name] - tensor).float().abs().sum()) for name, tensor in here.weights().items())
    assert apart < moved * max(10 * rounding, 0.01)


@pytest.mark.live
def test_a_checkpoint_goes_from_one_device_to_the_other(model_dir, batch, tmp_path):
    settings = TrainSettings(lr=1e-3)
    with pretended_gpu() as device:
        there = Replica(model_dir, settings, dtype="bfloat16", master_dtype="float32", device=device)
        batch = batch[:2]
        there.step(batch, 0)
        there.save(tmp_path / "step-000001")
        again = Replica(model_dir, settings, dtype="bfloat16", master_dtype="float32", device=device)
        again.load(tmp_path / "step-000001")
        same = again.step(batch, 1).digest
        assert there.step(batch, 1).digest == same
    here = Replica(model_dir, settings, dtype="bfloat16", master_dtype="float32")
    here.load(tmp_path / "step-000001")
    assert here.step(batch, 1).loss == pytest.approx(there.last_report.loss, rel=0.05, abs=1e-3)


def test_a_mixture_of_devices_is_refused(model_dir, batch):
    with pretended_gpu() as device:
        with pytest.raises(RuntimeError, match="same device"):
            torch.ones(2, 3).to(device) + torch.ones(2, 3)
        with pytest.raises(TypeError, match="numpy"):
            np.asarray(torch.ones(2, 3).to(device))
        replica = Replica(model_dir, TrainSettings(), device=device)
        replica.gradient.device = torch.device("cpu")  # as if micro-batches were not moved
        with pytest.raises(RuntimeError, match="same device"):
            replica.step(batch, 0)


def test_the_device_is_the_gpu_where_there_is_one():
    assert compute_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert compute_device("cpu").type == "cpu"
    for unknown in ("gpu",) if torch.cuda.is_available() else ("gpu", "cuda"):
        with pytest.raises(ConfigError):
            compute_device(unknown)
