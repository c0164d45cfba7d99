import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.rollout.slot_table import Job
from libra.rollout.speculation import (
    FIRST_TRIED_AFTER,
    LENGTHS,
    MAX_GROUPS,
    MOST_ROWS,
    SUFFIXES,
    TRIED_AFTER,
    DraftLength,
    Drafts,
    GroupDrafts,
    accepted,
)

TOKENS = st.integers(0, 3)


def test_a_draft_follows_what_a_sibling_of_its_group_wrote():
    drafts = GroupDrafts()
    drafts.extend("a", [1, 2, 3, 4, 5, 6, 7])
    assert drafts.propose([9, 3, 4], 8) == [5, 6, 7]
    assert drafts.propose([4], 8) == drafts.propose([4, 9], 8) == []
    drafts.extend("b", [3, 4, 8, 3, 4, 8])
    assert drafts.propose([3, 4], 1) == [8]  # twice, and 5 once
    assert drafts.propose([1, 2, 3, 4], 2) == [5, 6]  # the longer suffix knows better
    groups = Drafts()
    groups.of("one").extend("a", [1, 2, 3])
    assert groups.of("one").propose([1, 2], 1) == [3] and groups.of("two").propose([1, 2], 1) == []
    for index in range(MAX_GROUPS):
        groups.of(f"more {index}")
    assert groups.of("one").propose([1, 2], 1) == []  # the oldest is forgotten


@given(st.lists(st.lists(TOKENS, max_size=40), max_size=4), st.lists(TOKENS, min_size=2, max_size=12))
def test_a_proposal_is_the_most_frequent_token_after_the_longest_known_suffix(rows, tail):
    drafts = GroupDrafts()
    for index, row in enumerate(rows):
        drafts.extend(str(index), row)
    expected = []
    shared = [0]  # first tokens that are those of the first row, which were counted with it
    for row in rows[1:]:
        shared.append(len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(rows[0], row, strict=False)))))
    for length in (length for length in SUFFIXES if length <= len(tail)):
        suffix = tail[-length:]
        begins = [(row, max(length, begin)) for row, begin in zip(rows, shared, strict=False)]
        seen = [row[i] for row, at in begins for i in range(at, len(row)) if row[i - length : i] == suffix]
        if seen:
            expected = [min(set(seen), key=lambda token: (-seen.count(token), token))]
            break
    assert drafts.propose(tail, 1) == expected


def test_sampled_tokens_count_up_to_the_first_that_differs_or_stops():
    assert accepted([5, 6], [5, 6, 7], set()) == 3
    assert accepted([5, 6], [5, 9, 7], set()) == 2
    assert accepted([5, 6], [4, 6, 7], set()) == 1
    assert accepted([5, 6], [5, 6, 7], {5}) == 1
    assert accepted([], [4], {4}) == 1


def test_the_length_is_the_one_that_was_fastest_and_others_are_tried_again():
    choice, seen = DraftLength(), []
    seconds, gained = {0: 1.0, 2: 1.1, 4: 1.3, 8: 2.5}, {0: 1.0, 2: 2.0, 4: 2.8, 8: 3.0}
    for _ in range(400):
        length = choice.choose(2)
        seen.append(length)
        choice.measured(2, length, 2 * length, round(2 * gained[length]), seconds[length])
    assert not any(seen[:FIRST_TRIED_AFTER]) and seen[FIRST_TRIED_AFTER] == LENGTHS[1]
    assert set(seen[: len(LENGTHS) * FIRST_TRIED_AFTER]) == set(LENGTHS)
    assert seen.count(4) > 0.85 * len(seen)
    tries = [step for step, length in enumerate(seen) if length == 8]
    waits = [later - before for before, later in itertools.pairwise(tries[1:])]
    assert TRIED_AFTER <= waits[0] <= TRIED_AFTER + 1  # another length was due in the same step
    assert all(later >= 2 * before - 2 for before, later in itertools.pairwise(waits))
    for _ in range(60):
        choice.measured(2, 8, 16, 18, 0.5)  # now it is the fastest
    assert [choice.choose(2) for _ in range(40)].count(8) > 30
    assert choice.choose(MOST_ROWS + 1) == 0
    assert set(choice.by_rows) == {2}
    assert choice.by_rows[2].accepted == choice.by_rows[2].generated - 2 * choice.by_rows[2].steps


def test_drafts_that_gain_little_or_are_not_found_are_not_made():
    choice = DraftLength()
    for _ in range(300):
        length = choice.choose(4)
        choice.measured(4, length, 0, 4, 1.0 if length == 0 else 1.1)  # nothing was found, which took time
    seen = []
    for _ in range(300):
        seen.append(choice.choose(3))
        choice.measured(3, seen[-1], 3 * seen[-1], 3, 1.0 if seen[-1] == 0 else 0.97)  # within the margin
    assert seen.count(0) > 0.95 * len(seen)


@pytest.mark.parametrize(("family", "fused"), [("qwen3", True), ("qwen2", False)])
def test_the_tokens_are_the_same_with_and_without(family, fused, make_batch, make_request, serve_all):
    plain, drafting = (make_batch(family, slots=6, fused=fused, speculate=speculate) for speculate in (False, True))
    rng = np.random.default_rng(0)
    for round_ in range(6):
        context = rng.integers(0, 48, int(rng.integers(2, 30)))
        requests = [
            make_request(
                f"{round_}-{sample}", context=context, new=int(rng.integers(1, 40)), seed=sample // 2, group=str(round_),
                temperature=(0.0, 0.3, 1.0)[round_ % 3], top_p=(1.0, 0.8)[round_ % 2], stop_ids=(7,),
            )
            for sample in range(8)
        ]  # fmt: skip
        expected, got = serve_all(plain, *requests), serve_all(drafting, *requests)
        assert expected.keys() == got.keys()
        for name, output in expected.items():
            assert output.token_ids.tolist() == got[name].token_ids.tolist()
            assert output.stop_reason == got[name].stop_reason
            np.testing.assert_allclose(output.logprobs, got[name].logprobs, atol=1e-4)
    stats = drafting.stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert stats.generated_tokens == plain.stats().generated_tokens and stats.steps < plain.stats().steps
    assert plain.stats().drafted_tokens == 0


def test_a_next_turn_uses_no_kv_of_rejected_drafts(make_batch, make_request, serve_all):
    plain, drafting = make_batch(), make_batch(speculate=True)
    outputs = []
    for batch in (plain, drafting):
        asked = [make_request(f"t{n}", length=9, new=25, seed=3, temperature=0.5, group="g") for n in range(3)]
        first = serve_all(batch, *asked)
        found = []
        for name in sorted(first):
            context = np.concatenate([make_request(name, length=9).context_ids, first[name].token_ids, [1, 2, 3]])
            found.append(make_request(name, context=context, new=25, seed=4, turn=1, temperature=0.5, group="g"))
        second = serve_all(batch, *found)
        outputs.append([second[name].token_ids.tolist() for name in sorted(second)])
        assert all(output.cached_tokens > 20 for output in second.values())
    assert outputs[0] == outputs[1] and drafting.stats().accepted_tokens > 0


def test_new_weights_in_mid_turn_and_requests_without_a_group(make_batch, make_request, make_model, serve_all):
    batch = make_batch(speculate=True)
    requests = [make_request(f"n{n}", new=40, seed=n, temperature=0.0, group="g") for n in range(2)]
    for ticket, request in enumerate(requests):
        batch.submit(Job(ticket, request, 0.0))
    for _ in range(6):
        batch.step()
    batch.load(1, make_model("qwen3", 1))
    for output in serve_all(batch).values():
        versions = output.weight_versions
        assert len(versions) == 40 and set(versions) == {0, 1} and (np.diff(versions) >= 0).all()
    before = batch.stats().drafted_tokens
    serve_all(batch, make_request("alone", new=30, temperature=0.0))
    assert batch.stats().drafted_tokens == before
