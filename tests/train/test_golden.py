"""Every recorded case of a peer's function, to 1e-9 in float64, gradients included (tests/golden/README.md)."""

from __future__ import annotations

import pytest
import torch

from libra.train.losses import clip_sums
from libra.train.peers import (
    areal_ppo_actor_loss,
    areal_rejection,
    trl_grpo_loss,
    verl_advantages,
    verl_agg_loss,
    verl_kl_penalty,
    verl_policy_loss,
    verl_rejection_mask,
    verl_rollout_weights,
    verl_value_loss,
)

ADVANTAGES = {
    "verl_adv_grpo": ("grpo", 12),
    "verl_adv_rloo": ("rloo", 6),
    "verl_adv_reinforce_pp": ("reinforce_plus_plus", 6),
    "verl_adv_reinforce_pp_baseline": ("reinforce_plus_plus_baseline", 6),
    "verl_adv_remax": ("remax", 5),
    "verl_gae": ("gae", 6),
}


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got.detach(), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_verl_advantages(golden, name):
    estimator, count = ADVANTAGES[name]
    cases = golden(name)
    assert len(cases) == count
    for parameters, arrays in cases:
        options = {key: parameters[key] for key in ("gamma", "lam", "epsilon") if key in parameters}
        advantages, returns = verl_advantages(
            estimator,
            arrays["in_token_level_rewards"],
            arrays["in_response_mask"],
            index=arrays.get("in_index"),
            values=arrays.get("in_values"),
            reward_baselines=arrays.get("in_reward_baselines"),
            norm_adv_by_std_in_grpo=parameters.get("norm_adv_by_std", True),
            **options,
        )
        close(advantages, arrays["out_advantages"])
        close(returns, arrays["out_returns"])


@pytest.mark.parametrize(("name", "mode"), [("ppo_dual_clip", "vanilla"), ("gspo", "gspo"), ("cispo", "cispo")])
def test_verl_policy_losses(golden, name, mode):
    cases = golden(f"verl_policy_loss_{name}")
    assert len(cases) == 24
    for parameters, arrays in cases:
        logp = arrays["in_log_prob"].clone().requires_grad_()
        loss = verl_policy_loss(
            mode,
            arrays["in_old_log_prob"],
            logp,
            arrays["in_advantages"],
            arrays["in_response_mask"],
            loss_agg_mode=parameters["mode"],
            clip_ratio_low=parameters["clip_low"],
            clip_ratio_high=parameters["clip_high"],
            clip_ratio_c=parameters["clip_c"],
            rollout_is_weights=arrays.get("in_rollout_is_weights"),
        )
        loss.backward()
        close(loss, arrays["out_loss"])
        close(logp.grad, arrays["out_grad"])


def test_verl_clip_shares(golden):
    for parameters, arrays in golden("verl_policy_loss_ppo_dual_clip"):
        mask = arrays["in_response_mask"] > 0
        tokens = [arrays[f"in_{name}"][mask] for name in ("log_prob", "old_log_prob", "advantages")]
        sums = clip_sums(*tokens, clip_low=parameters["clip_low"], clip_high=parameters["clip_high"])
        share = (sums["clipped_low"] + sums["clipped_high"]) / int(mask.sum())
        # verl counts a negative advantage's low clips and a positive one's high clips, over tokens + 1e-8
        assert share == pytest.approx(parameters["metrics"]["actor/pg_clipfrac"], abs=1e-7)


def test_verl_aggregation(golden):
    cases = golden("verl_agg_loss")
    assert len(cases) == 24
    for parameters, arrays in cases:
        loss = verl_agg_loss(
            arrays["in_loss_mat"],
            arrays["in_loss_mask"],
            parameters["mode"],
            dp_size=parameters["dp_size"],
            batch_num_tokens=parameters["batch_num_tokens"],
            global_batch_size=parameters["global_batch_size"],
        )
        close(loss, arrays["out_loss"])


def test_verl_kl(golden):
    cases = golden("verl_kl_penalty")
    assert len(cases) == 15
    for parameters, arrays in cases:
        logp = arrays["in_logprob"].clone().requires_grad_()
        kl = verl_kl_penalty(logp, arrays["in_ref_logprob"], parameters["kind"])
        kl.sum().backward()
        close(kl, arrays["out_kl"])
        close(logp.grad, arrays["out_grad"])


def test_verl_importance_weights(golden):
    cases = golden("verl_truncated_is")
    assert len(cases) == 24
    for parameters, arrays in cases:
        weights = verl_rollout_weights(
            arrays["in_log_ratio"],
            arrays["in_response_mask"],
            rollout_is=parameters["level"],
            rollout_is_threshold=parameters["threshold"],
            rollout_is_batch_normalize=parameters["batch_normalize"],
        )
        close(weights, arrays["out_weights"])


def test_verl_value_loss(golden):
    cases = golden("verl_value_loss")
    assert len(cases) == 12
    for parameters, arrays in cases:
        loss, clipped = verl_value_loss(
            arrays["in_vpreds"],
            arrays["in_returns"],
            arrays["in_values"],
            arrays["in_response_mask"],
            cliprange_value=parameters["cliprange_value"],
            loss_agg_mode=parameters["mode"],
        )
        close(loss, arrays["out_loss"])
        close(clipped, arrays["out_clipfrac"])


def test_trl_losses(golden):
    cases = golden("trl_grpo_losses")
    assert len(cases) == 96
    for parameters, arrays in cases:
        logp = arrays["in_log_prob"].clone().requires_grad_()
        loss = trl_grpo_loss(
            logp,
            arrays["in_old_log_prob"],
            arrays["in_advantages"],
            arrays["in_completion_mask"],
            loss_type=parameters["loss_type"],
            importance_sampling_level=parameters["level"],
            epsilon=parameters["epsilon_low"],
            epsilon_high=parameters["epsilon_high"],
            delta=parameters["delta"],
            beta=parameters["beta"],
            ref_per_token_logps=arrays["in_ref_log_prob"],
            max_completion_length=parameters["max_completion_length"],
            num_items_in_batch=parameters["num_items_in_batch"],
        )
        loss.backward()
        close(loss, arrays["out_loss"])
        close(logp.grad, arrays["out_grad"])


def test_trl_options(golden):
    cases = golden("trl_grpo_options")
    assert len(cases) == 64
    for parameters, arrays in cases:
        logp = arrays["in_log_prob"].clone().requires_grad_()
        options = dict(parameters)
        loss = trl_grpo_loss(
            logp,
            arrays["in_old_log_prob"],
            arrays["in_advantages"],
            arrays["in_completion_mask"],
            importance_sampling_level=options.pop("level"),
            epsilon=options.pop("epsilon_low"),
            ref_per_token_logps=arrays["in_ref_log_prob"],
            importance_sampling_ratio=arrays.get("in_importance_sampling_ratio"),
            entropies=arrays["in_entropies"],
            **options,
        )
        loss.backward()
        close(loss, arrays["out_loss"])
        close(logp.grad, arrays["out_grad"])


def test_areal_decoupled_ppo(golden):
    cases = golden("areal_decoupled_ppo")
    assert len(cases) == 160
    for parameters, arrays in cases:
        logp = arrays["in_logprobs"].clone().requires_grad_()
        loss, weights = areal_ppo_actor_loss(
            logp,
            arrays["in_proximal_logprobs"],
            arrays["in_old_logprobs"],
            arrays["in_advantages"],
            arrays["in_loss_mask"],
            eps_clip=parameters["eps_clip"],
            eps_clip_higher=parameters["eps_clip_higher"],
            c_clip=parameters["c_clip"],
            importance_sampling_level=parameters["level"],
            rejection=parameters["rejection"],
        )
        loss.backward()
        close(loss, arrays["out_loss"])
        close(logp.grad, arrays["out_grad"])
        if weights is not None:
            close(weights, arrays["out_behave_imp_weight"])


def test_the_page_names_every_function_of_the_peers(repository):
    page = (repository / "docs/golden.md").read_text()
    from libra.train import peers

    assert [name for name in peers.__all__ if f"`{name}" not in page] == []


def test_icepop_and_rejection_options_that_have_no_recorded_case_by_hand():
    log_ratio = torch.tensor([[0.1, 2.0, -2.0, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    kept = verl_rejection_mask(log_ratio, mask, rollout_rs="token_k1,token_k3", rollout_rs_threshold="0.5_9.0,1.2")
    assert kept.tolist() == [[1.0, 0.0, 1.0, 0.0]]  # k1 bounds p_engine / p_trainer, k3 of d = 2 is 4.4, of -2 is 1.14
    kept = verl_rejection_mask(log_ratio, mask, rollout_rs="seq_max_k2", rollout_rs_threshold=1.0)
    assert kept.sum() == 0
    normalised = verl_rollout_weights(log_ratio, mask, rollout_is_threshold=2.0, rollout_is_batch_normalize=True)
    assert float(normalised.sum()) == pytest.approx(3)
    proximal, engine = log_ratio, torch.zeros_like(log_ratio)
    kept, weight = areal_rejection(proximal, engine, mask > 0, metric="kl_k3", upper=1.2)
    assert kept.tolist() == [[True, True, False, False]]  # e^-d - 1 + d: 1.14 for d = 2, 4.4 for -2
    assert weight[0, 1] == pytest.approx(float(torch.tensor(2.0).exp()))
    kept, weight = areal_rejection(proximal, engine, mask > 0, level="sequence", agg="max", action="clamp", upper=2.0)
    assert kept.sum() == 3
    assert weight[0, :3].tolist() == pytest.approx([float(torch.tensor(0.1 / 3).exp())] * 3)  # its own mean is inside
