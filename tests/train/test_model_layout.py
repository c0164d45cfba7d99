"""Layouts of the model change no result: recomputed activations, and weights that add up undivided."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from libra.errors import ConfigError
from libra.train import TrainSettings
from libra.train.aggregation import AGGREGATIONS, Aggregation


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
    assert not any(
        module.training for module in saving.model.modules() if not hasattr(module, "gradient_checkpointing")
    )


def test_offload_without_shards_is_refused():
    with pytest.raises(ConfigError, match=r"trainer\.offload: got True; allowed is false where trainer\.layout is ddp"):
        TrainSettings(offload=True)
    TrainSettings(offload=True, layout="fsdp2")


@pytest.mark.parametrize("mode", AGGREGATIONS)
@given(counts=st.lists(st.integers(1, 10**6), min_size=1, max_size=12), cut=st.integers(0, 12))
def test_weights_of_slices_add_up_exactly_to_those_of_the_minibatch(mode, counts, cut):
    rule = Aggregation(mode, horizon_tokens=4097.0, divisor=0.1)

    def weight(part):
        return rule.weight_sum(num_tokens=sum(part), num_sequences=len(part))

    whole = weight(counts)
    assert weight(counts[:cut]) + weight(counts[cut:]) == whole
    assert rule.divisor_of(whole) == rule.denominator(num_tokens=sum(counts), num_sequences=len(counts))
