import numpy as np
import pytest
import torch

from libra.config.task_sections import DistilSection
from libra.errors import TrainError
from libra.train import pack, sample_of
from libra.train.logprobs import chunked_columns
from libra.train.losses import sampled_divergence, top_k_divergence
from libra.train.teacher_model import Scoring, TeacherModel
from libra.types import Drawn, Taught

N, H, V, K = 23, 6, 17, 5
VOCABULARY = 48
DOUBLE = torch.float64
DISTIL = {
    "reverse": ({"tokens": 6, "divergence": "reverse"}, {}),
    "sampled": ({"estimator": "sampled", "tokens": 6}, {}),
    "drawn by the student": ({"estimator": "sampled", "tokens": 1, "divergence": "reverse"}, {}),
    "with rewards": ({"tokens": 6, "reward_coef": 0.5}, {"entropy_coef": 0.1}),
}


@pytest.fixture
def logits():
    torch.manual_seed(3)
    return torch.randn(N, H, dtype=DOUBLE), torch.randn(V, H, dtype=DOUBLE), (2 * torch.randn(N, V)).log_softmax(-1)


def dense(hidden_NH, head_VH, teacher_NV, columns_NK, direction):
    """The divergence of K + 1 outcomes from whole distributions (N,)."""

    def outcomes(logp_NV):
        rest_N1 = logp_NV.exp().scatter(1, columns_NK, 0.0).sum(-1, keepdim=True)
        return torch.cat([logp_NV.exp().gather(1, columns_NK), rest_N1], -1)

    student_NV = (hidden_NH @ head_VH.T / 0.7).log_softmax(-1)
    p_NO, q_NO = outcomes(student_NV), outcomes(teacher_NV.to(DOUBLE))
    if columns_NK.shape[1] == V:
        p_NO, q_NO = p_NO[:, :-1], q_NO[:, :-1]
    first, second = (q_NO, p_NO) if direction == "forward" else (p_NO, q_NO)
    return (first * (first.log() - second.log())).sum(-1)


@pytest.mark.parametrize("k", [1, K, V])
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_value_and_gradient_are_those_of_whole_distributions(logits, direction, k):
    teacher_NV = logits[2].to(DOUBLE)
    columns_NK = teacher_NV.topk(k, -1).indices
    rest_N = teacher_NV.scatter(1, columns_NK, -torch.inf).logsumexp(-1)
    slope_N = torch.linspace(-1, 2, N, dtype=DOUBLE)
    found = []
    for whole in (True, False):
        hidden_NH, head_VH = (each.clone().requires_grad_() for each in logits[:2])
        if whole:
            divergence_N = dense(hidden_NH, head_VH, teacher_NV, columns_NK, direction)
        else:
            own_NK = torch.cat([torch.zeros(N, 1, dtype=torch.int64), columns_NK], -1)
            options = {"temperature": 0.7, "chunk_tokens": 4, "rest_from": 1}
            logp_NK, _, ours_N = chunked_columns(hidden_NH, head_VH, own_NK, **options)
            divergence_N = top_k_divergence(logp_NK[:, 1:], ours_N, teacher_NV.gather(1, columns_NK), rest_N, direction)
        (divergence_N * slope_N).sum().backward()
        found.append((divergence_N.detach(), hidden_NH.grad, head_VH.grad))
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    assert (found[0][0] >= -1e-12).all()


@pytest.mark.parametrize("case", ["reverse", "reverse, stale", "forward"])
def test_the_mean_over_all_draws_is_the_gradient_of_the_divergence(logits, case):
    """Each token once, weighed by the probability with which it was drawn: the expectation, without sampling."""
    teacher_NV, found = logits[2].to(DOUBLE), []
    for exact in (True, False):
        student_NV = (logits[0] @ logits[1].T).requires_grad_()
        logp_NV = student_NV.log_softmax(-1)
        old_NV = (logp_NV + 0.7 * torch.randn(N, V, generator=torch.Generator().manual_seed(1))).detach()
        old_NV = old_NV.log_softmax(-1) if "stale" in case else logp_NV.detach()
        drawn_NV = teacher_NV if case == "forward" else old_NV  # the teacher's draws, or the student's
        if exact:
            forward, reverse = (teacher_NV.exp() * (teacher_NV - logp_NV)), logp_NV.exp() * (logp_NV - teacher_NV)
            value = (forward if case == "forward" else reverse).sum()
        else:
            old = [None if case == "forward" else old_NV[:, [v]] for v in range(V)]
            each = [sampled_divergence(logp_NV[:, [v]], teacher_NV[:, [v]], old[v]) for v in range(V)]
            value = sum((drawn_NV[:, v].exp() * each[v]).sum() for v in range(V))
        value.backward()
        found.append((value.detach(), student_NV.grad))
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def teacher_of(model_dir, dtype=DOUBLE, **distil):
    section = DistilSection(teacher="t", **distil)
    return TeacherModel.load(model_dir, Scoring(section, 0.7, VOCABULARY, chunk_tokens=3), dtype=dtype)


def whole_logp(teacher, one):
    """The teacher's log-probabilities at each generated token (A, V), from whole logits."""
    where = np.flatnonzero(one.is_action)
    logits = teacher.model(input_ids=torch.from_numpy(one.token_ids.astype(np.int64))[None]).logits[0]
    return (logits[torch.from_numpy(where - 1)] / 0.7).log_softmax(-1)


def test_a_teacher_keeps_its_likeliest_tokens_and_the_rest_as_one(model_dir, trajectory):
    teacher, one = teacher_of(model_dir, tokens=7), trajectory(4)
    taught = teacher.score(one, np.random.default_rng(0))
    assert taught is not None and taught.rest_logp is not None and taught.old_logp is None
    whole_AV = whole_logp(teacher, one)
    top = whole_AV.topk(7, -1)
    assert taught.token_ids.tolist() == top.indices.tolist()
    np.testing.assert_allclose(taught.logp, top.values, atol=1e-5)
    np.testing.assert_allclose(np.exp(taught.rest_logp), 1 - top.values.exp().sum(-1), atol=1e-6)
    own = whole_AV.gather(1, torch.from_numpy(one.token_ids[one.is_action].astype(np.int64))[:, None])[:, 0]
    np.testing.assert_allclose(taught.own_logp, own, atol=1e-5)
    everything = teacher_of(model_dir, tokens=48).score(one, np.random.default_rng(0))
    assert everything is not None and np.isneginf(everything.rest_logp).all()


def test_a_teacher_draws_from_its_own_distribution_and_scores_what_the_student_drew(model_dir, trajectory):
    one = trajectory(4)
    teacher = teacher_of(model_dir, estimator="sampled", tokens=4000)
    taught = teacher.score(one, np.random.default_rng(0))
    again = teacher.score(one, np.random.default_rng(0))
    assert taught is not None and again is not None and taught.token_ids.tolist() == again.token_ids.tolist()
    for drawn, logp_V in zip(taught.token_ids, whole_logp(teacher, one), strict=True):
        np.testing.assert_allclose(np.bincount(drawn, minlength=48) / 4000, logp_V.exp(), atol=0.04)
    reverse = teacher_of(model_dir, estimator="sampled", tokens=3, divergence="reverse")
    assert reverse.score(one, np.random.default_rng(0)) is None  # nothing was drawn
    count = one.num_action_tokens
    ids = np.arange(2 * count, dtype=np.int32).reshape(count, 2) % 48
    one.drawn = Drawn(ids, np.full((count, 2), -1.5, np.float32))
    scored = reverse.score(one, np.random.default_rng(0))
    assert scored is not None and scored.old_logp is not None
    assert scored.token_ids[:, 0].tolist() == one.token_ids[one.is_action].tolist()
    assert scored.old_logp[:, 0].tolist() == one.behaviour_logprob[one.is_action].tolist()
    assert scored.token_ids[:, 1:].tolist() == one.drawn.token_ids.tolist() and (scored.old_logp[:, 1:] == -1.5).all()
    expected = whole_logp(reverse, one).gather(1, torch.from_numpy(scored.token_ids.astype(np.int64)))
    np.testing.assert_allclose(scored.logp, expected, atol=1e-5)


@pytest.mark.parametrize("case", DISTIL)
def test_a_step_is_that_of_one_sequence_at_a_time_however_it_is_packed(case, model_dir, replica, batch):
    distil, settings = DISTIL[case]
    teacher = teacher_of(model_dir, **distil)
    with torch.no_grad():
        for weight in teacher.model.parameters():
            weight.mul_(1.2)
    for number, one in enumerate(batch):
        one.taught = None if number == 3 else teacher.score(one, np.random.default_rng(number))
    term = {"divergence": distil.get("divergence", "forward"), "reward_coef": distil.get("reward_coef", 0.0)}
    found = []
    for layout in ({"max_row_tokens": 1}, {"max_row_tokens": 60, "micro_batch_tokens": 200, "logit_chunk_tokens": 3}):
        one = replica(DOUBLE, distil=term, **settings, **layout)
        applied = []
        one.apply_gradient = lambda step, tally, one=one, applied=applied: applied.append(
            torch.cat([p.grad.flatten().clone() for p in one.optimized().values() if p.grad is not None])
        )
        found.append((one.step(batch, 0), applied[0]))
    (alone, gradient), (packed, other) = found
    torch.testing.assert_close(other, gradient, rtol=1e-9, atol=1e-12)
    assert gradient.abs().max() > 1e-3
    assert packed.kl_teacher == pytest.approx(alone.kl_teacher, abs=1e-12) and packed.kl_teacher != 0
    left_out = batch[3].num_action_tokens / sum(each.num_action_tokens for each in batch)
    assert packed.taught_frac == pytest.approx(1 - left_out)
    has_top = "estimator" not in distil
    assert (0 < packed.top_k_student_frac < 1 and 0 < packed.top_k_teacher_frac < 1) == has_top


@pytest.mark.parametrize("case", ["forward", *DISTIL])
def test_a_model_distilled_from_itself_stays_as_it_is(case, model_dir, replica, batch, score):
    distil, _ = DISTIL.get(case, ({"tokens": 6}, {}))
    teacher, term = teacher_of(model_dir, torch.float32, **distil), {"divergence": distil.get("divergence", "forward")}
    one = replica(distil=term | {"rounding_nats": 1e-3}, temperature=0.7)
    before = [weight.clone() for weight in one.weights().values()]
    for each, logp in zip(batch, score(teacher, [sample_of(each, 0) for each in batch]), strict=True):
        each.behaviour_logprob[each.is_action] = logp.numpy()
        each.taught = teacher.score(each, np.random.default_rng(0))
    for step in range(2):
        assert one.step(batch, step).taught_frac == 1
    assert all(map(torch.equal, before, one.weights().values()))


def test_scores_of_another_trajectory_or_kind_are_refused(trajectory):
    one, other = trajectory(1), trajectory(2, lengths=(4, 3))
    logp = np.zeros((one.num_action_tokens, 2), np.float32)
    one.taught = Taught(logp.astype(np.int32), logp, logp[:, 0], logp[:, 0])
    other.taught = one.taught
    with pytest.raises(TrainError):
        sample_of(other, 0)
    other.taught = Taught(*(each[:3] for each in one.taught[:3]))
    with pytest.raises(TrainError):
        pack([sample_of(one, 0), sample_of(other, 0)], max_row_tokens=100, micro_batch_tokens=100)
