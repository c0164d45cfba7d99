"""Every algorithm of the configuration, through the replica: the same as the library's functions on padded rows."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from golden.peers import Padded, aggregated

from libra.config.algorithms import ALGORITHMS
from libra.train import Aggregation, TrainSettings, corrections, kl_estimate, losses, pack, sample_of
from libra.train.step_report import Tally

OTHERS = {"remax", "reinforce_pp_baseline", "opd"}
VARIANTS = {
    **{name: (name, {}) for name in sorted(ALGORITHMS.keys() - OTHERS)},
    "entropy": ("dapo", {"entropy_coef": 0.1}),
    "k2": ("gspo", {"kl_coef": 0.1, "kl_args": {"estimator": "k2+"}}),
    "dual_clip": ("grpo", {"loss_args": {"dual_clip": 1.5}}),
    "two_factors": ("dapo", {"old_logp": "exact", "correction": "truncate", "correction_args": {"level": "sequence"}}),
    "vespo_weighted": ("vespo", {"old_logp": "proximal", "correction": "truncate"}),
    "dppo_kl": ("dppo", {"loss_args": {"divergence": "kl", "clip_high": 0.02, "clip_low": 0.02}}),
    "ratio_max": ("grpo", {"loss_args": {"ratio_max": 1.05}}),
    "reject": ("ppo_decoupled", {"reject": "k3", "reject_args": {"high": 0.02}}),
    "reject_sequences": (
        "dapo",
        {"reject": "ratio", "reject_args": {"level": "sequence", "reduce": "sum", "low": 0.9, "high": 2.0}},
    ),
    "reject_binary": ("gspo", {"reject": "binary-kl", "reject_args": {"high": 1e-4}}),
    "off_policy": ("cispo", {"reject_args": {"off_policy": 0.01}}),
    "geometric": ("ppo_decoupled", {"correction_args": {"level": "geometric", "low": 0.5, "high": 1.5}}),
}


def settings_of(variant):
    name, changes = VARIANTS[variant]
    if name == "dr_grpo":
        changes = {"loss_divisor": 64.0, **changes}
    return TrainSettings(algorithm=name, **changes).model_dump(exclude={"lr"})


def samples_of(batch, rng, spread=0.2):
    """Samples whose proximal log-probabilities lie beside the engine's, a third of them of older weights."""
    samples = [sample_of(trajectory, 0) for trajectory in batch]
    for index, sample in enumerate(samples):
        proximal = sample.behaviour_logp + spread * rng.normal(size=sample.num_actions)
        samples[index] = replace(sample, proximal_logp=proximal, current=rng.random(sample.num_actions) < 0.7)
    return samples


def near(model, batch, score, rng):
    """Give the batch behaviour log-probabilities near the model's, so that losses are not at their clips everywhere."""
    for one, logp in zip(batch, score(model, [sample_of(one, 0) for one in batch]), strict=True):
        one.behaviour_logprob[one.is_action] = logp.numpy() + 0.1 * rng.normal(size=len(logp))


def gradient(model, samples):
    denominator = model.gradient.objective.aggregation.divisor_of(model.gradient.weight_of(samples))
    model.optimizer.zero_grad()
    total, batches = 0.0, pack(samples, max_row_tokens=64, micro_batch_tokens=90, logp_dtype=torch.float64)
    assert len(batches) > 1
    for micro in batches:
        loss = model.gradient.micro_batch_loss(micro, Tally()) / denominator
        loss.backward()
        total += float(loss.detach())
    return total, {name: parameter.grad.clone() for name, parameter in model.parameters().items()}


def padded(columns):
    return torch.nn.utils.rnn.pad_sequence(columns, batch_first=True, padding_value=float("nan"))


def written_out(settings, tokens, rows):
    """The loss of padded rows, written with the library's functions and nothing else."""
    logp, engine, advantage = tokens["logp"], tokens["engine"], tokens["advantage"]
    old, weight = engine, torch.ones_like(engine)
    if settings.old_logp != "behaviour":
        exact = tokens["current"] > 0 if settings.old_logp == "exact" else torch.ones_like(rows.mask_N)
        factors = corrections.two_factors(tokens["proximal"], engine, exact)
        old = factors.old_logp_N
        if settings.correction != "none":
            args = settings.correction_args
            weight = corrections.importance_weights(factors.mismatch_N, rows, action=settings.correction, **args)
    args = settings.loss_args
    mismatch = None if settings.correction == "none" else weight
    loss = {
        "ppo": lambda: losses.ppo_loss(logp, old, advantage, **args),
        "vespo": lambda: losses.vespo_loss(logp, old, advantage, rows, weight_N=mismatch, **args),
        "gspo": lambda: losses.gspo_loss(logp, old, advantage, rows, **args),
        "cispo": lambda: losses.cispo_loss(logp, old, advantage, **args),
        "sapo": lambda: losses.sapo_loss(logp, old, advantage, **args),
        "gmpo": lambda: losses.gmpo_loss(logp, old, advantage, rows, **args),
        "dppo": lambda: losses.dppo_loss(logp, old, advantage, **args),
        "reinforce": lambda: losses.reinforce_loss(logp, advantage),
    }[settings.loss]()
    if settings.loss != "vespo":
        loss = loss * weight
    loss = loss * kept(settings, tokens, rows, old)
    if settings.kl_coef:
        kl = kl_estimate(logp, tokens["reference"], settings.kl_args["estimator"], bound=10.0)
        loss = loss + settings.kl_coef * kl
    loss = loss - settings.entropy_coef * tokens["entropy"]
    horizon = settings.loss_divisor if settings.aggregation == "seq-mean-token-sum-norm" else None
    return aggregated(Aggregation(settings.aggregation, horizon_tokens=horizon), loss, rows)


def kept(settings, tokens, rows, old):
    now, engine = tokens["logp"].detach(), tokens["engine"]
    trainer = now if settings.old_logp == "behaviour" else old
    keep = rows.mask_N
    if settings.reject == "binary-kl":
        keep = keep & corrections.binary_kl_mask(trainer, engine, rows, high=settings.reject_args["high"])
    elif settings.reject != "none":
        args = {k: settings.reject_args[k] for k in ("level", "reduce", "low", "high")} | {"metric": settings.reject}
        keep = keep & corrections.rejection_mask(trainer - engine, rows, **args)
    if settings.reject_args["off_policy"] is not None:
        tokens_of = (now, engine, tokens["advantage"], rows)
        keep = keep & corrections.off_policy_sequence_mask(*tokens_of, threshold=settings.reject_args["off_policy"])
    return keep


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_loss_is_that_of_the_library_on_padded_rows(replica, batch, score, variant):
    settings = settings_of(variant)
    model = replica(torch.float64, **settings)
    rng = np.random.default_rng(1)
    near(model, batch, score, rng)
    samples = samples_of(batch, rng)
    reference = score(model, samples)
    with torch.no_grad():
        model.model.model.norm.weight.add_(0.02)
    columns = {}
    for sample, reference_logp in zip(samples, reference, strict=True):
        logits = model.model(input_ids=torch.as_tensor(sample.token_ids)[None]).logits[0][sample.action_at]
        all_logp = logits.log_softmax(-1)
        column = {
            "logp": all_logp.gather(-1, torch.as_tensor(sample.target)[:, None])[:, 0],
            "engine": torch.as_tensor(sample.behaviour_logp).double(),
            "proximal": torch.as_tensor(sample.proximal_logp).double(),
            "advantage": torch.full((sample.num_actions,), sample.advantage, dtype=torch.float64),
            "current": torch.as_tensor(sample.current).double(),
            "reference": reference_logp,
            "entropy": -(all_logp.exp() * all_logp).sum(-1),
        }
        for name, values in column.items():
            columns.setdefault(name, []).append(values)
    tokens = {name: padded(values) for name, values in columns.items()}
    rows = Padded(~torch.isnan(tokens["engine"]))
    tokens = {name: rows.only(values) for name, values in tokens.items()}
    expected = written_out(TrainSettings(**settings), tokens, rows)
    model.optimizer.zero_grad()
    expected.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.parameters().items()}
    got, got_gradients = gradient(model, samples)
    assert got == pytest.approx(float(expected.detach()), abs=1e-9)
    assert max(float(tensor.abs().max()) for tensor in gradients.values()) > 1e-4
    for name, tensor in gradients.items():
        torch.testing.assert_close(got_gradients[name], tensor, rtol=0, atol=1e-9)


def test_proximal_log_probabilities_are_those_before_the_first_optimizer_step(replica, batch, score):
    model = replica(**{**settings_of("ppo_decoupled"), "epochs": 2, "minibatches": 2, "lr": 3e-3})
    near(model, batch, score, np.random.default_rng(0))
    seen, samples, whole = {}, [sample_of(one, 0) for one in batch], model.gradient.with_proximal

    def spy(samples):
        scored = whole(samples)
        seen.update({sample.token_ids.tobytes(): sample.proximal_logp for sample in scored})
        return scored

    model.gradient.with_proximal = spy
    before = {s.token_ids.tobytes(): logp for s, logp in zip(samples, score(model, samples), strict=True)}
    report = model.step(batch, 0)
    assert report.optimizer_steps == 4
    assert seen.keys() == before.keys()
    for key, logp in before.items():
        np.testing.assert_allclose(seen[key], logp.numpy(), atol=1e-4)
    assert report.ratio_mean != pytest.approx(1, abs=1e-6)  # later passes have moved off


@pytest.mark.parametrize("variant", ["ppo_decoupled", "reject_sequences", "off_policy"])
def test_weights_at_their_bounds_and_tokens_left_out_are_counted(replica, batch, score, variant):
    settings = settings_of(variant)
    settings["correction_args"] |= {"high": 1.05}
    model = replica(torch.float64, **settings)
    near(model, batch, score, np.random.default_rng(0))
    report = model.step(batch, 0)
    if variant == "ppo_decoupled":
        assert 0 < report.correction_frac < 1 and 0 < report.effective_sample_frac < 1
        assert report.clip_low_frac == report.clip_high_frac == 0  # the first step has not moved
    else:
        assert 0 < report.rejected_frac < 1


def test_m2po_chooses_over_the_whole_minibatch_whatever_its_micro_batches(replica, batch, score):
    reports = []
    for tokens in (64, 10_000):
        layout = {"max_row_tokens": 1, "micro_batch_tokens": tokens, "minibatches": 2}
        model = replica(torch.float64, reject_args={"m2po": 0.004}, lr=3e-3, **layout)
        near(model, batch, score, np.random.default_rng(0))
        reports.append(model.step(batch, 0))
    many, one = reports
    assert many.micro_batches > one.micro_batches
    assert 0 < many.rejected_frac == one.rejected_frac < 1
    assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-9)
