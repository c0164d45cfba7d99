"""Recorded cases of peers through the objective that a run builds from its configuration, to 1e-9, gradients included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from libra.config import config_from_dict
from libra.train import GroupRewards, Sample, TrainSettings, batch_advantages
from libra.train.objective import Objective
from libra.train.peers import verl_rejection_mask
from libra.train.sequence_packing import MicroBatch

Arrays = dict[str, torch.Tensor]
FREE_WEIGHT = {"old_logp": "proximal", "correction": "truncate", "correction_high": None}
"""Importance weights without bounds."""


def micro_batch(rows: Arrays, mask: torch.Tensor) -> MicroBatch:
    """The tokens under ``mask`` as a step packs them. Rows without a token are none of its sequences."""
    samples = [
        Sample(
            token_ids=np.arange(count + 1),
            action_at=np.arange(count),
            target=np.arange(1, count + 1),
            behaviour_logp=row["engine"][here].float().numpy(),
            current=np.ones(count, np.bool_),
            advantage=float(row["advantage"][here][0]),
        )
        for row, here, count in (
            ({name: values[index] for name, values in rows.items()}, mask[index], int(mask[index].sum()))
            for index in range(len(mask))
        )
        if count
    ]
    none = torch.zeros(1, 1, dtype=torch.int64)
    return MicroBatch(
        none, none, none[0], none[0], rows["engine"][mask], rows["advantage"][mask],
        torch.ones(int(mask.sum()), dtype=torch.bool), rows["old"][mask], tuple(samples), len(samples),
    )  # fmt: skip


def run_loss(trainer: dict[str, Any], rows: Arrays, mask: torch.Tensor, num_sequences: int) -> tuple[float, Any, Any]:
    """Loss of the whole minibatch with its gradient to ``rows["logp"]``, and the sums of its report."""
    settings = TrainSettings.of_run(config_from_dict({"trainer": trainer}))
    objective = Objective(settings)
    logp = rows["logp"].clone().requires_grad_()
    reference = rows["reference"][mask] if settings.kl_coef else None
    batch = micro_batch(rows, mask)
    loss_N, sums = objective.token_losses(batch, logp[mask], entropy_N=rows["logp"][mask], reference_logp_N=reference)
    weight = objective.aggregation.weight_sum(num_tokens=len(loss_N), num_sequences=num_sequences)
    loss = objective.aggregation.weighted_sum(loss_N, batch.sequences) / objective.aggregation.divisor_of(weight)
    loss.backward()
    return float(loss.detach()), logp.grad, sums


TRL_AGGREGATION = {
    "grpo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean", "bnpo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm", "luspo": "seq-mean-token-sum",
    "dapo": "constant", "cispo": "constant", "vespo": "constant",
}  # fmt: skip


def trl_settings(p: dict[str, Any], a: Arrays) -> dict[str, Any] | None:
    """The keys of ``trainer`` that are the options of a case; None if no run has them."""
    kind, sequence, weighted = p["loss_type"], p["level"] == "sequence", "importance_sampling_ratio" in a
    clips = kind not in ("cispo", "sapo", "vespo")
    if p.get("use_bias_correction_kl") or p.get("entropy_coef") or (kind == "cispo" and p["epsilon_high"] <= 1):
        return None
    if sequence and (weighted or not clips):  # one ratio per sequence is a run's for the clipped losses
        return None
    if weighted and p.get("off_policy_mask_threshold") is not None:  # compared there with the trainer's old policy
        return None
    keys: dict[str, Any] = {
        "loss": ("gspo" if sequence else "ppo") if clips else kind,
        "aggregation": TRL_AGGREGATION[kind],
        "loss_divisor": {"dr_grpo": float(p["max_completion_length"])}.get(kind, float(p["num_items_in_batch"])),
        "kl_coef": p["beta"],
        "kl_bound": None,
        "off_policy_threshold": p.get("off_policy_mask_threshold"),
    }
    if clips:
        keys |= {"clip_low": p["epsilon_low"], "clip_high": p["epsilon_high"], "ratio_max": p["delta"]}
    elif kind == "cispo":
        keys |= {"clip_low": 1.0, "clip_high": p["epsilon_high"] - 1}
    elif kind == "sapo":
        keys |= {
            "tau_positive": p.get("sapo_temperature_pos", 1.0),
            "tau_negative": p.get("sapo_temperature_neg", 1.05),
        }
    if keys["loss_divisor"] is not None and keys["aggregation"] not in ("constant", "seq-mean-token-sum-norm"):
        del keys["loss_divisor"]
    return keys | (FREE_WEIGHT if weighted else {})


@pytest.mark.parametrize(("name", "least"), [("trl_grpo_losses", 80), ("trl_grpo_options", 20)])
def test_trl_cases_through_a_configuration(golden, name, least):
    seen: dict[str, int] = {}
    for p, a in golden(name):
        inputs = {key.removeprefix("in_"): value for key, value in a.items() if key.startswith("in_")}
        if (keys := trl_settings(p, inputs)) is None:
            continue
        mask = inputs["completion_mask"] > 0
        old = inputs["old_log_prob"]
        weight = inputs.get("importance_sampling_ratio", torch.ones_like(old)).expand_as(old)
        rows = {
            "logp": inputs["log_prob"],
            "old": old,
            "engine": old - weight.clamp(min=1e-300).log(),
            "reference": inputs["ref_log_prob"],
            "advantage": inputs["advantages"][:, None].expand_as(old),
        }
        loss, gradient, _ = run_loss(keys, rows, mask, len(mask))
        assert loss == pytest.approx(float(a["out_loss"]), abs=1e-9), p
        torch.testing.assert_close(gradient, a["out_grad"], rtol=0, atol=1e-9)
        for key in (p["loss_type"], *(key for key in ("delta", "off_policy_mask_threshold") if p.get(key) is not None)):
            seen[key] = seen.get(key, 0) + 1
    assert sum(seen[kind] for kind in TRL_AGGREGATION if kind in seen) >= least, seen
    assert name == "trl_grpo_losses" or {"vespo", "delta", "off_policy_mask_threshold"} <= seen.keys()


def test_areal_rejections_through_a_configuration(golden):
    """A free weight for the kept tokens and a mask: its action "mask"; a weight cut at the bound: "clamp"."""
    seen = 0
    for p, a in golden("areal_decoupled_ppo"):
        rejection = p["rejection"]
        if p["level"] != "token" or rejection is None:
            continue
        level, bound = rejection["level"], rejection["upper"]
        keys = FREE_WEIGHT | {
            "clip_low": p["eps_clip"],
            "clip_high": p["eps_clip_higher"] or p["eps_clip"],
            "dual_clip": p["c_clip"],
            "correction_level": "token" if level == "token" else "geometric",
        }
        if rejection["action"] == "mask":
            keys |= {"reject": "ratio", "reject_level": level, "reject_high": bound}
        else:
            keys |= {"correction_high": bound}
        mask = a["in_loss_mask"] > 0
        rows = {
            "logp": a["in_logprobs"], "old": a["in_proximal_logprobs"], "engine": a["in_old_logprobs"],
            "advantage": a["in_advantages"],
        }  # fmt: skip
        loss, gradient, sums = run_loss(keys, rows, mask, len(mask))
        assert loss == pytest.approx(float(a["out_loss"]), abs=3e-7), p  # AReaL's weights are float32
        torch.testing.assert_close(gradient, a["out_grad"].to(gradient.dtype), rtol=0, atol=3e-7)
        if rejection["action"] == "mask":
            assert sums["rejected"] == int((mask & (a["out_behave_imp_weight"] == 0)).sum())
        seen += 1
    assert seen >= 8


@pytest.mark.parametrize(
    ("keys", "verl", "threshold"),
    [
        ({"reject": "k2", "reject_high": 0.01}, "token_k2", 0.01),
        ({"reject": "k3", "reject_high": 0.06, "reject_level": "sequence", "reject_reduce": "max"}, "seq_max_k3", 0.06),
        ({"reject": "k3", "reject_high": 0.2, "reject_level": "sequence", "reject_reduce": "sum"}, "seq_sum_k3", 0.2),
        ({"reject": "ratio", "reject_low": 0.9, "reject_high": 1.2}, "token_k1", "0.9_1.2"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("old_logp", ["behaviour", "proximal"])
def test_rejected_tokens_are_those_of_verl(keys, verl, threshold, old_logp):
    """verl's k1 bounds p_engine / p_trainer, its other metrics are of p_trainer / p_engine."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        mask = torch.rand(8, 12, generator=generator) < 0.8
        log_ratio = 0.2 * torch.randn(8, 12, generator=generator, dtype=torch.float64)
        zero = torch.zeros_like(log_ratio)
        engine = zero - 1
        trainer = engine + (-log_ratio if verl == "token_k1" else log_ratio)
        rows = {"logp": trainer, "old": trainer, "engine": engine, "advantage": zero + 1}
        rows["logp" if old_logp == "proximal" else "old"] = zero - 3  # which is not what is compared
        _, gradient, sums = run_loss({"old_logp": old_logp, "clip_high": 1e9, **keys}, rows, mask, len(mask))
        given = {"rollout_rs": verl, "rollout_rs_threshold": threshold}
        kept = verl_rejection_mask(log_ratio, mask, **given) > 0
        assert 0 < int(kept.sum()) < int(mask.sum())
        assert torch.equal(gradient != 0, kept & mask)
        assert sums["rejected"] == int((mask & ~kept).sum())


def test_greedy_baselines_of_verl_through_the_groups_of_a_batch(golden):
    compared = 0
    for _, a in golden("verl_adv_remax"):
        rewards, mask = a["in_token_level_rewards"].double(), a["in_response_mask"] > 0
        groups = [
            GroupRewards(
                reward=np.array([float(a["in_reward_baselines"][row]), float((rewards[row] * mask[row]).sum())]),
                valid=np.ones(2, np.bool_),
                num_tokens=np.array([1, int(mask[row].sum())]),
                finished=np.ones(2, np.bool_),
            )
            for row in range(len(mask))
        ]
        advantages, trains = batch_advantages(groups, "remax")
        assert all(one.tolist() == [False, True] for one in trains)
        for row, (_, advantage) in enumerate(advantages):
            first = torch.nonzero(mask[row])[:1, 0]  # an outcome reward: the same at every token
            if len(first):
                assert advantage == pytest.approx(float(a["out_advantages"][row, first[0]]), abs=1e-9)
                compared += 1
    assert compared > 5


def test_a_group_without_its_greedy_answer_is_left_out_and_a_uniform_one_can_be():
    def group(rewards: list[float], valid: list[bool]) -> GroupRewards:
        count = len(rewards)
        return GroupRewards(np.array(rewards), np.array(valid), np.full(count, 5), np.ones(count, np.bool_))

    groups = [
        group([0.5, 1.0, float("nan")], [True, True, False]),
        group([float("nan"), 1.0], [False, True]),
        group([1.0, 1.0], [True, True]),
    ]
    advantages, trains = batch_advantages(groups, "remax")
    assert [one.tolist() for one in advantages] == [[0.0, 0.5, 0.0], [0.0, 0.0], [0.0, 0.0]]
    assert [one.tolist() for one in trains] == [[False, True, False], [False, False], [False, True]]
    _, trains = batch_advantages(groups, "remax", drop_uniform_groups=True)
    assert [one.tolist() for one in trains] == [[False, True, False], [False, False], [False, False]]
