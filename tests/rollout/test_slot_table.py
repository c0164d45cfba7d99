from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from libra.errors import ContextOverflow, EngineError
from libra.policy.trajectory_table import OVERDUE
from libra.rollout.engine import check_request, packed_priority
from libra.rollout.slot_table import (
    QueuedJob,
    RequestQueue,
    draw_further,
    draw_uniforms,
    further_uniforms,
    sample,
)
from libra.types import TurnRequest

PARTS = (st.integers(-1, 2**20 - 3), st.integers(-1, 2**10 - 3), st.integers(-1, 2**30 - 3))
PRIORITIES = st.tuples(*PARTS).flatmap(lambda whole: st.integers(0, 3).map(lambda size: whole[:size]))


def request(name="a", priority=(0,), **fields):
    return TurnRequest(name, 0, np.arange(4, dtype=np.int32), fields.pop("new", 2), priority=priority, **fields)


@given(PRIORITIES, PRIORITIES)
def test_one_number_orders_priorities_as_the_tuples_do(one, other):
    assert (packed_priority(one) < packed_priority(other)) == (one < other)
    assert 0 <= packed_priority(one) < 2**60
    assert packed_priority((3, OVERDUE, 7)) < packed_priority((3, 0, 0)) < packed_priority((4, OVERDUE, 0))


@pytest.mark.parametrize("priority", [(1, 2, 3, 4), (-2,), (0, 2**10), (2**20,), (0, 0, 2**30)])
def test_a_priority_that_one_number_cannot_hold_is_refused(priority):
    with pytest.raises(EngineError):
        packed_priority(priority)


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=40), st.randoms())
def test_the_queue_is_a_sorted_list_with_places(slots, jobs, random):
    queue, expected, running = RequestQueue(slots), [], set()
    for ticket, (priority, ends) in enumerate(jobs):
        queue.push(QueuedJob(ticket, request(f"t{ticket}", (priority,)), 0.0))
        expected.append((priority, ticket))
        if ends == 1 and running:  # one that runs ends
            queue.end(queue.running[running.pop()])
        elif ends == 2:  # one that waits is taken back
            gone = random.choice(sorted(expected))
            expected.remove(gone)
            queue.end(queue.waiting[f"t{gone[1]}"])
        started = [each.ticket for each in queue.start()]
        due = sorted(expected)[: slots - len(running)]
        assert started == [number for _, number in due]
        expected = [entry for entry in expected if entry not in due]
        running |= {f"t{number}" for number in started}
        assert len(queue.running) == len(running) <= slots
        assert set(queue.running) == running
    assert {each.name for each in queue.jobs()} == running | {f"t{number}" for _, number in expected}


def test_a_trajectory_has_one_job():
    queue = RequestQueue(1)
    first = QueuedJob(0, request("a"), 0.0)
    queue.push(first)
    with pytest.raises(EngineError):
        queue.push(QueuedJob(1, request("a"), 0.0))
    assert list(queue.start()) == [first]
    with pytest.raises(EngineError):
        queue.push(QueuedJob(2, request("a"), 0.0))
    queue.end(first)
    assert queue.find("a") is None
    queue.push(QueuedJob(3, request("a"), 0.0))


@pytest.mark.parametrize("fields", [{"new": 0}, {"new": 13}, {"temperature": -1.0}, {"top_p": 0.0}, {"seed": -1}])
def test_what_no_engine_serves_is_refused(fields):
    with pytest.raises(ContextOverflow if fields == {"new": 13} else EngineError):
        check_request(request(**fields), max_context_tokens=16, vocab_size=10)
    check_request(request(new=12), max_context_tokens=16, vocab_size=10)
    with pytest.raises(EngineError):
        check_request(request(), max_context_tokens=16, vocab_size=3)


def test_tokens_follow_the_distribution():
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0])
    uniforms = torch.from_numpy(draw_uniforms(1, 40_000))
    tokens, logprobs = sample(logits.expand(40_000, -1), uniforms, None, None)
    expected = torch.softmax(logits, -1)
    got = torch.bincount(tokens, minlength=4) / 40_000
    assert (got - expected).abs().max() < 0.01  # four standard errors at the middle of the range
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1)[tokens])


def test_each_row_has_its_own_temperature_and_zero_is_greedy():
    logits = torch.tensor([[0.0, 2.0, 1.9]]).expand(3, -1)
    uniforms = torch.tensor([0.01, 0.01, 0.01])
    tokens, logprobs = sample(logits, uniforms, torch.tensor([0.0, 1.0, 0.01]), None)
    assert tokens.tolist() == [1, 0, 1]
    torch.testing.assert_close(logprobs[0], torch.log_softmax(logits[0], -1)[1])
    assert logprobs[2] > -1e-3  # after temperature, not before


def test_top_p_keeps_the_fewest_tokens_that_reach_it_and_renormalises():
    logits = torch.log(torch.tensor([[0.1, 0.5, 0.05, 0.35]])).expand(1000, -1)
    uniforms = torch.linspace(0, 1 - 2**-24, 1000)
    tokens, logprobs = sample(logits, uniforms, None, torch.full((1000,), 0.6))
    assert set(tokens.tolist()) == {1, 3}
    torch.testing.assert_close(logprobs.exp()[0], torch.tensor(0.5 / 0.85))
    whole, _ = sample(logits, uniforms, None, torch.ones(1000))
    assert set(whole.tolist()) == {0, 1, 2, 3}
    _, greedy = sample(logits[:1], torch.tensor([0.5]), torch.tensor([0.0]), torch.tensor([0.1]))
    torch.testing.assert_close(greedy, torch.tensor([0.5]).log())  # not of the rest alone


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24])
def test_no_uniform_number_reaches_a_token_without_probability(uniform):
    logits = torch.full((1, 1000), -torch.inf)
    logits[0, 300:700] = torch.randn(400, generator=torch.Generator().manual_seed(0))
    token, logprob = sample(logits, torch.tensor([uniform]), None, None)
    assert 300 <= token.item() < 700
    assert torch.isfinite(logprob).all()


def test_a_seed_names_its_numbers_and_a_longer_request_begins_with_the_same():
    assert draw_uniforms(3, 8).tolist() == draw_uniforms(3, 20)[:8].tolist()
    assert draw_uniforms(3, 8).tolist() != draw_uniforms(4, 8).tolist()
    assert draw_uniforms(3, 8).dtype == np.float32


@pytest.mark.parametrize("speculate", [False, True])
def test_further_draws_change_no_token_and_have_their_log_probabilities(
    speculate, make_batch, make_model, make_request, reference_logprobs, serve_all
):
    requests = [make_request(f"d{n}", length=9, new=12, seed=n, temperature=0.8, group="g") for n in (1, 2)]

    def outputs(asked):
        found = serve_all(make_batch(speculate=speculate), *asked)
        return [found[request.trajectory_id] for request in asked]

    plain = outputs(requests)
    with_draws = outputs([replace(requests[0], draws=5), requests[1]])
    for one, other in zip(plain, with_draws, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist() and one.logprobs.tolist() == other.logprobs.tolist()
    assert with_draws[1].drawn is None and plain[0].drawn is None
    drawn = with_draws[0].drawn
    assert drawn.token_ids.shape == drawn.logprobs.shape == (12, 5)
    context, ids = requests[0].context_ids, with_draws[0].token_ids
    for place in range(12):
        before = np.concatenate([context, ids[:place]])
        for token, logp in zip(drawn.token_ids[place], drawn.logprobs[place], strict=True):
            (expected,) = reference_logprobs(make_model("qwen3"), before, np.array([token]), 0.8)
            assert logp == pytest.approx(expected, abs=1e-4)


def test_draws_follow_the_distribution_and_go_on_in_the_next_part_of_a_turn():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    uniforms = np.stack([further_uniforms(3, place, 50) for place in range(200)]).reshape(1, -1)
    ids, logp = draw_further(logits, torch.from_numpy(uniforms), torch.tensor([0.5]))
    expected = (logits / 0.5).softmax(-1)[0]
    np.testing.assert_allclose(np.bincount(ids[0], minlength=4) / ids.numel(), expected, atol=0.02)
    assert torch.allclose(logp[0], expected.log()[ids[0]], atol=1e-6)
    one, again, other = (further_uniforms(3, place, 4).tolist() for place in (7, 7, 8))
    assert one == again != other
