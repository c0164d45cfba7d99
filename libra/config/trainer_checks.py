"""Contradictions between the sections trainer, staleness and distil and other fields."""

from __future__ import annotations

import math
from collections.abc import Iterator

from libra.config.algorithms import DEFAULT_ALGORITHM, GROUP_ADVANTAGES
from libra.config.sections import RunSections
from libra.config.service_devices import draws_of_student
from libra.config.streaming import most_waves, streaming_obstacle, turning_obstacle
from libra.config.yaml_text import one_line_yaml
from libra.errors import nearest_name


def trainer_contradictions(config: RunSections) -> Iterator[str]:
    """A message for each contradiction of the sections trainer, staleness and distil."""
    for check in (
        _trainer, _batch, _algorithm, _staleness, _masks, _routes, _token_rewards, _late, _streaming, _lora,
        _distil, _spare_groups,
    ):  # fmt: skip
        yield from check(config)


def _trainer(config: RunSections) -> Iterator[str]:
    trainer = config.trainer
    if trainer.micro_batch_tokens < trainer.max_row_tokens:
        yield (
            f"trainer.micro_batch_tokens: a micro-batch of {trainer.micro_batch_tokens} tokens does not hold one row of "
            f"trainer.max_row_tokens={trainer.max_row_tokens}; type trainer.micro_batch_tokens={trainer.max_row_tokens}"
        )


def _batch(config: RunSections) -> Iterator[str]:
    trainer = config.trainer
    if trainer.group_size == 1 and trainer.normalize_std and trainer.advantage == "grpo":
        yield (
            "trainer.group_size: group size 1 has no standard deviation; type trainer.group_size=8 or "
            "trainer.normalize_std=false"
        )
    if trainer.group_size == 1 and trainer.advantage == "remax":
        yield (
            "trainer.group_size: 1, and trainer.advantage=remax answers the first sample of a group greedily, as baseline of the "
            "others; type trainer.group_size=2 or more"
        )
    if trainer.group_size == 1 and trainer.drop_uniform_groups:
        yield (
            "trainer.drop_uniform_groups: a group of one is always uniform, so every group would be dropped; type "
            "trainer.drop_uniform_groups=false, or trainer.group_size=8"
        )
    batch = trainer.prompts * trainer.group_size
    if trainer.minibatches > batch:
        yield (
            f"trainer.minibatches: {trainer.minibatches} minibatches cannot be cut from a batch of {batch} trajectories "
            f"(trainer.prompts={trainer.prompts} x trainer.group_size={trainer.group_size}); type "
            f"trainer.minibatches={batch} or less"
        )


def _algorithm(config: RunSections) -> Iterator[str]:
    trainer = config.trainer
    steps = trainer.epochs * trainer.minibatches
    if trainer.loss == "reinforce" and (config.run.eta > 0 or steps > 1):
        yield (
            f"trainer.loss: reinforce is right only on samples of the current weights, but run.eta={config.run.eta} and one "
            f"batch takes {steps} optimizer steps; type trainer.loss=ppo, or run.eta=0 trainer.epochs=1 trainer.minibatches=1"
        )
    if trainer.correction != "none" and trainer.old_logp == "behaviour":
        yield (
            f"trainer.correction: {trainer.correction} weighs the trainer against the engine, and the ratio to "
            "trainer.old_logp=behaviour already does; type trainer.old_logp=proximal, or trainer.correction=none"
        )
    low, high = trainer.correction_args["low"], trainer.correction_args["high"]
    if low is not None and high is not None and low > high:
        yield f"trainer.correction_args: low={low} is above high={high}; type trainer.correction_args.low={high} or less"


def _staleness(config: RunSections) -> Iterator[str]:
    run, section, trainer = config.run, config.staleness, config.trainer
    most = run.eta + 1
    if section.window is not None and section.window > most and section.over_age == "wait":
        yield (
            f"staleness.window: {section.window} versions, and staleness.over_age=wait with run.eta={run.eta} lets {most} live; "
            f"type staleness.window={most} or less, or run.eta={section.window - 1}"
        )
    if section.versions == "one" and config.cluster.hybrid_workers:
        yield (
            f"staleness.versions: one, and with cluster.hybrid_workers={config.cluster.hybrid_workers} an engine that changes its "
            "role would start its trajectories again; type staleness.versions=many, or cluster.hybrid_workers=0"
        )
    if section.engines == "rounded" and section.versions != "one":
        yield "staleness.engines: rounded, and trajectories have many versions; type staleness.versions=one"
    if section.over_age != "wait" and most_waves(config):
        yield (
            f"staleness.over_age: {section.over_age}, and with trainer.streaming={trainer.streaming} a batch is the groups of its "
            "own iteration, which are never over age; type trainer.streaming=off, or staleness.over_age=wait"
        )
    if section.over_age == "correct" and trainer.old_logp != "behaviour" and trainer.correction == "none":
        yield (
            f"staleness.over_age: correct, and with trainer.old_logp={trainer.old_logp} and trainer.correction=none nothing "
            "corrects a stale token; type trainer.correction=truncate, or trainer.old_logp=behaviour"
        )
    if section.over_age == "correct" and trainer.old_logp == "version":
        yield (
            "staleness.over_age: correct, and trainer.old_logp=version keeps the weights of run.eta versions, which over-age "
            "tokens are older than; type trainer.old_logp=proximal trainer.correction=truncate, or staleness.over_age=mask"
        )
    returns = trainer.advantage == "reinforce_pp" and trainer.gamma < 1
    if section.over_age in ("drop", "mask") and (trainer.kl_args["in_reward"] or returns):
        name = "trainer.kl_args.in_reward=true" if trainer.kl_args["in_reward"] else f"trainer.gamma={trainer.gamma:g}"
        yield (
            f"staleness.over_age: {section.over_age}, and with {name} the trainer needs all members of the batch for its "
            "advantages; type staleness.over_age=wait"
        )


def _masks(config: RunSections) -> Iterator[str]:
    trainer = config.trainer
    low, high = trainer.reject_args["low"], trainer.reject_args["high"]
    if trainer.reject != "none" and high is None and (low is None or trainer.reject == "binary-kl"):
        yield (
            f"trainer.reject: {trainer.reject}, and trainer.reject_args has no high, so it bounds nothing; type "
            "e.g. trainer.reject_args.high=2.0, or trainer.reject=none"
        )
    if low is not None and high is not None and low > high:
        yield f"trainer.reject_args: low={low} is above high={high}; type trainer.reject_args.low={high} or less"
    least = {"none": -math.inf, "k1": -math.inf, "ratio": 1.0}.get(trainer.reject, 0.0)
    if high is not None and (high < 0.0 <= least or high <= 0.0 < least):
        yield (
            f"trainer.reject_args: high={high}, and trainer.reject={trainer.reject} is never that small: every token would "
            f"be left out; type trainer.reject_args.high={least + 1.0:g}, or another bound above 0"
        )
    if trainer.loss == "vespo" and trainer.correction != "none" and trainer.correction_args["level"] != "token":
        yield (
            f"trainer.correction_args: level={trainer.correction_args['level']}, and trainer.loss=vespo multiplies the "
            "weights of a sequence's tokens itself; type trainer.correction_args.level=token, or trainer.correction=none"
        )


def _routes(config: RunSections) -> Iterator[str]:
    rollout = config.rollout
    if config.trainer.routes == "recompute":
        return
    if rollout.engine == "vllm":
        yield (
            "trainer.routes: replay needs engines that record routes, and rollout.engine=vllm does not; type "
            "trainer.routes=recompute, or rollout.engine=transformers"
        )
    if rollout.kv_host_gib is not None:
        yield (
            "trainer.routes: replay needs rollout.kv_host_gib=null: KV in host memory is kept without its routes; type "
            "trainer.routes=recompute, or rollout.kv_host_gib=null"
        )
    if rollout.exact_logprobs:
        yield (
            "trainer.routes: replay needs rollout.exact_logprobs=false, which scores both sides without routes; type "
            "trainer.routes=recompute, or rollout.exact_logprobs=false"
        )


def _token_rewards(config: RunSections) -> Iterator[str]:
    trainer, in_reward = config.trainer, config.trainer.kl_args["in_reward"]
    if in_reward and trainer.advantage not in ("rloo", "reinforce_pp"):
        yield (
            f"trainer.kl_args: in_reward=true, and trainer.advantage={trainer.advantage} has no reward per token; type "
            "trainer.advantage=rloo (or reinforce_pp), or trainer.kl_args.in_reward=false, which puts the KL into the loss"
        )
    if trainer.kl_args["target"] is not None and not in_reward:
        yield (
            f"trainer.kl_args: target={trainer.kl_args['target']:g} adapts the KL in the reward; type "
            "trainer.kl_args.in_reward=true, or trainer.kl_args.target=null"
        )
    discounted = trainer.gamma < 1 and trainer.advantage == "reinforce_pp"
    name = "kl_args.in_reward=true" if in_reward else f"gamma={trainer.gamma:g}"
    for dropped in ("drop_uniform_groups", "drop_truncated"):
        if (in_reward or discounted) and getattr(trainer, dropped):
            yield (
                f"trainer.{dropped}: true, and with trainer.{name} the trainer needs all "
                f"members of the batch for its advantages; type trainer.{dropped}=false"
            )


def _late(config: RunSections) -> Iterator[str]:
    trainer = config.trainer
    if trainer.late != "correct":
        return
    if trainer.advantage not in GROUP_ADVANTAGES:
        yield (
            f"trainer.late: correct, and trainer.advantage={trainer.advantage} may look at other groups, whose batch is over; type "
            f"trainer.advantage={GROUP_ADVANTAGES[0]} (or {', '.join(GROUP_ADVANTAGES[1:])}), or trainer.late=wait"
        )
    if trainer.minibatches > 1:
        yield (
            f"trainer.late: correct, and of trainer.minibatches={trainer.minibatches} one might have corrections alone, which "
            "count in no denominator; type trainer.minibatches=1, or trainer.late=wait"
        )
    if trainer.kl_args["in_reward"]:
        yield (
            "trainer.late: correct, and with trainer.kl_args.in_reward=true the trainer computes advantages of a batch's rewards "
            "alone; type trainer.kl_args.in_reward=false, or trainer.late=wait"
        )
    if (
        trainer.loss == "reinforce"
        or ":" in trainer.loss
        or (trainer.loss == "dppo" and trainer.loss_args["log_ratio_coef"] > 0)
    ):
        why = "has no ratio" if trainer.loss == "reinforce" else "may have a term without the advantage"
        yield (
            f"trainer.late: correct needs a clipped ratio, and trainer.loss={trainer.loss} {why}; type trainer.loss=ppo, or "
            "trainer.late=wait"
        )
    if trainer.old_logp not in ("behaviour", "exact") and trainer.correction == "none":
        yield (
            f"trainer.late: correct needs the ratio to the policy that sampled, and trainer.old_logp={trainer.old_logp} is another "
            "one; type trainer.correction=truncate, or trainer.old_logp=behaviour"
        )


def _streaming(config: RunSections) -> Iterator[str]:
    if config.trainer.streaming == "on" and (obstacle := streaming_obstacle(config)) is not None:
        yield f"trainer.streaming: on, but {obstacle}, or trainer.streaming=auto"
    if config.trainer.batches == "first_come":
        if not config.run.eta:
            yield (
                "trainer.batches: first_come, but with run.eta=0 nothing of another iteration is generated before the batch is "
                "trained; type run.eta=1, or trainer.batches=own"
            )
        elif not most_waves(config):
            why = streaming_obstacle(config) or "trainer.streaming=off; type trainer.streaming=on"
            yield (
                f"trainer.batches: first_come is of streamed steps, and {why}, or trainer.batches=own, with which a step that is "
                "not streamed takes the oldest groups that are complete"
            )
    if config.trainer.turning == "on" and (obstacle := turning_obstacle(config)) is not None:
        yield f"trainer.turning: on, but {obstacle}, or trainer.turning=auto"


def _lora(config: RunSections) -> Iterator[str]:
    trainer, cluster = config.trainer, config.cluster
    if trainer.lora_rank is None:
        return
    if trainer.layout == "fsdp2_offload":
        yield (
            f"trainer.lora_rank: {trainer.lora_rank} with trainer.layout=fsdp2_offload, and gradients of adapters are computed "
            "where the shards are used; type trainer.layout=fsdp2, or trainer.lora_rank=null"
        )
    if cluster.hybrid_workers:
        yield (
            f"trainer.lora_rank: {trainer.lora_rank} with cluster.hybrid_workers={cluster.hybrid_workers}, which have no "
            "adapters to compute gradients of; type cluster.hybrid_workers=0, or trainer.lora_rank=null"
        )


def _distil(config: RunSections) -> Iterator[str]:
    distil, trainer, rollout = config.distil, config.trainer, config.rollout
    if distil.teacher is None:
        if trainer.algorithm == "opd":
            yield (
                "distil.teacher: null, and trainer.algorithm=opd learns from a teacher; type distil.teacher=MODEL (a directory, a "
                f"Hugging Face id or libra/NAME), or trainer.algorithm={DEFAULT_ALGORITHM}"
            )
        return
    if trainer.algorithm != "opd":
        yield (
            f"distil.teacher: {one_line_yaml(distil.teacher)}, and trainer.algorithm={trainer.algorithm} learns from rewards "
            "alone; type trainer.algorithm=opd (with distil.reward_coef=1 rewards count, too), or distil.teacher=null"
        )
    yield from _service_contradictions(config)
    if not draws_of_student(config):
        return
    if rollout.top_p < 1:
        yield (
            f"distil.estimator: sampled with distil.divergence=reverse draws from all that the student may say, and "
            f"rollout.top_p={rollout.top_p:g} cuts it; type rollout.top_p=1, or distil.estimator=top_k"
        )
    if distil.tokens > 1 and rollout.engine != "transformers":
        yield (
            f"distil.tokens: {distil.tokens} tokens for each place are drawn by rollout.engine=transformers only, and it is "
            f"{rollout.engine}; type distil.tokens=1, or distil.estimator=top_k"
        )


def _service_contradictions(config: RunSections) -> Iterator[str]:
    name, named = config.distil.service, config.services.named
    if name is None:
        return
    if name not in named:
        near = nearest_name(name, named)
        there = f"; services.named has {', '.join(named)}" if named else ""
        meant = f", did you mean {near!r}?" if near else ""
        yield (
            f"distil.teacher: service {name!r} is not configured{meant}{there}; type services.named={{{name}: {{model: MODEL, "
            "function: teach}}"
        )
    elif named[name].function != "teach":
        yield (
            f"distil.teacher: service {name!r} has function {named[name].function}, which does not score each token that a student "
            f"generates; type function: teach for it in services.named, or name the model itself: distil.teacher=MODEL"
        )


def _spare_groups(config: RunSections) -> Iterator[str]:
    trainer = config.trainer
    if trainer.train_prompts is None:
        return
    if trainer.train_prompts > trainer.prompts:
        yield (
            f"trainer.train_prompts: {trainer.train_prompts} groups are to train, and trainer.prompts={trainer.prompts} are made; "
            f"type trainer.prompts={2 * trainer.train_prompts}, or trainer.train_prompts={trainer.prompts} or less"
        )
    if trainer.group_size == 1:
        yield (
            "trainer.train_prompts: a group of one has no rewards that differ, so none would train; type trainer.group_size=8, or "
            "leave trainer.train_prompts out"
        )
    if trainer.streaming != "off":
        yield (
            f"trainer.train_prompts: chosen among all groups of a batch, and trainer.streaming={trainer.streaming} trains on some "
            "before the last is complete; type trainer.streaming=off"
        )
    if trainer.late == "correct":
        yield (
            "trainer.train_prompts: chosen once, and with trainer.late=correct a group may have another signal later; type "
            "trainer.late=wait"
        )
    if trainer.algorithm == "opd" and not config.distil.reward_coef:
        yield (
            "trainer.train_prompts: goes by rewards, and trainer.algorithm=opd learns without them; type distil.reward_coef=1, or "
            "leave trainer.train_prompts out"
        )
