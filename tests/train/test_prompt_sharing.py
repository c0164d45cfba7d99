from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from libra.train import Sample, TrainSettings, pack, sample_of
from libra.train.packing import can_share, row_tokens, share_rows
from libra.train.step_report import Tally

SHAPES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), min_size=1, max_size=20)


@pytest.fixture
def siblings(trajectory):
    """Two groups of four trajectories of several turns with one prompt each, and one with a prompt of its own."""
    made = [trajectory(n, lengths=(6 + n % 2, 4 + n, 3, 2 + n)) for n in range(9)]
    for group in (made[0:8:2], made[1:8:2]):
        for member in group[1:]:
            length = np.flatnonzero(member.is_action)[0]
            member.token_ids[:length] = group[0].token_ids[:length]
    return [sample_of(one, 0) for one in made]


@pytest.mark.parametrize("max_row_tokens", [40, 500])
def test_log_probabilities_and_gradient_are_those_without_sharing(replica, siblings, score, max_row_tokens):
    model = replica(torch.float64, kl_coef=0.1)
    with torch.no_grad():
        model.model.model.norm.weight.add_(0.1)  # away from the reference
    alone = torch.cat(score(model, siblings)).detach()
    behaviour = torch.cat([torch.as_tensor(sample.behaviour_logp) for sample in siblings])
    by_behaviour = {float(logp): float(value) for logp, value in zip(behaviour, alone, strict=True)}
    assert len(by_behaviour) == len(alone)

    def gradient(share):
        model.optimizer.zero_grad()
        layout = {"max_row_tokens": max_row_tokens, "micro_batch_tokens": 500, "share_prompts": share}
        batches = pack(siblings, logp_dtype=torch.float64, **layout)
        for micro in batches:
            logp_N, _ = model.gradient.scorer.logp(*micro.inputs)
            expected = torch.tensor([by_behaviour[float(each)] for each in micro.behaviour_logp_N], dtype=torch.float64)
            torch.testing.assert_close(logp_N.detach(), expected, rtol=0, atol=1e-9)
            model.gradient.micro_batch_loss(micro, Tally()).backward()
        made = {name: parameter.grad.clone() for name, parameter in model.parameters().items()}
        return made, sum(micro.num_tokens for micro in batches)

    (plain, plain_tokens), (shared, shared_tokens) = gradient(False), gradient(True)
    assert shared_tokens < plain_tokens == sum(sample.num_tokens for sample in siblings)
    assert max(float(tensor.abs().max()) for tensor in plain.values()) > 1
    for name, tensor in plain.items():
        # Qwen3's norms compute in float32 whatever the dtype: the prompt's gradients are rounded before or after their sum.
        torch.testing.assert_close(shared[name], tensor, rtol=0, atol=2e-6)


@given(shapes=SHAPES, max_row_tokens=st.integers(1, 40))
def test_every_sample_is_in_one_row_beside_its_prompts_others(shapes, max_row_tokens):
    samples = []
    for number, (prompt, rest) in enumerate(shapes):  # prompt p is p + 2 tokens long; other tokens occur nowhere else
        own = np.arange(rest) + 1000 * (number + 1)
        ids = np.concatenate([np.full(prompt + 2, prompt), own])
        at = np.arange(prompt + 1, len(ids))
        logp, current = np.zeros(len(at), np.float32), np.ones(len(at), np.bool_)
        samples.append(Sample(ids, at, at, logp, current, 1.0))
    rows, alone = share_rows(samples, max_row_tokens)
    assert sorted(map(id, [*(sample for row in rows for sample in row), *alone])) == sorted(map(id, samples))
    for row in rows:
        assert len(row) > 1
        assert len({sample.token_ids[: sample.num_prompt_tokens].tobytes() for sample in row}) == 1
        assert row_tokens(row) <= max_row_tokens + len(row)  # an empty rest counts as one token


def test_only_full_attention_can_share():
    sliding = {"sliding_window": 4096}
    mixed = {"layer_types": ["full_attention", "sliding_attention"]}
    for config, able in (({}, True), (mixed, False), (sliding, False), (sliding | {"use_sliding_window": False}, True)):
        text = SimpleNamespace(**config)
        assert can_share(SimpleNamespace(config=SimpleNamespace(get_text_config=lambda text=text: text))) is able


@pytest.mark.parametrize("algorithm", ["dapo", "gspo", "ppo_decoupled"])
def test_a_replica_shares_unless_it_is_told_not_to(replica, trajectory, algorithm):
    batch = [trajectory(n, lengths=(6, 4 + n)) for n in range(4)]
    for member in batch[1:]:
        member.token_ids[:6] = batch[0].token_ids[:6]
    settings = TrainSettings(algorithm=algorithm, lr=1e-3).model_dump()
    shared = replica(torch.float64, **settings)
    plain = replica(torch.float64, **settings | {"share_prompts": False})
    reports = [one.step([replace(member) for member in batch], 0) for one in (shared, plain)]
    assert [report.forwarded_tokens for report in reports] == [6 + 3 + 4 + 5 + 6, 4 * 6 + 3 + 4 + 5 + 6]
    for name, tensor in plain.weights().items():
        torch.testing.assert_close(shared.weights()[name], tensor, rtol=0, atol=1e-6)
