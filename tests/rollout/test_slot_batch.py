import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import _disable_current_modes

from libra.errors import EngineError, ModelError
from libra.rollout import attention as slot_cache
from libra.rollout import slot_batch as batch_module
from libra.rollout.attention import SLOT_ATTENTION, SlotKV
from libra.rollout.forward import Forward
from libra.rollout.slot_batch import SlotBatch
from libra.rollout.slot_table import FREE, RETAINED, RUNNING, Job
from libra.rollout.weight_loading import load_causal_lm
from libra.types import StopReason
from pretended_gpu import PretendedTensor, pretended_gpu

CASES = [("qwen3", True), ("qwen2", True), ("llama", True), ("qwen3", False), ("qwen2", False)]
"""Families and whether their passes are fused."""
ACTIONS = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 6), st.integers(1, 12), st.integers(1, 6), st.integers(0, 2)),
    st.tuples(st.sampled_from(["abort", "forget"]), st.integers(0, 6)),
    st.tuples(st.just("step"), st.integers(1, 4)),
)


@pytest.fixture
def shared_batch(make_batch):
    """One batch for all examples of a property: each example leaves it empty. Its KV is less than three requests may need."""
    return make_batch(slots=3, max_context_tokens=30, kv_tokens=36)


def submit(batch, *requests):
    for request in requests:
        batch.check(request)
        submit.tickets += 1
        batch.submit(Job(submit.tickets, request, 0.0))


submit.tickets = 0


def drain(batch, most_steps=2000):
    """Step until nothing is left, checking the invariants; outputs by trajectory, in order of their end."""
    outputs = {}
    while batch.has_work:
        most_steps -= 1
        assert most_steps, "the batch does not come to an end"
        for job, output in batch.step():
            assert job.request.trajectory_id not in outputs
            outputs[job.request.trajectory_id] = output
        check_invariants(batch)
    return outputs


def answered(batch, *requests):
    submit(batch, *requests)
    return drain(batch)


def check_invariants(batch):
    table, shared = batch.table, batch.shared
    for slot, state in enumerate(table.state):
        assert (table.jobs[slot] is not None) == (state == RUNNING)
        assert bool(table.owner[slot]) == (state != FREE)
        if state != FREE:
            assert table.slot_of[table.owner[slot]] == slot
            assert table.cached[slot] < table.known[slot]
        if state == RUNNING:
            assert table.jobs[slot].slot == slot
            assert batch.queue.running[table.owner[slot]] is table.jobs[slot]
    assert shared._context_of.keys() | set(shared.following) <= set(table.slot_of)
    assert not shared._context_of.keys() & set(shared.following)
    assert all(table.cached[table.slot_of[name]] == 0 for name in shared.following)
    assert len(table.slot_of) == int((table.state != FREE).sum())
    assert len(batch.queue.running) == int((table.state == RUNNING).sum())
    running, retained = table.state == RUNNING, table.state == RETAINED
    reserved = (table.known - table.generated + table.sampling.limit)[running].sum()
    assert reserved + table.known[retained].sum() <= batch.kv_tokens


@pytest.mark.parametrize(("family", "fused"), CASES)
def test_ragged_prompts_are_answered_as_by_plain_transformers(
    family, fused, make_batch, make_request, make_model, reference, reference_logprobs
):
    greedy = [make_request(f"g{n}", length=n, new=12, temperature=0.0) for n in (1, 17, 40)]
    drawn = [make_request(f"l{n}", length=n, new=20, seed=n, temperature=t) for n, t in ((3, 1.0), (30, 1.0), (8, 0.7))]
    batch = make_batch(family, slots=6, fused=fused)
    assert (batch.forward.fused is not None) == fused
    outputs = answered(batch, *greedy, *drawn)
    for request in greedy:
        ids = torch.from_numpy(request.context_ids.astype(np.int64))[None]
        expected = reference(make_model(family)).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
        )
        assert outputs[request.trajectory_id].token_ids.tolist() == expected[0, ids.shape[1] :].tolist()
    for request in greedy + drawn:
        output, temperature = outputs[request.trajectory_id], request.temperature or 1.0
        assert len(output.token_ids) == len(output.logprobs) == len(output.weight_versions) == request.max_new_tokens
        assert output.stop_reason is StopReason.LENGTH
        expected = reference_logprobs(make_model(family), request.context_ids, output.token_ids, temperature)
        np.testing.assert_allclose(output.logprobs, expected, atol=1e-4)
        assert len(set(output.token_ids.tolist())) > 1 or request in greedy


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_second_turn_on_retained_kv_equals_one_from_scratch(family, make_batch, make_request):
    batch, fresh = make_batch(family), make_batch(family)
    first = make_request("a", length=12, new=7, seed=1)
    submit(batch, first, make_request("other", length=5, new=30))
    context = np.concatenate([first.context_ids, drain(batch)["a"].token_ids, [4, 5, 6]])
    second = make_request("a", context=context, turn=1, new=15, seed=2)
    before = batch.counters.prefilled_tokens
    warm, cold = answered(batch, second)["a"], answered(fresh, second)["a"]
    assert warm.token_ids.tolist() == cold.token_ids.tolist()
    np.testing.assert_allclose(warm.logprobs, cold.logprobs, atol=1e-5)
    assert (warm.cached_tokens, cold.cached_tokens) == (12 + 7 - 1, 0)
    # the last generated token, whose KV was never needed, and three new
    assert batch.counters.prefilled_tokens - before == 4


def test_samples_of_a_group_compute_their_prompt_once(make_batch, make_request, make_model, reference_logprobs):
    batch = make_batch(slots=6)
    context = make_request("prompt", length=17).context_ids
    siblings = [make_request(f"s{n}", context=context, new=9, seed=n) for n in range(4)]
    submit(batch, *siblings[:3], make_request("other", length=5, new=30))
    batch.step()
    submit(batch, siblings[3])
    outputs = drain(batch)
    assert batch.counters.prefilled_tokens == 17 + 5
    assert [outputs[f"s{n}"].cached_tokens for n in range(4)] == [0, 16, 16, 16]
    assert len({tuple(outputs[f"s{n}"].token_ids) for n in range(4)}) == 4
    for request in siblings:
        output = outputs[request.trajectory_id]
        expected = reference_logprobs(make_model(), context, output.token_ids)
        np.testing.assert_allclose(output.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("interruption", ["abort", "load"])
def test_who_waits_for_a_siblings_prompt_gets_right_answers_when_it_goes(
    interruption, make_batch, make_request, make_model, reference_logprobs, monkeypatch
):
    monkeypatch.setattr(batch_module, "PREFILL_TOKENS_PER_STEP", 8)  # the prompt takes three steps
    batch = make_batch()
    context = make_request("prompt", length=20).context_ids
    submit(batch, *(make_request(f"s{n}", context=context, new=6, seed=n) for n in range(3)))
    batch.step()
    if interruption == "abort":
        batch.abort("s0")
    else:
        batch.load(1, make_model("qwen3", seed=1))
    outputs = drain(batch)
    assert sorted(outputs) == ["s0", "s1", "s2"][interruption == "abort" :]
    for output in outputs.values():
        weights = make_model("qwen3", seed=int(interruption == "load"))
        np.testing.assert_allclose(output.logprobs, reference_logprobs(weights, context, output.token_ids), atol=1e-4)


def test_only_the_part_of_the_cache_that_equals_the_context_is_used(make_batch, make_request):
    batch, fresh = make_batch(), make_batch()
    first = make_request("a", length=12, new=7)
    answered(batch, first)
    changed = first.context_ids.copy()
    changed[5] = (changed[5] + 1) % 48
    for context, cached in ((changed, 5), (changed[:4], 3)):
        request = make_request("a", context=context, new=9, seed=3)
        warm, cold = answered(batch, request)["a"], answered(fresh, request)["a"]
        fresh.forget("a")
        assert warm.cached_tokens == cached
        assert warm.token_ids.tolist() == cold.token_ids.tolist()


def test_eviction_takes_the_least_recently_used_and_spares_who_waits(make_batch, make_request):
    batch = make_batch(slots=3)
    for name in ("old", "wanted", "young"):
        answered(batch, make_request(name, new=2))
    wanted = batch.table.slot_of["wanted"]
    batch.table.used_at[wanted] = 0  # the oldest of all, but its next turn is already in the queue
    submit(batch, make_request("new1", new=2, priority=(0,)), make_request("wanted", new=2, priority=(1,)))
    batch.step()
    assert set(batch.table.slot_of) == {"new1", "wanted", "young"}
    drain(batch)


def test_kv_is_held_to_its_budget_by_waiting_and_by_making_retained_contexts_way(make_batch, make_request):
    batch = make_batch(slots=4, max_context_tokens=40, kv_tokens=60)
    for name in ("first", "second"):
        answered(batch, make_request(name, length=10, new=10))
    assert set(batch.table.slot_of) == {"first", "second"}  # 40 tokens are retained
    submit(batch, make_request("third", length=20, new=15), make_request("fourth", length=10, new=20))
    batch.step()
    assert set(batch.table.slot_of) == {"second", "third"}
    assert list(batch.queue.waiting) == ["fourth"]  # 35 + 30 would not fit
    outputs = drain(batch)
    assert {name: len(output.token_ids) for name, output in outputs.items()} == {"third": 15, "fourth": 20}
    roomy = make_batch(slots=4, max_context_tokens=40)
    assert (
        answered(roomy, make_request("fourth", length=10, new=20))["fourth"].token_ids.tolist()
        == outputs["fourth"].token_ids.tolist()
    )


def test_long_prompts_are_prefilled_in_chunks_within_the_budget(make_batch, make_request, monkeypatch):
    whole, parts = make_batch(), make_batch()
    requests = [make_request(f"p{n}", length=n, new=6, seed=n) for n in (50, 41, 3, 1)]
    submit(parts, *requests)
    expected = answered(whole, *requests)
    monkeypatch.setattr(batch_module, "PREFILL_TOKENS_PER_STEP", 16)
    fed = []
    while parts.has_work:
        before = parts.counters.prefilled_tokens
        for job, output in parts.step():
            assert output.token_ids.tolist() == expected[job.request.trajectory_id].token_ids.tolist()
            fed.append(job.request.trajectory_id)
        assert parts.counters.prefilled_tokens - before <= 16
    assert sorted(fed) == sorted(expected)
    assert parts.counters.prefilled_tokens == whole.counters.prefilled_tokens == 50 + 41 + 3


def test_new_weights_take_over_between_two_tokens(make_batch, make_request, make_model, reference_logprobs):
    batch = make_batch()
    answered(batch, make_request("kept", new=2))
    requests = [make_request(f"v{n}", length=n, new=14, seed=n) for n in (4, 20)]
    submit(batch, *requests)
    for _ in range(5):
        assert batch.step() == []
    batch.load(3, make_model("qwen3", seed=1))
    assert "kept" not in batch.table.slot_of
    outputs = drain(batch)
    for request in requests:
        output = outputs[request.trajectory_id]
        assert output.weight_versions.tolist() == output.kv_versions.tolist() == [0] * 5 + [3] * 9
        old = reference_logprobs(make_model("qwen3", seed=0), request.context_ids, output.token_ids)
        new = reference_logprobs(make_model("qwen3", seed=1), request.context_ids, output.token_ids)
        np.testing.assert_allclose(output.logprobs[:5], old[:5], atol=1e-4)
        np.testing.assert_allclose(output.logprobs[5:], new[5:], atol=1e-4)
        assert np.abs(old - new).max() > 0.1


def test_scattered_slots_are_brought_together_with_their_kv(make_batch, make_request):
    alone = make_batch(slots=1)
    keep = make_request("keep", length=11, new=40, seed=9)
    expected = answered(alone, keep)["keep"]
    batch = make_batch(slots=16)
    submit(batch, *(make_request(f"short{n}", new=2 + n % 3) for n in range(15)), keep)
    spans = []
    while batch.has_work:
        for job, output in batch.step():
            if job.request.trajectory_id == "keep":
                assert output.token_ids.tolist() == expected.token_ids.tolist()
                np.testing.assert_allclose(output.logprobs, expected.logprobs, atol=1e-5)
                spans.append("keep")
        check_invariants(batch)
        if len(batch.table.running) == 1 and not batch.table.changed:
            spans.append(int(batch.table.running[0]))
    assert spans[0] < 15
    assert spans[-1] == "keep"
    follow = np.concatenate([keep.context_ids, expected.token_ids, [1]])
    again = make_request("keep", context=follow, new=2), make_request("short3", length=3, new=2)
    assert answered(batch, *again)["keep"].cached_tokens == 50


def test_broken_weights_are_an_error_and_leave_no_trace(make_batch, make_request):
    batch, sound = make_batch(), make_batch()
    request = make_request("n", new=6)
    submit(batch, request)
    batch.step()
    weight = next(batch.model.parameters())
    saved = weight.clone()
    weight.fill_(float("nan"))
    with pytest.raises(EngineError):
        batch.step()
    assert [job.request.trajectory_id for job in batch.drop_all()] == ["n"]
    weight.copy_(saved)
    one, other = answered(batch, request)["n"], answered(sound, request)["n"]
    assert one.token_ids.tolist() == other.token_ids.tolist()


def test_a_leader_whose_next_turn_differs_from_what_it_leads_is_followed_by_nobody(make_batch, make_request):
    batch = make_batch()
    prompt = make_request("prompt", length=9).context_ids
    answered(batch, make_request("first", context=prompt, new=2))
    both = make_request("first", context=prompt[:5], new=2), make_request("second", context=prompt, new=2)
    assert set(answered(batch, *both)) == {"first", "second"}


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=st.lists(ACTIONS, min_size=5, max_size=40))
def test_every_request_ends_exactly_once_whatever_happens(actions, shared_batch, make_request):
    batch = shared_batch
    asked, ended = [], []
    for action in actions:
        name = f"t{action[1]}"
        if action[0] == "ask":
            busy = batch.queue.find(name) is not None
            context = make_request(f"group {action[1] % 2}", length=action[2]).context_ids
            request = make_request(name, context=context, new=action[3], priority=(action[4],))
            if busy:
                with pytest.raises(EngineError):
                    submit(batch, request)
            else:
                submit(batch, request)
                asked.append(name)
        elif action[0] == "abort":
            answer = batch.abort(name)
            assert name not in batch.table.slot_of
            ended += [] if answer is None else [answer[0].request.trajectory_id]
        elif action[0] == "forget":
            batch.forget(name)
            assert name not in batch.table.slot_of or batch.table.state[batch.table.slot_of[name]] == RUNNING
        else:
            for _ in range(action[1]):
                ended += [job.request.trajectory_id for job, _ in batch.step()]
                check_invariants(batch)
    ended += drain(batch)
    assert sorted(asked) == sorted(ended)
    for name in list(batch.table.slot_of):
        assert batch.table.state[batch.table.slot_of[name]] == RETAINED
        batch.forget(name)
    assert (batch.table.state == FREE).all()


@pytest.fixture
def load(make_model):
    slot_cache.register()
    return lambda family="qwen3", dtype="float32": load_causal_lm(make_model(family), dtype, SLOT_ATTENTION)


def kv_for(model, dtype=torch.float32):
    return SlotKV(model.config, 2, 64, dtype)


def test_fused_projections_are_the_stock_modules_own_storage(load):
    model = load("qwen2")
    layer, attention = Forward(model, kv_for(model)).fused.layers[0], model.model.layers[0].self_attn
    attention.k_proj.weight.data[0, 0] = 123.0
    attention.v_proj.bias.data[0] = 321.0
    assert layer.qkv[attention.q_proj.out_features, 0] == 123.0
    assert 321.0 in layer.qkv_bias


def test_a_pass_that_disagrees_with_transformers_is_refused(load, monkeypatch):
    model = load()
    true_attend = slot_cache.attend
    monkeypatch.setattr("libra.rollout.forward.attend", lambda *a: true_attend(*a) * 1.05)
    with pytest.raises(ModelError, match="nats"):
        Forward(model, kv_for(model))
    Forward(model, kv_for(model), fused=False)


def test_bfloat16_logprobs_are_near_transformers(make_batch, make_model, make_request, reference_logprobs, serve_all):
    request = make_request("b", length=20, new=30)
    output = serve_all(make_batch(dtype="bfloat16"), request)["b"]
    expected = reference_logprobs(make_model(), request.context_ids, output.token_ids)
    assert np.abs(output.logprobs - expected).mean() < 0.1


def served(make_model, make_request, device, family, fused, exact):
    """Everything a batch on ``device`` answers: turns of several trajectories, probes, and all of it after other weights."""
    slot_cache.register()
    with _disable_current_modes():  # transformers loads by way of the device ``meta``, a name the pretended GPU has
        model = load_causal_lm(make_model(family), "float32", slot_cache.SLOT_ATTENTION)
        others = make_model(family, 1)
    model.to(device)
    batch = SlotBatch(model, slots=3, max_context_tokens=96, version=0, fused=fused, exact_logprobs=exact)
    tokens, answers = [], []
    for version in (0, 1):
        if version:
            batch.load(version, others)
        requests = [make_request("a", length=40, new=4), make_request("b", new=6, temperature=0.7, top_p=0.9)]
        requests += [make_request("c", length=40, new=3, temperature=0.0), make_request("d", new=3)]
        requests += [make_request("e", new=4, context=requests[0].context_ids)]
        turns = answered(batch, *requests)
        assert len(turns) == len(requests)
        tokens += [output.token_ids for _, output in sorted(turns.items())]
        answers += [output.logprobs for _, output in sorted(turns.items())]
        answers.append(batch.score(np.arange(20, dtype=np.int32)))
        answers += [np.array(numbers) for _, numbers in sorted(batch.forward.project(7).items())]
        wanted = {"model.embed_tokens.weight": (3, 5), "model.norm.weight": ()}
        wanted["model.layers.0.self_attn.q_proj.weight"] = (1,)
        answers += [found for _, found in sorted(batch.forward.columns(wanted).items())]
    return batch, tokens, answers


@pytest.mark.parametrize(("family", "fused"), [("qwen3", True), ("qwen2", False)])
def test_an_engine_elsewhere_answers_as_one_here(make_model, make_request, family, fused):
    exact = not fused
    _, expected_tokens, expected = served(make_model, make_request, "cpu", family, fused, exact)
    with pretended_gpu() as device:
        batch, got_tokens, got = served(make_model, make_request, device, family, fused, exact)
        assert all(isinstance(layer, PretendedTensor) for layer in batch.kv.data)
    for one, other in zip(got_tokens, expected_tokens, strict=True):
        assert one.tolist() == other.tolist()
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
