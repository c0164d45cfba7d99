"""A trajectory of several sequences counts as one, and each sequence scores as it would alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import factories
from libra.train import Sample, pack, sample_of
from libra.train.aggregation import Aggregation
from libra.train.logprobs import Scorer
from libra.train.minibatch_slices import from_tensors, to_tensors
from libra.train.mismatch import stretches
from libra.train.prompt_sharing import share_rows
from libra.train.row_packing import fill_rows
from libra.types import Trajectory


def alone(ids: list[int], actions: list[int]) -> Sample:
    at = np.array(actions)
    logp = np.zeros(len(at), np.float32)
    return Sample(np.array(ids[:-1]), at - 1, np.array(ids)[at], logp, np.ones(len(at), np.bool_), 1.0)


def trajectory() -> Trajectory:
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


def scored(scorer: Scorer, samples: list[Sample]) -> torch.Tensor:
    parts = []
    for batch in pack(samples, max_row_tokens=64, micro_batch_tokens=64):
        assert batch.packed == (len(batch.samples) > len(batch.token_ids_RW) or any(s.starts for s in batch.samples))
        parts.append(scorer.logp(*batch.inputs)[0])
    return torch.cat(parts)


def test_each_sequence_scores_as_it_does_alone(scorer):
    sample = sample_of(trajectory(), 0)
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
    sample, other = sample_of(trajectory(), 0), alone([20, 21, 22, 23], [2, 3])
    (batch,) = pack([sample, other], max_row_tokens=64, micro_batch_tokens=64)
    loss = torch.ones(batch.sequences.mask_N.shape[0])
    for mode, weight in (("seq-mean-token-mean", 2), ("token-mean", 7)):
        aggregation = Aggregation(mode)
        assert float(aggregation.weighted_sum(loss, batch.sequences)) == weight
        assert aggregation.weight_sum(num_tokens=7, num_sequences=batch.num_sequences) == weight


def test_branches_go_whole_to_other_ranks_and_share_no_prompt():
    sample = sample_of(trajectory(), 0)
    (back,) = from_tensors(to_tensors([sample]))
    assert back.starts == (6,) and back.token_ids.tolist() == sample.token_ids.tolist()
    rows, rest = share_rows([sample, sample], 64, fill_rows)
    assert not rows and len(rest) == 2
    assert [(begin, end) for begin, end in stretches(sample)] == [(0, 2), (2, 3), (3, 5)]
