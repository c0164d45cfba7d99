from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from libra.errors import TrainError
from libra.train import Sample, fill_rows, fill_rows_mffd, pack, sample_of
from libra.train.logprobs import Scorer, check_packing


def made(lengths: list[int]) -> list[Sample]:
    """Samples whose inputs and targets are numbers that occur nowhere else."""
    samples, number = [], 0
    for length in lengths:
        actions = np.arange(length)[:: 1 + number % 3]
        samples.append(
            Sample(
                token_ids=np.arange(number, number + length),
                action_at=actions,
                target=10_000 + number + actions,
                behaviour_logp=-(number + actions).astype(np.float32),
                current=actions % 2 == 0,
                advantage=float(number),
            )
        )
        number += length
    return samples


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


@pytest.mark.parametrize("fill", [fill_rows, fill_rows_mffd])
@given(lengths=LENGTHS, max_row_tokens=st.integers(1, 60), micro_batch_tokens=st.integers(40, 200))
def test_packing_round_trip(fill, lengths, max_row_tokens, micro_batch_tokens):
    samples = made(lengths)
    seen = {}
    layout = {"max_row_tokens": max_row_tokens, "micro_batch_tokens": micro_batch_tokens, "fill": fill}
    for batch in pack(samples, **layout):
        assert batch.num_places <= micro_batch_tokens
        ids, positions = batch.token_ids_RW.flatten(), batch.position_ids_RW.flatten()
        for at, target, logp, advantage, current in zip(
            batch.action_at_N.tolist(),
            batch.target_N.tolist(),
            batch.behaviour_logp_N.tolist(),
            batch.advantage_N.tolist(),
            batch.current_N.tolist(),
            strict=True,
        ):
            # the whole sequence up to here lies before it in the row, position by position
            position = int(positions[at])
            sequence = ids[at - position : at + 1].tolist()
            assert positions[at - position : at + 1].tolist() == list(range(position + 1))
            assert target not in seen
            seen[target] = (sequence, logp, advantage, current)
    expected = {
        int(target): (sample.token_ids[: at + 1].tolist(), float(logp), sample.advantage, bool(current))
        for sample in samples
        for at, target, logp, current in zip(
            sample.action_at, sample.target, sample.behaviour_logp, sample.current, strict=True
        )
    }
    assert seen == expected


@pytest.mark.parametrize("max_row_tokens", [1, 64, 200])
def test_packed_log_probabilities_are_those_of_each_sequence_alone(replica, batch, score, max_row_tokens):
    model = replica(torch.float64)
    samples = [sample_of(trajectory, 0) for trajectory in batch]
    alone = torch.cat(score(model, samples))
    targets = torch.cat([torch.as_tensor(sample.behaviour_logp) for sample in samples])
    scored = {float(behaviour): float(logp) for behaviour, logp in zip(targets, alone, strict=True)}
    rows_shared = 0
    for micro in pack(samples, max_row_tokens=max_row_tokens, micro_batch_tokens=220):
        logp_N, entropy_N = model.gradient.scorer.logp(
            micro.token_ids_RW, micro.position_ids_RW, micro.action_at_N, micro.target_N
        )
        rows_shared += micro.num_sequences - len(micro.token_ids_RW)
        expected = torch.tensor([scored[float(value)] for value in micro.behaviour_logp_N], dtype=torch.float64)
        torch.testing.assert_close(logp_N.detach(), expected, rtol=0, atol=1e-9)
        assert (entropy_N > 0).all()
    assert (rows_shared > 0) == (max_row_tokens > 1)


def test_a_model_that_ignores_restarts_is_refused(replica):
    model = replica().model
    check_packing(Scorer(model), 1e-4)
    forward = model.model.forward
    # what an architecture without support for packing does: attention over the whole row
    mask = torch.ones(12, 12, dtype=torch.bool).tril()
    model.model.forward = lambda **inputs: forward(
        **{**inputs, "attention_mask": mask[None, None, : inputs["input_ids"].shape[1], : inputs["input_ids"].shape[1]]}
    )
    with pytest.raises(TrainError, match="max_row_tokens"):
        check_packing(Scorer(model), 1e-4)


def test_only_what_the_loss_needs_is_forwarded_and_current_tokens_have_their_own_kv(trajectory):
    sample = sample_of(trajectory(0, lengths=(5, 4, 3, 6, 9)), 0)
    assert (sample.num_tokens, sample.num_actions) == (5 + 4 + 3 + 6 - 1, 10)
    made = trajectory(0, version=4)
    made.kv_version[6] = 3
    made.weight_version[5] = 3
    assert sample_of(made, 4).current.tolist() == [False, False] + [True] * 8
    assert not sample_of(made, 5).current.any()


def test_a_sequence_longer_than_a_micro_batch_is_refused():
    with pytest.raises(TrainError, match="micro_batch_tokens"):
        pack(made([9]), max_row_tokens=20, micro_batch_tokens=8)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.behaviour_logprob.__setitem__(6, np.nan),
        lambda t: setattr(t, "advantage", np.inf),
        lambda t: t.is_action.__setitem__(0, True),
        lambda t: t.is_action.fill(False),
        lambda t: setattr(t, "token_ids", t.token_ids[:-1]),
    ],
)
def test_a_trajectory_that_cannot_be_trained_on_is_named(trajectory, change):
    bad = trajectory(3)
    change(bad)
    with pytest.raises(TrainError, match="train-0-0-3"):
        sample_of(bad, 0)
