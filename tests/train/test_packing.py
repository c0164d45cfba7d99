import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import factories
from libra.errors import TrainError
from libra.train import Sample, fill_rows, karmarkar_karp, pack, sample_of
from libra.train.hybrid_pool import from_tensors, to_tensors
from libra.train.logprobs import Scorer, check_packing
from libra.train.losses import Aggregation
from libra.train.mismatch import stretches
from libra.train.packing import share_rows

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def made(lengths):
    """Samples whose inputs and targets are numbers that occur nowhere else."""
    samples, number = [], 0
    for length in lengths:
        actions = np.arange(length)[:: 1 + number % 3]
        ids, logp = np.arange(number, number + length), -(number + actions).astype(np.float32)
        samples.append(Sample(ids, actions, 10_000 + number + actions, logp, actions % 2 == 0, float(number)))
        number += length
    return samples


def columns_of(sample):
    return sample.action_at, sample.target, sample.behaviour_logp, sample.current


@given(lengths=LENGTHS, max_row_tokens=st.integers(1, 60), micro_batch_tokens=st.integers(40, 200))
def test_packing_round_trip(lengths, max_row_tokens, micro_batch_tokens):
    samples = made(lengths)
    seen = {}
    layout = {"max_row_tokens": max_row_tokens, "micro_batch_tokens": micro_batch_tokens}
    for batch in pack(samples, **layout):
        assert batch.num_places <= micro_batch_tokens
        ids, positions = batch.token_ids_RW.flatten(), batch.position_ids_RW.flatten()
        columns = batch.action_at_N, batch.target_N, batch.behaviour_logp_N, batch.advantage_N, batch.current_N
        for at, target, logp, advantage, current in zip(*(each.tolist() for each in columns), strict=True):
            # the whole sequence up to here lies before it in the row, position by position
            position = int(positions[at])
            sequence = ids[at - position : at + 1].tolist()
            assert positions[at - position : at + 1].tolist() == list(range(position + 1))
            assert target not in seen
            seen[target] = (sequence, logp, advantage, current)
    expected = {
        int(target): (sample.token_ids[: at + 1].tolist(), float(logp), sample.advantage, bool(current))
        for sample in samples
        for at, target, logp, current in zip(*columns_of(sample), strict=True)
    }
    assert seen == expected


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


@pytest.mark.parametrize("change", [
    lambda t: t.behaviour_logprob.__setitem__(6, np.nan), lambda t: setattr(t, "advantage", np.inf),
    lambda t: t.is_action.__setitem__(0, True), lambda t: t.is_action.fill(False),
    lambda t: setattr(t, "token_ids", t.token_ids[:-1]),
])  # fmt: skip
def test_a_trajectory_that_cannot_be_trained_on_is_named(trajectory, change):
    bad = trajectory(3)
    change(bad)
    with pytest.raises(TrainError, match="train-0-0-3"):
        sample_of(bad, 0)


@given(lengths=st.lists(st.integers(1, 80), max_size=60), room=st.integers(1, 100))
def test_rows_hold_every_sequence_once_within_their_room(lengths, room):
    rows = fill_rows(lengths, room)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    sums = [sum(lengths[index] for index in row) for row in rows]
    assert all(total <= room or len(row) == 1 for row, total in zip(rows, sums, strict=True))
    assert sums == sorted(sums, reverse=True)
    assert all(a + b > room for i, a in enumerate(sums) for b in sums[i + 1 :])  # no two could have been one


def alone(ids, actions):
    at = np.array(actions)
    logp = np.zeros(len(at), np.float32)
    return Sample(np.array(ids[:-1]), at - 1, np.array(ids)[at], logp, np.ones(len(at), np.bool_), 1.0)


def branched():
    """Two sequences: the second has the first turn as context, and a turn of its own."""
    ids = np.array([5, 6, 7, 8, 9, 10, *[5, 6, 7, 8, 11, 12, 13]], np.int32)
    is_action = np.array([0, 0, 1, 1, 0, 1, *[0, 0, 0, 0, 0, 1, 1]], bool)
    versions = np.where(is_action, 0, -1).astype(np.int32)
    turns = [
        {"turn": turn, "prompt_tokens": prompt, "generated_tokens": new, "sequence_start": start}
        for turn, (prompt, new, start) in enumerate([(2, 2, 0), (5, 1, 0), (5, 2, 6)])
    ]
    columns = {"token_ids": ids, "is_action": is_action, "weight_version": versions, "kv_version": versions}
    logp = np.where(is_action, -0.5, 0).astype(np.float32)
    return factories.trajectory(lengths=(13,), **columns, behaviour_logprob=logp, turns=turns, advantage=1.0)


@pytest.fixture(scope="module")
def scorer(random_model):
    return Scorer(AutoModelForCausalLM.from_pretrained(random_model).eval())


def scored(scorer, samples):
    parts = []
    for batch in pack(samples, max_row_tokens=64, micro_batch_tokens=64):
        assert batch.packed == (len(batch.samples) > len(batch.token_ids_RW) or any(s.starts for s in batch.samples))
        parts.append(scorer.logp(*batch.inputs)[0])
    return torch.cat(parts)


def test_each_sequence_scores_as_it_does_alone(scorer):
    sample = sample_of(branched(), 0)
    assert sample.starts == (6,) and sample.turn_at.tolist() == [1, 4, 10]
    first, second = alone([5, 6, 7, 8, 9, 10], [2, 3, 5]), alone([5, 6, 7, 8, 11, 12, 13], [5, 6])
    expected = torch.cat([scored(scorer, [first]), scored(scorer, [second])])
    torch.testing.assert_close(scored(scorer, [sample]), expected, atol=1e-5, rtol=1e-5)
    other = alone([20, 21, 22, 23], [2, 3])
    both = scored(scorer, [other, sample])  # the longer one is first in the row
    torch.testing.assert_close(both[:5], expected, atol=1e-5, rtol=1e-5)
    joined = scored(scorer, [replace(sample, starts=())])
    assert not torch.allclose(joined[3:], expected[3:], atol=1e-3), "without the border the second would see the first"


def test_branches_do_not_count_more():
    sample, other = sample_of(branched(), 0), alone([20, 21, 22, 23], [2, 3])
    (batch,) = pack([sample, other], max_row_tokens=64, micro_batch_tokens=64)
    loss = torch.ones(batch.sequences.mask_N.shape[0])
    for mode, weight in (("seq-mean-token-mean", 2), ("token-mean", 7)):
        aggregation = Aggregation(mode)
        assert float(aggregation.weighted_sum(loss, batch.sequences)) == weight
        assert aggregation.weight_sum(num_tokens=7, num_sequences=batch.num_sequences) == weight


def test_branches_go_whole_to_other_ranks_and_share_no_prompt():
    sample = sample_of(branched(), 0)
    (back,) = from_tensors(to_tensors([sample]))
    assert back.starts == (6,) and back.token_ids.tolist() == sample.token_ids.tolist()
    rows, rest = share_rows([sample, sample], 64)
    assert not rows and len(rest) == 2
    assert [(begin, end) for begin, end in stretches(sample)] == [(0, 2), (2, 3), (3, 5)]


@st.composite
def weights_and_parts(draw):
    num_parts = draw(st.integers(1, 8))
    return draw(st.lists(st.integers(0, 5000), min_size=num_parts, max_size=60)), num_parts


def test_sums_are_verls(repository):
    cases = json.loads((repository / "tests" / "golden" / "verl_karmarkar_karp.json").read_text())["cases"]
    for case in (case for case in cases if not case["equal_size"]):
        weights = case["seqlens"]
        parts = karmarkar_karp(weights, case["k"])
        assert sorted(sum(weights[index] for index in part) for part in parts) == sorted(case["kk_sums"])


@given(given=weights_and_parts())
def test_every_item_is_in_one_part_and_none_is_empty(given):
    weights, num_parts = given
    parts = karmarkar_karp(weights, num_parts)
    assert len(parts) == num_parts
    assert all(parts)
    assert sorted(index for part in parts for index in part) == list(range(len(weights)))


def test_parts_that_cannot_be_are_refused():
    with pytest.raises(TrainError):
        karmarkar_karp([1, 2], 3)
