"""Bytes of a training step: every term is what autograd and torch hold, and each option moves what it should."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from libra.hardware.shapes import shape_from_config
from libra.planner.cost import Layout, MicroBatchSize, fullest_moment, step_bytes
from libra.planner.cost.training_cost import micro_batch_sizes
from libra.planner.cost.training_memory import kept_per_token
from libra.train.logprobs import Scorer

SIZES = {
    "vocab_size": 500, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 16,
}  # fmt: skip
TOKENS = 64
BIG = shape_from_config(Qwen3Config(**{**SIZES, "num_hidden_layers": 12, "vocab_size": 32_000}).to_dict())
SIZE = MicroBatchSize(rows=2, row_tokens=1024, action_tokens=1500, first_of=2)
PLAIN = Layout(kind="ddp", weight_bytes=4, master_bytes=None, gradient_checkpointing=False)
SHARDED = replace(PLAIN, kind="fsdp2")


def kept_bytes(config, dtype, masked):
    """Storage that the autograd graph of one row holds, parameters left out."""
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).to(dtype).eval()
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    seen = {}
    alive = []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # so that no address is used again
        return tensor

    ids_RW, at_N = torch.zeros(1, TOKENS, dtype=torch.int64), torch.arange(TOKENS)
    mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).tril() if masked else None
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logp_N, _ = Scorer(model).logp(ids_RW, torch.arange(TOKENS)[None], at_N, torch.zeros_like(at_N), mask)
    assert logp_N.requires_grad
    return sum(seen.values())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Qwen3Config, LlamaConfig])
def test_a_layer_keeps_what_autograd_holds_of_it(kind, dtype, masked):
    few, many = (kind(**SIZES, num_hidden_layers=layers, attn_implementation="sdpa") for layers in (1, 3))
    measured = kept_bytes(many, dtype, masked) - kept_bytes(few, dtype, masked)
    predicted = 2 * TOKENS * kept_per_token(shape_from_config(many.to_dict()), dtype.itemsize, TOKENS if masked else 0)
    assert measured == predicted


def test_every_option_moves_its_own_term():
    def total(size=SIZE, **options):
        return sum(step_bytes(BIG, size, replace(PLAIN, **options)).values())

    base, weights = total(), 4.0 * BIG.num_params
    assert total(gradient_checkpointing=True) < base - 7 * SIZE.places * kept_per_token(BIG, 4) * 0.9
    assert total(reference=True) >= base + weights
    assert total(epochs=2) == base + 3 * weights
    assert base - total(SIZE, logit_chunk_tokens=1000) == pytest.approx(24 * BIG.vocab * 2 * 4)  # two such arrays
    assert total(entropy_bonus=True) > base
    assert total(replace(SIZE, masked=True)) > base + BIG.num_layers * SIZE.places * SIZE.row_tokens * 4
    assert total(replace(SIZE, first_of=1)) == pytest.approx(base - weights)
    sharded = step_bytes(BIG, SIZE, SHARDED, 4)
    assert sharded["weights"] + sharded["optimizer"] == pytest.approx(3 * weights / 4)
    assert sharded["gathered"] >= BIG.vocab * BIG.hidden * 4
    away = step_bytes(BIG, SIZE, replace(SHARDED, offload=True), 4)
    assert away["weights"] == away["optimizer"] == 0
    assert fullest_moment(BIG, SIZE, PLAIN) == "head, forward"
    assert fullest_moment(BIG, SIZE, replace(PLAIN, logit_chunk_tokens=64)) == "head"
    assert fullest_moment(BIG, MicroBatchSize(1, 8, 4), PLAIN, 2) in ("embedding", "reduce")


def test_micro_batches_are_as_the_trainer_packs_them():
    lengths = np.array([900.0, 700.0, 300.0, 300.0, 200.0])
    alone = micro_batch_sizes(lengths, 1, Layout(micro_batch_tokens=1000, max_row_tokens=1))
    assert {(size.rows, size.row_tokens) for size in alone} == {(1.0, 900.0)}
    assert not any(size.masked for size in alone)
    packed = micro_batch_sizes(lengths, 1, Layout(micro_batch_tokens=1000, max_row_tokens=500))
    assert [size.masked for size in packed] == [False, False, True, True]
    assert max(size.row_tokens for size in packed if size.masked) == 500
    assert all(size.places <= 1000 for size in packed)
