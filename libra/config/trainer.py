"""Section ``trainer``: the algorithm, batch, optimizer, and computation of a step.

`libra.config.algorithms` fills keys marked (preset).
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import Field, ModelWrapValidatorHandler, ValidationInfo, field_validator, model_validator

from libra.config.algorithms import (
    ADVANTAGES,
    DEFAULT_ALGORITHM,
    LOSS_ARGS,
    AdamArgs,
    AggregationMode,
    AlgorithmName,
    CorrectionAction,
    CorrectionArgs,
    KLArgs,
    LateArgs,
    LayoutName,
    LoraArgs,
    LossName,
    MismatchArgs,
    OldLogp,
    RejectArgs,
    RejectMetric,
    preset_values,
)
from libra.config.section import AtLeastOne, AtLeastZero, OwnOr, Section, arguments

FEWEST_MISMATCH_TOKENS = 64
"""Tokens of an engine or length class from which its mismatch can raise an alarm: k3 of few has a
long right tail."""
ROUNDING_NATS: Final = {"float32": 1e-3, "bfloat16": 0.1}
"""Mean |log p(rollout) - log p(trainer)| that rounding explains, ten to a thousand times what is
measured (`mismatch_args`)."""


class TrainerSection(Section):
    """The algorithm, its batch and its optimizer (AdamW)."""

    algorithm: AlgorithmName = DEFAULT_ALGORITHM
    """Training algorithm: a preset for the keys marked (preset) that are not given, listed in
    docs/algorithms.md. A file or a command line that changes it starts from its preset."""
    prompts: AtLeastOne = 16
    """Groups in one batch: B prompts, each sampled `group_size` times."""
    group_size: AtLeastOne = 8
    """Trajectories per prompt (G); their mean reward is the baseline."""
    resample: AtLeastZero = 1
    """Retries of a trajectory that failed for a reason other than the model, and of a failed
    grading. Then the group closes without that member (`docs/failures.md`)."""
    lr: Annotated[float, Field(ge=0)] = 1e-4
    """Learning rate after warm-up. 0: measure without training."""
    adam_args: dict[str, Any] = AdamArgs().model_dump(mode="json")
    """AdamW's decay rates of both moments (`betas`), its decoupled `weight_decay`, and the norm to
    which gradients are clipped (`max_grad_norm`)."""
    warmup_steps: AtLeastZero = 0
    """Optimizer steps over which the learning rate rises linearly from 0."""
    lr_schedule: Annotated[str, OwnOr(("constant",))] = "constant"
    """Factor of the learning rate at each step, on top of the warm-up. constant: 1. Your own:
    `libra.train.own_parts.LRSchedule`."""
    lora_rank: AtLeastOne | None = None
    """Train adapters of this rank (LoRA) instead of all weights; versions and checkpoints hold the
    merged model, and CHECKPOINT/adapter the adapters in the format of peft. Not with `layout`
    fsdp2_offload, nor with `cluster.hybrid_workers`. If null, all weights."""
    lora_args: dict[str, Any] = LoraArgs().model_dump(mode="json")
    """`alpha`: the product of the adapters is multiplied by alpha / `lora_rank`. `targets`: linear
    layers with adapters, by the last part of their name, e.g. {targets: [q_proj, v_proj]}; empty:
    all but the output head."""
    advantage: Annotated[str, OwnOr(tuple(ADVANTAGES))] = Field(
        default="grpo",
        description=f"(preset) Advantage estimator. {'; '.join(f'{name}: {text}' for name, (_, text) in ADVANTAGES.items())}. "
        "Your own: `libra.train.own_parts.AdvantageEstimator`.",
    )
    normalize_std: bool = True
    """(preset) Divide advantages by the standard deviation of their group (GRPO); false leaves the
    centred reward (Dr. GRPO). For `advantage` grpo."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """For `advantage` reinforce_pp: discount per generated token. Below 1 every token has an
    advantage of its own."""
    drop_uniform_groups: bool = False
    """Leave groups whose rewards are all equal out of the step and its means. With `train_prompts`
    spare groups replace them."""
    train_prompts: AtLeastOne | None = None
    """Groups of a batch that train: the first of the `prompts` generated groups whose rewards
    differ, in the order of the batch. The others are spares for groups without signal (DAPO's
    dynamic sampling, with the candidates generated beforehand) and count in no denominator. All are
    generated to their end, so that short ones are not preferred. If fewer groups have a signal,
    only these train. Not with `streaming`. If null, all groups train."""
    no_signal: Literal["warn", "stop"] = "warn"
    """Reaction to a batch in which no member has an advantage, because every trajectory failed or
    no group has rewards that differ. warn: a line with the first cause. stop: also end the run
    after three such batches in a row."""
    drop_truncated: bool = False
    """Exclude truncated trajectories ("length") from the step; they still count in the baseline of
    their group."""
    loss: Annotated[str, OwnOr(get_args(LossName))] = "ppo"
    """(preset) Loss of a token, as a function of its probability ratio and advantage. Your own:
    `libra.train.own_parts.TokenLoss`."""
    loss_args: dict[str, Any] = preset_values(DEFAULT_ALGORITHM)["loss_args"]
    """(preset) Arguments of the loss, by name (docs/algorithms.md). ppo, gspo, cispo, gmpo: the
    ratio is clipped to [1 - `clip_low`, 1 + `clip_high`] (gmpo: its logarithm). ppo, gspo:
    `dual_clip` bounds the loss at negative advantages to this many times the advantage, `ratio_max`
    the unclipped ratio. sapo: `tau_positive` and `tau_negative` are the steepness of its gate.
    dppo: the `divergence` (tv or kl) of "this token or another" is bounded by `clip_low` and
    `clip_high`; `log_ratio_coef` weighs the squared log ratio; above `ratio_max` the gradient goes
    through the log-probability alone. vespo: k and lambda of the sequence weight e^lambda w^k
    e^(-lambda w), for positive and negative advantages. A loss of your own reads them from
    ``settings.loss_args``."""
    aggregation: AggregationMode = "token-mean"
    """(preset) How token losses become the loss of the step: their mean over all tokens; the mean
    over sequences of each sequence's token sum or token mean; that token sum divided by
    `rollout.max_context_tokens` (-norm)."""
    old_logp: OldLogp = "behaviour"
    """(preset) Denominator of the probability ratio: the engine's recorded log-probability
    (behaviour), the trainer's at the start of the step (proximal), the trainer's for tokens of the
    newest weights and the engine's for stale ones (exact), the trainer's under the weights that
    sampled each token (version), or under a moving average of the weights (ewma). All but the first
    cost a forward pass if one batch takes several optimizer steps. version also costs a pass over
    the stale tokens, and keeps the weights of `run.eta` versions before the newest checkpoint and
    of all since, unless engines record exact log-probabilities (`rollout.exact_logprobs`). ewma
    costs a pass over the batch, and a copy of the weights in memory and checkpoints."""
    correction: CorrectionAction = "none"
    """(preset) Treatment of a token's importance weight (trainer over engine) outside the bounds in
    `correction_args`: set to the bound (truncate) or to 0 (mask). none: no weights. Not with
    `old_logp` behaviour."""
    correction_args: dict[str, Any] = preset_values(DEFAULT_ALGORITHM)["correction_args"]
    """(preset) `level`: the weight is the ratio of the token, the product over its sequence, or the
    geometric mean over it. `low` and `high`: smallest and largest weight; null: no bound."""
    reject: RejectMetric = "none"
    """Leave tokens out of the loss where trainer and engine disagree, with d = log p(trainer) - log
    p(engine): outside the bounds of `reject_args` lies e^d (ratio), d (k1), d^2/2 (k2), e^d - 1 - d
    (k3), e^-d - 1 + d (k3-reverse), or above `high` the KL divergence of "this token or another" in
    either direction (binary-kl). p(trainer) follows `old_logp`; for behaviour it is the weights' in
    training. Rejected tokens still count in the denominators."""
    reject_args: dict[str, Any] = RejectArgs().model_dump(mode="json")
    """For `reject`: `low` and `high` are the smallest and largest value that is kept, null: no bound;
    `level`: leave out tokens, or whole sequences by their mean, sum or max (`reduce`; for ratio of the
    logarithms). With or without `reject`, `off_policy` leaves out sequences of negative advantage whose
    mean of log p(engine) - log p(now) is above this many nats (DeepSeek-V3.2), and `m2po` the fewest
    tokens that bring the mean square of log p(now) - log p(engine) over the minibatch down to this (M2PO:
    0.04), the largest first and only those that the advantage pushes further away, at the cost of a
    forward pass per optimizer step; null: off."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """(preset) Weight of the KL term to the model of `model.path`. 0: no reference model is loaded."""
    kl_args: dict[str, Any] = KLArgs().model_dump(mode="json")
    """`estimator` of the KL term: k1, k2, k3, abs or one of them with +, whose value is the estimator's
    and whose gradient is k2's, the gradient of the divergence. `in_reward`: subtract `kl_coef` x KL
    estimate from the reward of each token, before advantages are computed, instead of a term of the loss
    (`advantage` rloo and reinforce_pp, as in their papers); the KL is the engine's policy's at the time it
    sampled, and the advantages in the record of a batch are without it. `target`: adapt the coefficient in
    the reward, which starts at `kl_coef`, so that the mean KL per token approaches this many nats: after
    each batch it changes by a share of at most 0.2 x trajectories / 10000; null: it stays."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus, in units of loss per nat."""
    epochs: AtLeastOne = 1
    """Passes over each batch."""
    minibatches: AtLeastOne = 1
    """Optimizer steps per pass; one batch takes `epochs` x `minibatches` of them."""
    max_row_tokens: AtLeastOne = 512
    """Trajectories are packed into rows of up to this many tokens; a longer one has a row of its
    own. Short rows are faster on a CPU, where attention costs the square of the row length. The
    result does not change."""
    micro_batch_tokens: AtLeastOne = 4096
    """Tokens per forward and backward pass. Bounds memory; the result does not change."""
    logit_chunk_tokens: AtLeastOne = 1024
    """Generated tokens whose logits (times the vocabulary) the trainer holds at once; the backward
    pass recomputes them. Bounds memory; the result changes only by the rounding of sums."""
    mismatch_args: dict[str, Any] = MismatchArgs().model_dump(mode="json")
    """Thresholds of the mismatch alarm, over the tokens of a step that were sampled from the trained
    weights, in all or for one engine or length class. `mean`: mean |log p(rollout) - log p(trainer)| in
    nats; float32 has about 1e-6, bfloat16 about 0.01; null: 1e-3 (float32) or 0.1 (bfloat16), plus
    -log(`rollout.top_p`), by which engines record more. `k3`: the k3 estimate of KL(rollout | trainer) in
    nats, about half the mean square of the gap, so that few large gaps count; float32 has about 1e-12,
    bfloat16 about 1e-4; null: only recorded."""
    mismatch_action: Literal["warn", "pause", "stop"] = "stop"
    """Reaction to either alarm: a line on terminal and page; end the run after this step (`libra
    resume` continues it); or end it before this step."""
    layout: LayoutName = "ddp"
    """Layout of the model on `cluster.train_workers` replicas: whole on each (ddp), or weights,
    gradients and optimizer state in shards (fsdp2), which needs 1 / replicas of the memory and more
    network. fsdp2_offload keeps the shards in host memory between their uses; on a CPU it is fsdp2. No
    effect with one replica."""
    late: Literal["off", "correct", "wait", "drop"] = "off"
    """Treatment of a reward that comes later (`libra.Late`, docs/rewards.md). A reward that is
    there when its batch is made counts in it. Otherwise the provisional value counts, or the
    trajectory is left out where it has none; afterwards correct: the reward counts in the next
    batch, as the difference that it makes to the advantages of its group, times e^(-delay / 50
    versions) and the clipped ratio of the loss (RAC). wait: batches wait for the reward, up to
    `late_args.wait_s`. drop: the reward is dropped. off: a late reward is a failure of class
    reward."""
    late_args: dict[str, Any] = LateArgs().model_dump(mode="json")
    """`versions`, for `late` correct: versions after which a late reward is dropped; group records
    are kept as long. `wait_s`, for `late` wait: seconds that a batch waits for the rewards of its
    members before it takes the provisional values."""
    dispatch: Literal["storage", "peer"] = "storage"
    """Source of a step's trajectories. "storage": every replica reads the whole batch from the run
    directory. "peer": each replica fetches its slice over the network from the workers that graded
    it, and reads rows that those workers lost from the run directory. It fetches the whole batch if
    several steps begin with a pass over it (`old_logp`), with `reject_args.m2po`, or with
    `exact_logprobs`."""
    routes: Literal["recompute", "replay"] = "recompute"
    """Experts of a mixture of experts in training. recompute: as the trainer's routers choose.
    replay: those that the engine recorded while it generated; their weights are the trainer's
    (Rollout Routing Replay). Removes what near ties of a router add to the mismatch. Needs a
    qwen3_moe model, engines transformers, no `rollout.kv_host_gib` and no `rollout.exact_logprobs`;
    takes 2 x layers x experts per token bytes per token in records and engines."""
    gradient_checkpointing: bool = False
    """Keep only each layer's input and recompute the rest in the backward pass: less memory, about
    a third more compute."""
    streaming: Literal["off", "auto", "on"] = "off"
    """Add up the gradient of a batch in waves of complete groups while its other groups are
    generated. Needs one optimizer step per batch and advantages of a group alone. auto: where that
    is so and pays, by `planner.planned` and then by each measured step. A batch then is the
    groups of its own iteration, also with `run.eta` above 0, unless `batches` says otherwise. The
    result changes only by the rounding of sums."""
    batches: Literal["own", "first_come"] = "own"
    """Groups of a streamed batch (`streaming`) with `run.eta` above 0. own: the groups of its
    iteration. first_come: the first complete ones of any iteration, with places kept for groups
    that would otherwise exceed `run.eta`. Without `streaming` a batch takes the oldest complete
    groups."""
    turning: Literal["off", "auto", "on"] = "off"
    """Let workers of `cluster.hybrid_workers` train for the open step while the tail of its rollout
    fits on the other engines, and generate again for the next rollout. Needs streamed steps
    (`streaming`) and another engine. auto: where that is possible and pays, as for `streaming`.
    Generations on such a worker end their turn or chunk first, or stop after
    `cluster.drain_timeout_s`. The result changes only by the rounding of sums."""

    @model_validator(mode="wrap")
    @classmethod
    def _preset(cls, given: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Fill missing keys from the preset; they do not count as given (``model_fields_set``)."""
        if not isinstance(given, dict):
            return validate(given)
        preset = preset_values(given.get("algorithm", DEFAULT_ALGORITHM))
        filled = {**preset, **given}
        for name in ("loss_args", "correction_args"):
            other_loss = name == "loss_args" and filled.get("loss") != preset.get("loss")
            if other_loss or isinstance(given.get(name), dict):
                filled[name] = ({} if other_loss else preset.get(name, {})) | given.get(name, {})
        made = validate(filled)
        made.model_fields_set.difference_update(preset.keys() - given.keys())
        return made

    @field_validator(
        "loss_args", "correction_args", "reject_args", "lora_args", "adam_args", "late_args", "kl_args", "mismatch_args"
    )
    @classmethod
    def _arguments(cls, given: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """Arguments of the chosen loss, correction or metric, with defaults; own losses take
        any."""
        name = str(info.field_name).removesuffix("_args")
        chosen = info.data.get(name, "")
        kinds: dict[str, type[Section]] = {
            "correction": CorrectionArgs,
            "reject": RejectArgs,
            "lora": LoraArgs,
            "adam": AdamArgs,
            "late": LateArgs,
            "kl": KLArgs,
            "mismatch": MismatchArgs,
        }
        kind = LOSS_ARGS.get(chosen) if name == "loss" else kinds[name]
        return (
            given
            if kind is None
            else arguments(kind, given, f"trainer.{name}={chosen}" if chosen else f"trainer.{name}_args")
        )
