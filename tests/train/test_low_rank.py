import pytest
import torch
from safetensors.torch import load_file

import factories
from libra.config import config_from_dict
from libra.errors import ConfigError, TrainError
from libra.train import Replica, TrainSettings
from libra.train.logprobs import load_model
from libra.train.weight_copies import LowRankWeights
from libra.types import TrajectoryId

LORA = {"lora_rank": 2, "lora_args": {"alpha": 8.0, "targets": ("q_proj", "down_proj")}, "lr": 1e-2}


def trajectories(seed=0):
    shape = {"lengths": (4, 8), "vocabulary": 200}
    return [
        factories.trajectory(TrajectoryId(0, 0, n), seed=10 * seed + n, advantage=(-1.0) ** n, **shape)
        for n in range(4)
    ]


def replica(model, **changes):
    return Replica(model, TrainSettings(**{**LORA, **changes}), master_dtype="float32", threads=1)


def test_gradients_are_those_of_the_product(random_model):
    model = load_model(random_model, torch.float32)
    adapters = LowRankWeights(model, rank=3, alpha=6.0, targets=(), dtype=torch.float32, seed=1)
    for tensor in adapters.tensors.values():
        torch.nn.init.normal_(tensor, std=0.05)
    adapters.round_into_model()
    ids = torch.arange(10)[None]
    model(ids).logits.square().mean().backward()
    name = "model.layers.1.self_attn.q_proj"
    a, b = adapters.tensors[f"{name}.weight.lora_A"], adapters.tensors[f"{name}.weight.lora_B"]
    assert model.get_submodule(name).weight.grad is None

    base = load_model(random_model, torch.float32).get_submodule(name).weight.detach()
    free_a, free_b = a.detach().clone().requires_grad_(), b.detach().clone().requires_grad_()
    merged = base + 2.0 * (free_b @ free_a)
    out = torch.func.functional_call(model, {f"{name}.weight": merged}, (ids,)).logits.square().mean()
    expected = torch.autograd.grad(out, (free_a, free_b))
    assert torch.allclose(a.grad, expected[0], atol=1e-6)
    assert torch.allclose(b.grad, expected[1], atol=1e-6)


def test_a_step_changes_the_adapted_layers_alone_and_by_the_rank(random_model):
    trained, base = replica(random_model), load_model(random_model, torch.float32).state_dict()
    before = {name: tensor.clone() for name, tensor in trained.weights().items()}
    assert all(torch.equal(before[name], base[name]) for name in before), "version 0 is the model itself"
    trained.step(trajectories(), 0)
    trained.step(trajectories(1), 1)
    for name, tensor in trained.weights().items():
        change = tensor - before[name]
        if "q_proj" in name or "down_proj" in name:
            assert 1 <= int(torch.linalg.matrix_rank(change, rtol=1e-4)) <= 2, name
        else:
            assert not change.any(), name
    assert set(trained.optimized()) == {
        f"model.layers.{layer}.{part}.weight.lora_{ab}"
        for layer in (0, 1) for part in ("self_attn.q_proj", "mlp.down_proj") for ab in "AB"
    }  # fmt: skip


def test_a_checkpoint_goes_on_bit_for_bit_and_has_the_adapters_as_peft_reads_them(random_model, tmp_path):
    first = replica(random_model)
    first.step(trajectories(), 0)
    first.save(tmp_path / "step-000001")
    again = replica(random_model)
    again.load(tmp_path / "step-000001")
    for each in (first, again):
        each.step(trajectories(1), 1)
    own, other = first.weights(), again.weights()
    assert all(torch.equal(own[name], other[name]) for name in own)

    saved = load_file(tmp_path / "step-000001" / "adapter" / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    product = 4.0 * (saved[f"{prefix}.lora_B.weight"] @ saved[f"{prefix}.lora_A.weight"])
    merged = load_file(tmp_path / "step-000001" / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    base = load_model(random_model, torch.float32).state_dict()["model.layers.0.self_attn.q_proj.weight"]
    assert torch.allclose(merged, base + product, atol=1e-7)
    assert not torch.equal(merged, base)


def test_bfloat16_weights_are_the_rounded_sum(random_model):
    trained = Replica(random_model, TrainSettings(**LORA), dtype="bfloat16", master_dtype="float32", threads=1)
    trained.step(trajectories(), 0)
    assert {tensor.dtype for tensor in trained.optimized().values()} == {torch.float32}
    name = "model.layers.0.self_attn.q_proj.weight"
    base = load_model(random_model, torch.bfloat16).state_dict()[name].float()
    a, b = (trained.optimized()[f"{name}.lora_{ab}"] for ab in "AB")
    assert torch.equal(trained.weights()[name], (base + 4.0 * (b @ a)).bfloat16())


def test_what_cannot_have_adapters_is_refused(random_model):
    with pytest.raises(TrainError, match="q_pro"):
        replica(random_model, lora_args={"targets": ("q_pro",)})
    for more in ({"trainer": {"lora_rank": 4, "layout": "fsdp2_offload"}}, {"cluster": {"hybrid_workers": 1}}):
        with pytest.raises(ConfigError):
            config_from_dict({"trainer": {"lora_rank": 4}} | more)
