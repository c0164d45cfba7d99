"""Recorded cases of peers through the objective that a run builds from its configuration, to 1e-9, gradients included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from libra.config import config_from_dict
from libra.train import GroupRewards, Sample, TrainSettings, batch_advantages
from libra.train.objective import Objective
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


def test_a_group_without_its_greedy_answer_is_left_out_and_a_uniform_one_can_be():
    nan = float("nan")
    groups = [
        GroupRewards(np.array(rewards), ~np.isnan(rewards), np.full(len(rewards), 5), np.ones(len(rewards), np.bool_))
        for rewards in ([0.5, 1.0, nan], [nan, 1.0], [1.0, 1.0])
    ]
    advantages, trains = batch_advantages(groups, "remax")
    assert [one.tolist() for one in advantages] == [[0.0, 0.5, 0.0], [0.0, 0.0], [0.0, 0.0]]
    assert [one.tolist() for one in trains] == [[False, True, False], [False, False], [False, True]]
    _, trains = batch_advantages(groups, "remax", drop_uniform_groups=True)
    assert trains[2].tolist() == [False, False]
