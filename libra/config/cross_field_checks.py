"""Checks that concern more than one field of a configuration.

Each check yields one message per contradiction: ``FIELD: what contradicts what; type A, or B``. The message names every field
involved by its dotted name, the one to change first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import pairwise

from libra.config.agent_checks import agent_contradictions
from libra.config.distil_checks import distil_contradictions
from libra.config.models import RunSections
from libra.config.services_checks import services_contradictions
from libra.config.spare_groups import spare_group_contradictions
from libra.config.streaming import GROUP_ADVANTAGES, most_waves, streaming_obstacle, turning_obstacle

_DOTTED_NAME = re.compile(r"\b[a-z_]+\.[a-z][a-z0-9_]*\b")


def contradictions(config: RunSections) -> list[str]:
    """A message for every contradiction between fields; empty if there is none."""
    checks = (
        agent_contradictions, _rollout, _vllm_only, _transformers_only, _workers, _boundaries, _trainer, _batch, _algorithm,
        _staleness, _masks, _routes, _token_rewards, _late, _streaming, _lora, _schedules, _planner,
        _layout_auto, _as_planned, distil_contradictions, spare_group_contradictions,
        services_contradictions,
    )  # fmt: skip
    return [message for check in checks for message in check(config)]


def fields_of(message: str) -> list[str]:
    """Dotted names in a message, in order, each once."""
    return list(dict.fromkeys(_DOTTED_NAME.findall(message)))


def _rollout(config: RunSections) -> Iterator[str]:
    rollout, trainer = config.rollout, config.trainer
    if rollout.max_new_tokens > rollout.max_context_tokens:
        yield (
            f"rollout.max_new_tokens: {rollout.max_new_tokens} tokens of one turn do not fit into a context of "
            f"rollout.max_context_tokens={rollout.max_context_tokens}; type "
            f"rollout.max_new_tokens={rollout.max_context_tokens} or less, or raise rollout.max_context_tokens"
        )
    for name, wrong, right in (
        ("engine", rollout.engine != "transformers", "transformers"),
        ("top_p", rollout.top_p != 1, "1"),
        ("temperature", rollout.temperature == 0, "1"),
    ):
        if rollout.exact_logprobs and wrong:
            yield (
                f"rollout.exact_logprobs: the trainer cannot compute the same with rollout.{name}={getattr(rollout, name)}; "
                f"type rollout.{name}={right}, or rollout.exact_logprobs=false"
            )
    if rollout.max_context_tokens > trainer.micro_batch_tokens:
        yield (
            f"trainer.micro_batch_tokens: a trajectory of rollout.max_context_tokens={rollout.max_context_tokens} does not "
            f"fit into a micro-batch of {trainer.micro_batch_tokens}; type "
            f"trainer.micro_batch_tokens={rollout.max_context_tokens}"
        )
    if rollout.temperature == 0:
        yield (
            "rollout.temperature: at 0 all samples of a group are the same, and nothing can be learned; type "
            "rollout.temperature=1.0 (evaluation.temperature=0 evaluates greedily)"
        )


def _vllm_only(config: RunSections) -> Iterator[str]:
    rollout, engines = config.rollout, config.cluster.engines
    for name, given, what in (
        ("rollout.tp", rollout.tp > 1, "have a tensor-parallel degree above 1"),
        ("rollout.keep_kv", rollout.keep_kv, "keep KV over an update"),
        ("cluster.engines", any(group.tp > 1 for group in engines), "have a tensor-parallel degree above 1"),
    ):
        own_says = ":" in rollout.engine and name != "rollout.keep_kv"  # by its tp_degrees, when it is imported
        if given and rollout.engine != "vllm" and not own_says:
            yield f"{name}: only vllm engines can {what}, and rollout.engine={rollout.engine}; type rollout.engine=vllm"


def _transformers_only(config: RunSections) -> Iterator[str]:
    rollout = config.rollout
    paced = any(group.min_pass_s is not None for group in config.cluster.engines)
    for name, given, why in (
        (
            "rollout.kv_host_gib",
            rollout.kv_host_gib is not None,
            "rollout.engine_args has the KV connector of a vllm engine, e.g. {kv_transfer_config: {kv_connector: OffloadingConnector}}",
        ),
        (
            "rollout.speculate",
            rollout.speculate,
            "rollout.engine_args makes a vllm engine draft, e.g. {speculative_config: {method: ngram, num_speculative_tokens: 4}}",
        ),
        ("cluster.engines", paced, "only transformers engines wait for min_pass_s"),
        ("model.loader", config.model.loader is not None, "a vllm engine builds the model itself"),
    ):
        if given and rollout.engine == "vllm":
            yield f"{name}: {why}, and rollout.engine=vllm; leave it out, or type rollout.engine=transformers"


def _workers(config: RunSections) -> Iterator[str]:
    cluster = config.cluster
    listed = sum(group.count for group in cluster.engines)
    count = listed or cluster.rollout_workers
    if cluster.scheduler is None and cluster.hybrid_workers > count and config.planner.layout != "auto":
        yield (
            f"cluster.hybrid_workers: {cluster.hybrid_workers} workers are to change roles, and there are {count} rollout "
            f"workers; type cluster.hybrid_workers={count} or less, or raise cluster.rollout_workers"
        )
    most = cluster.tool_workers_most
    if most is not None and most < cluster.tool_workers:
        yield (
            f"cluster.tool_workers_most: {most}, and there are cluster.tool_workers={cluster.tool_workers} to begin with; type "
            f"cluster.tool_workers_most={cluster.tool_workers} or more, or fewer cluster.tool_workers"
        )
    if listed and cluster.rollout_workers != 1:
        yield (
            f"cluster.rollout_workers: {cluster.rollout_workers} workers, but cluster.engines lists {listed} by kind; leave "
            "cluster.rollout_workers out, or type cluster.engines=[]"
        )


def _boundaries(config: RunSections) -> Iterator[str]:
    policy = config.policy
    if policy.boundaries_tokens and policy.name != "cmlfq":
        yield (
            f"policy.boundaries_tokens: policy.name={policy.name} has no boundaries; type policy.name=cmlfq, or "
            "policy.boundaries_tokens={}"
        )
    ends = [tokens for _, tokens in sorted(policy.boundaries_tokens.items())]
    if any(later <= end for end, later in pairwise(ends)):
        yield (
            f"policy.boundaries_tokens: {policy.boundaries_tokens} do not rise with the degree; type e.g. "
            "policy.boundaries_tokens={tp1: 3000, tp2: 12000}"
        )


def _trainer(config: RunSections) -> Iterator[str]:
    trainer = config.trainer
    if trainer.micro_batch_tokens < trainer.max_row_tokens:
        yield (
            f"trainer.micro_batch_tokens: a micro-batch of {trainer.micro_batch_tokens} tokens does not hold one row of "
            f"trainer.max_row_tokens={trainer.max_row_tokens}; type trainer.micro_batch_tokens={trainer.max_row_tokens}"
        )
    if trainer.offload and trainer.layout != "fsdp2":
        yield (
            f"trainer.offload: trainer.layout={trainer.layout} has no shards to offload; type trainer.layout=fsdp2, or "
            "trainer.offload=false"
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
    if section.over_age in ("drop", "mask") and (trainer.kl_in_reward or returns):
        name = "trainer.kl_in_reward=true" if trainer.kl_in_reward else f"trainer.gamma={trainer.gamma:g}"
        yield (
            f"staleness.over_age: {section.over_age}, and with {name} the trainer needs all members of the batch for its "
            "advantages; type staleness.over_age=wait"
        )


def _masks(config: RunSections) -> Iterator[str]:
    trainer = config.trainer
    low, high = trainer.reject_args["low"], trainer.reject_args["high"]
    if trainer.reject != "none" and high is None and (low is None or trainer.reject == "binary-kl"):
        yield (
            f"trainer.reject: {trainer.reject}, and trainer.reject_args has no high, so it bounds nothing; type e.g. trainer.reject_args.high=2.0, or "
            "trainer.reject=none"
        )
    if low is not None and high is not None and low > high:
        yield f"trainer.reject_args: low={low} is above high={high}; type trainer.reject_args.low={high} or less"
    least = {"none": -math.inf, "k1": -math.inf, "ratio": 1.0}.get(trainer.reject, 0.0)
    if high is not None and (high < 0.0 <= least or high <= 0.0 < least):
        yield (
            f"trainer.reject_args: high={high}, and trainer.reject={trainer.reject} is never that small: every token would be left out; "
            f"type trainer.reject_args.high={least + 1.0:g}, or another bound above 0"
        )
    if trainer.loss == "vespo" and trainer.correction != "none" and trainer.correction_args["level"] != "token":
        yield (
            f"trainer.correction_args: level={trainer.correction_args['level']}, and trainer.loss=vespo multiplies the weights of a sequence's "
            "tokens itself; type trainer.correction_args.level=token, or trainer.correction=none"
        )


def _token_rewards(config: RunSections) -> Iterator[str]:
    trainer = config.trainer
    if trainer.kl_in_reward and trainer.advantage not in ("rloo", "reinforce_pp"):
        yield (
            f"trainer.kl_in_reward: trainer.advantage={trainer.advantage} has no reward per token; type trainer.advantage=rloo (or "
            "reinforce_pp), or trainer.kl_in_reward=false, which puts the KL into the loss"
        )
    discounted = trainer.gamma < 1 and trainer.advantage == "reinforce_pp"
    name = "kl_in_reward" if trainer.kl_in_reward else "gamma"
    for dropped in ("drop_uniform_groups", "drop_truncated"):
        if (trainer.kl_in_reward or discounted) and getattr(trainer, dropped):
            yield (
                f"trainer.{dropped}: true, and with trainer.{name}={str(getattr(trainer, name)).lower()} the trainer needs all "
                f"members of the batch for its advantages; type trainer.{dropped}=false"
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
    if trainer.kl_in_reward:
        yield (
            "trainer.late: correct, and with trainer.kl_in_reward=true the trainer computes advantages of a batch's rewards alone; "
            "type trainer.kl_in_reward=false, or trainer.late=wait"
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
    if trainer.offload:
        yield (
            f"trainer.lora_rank: {trainer.lora_rank} with trainer.offload=true, and gradients of adapters are computed where "
            "the shards are used; type trainer.offload=false, or trainer.lora_rank=null"
        )
    if cluster.hybrid_workers:
        yield (
            f"trainer.lora_rank: {trainer.lora_rank} with cluster.hybrid_workers={cluster.hybrid_workers}, which have no "
            "adapters to compute gradients of; type cluster.hybrid_workers=0, or trainer.lora_rank=null"
        )


def _schedules(config: RunSections) -> Iterator[str]:
    checkpoint, evaluation = config.checkpoint, config.evaluation
    every, between = checkpoint.every, evaluation.every
    if every and between and every % between and between % every:
        yield (
            f"checkpoint.every: checkpoints every {every} steps and evaluations every {between} (evaluation.every) rarely "
            "coincide, and only an evaluated checkpoint can be the best; type "
            f"checkpoint.every={between}"
        )
    if between > 0 and evaluation.prompts == 0:
        yield (
            f"evaluation.every: {between}, and evaluation.prompts=0 gives no questions; type evaluation.prompts=256, or "
            "evaluation.every=0"
        )
    if config.watchdog.restart and config.watchdog.timeout_s is None:
        yield (
            "watchdog.restart: watchdog.timeout_s=null turns the watchdog off; type watchdog.timeout_s=auto, or "
            "watchdog.restart=false"
        )


def _planner(config: RunSections) -> Iterator[str]:
    planner = config.planner
    if planner.apply and not planner.replan:
        yield "planner.apply: true, but without planner.replan there is no plan to apply; type planner.replan=true"
    median, last = planner.lengths["generated_p50_tokens"], planner.lengths["generated_p99_tokens"]
    if last < median:
        yield (
            f"planner.lengths: generated_p99_tokens={last:g} is below the median, generated_p50_tokens={median:g}; type "
            f"planner.lengths.generated_p99_tokens={4 * median:g}"
        )


def _layout_auto(config: RunSections) -> Iterator[str]:
    """What ``planner.layout=auto`` plans must not be configured too."""
    cluster = config.cluster
    if config.planner.layout != "auto":
        return
    engines = 'planner.fixed_engines={"1": 2}, by degree'
    workers = f'planner.fixed_engines={{"{config.rollout.tp}": {cluster.rollout_workers}}}'
    for name, given, fixed in (
        ("cluster.engines", bool(cluster.engines), f" (to fix it for the plan: {engines})"),
        ("cluster.rollout_workers", cluster.rollout_workers != 1, f" (to fix it for the plan: {workers})"),
        (
            "cluster.train_workers",
            cluster.train_workers != 1,
            f" (to fix it for the plan: planner.fixed_train_gpus={cluster.train_workers})",
        ),
        ("policy.boundaries_tokens", bool(config.policy.boundaries_tokens), ""),
    ):
        if given and config.planner.planned is None:
            yield (
                f"{name}: planner.layout=auto plans it and would ignore the given value; leave it out{fixed}, or type "
                "planner.layout=configured"
            )
    if cluster.scheduler is not None:
        yield (
            f"planner.layout: auto starts the workers that it plans, and the cluster at cluster.scheduler={cluster.scheduler} has "
            "its own; type libra plan CONFIG --write FILE, start those workers (libra cluster slurm FILE up), then libra run FILE "
            "--scheduler ADDR"
        )


def _as_planned(config: RunSections) -> Iterator[str]:
    """Settings that a plan gave must still have the plan's values."""
    planned, cluster = config.planner.planned, config.cluster
    if planned is None:
        return
    engines = sorted((group.tp, group.count, group.slots or config.rollout.slots) for group in cluster.engines)
    for name, has, wanted in (
        ("cluster.train_workers", cluster.train_workers, planned.train_gpus),
        ("trainer.micro_batch_tokens", config.trainer.micro_batch_tokens, planned.micro_batch_tokens),
        ("cluster.engines", _engine_words(engines), _engine_words(sorted(e.key for e in planned.engines))),
        ("policy.boundaries_tokens", config.policy.boundaries_tokens, planned.route),
    ):
        if has != wanted and not (name.startswith("policy.") and config.policy.name != "cmlfq"):
            yield (
                f"{name}: {has}, and planner.planned has {wanted}; leave {name} as planned, or type planner.planned=null "
                "to start another layout"
            )
    gpus = planned.train_gpus + sum(engines.tp * engines.count for engines in planned.engines)
    if gpus > planned.num_gpus:
        yield (
            f"planner.planned: its training and engines take {gpus} GPUs, and it is for {planned.num_gpus}; type libra plan CONFIG "
            "--write FILE for a plan that fits"
        )
    boundaries = len(planned.engines) - 1
    if len(planned.boundaries_tokens) != boundaries:
        yield (
            f"planner.planned: {len(planned.engines)} degrees have {boundaries} boundaries, got "
            f"{len(planned.boundaries_tokens)}; type libra plan CONFIG --write FILE, which writes them"
        )


def _engine_words(engines: list[tuple[int, int, int]]) -> str:
    """Engines, each (degree, number, slots), in words."""
    return ", ".join(f"{count} x TP{tp} with {slots} slots" for tp, count, slots in engines) or "none"
