"""Every recorded case of a peer's function, to 1e-9 in float64, gradients included (tests/golden/README.md)."""

import pytest
import torch
from golden import peers

from libra.train.losses import clip_sums

TRL_NAMES = {"level": "importance_sampling_level", "epsilon_low": "epsilon"}


def advantages(estimator):
    def call(p, a):
        options = {key: a.get(key) for key in ("index", "reward_baselines")}
        options |= {key: p[key] for key in ("gamma", "epsilon") if key in p}
        options["norm_adv_by_std_in_grpo"] = p.get("norm_adv_by_std", True)
        found = peers.verl_advantages(estimator, a["token_level_rewards"], a["response_mask"], **options)
        return dict(zip(("advantages", "returns"), found, strict=True))

    return call


def policy_loss(mode):
    def call(p, a):
        inputs = [a[name] for name in ("old_log_prob", "log_prob", "advantages", "response_mask")]
        options = {f"clip_ratio_{each}": p[f"clip_{each}"] for each in ("low", "high", "c")}
        options |= {"loss_agg_mode": p["mode"], "rollout_is_weights": a.get("rollout_is_weights")}
        return {"loss": peers.verl_policy_loss(mode, *inputs, **options)}

    return call


def agg_loss(p, a):
    sizes = {key: p[key] for key in ("dp_size", "batch_num_tokens", "global_batch_size")}
    return {"loss": peers.verl_agg_loss(a["loss_mat"], a["loss_mask"], p["mode"], **sizes)}


def rollout_weights(p, a):
    given = {"rollout_is": p["level"]} | {f"rollout_is_{key}": p[key] for key in ("threshold", "batch_normalize")}
    return {"weights": peers.verl_rollout_weights(a["log_ratio"], a["response_mask"], **given)}


def trl(p, a):
    inputs = (a["log_prob"], a["old_log_prob"], a["advantages"], a["completion_mask"])
    options = {TRL_NAMES.get(key, key): value for key, value in p.items() if key != "seed"}
    optional = {name: a[name] for name in ("importance_sampling_ratio", "entropies") if name in a}
    return {"loss": peers.trl_grpo_loss(*inputs, ref_per_token_logps=a["ref_log_prob"], **options, **optional)}


def areal(p, a):
    inputs = [a[name] for name in ("logprobs", "proximal_logprobs", "old_logprobs", "advantages", "loss_mask")]
    options = {key: p[key] for key in ("eps_clip", "eps_clip_higher", "c_clip", "rejection")}
    loss, weights = peers.areal_ppo_actor_loss(*inputs, importance_sampling_level=p["level"], **options)
    return {"loss": loss} if weights is None else {"loss": loss, "behave_imp_weight": weights}


GOLDEN = {
    "verl_adv_grpo": (None, advantages("grpo")),
    "verl_adv_rloo": (None, advantages("rloo")),
    "verl_adv_reinforce_pp": (None, advantages("reinforce_plus_plus")),
    "verl_adv_reinforce_pp_baseline": (None, advantages("reinforce_plus_plus_baseline")),
    "verl_adv_remax": (None, advantages("remax")),
    "verl_policy_loss_ppo_dual_clip": ("log_prob", policy_loss("vanilla")),
    "verl_policy_loss_gspo": ("log_prob", policy_loss("gspo")),
    "verl_policy_loss_cispo": ("log_prob", policy_loss("cispo")),
    "verl_agg_loss": (None, agg_loss),
    "verl_kl_penalty": (
        "logprob", lambda p, a: {"kl": peers.verl_kl_penalty(a["logprob"], a["ref_logprob"], p["kind"])}
    ),
    "verl_truncated_is": (None, rollout_weights),
    "trl_grpo_losses": ("log_prob", trl),
    "trl_grpo_options": ("log_prob", trl),
    "areal_decoupled_ppo": ("logprobs", areal),
}  # fmt: skip
"""By the name of the file: the input whose gradient is recorded, and the call."""


@pytest.mark.parametrize("name", GOLDEN)
def test_the_recorded_numbers_of_a_peer(golden, name):
    differentiated, call = GOLDEN[name]
    for parameters, arrays in golden(name):
        inputs = {key.removeprefix("in_"): value for key, value in arrays.items() if key.startswith("in_")}
        if differentiated is not None:
            inputs[differentiated] = inputs[differentiated].clone().requires_grad_()
        found = call(parameters, inputs)
        if differentiated is not None:
            next(iter(found.values())).sum().backward()
            found["grad"] = inputs[differentiated].grad
        # AReaL's weights are float32, whose exp differs by one rounding between processors
        tolerance = 3e-7 if parameters.get("rejection") else 1e-9
        for output, got in found.items():
            torch.testing.assert_close(got.detach(), arrays[f"out_{output}"], rtol=0, atol=tolerance)


def test_verl_clip_shares(golden):
    for parameters, arrays in golden("verl_policy_loss_ppo_dual_clip"):
        mask = arrays["in_response_mask"] > 0
        tokens = [arrays[f"in_{name}"][mask] for name in ("log_prob", "old_log_prob", "advantages")]
        sums = clip_sums(*tokens, clip_low=parameters["clip_low"], clip_high=parameters["clip_high"])
        share = float(sums["clipped_low"] + sums["clipped_high"]) / int(mask.sum())
        # verl counts a negative advantage's low clips and a positive one's high clips, over tokens + 1e-8
        assert share == pytest.approx(parameters["metrics"]["actor/pg_clipfrac"], abs=1e-7)


def test_icepop_and_rejection_options_that_have_no_recorded_case_by_hand():
    logs = torch.tensor([[0.1, 2.0, -2.0, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    kept = peers.verl_rejection_mask(logs, mask, rollout_rs="token_k1,token_k3", rollout_rs_threshold="0.5_9.0,1.2")
    assert kept.tolist() == [[1.0, 0.0, 1.0, 0.0]]  # k1 bounds p_engine / p_trainer, k3 of d = 2 is 4.4, of -2 is 1.14
    kept = peers.verl_rejection_mask(logs, mask, rollout_rs="seq_max_k2", rollout_rs_threshold=1.0)
    assert kept.sum() == 0
    normalised = peers.verl_rollout_weights(logs, mask, rollout_is_threshold=2.0, rollout_is_batch_normalize=True)
    assert float(normalised.sum()) == pytest.approx(3)
    engine = torch.zeros_like(logs)
    kept, weight = peers.areal_rejection(logs, engine, mask > 0, metric="kl_k3", upper=1.2)
    assert kept.tolist() == [[True, True, False, False]]  # e^-d - 1 + d: 1.14 for d = 2, 4.4 for -2
    assert weight[0, 1] == pytest.approx(float(torch.tensor(2.0).exp()))
    kept, weight = peers.areal_rejection(logs, engine, mask > 0, level="sequence", agg="max", action="clamp", upper=2.0)
    assert kept.sum() == 3
    assert weight[0, :3].tolist() == pytest.approx([float(torch.tensor(0.1 / 3).exp())] * 3)  # its own mean is inside
