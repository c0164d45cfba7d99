"""Checks that concern more than one field of a configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from libra.config.models import RunConfig


@dataclass(frozen=True, slots=True)
class CrossFieldProblem:
    """Fields that contradict each other.

    Attributes
    ----------
    fields : tuple of str
        Dotted names of all fields involved; the first is the one to look at.
    message : str
        What is wrong and what to type, beginning with a field's name.
    """

    fields: tuple[str, ...]
    message: str


def cross_field_problems(config: RunConfig) -> tuple[CrossFieldProblem, ...]:
    """Every contradiction between fields, in the order of the sections; empty where there is none."""
    return (
        *_rollout(config),
        *_engines(config),
        *_boundaries(config),
        *_trainer(config),
        *_algorithm(config),
        *_checkpoint(config),
        *_evaluation(config),
        *_watchdog(config),
        *_mismatch(config),
        *_layout(config),
        *_planner(config),
        *_planned_layout(config),
    )


def _rollout(config: RunConfig) -> Iterator[CrossFieldProblem]:
    rollout, trainer = config.rollout, config.trainer
    if rollout.max_new_tokens > rollout.max_context_tokens:
        yield CrossFieldProblem(
            ("rollout.max_new_tokens", "rollout.max_context_tokens"),
            f"rollout.max_new_tokens: {rollout.max_new_tokens} tokens of one turn do not fit into a context of "
            f"rollout.max_context_tokens={rollout.max_context_tokens}; type "
            f"rollout.max_new_tokens={rollout.max_context_tokens} or less, or raise rollout.max_context_tokens",
        )
    if rollout.exact_logprobs:
        for name, wrong, typed in (
            ("engine", rollout.engine != "transformers", "transformers"),
            ("top_p", rollout.top_p != 1, "1"),
            ("temperature", rollout.temperature == 0, "1"),
        ):
            if wrong:
                yield CrossFieldProblem(
                    ("rollout.exact_logprobs", f"rollout.{name}"),
                    f"rollout.exact_logprobs: the trainer cannot compute the same with rollout.{name}={getattr(rollout, name)}; "
                    f"type rollout.{name}={typed}, or rollout.exact_logprobs=false",
                )
    if rollout.max_context_tokens > trainer.micro_batch_tokens:
        yield CrossFieldProblem(
            ("trainer.micro_batch_tokens", "rollout.max_context_tokens"),
            f"trainer.micro_batch_tokens: a trajectory of rollout.max_context_tokens={rollout.max_context_tokens} does not "
            f"fit into a micro-batch of {trainer.micro_batch_tokens}; type "
            f"trainer.micro_batch_tokens={rollout.max_context_tokens}",
        )


def _engines(config: RunConfig) -> Iterator[CrossFieldProblem]:
    rollout, cluster = config.rollout, config.cluster
    if rollout.engine != "vllm":
        asked = [
            *(["rollout.tp"] if rollout.tp > 1 else []),
            *(["rollout.keep_kv"] if rollout.keep_kv else []),
            *(["cluster.engines"] if any(group.tp > 1 for group in cluster.engines) else []),
        ]
        for name in asked:
            what = "keep KV over an update" if name == "rollout.keep_kv" else "have a tensor-parallel degree above 1"
            yield CrossFieldProblem(
                (name, "rollout.engine"),
                f"{name}: only vllm engines can {what}, and rollout.engine={rollout.engine}; type rollout.engine=vllm",
            )
    paced = any(group.min_pass_s is not None for group in cluster.engines)
    for name, asked_for, instead in (
        (
            "rollout.kv_cache_gib",
            rollout.kv_cache_gib is not None,
            "vllm.kv_cache_gib says how much KV a vllm engine holds",
        ),
        ("cluster.engines", paced, "only transformers engines wait out min_pass_s"),
    ):
        if rollout.engine == "vllm" and asked_for:
            yield CrossFieldProblem(
                (name, "rollout.engine"),
                f"{name}: {instead}, and rollout.engine=vllm; leave it out, or type rollout.engine=transformers",
            )
    if rollout.engine == "vllm" and rollout.exact_logprobs:
        yield CrossFieldProblem(
            ("rollout.exact_logprobs", "rollout.engine"),
            "rollout.exact_logprobs: only transformers engines score with the trainer's own code, and rollout.engine=vllm; type "
            "rollout.engine=transformers, or rollout.exact_logprobs=false",
        )
    count = sum(group.count for group in cluster.engines) or cluster.rollout_workers
    planned_later = config.planner.layout == "auto"
    if cluster.scheduler is None and cluster.hybrid_workers > count and not planned_later:
        yield CrossFieldProblem(
            ("cluster.hybrid_workers", "cluster.rollout_workers"),
            f"cluster.hybrid_workers: {cluster.hybrid_workers} of {count} rollout workers are to change roles; type "
            f"cluster.hybrid_workers={count} or fewer, or start more rollout workers",
        )
    if cluster.engines and cluster.rollout_workers != 1:
        count = sum(group.count for group in cluster.engines)
        yield CrossFieldProblem(
            ("cluster.rollout_workers", "cluster.engines"),
            f"cluster.rollout_workers: {cluster.rollout_workers} workers, but cluster.engines lists {count} by their kind; "
            "leave cluster.rollout_workers out, or type cluster.engines=[]",
        )


def _boundaries(config: RunConfig) -> Iterator[CrossFieldProblem]:
    policy = config.policy
    if policy.boundaries_tokens and policy.name != "cmlfq":
        yield CrossFieldProblem(
            ("policy.boundaries_tokens", "policy.name"),
            f"policy.boundaries_tokens: policy.name={policy.name} follows none; type policy.name=cmlfq, or "
            "policy.boundaries_tokens={}",
        )
    ends = [tokens for _, tokens in sorted(policy.boundaries_tokens.items())]
    if any(later <= end for end, later in pairwise(ends)):
        yield CrossFieldProblem(
            ("policy.boundaries_tokens",),
            f"policy.boundaries_tokens: {policy.boundaries_tokens} do not rise with the degree; type e.g. "
            "policy.boundaries_tokens={tp1: 3000, tp2: 12000}",
        )


def _trainer(config: RunConfig) -> Iterator[CrossFieldProblem]:
    trainer = config.trainer
    if config.rollout.temperature == 0:
        yield CrossFieldProblem(
            ("rollout.temperature",),
            "rollout.temperature: at 0 all samples of a group are the same, and nothing can be learnt; type "
            "rollout.temperature=1.0 (evaluation.temperature=0 asks the held-out questions greedily)",
        )
    if trainer.group_size == 1 and trainer.normalize_std and trainer.advantage == "grpo":
        yield CrossFieldProblem(
            ("trainer.group_size", "trainer.normalize_std"),
            "trainer.group_size: group size 1 has no standard deviation; type trainer.group_size=8 or "
            "trainer.normalize_std=false",
        )
    batch = trainer.prompts * trainer.group_size
    if trainer.minibatches > batch:
        yield CrossFieldProblem(
            ("trainer.minibatches", "trainer.prompts", "trainer.group_size"),
            f"trainer.minibatches: {trainer.minibatches} minibatches cannot be cut from a batch of {batch} trajectories "
            f"(trainer.prompts={trainer.prompts} x trainer.group_size={trainer.group_size}); type "
            f"trainer.minibatches={batch} or less",
        )
    if trainer.micro_batch_tokens < trainer.max_row_tokens:
        yield CrossFieldProblem(
            ("trainer.micro_batch_tokens", "trainer.max_row_tokens"),
            f"trainer.micro_batch_tokens: a micro-batch of {trainer.micro_batch_tokens} tokens does not hold one row of "
            f"trainer.max_row_tokens={trainer.max_row_tokens}; type trainer.micro_batch_tokens={trainer.max_row_tokens}",
        )


def _algorithm(config: RunConfig) -> Iterator[CrossFieldProblem]:
    trainer = config.trainer
    if trainer.group_size == 1 and trainer.drop_uniform_groups:
        yield CrossFieldProblem(
            ("trainer.drop_uniform_groups", "trainer.group_size"),
            "trainer.drop_uniform_groups: a group of one is always uniform, so that nothing would be left; type "
            "trainer.drop_uniform_groups=false, or trainer.group_size=8",
        )
    steps = trainer.epochs * trainer.minibatches
    if trainer.loss == "reinforce" and (config.run.eta > 0 or steps > 1):
        yield CrossFieldProblem(
            ("trainer.loss", "run.eta", "trainer.epochs", "trainer.minibatches"),
            f"trainer.loss: reinforce is right only on samples of the present weights, but run.eta={config.run.eta} and one "
            f"batch takes {steps} optimizer steps; type trainer.loss=ppo, or run.eta=0 trainer.epochs=1 trainer.minibatches=1",
        )
    if trainer.correction != "none" and trainer.old_logp == "behaviour":
        yield CrossFieldProblem(
            ("trainer.correction", "trainer.old_logp"),
            f"trainer.correction: {trainer.correction} weighs the trainer against the engine, which the ratio to "
            "trainer.old_logp=behaviour does already; type trainer.old_logp=proximal, or trainer.correction=none",
        )
    low, high = trainer.correction_low, trainer.correction_high
    if low is not None and high is not None and low > high:
        yield CrossFieldProblem(
            ("trainer.correction_low", "trainer.correction_high"),
            f"trainer.correction_low: {low} is above trainer.correction_high={high}; type trainer.correction_low={high} or less",
        )
    if trainer.aggregation == "constant" and trainer.loss_divisor is None:
        yield CrossFieldProblem(
            ("trainer.loss_divisor", "trainer.aggregation"),
            "trainer.loss_divisor: trainer.aggregation=constant divides by it, and it is null; type e.g. "
            "trainer.loss_divisor=10000",
        )
    if trainer.dual_clip is not None and trainer.loss not in ("ppo", "gspo"):
        yield CrossFieldProblem(
            ("trainer.dual_clip", "trainer.loss"),
            f"trainer.dual_clip: trainer.loss={trainer.loss} has no dual clip; type trainer.dual_clip=null, or trainer.loss=ppo",
        )
    if trainer.log_ratio_coef > 0 and trainer.loss != "dppo":
        yield CrossFieldProblem(
            ("trainer.log_ratio_coef", "trainer.loss"),
            f"trainer.log_ratio_coef: trainer.loss={trainer.loss} has no such term; type trainer.log_ratio_coef=0, or "
            "trainer.loss=dppo",
        )


def _layout(config: RunConfig) -> Iterator[CrossFieldProblem]:
    trainer = config.trainer
    if trainer.offload and trainer.layout != "fsdp2":
        yield CrossFieldProblem(
            ("trainer.offload", "trainer.layout"),
            f"trainer.offload: shards go to host memory, and trainer.layout={trainer.layout} has none; type "
            "trainer.layout=fsdp2, or trainer.offload=false",
        )


def _mismatch(config: RunConfig) -> Iterator[CrossFieldProblem]:
    trainer = config.trainer
    if trainer.mismatch_action != "warn" and trainer.mismatch_alarm is None:
        yield CrossFieldProblem(
            ("trainer.mismatch_action", "trainer.mismatch_alarm"),
            f"trainer.mismatch_action: nothing can {trainer.mismatch_action} the run while trainer.mismatch_alarm=null; type "
            "trainer.mismatch_alarm=0.05, or trainer.mismatch_action=warn",
        )


def _checkpoint(config: RunConfig) -> Iterator[CrossFieldProblem]:
    checkpoint, evaluation = config.checkpoint, config.evaluation
    if (
        checkpoint.keep_best
        and checkpoint.every
        and evaluation.every
        and checkpoint.every % evaluation.every
        and evaluation.every % checkpoint.every
    ):
        yield CrossFieldProblem(
            ("checkpoint.every", "evaluation.every", "checkpoint.keep_best"),
            f"checkpoint.every: of checkpoints every {checkpoint.every} steps and evaluations every {evaluation.every} few meet, "
            "and only a checkpoint that is evaluated can be the best; type "
            f"checkpoint.every={evaluation.every}, or checkpoint.keep_best=false",
        )


def _evaluation(config: RunConfig) -> Iterator[CrossFieldProblem]:
    evaluation = config.evaluation
    if evaluation.every > 0 and evaluation.prompts == 0:
        yield CrossFieldProblem(
            ("evaluation.every", "evaluation.prompts"),
            f"evaluation.every: an evaluation every {evaluation.every} iterations asks no question while "
            "evaluation.prompts=0; type evaluation.prompts=256, or evaluation.every=0",
        )


def _watchdog(config: RunConfig) -> Iterator[CrossFieldProblem]:
    if config.watchdog.restart and config.watchdog.timeout_s is None:
        yield CrossFieldProblem(
            ("watchdog.restart", "watchdog.timeout_s"),
            "watchdog.restart: nothing is restarted while watchdog.timeout_s=null says that nobody looks; type "
            "watchdog.timeout_s=600, or watchdog.restart=false",
        )


def _planner(config: RunConfig) -> Iterator[CrossFieldProblem]:
    planner = config.planner
    if planner.apply and not planner.replan:
        yield CrossFieldProblem(
            ("planner.apply", "planner.replan"),
            "planner.apply: true, but nothing is planned while the run goes on; type planner.replan=true",
        )
    if planner.generated_p99_tokens < planner.generated_p50_tokens:
        yield CrossFieldProblem(
            ("planner.generated_p99_tokens", "planner.generated_p50_tokens"),
            f"planner.generated_p99_tokens: {planner.generated_p99_tokens:g} is below the median, "
            f"planner.generated_p50_tokens={planner.generated_p50_tokens:g}; type "
            f"planner.generated_p99_tokens={4 * planner.generated_p50_tokens:g}",
        )
    pools = planner.min_train_gpus + planner.min_rollout_gpus
    most = planner.num_gpus
    if most is not None and max(planner.min_train_gpus, planner.min_rollout_gpus) > 1 and pools > most:
        yield CrossFieldProblem(
            ("planner.num_gpus", "planner.min_train_gpus", "planner.min_rollout_gpus"),
            f"planner.num_gpus: {planner.num_gpus} GPUs do not hold planner.min_train_gpus={planner.min_train_gpus} and "
            f"planner.min_rollout_gpus={planner.min_rollout_gpus}; type planner.num_gpus={pools}",
        )


def _planned_layout(config: RunConfig) -> Iterator[CrossFieldProblem]:
    """What `planner.layout` auto plans is not also configured, and what was planned is what is configured."""
    cluster, planner = config.cluster, config.planner
    planned = planner.planned
    if planned is not None:
        yield from _as_planned(config)
    elif planner.layout == "auto":
        for name, given, typed in (
            ("cluster.engines", bool(cluster.engines), 'planner.fixed_engines={"1": 2}, by degree'),
            (
                "cluster.rollout_workers",
                cluster.rollout_workers != 1,
                f'planner.fixed_engines={{"{config.rollout.tp}": {cluster.rollout_workers}}}',
            ),
            ("cluster.train_workers", cluster.train_workers != 1, f"planner.fixed_train_gpus={cluster.train_workers}"),
            ("policy.boundaries_tokens", bool(config.policy.boundaries_tokens), ""),
        ):
            if given:
                fixed = f" (to fix it for the plan: {typed})" if typed else ""
                yield CrossFieldProblem(
                    (name, "planner.layout"),
                    f"{name}: planner.layout=auto plans it, and would not heed what is given; leave it out{fixed}, or type "
                    "planner.layout=configured",
                )
    if planner.layout == "auto" and cluster.scheduler is not None:
        yield CrossFieldProblem(
            ("planner.layout", "cluster.scheduler"),
            f"planner.layout: auto starts the workers that it plans, and the cluster at {cluster.scheduler} has its own; type "
            "libra plan CONFIG --write FILE, start those workers (libra cluster slurm FILE up), then libra run FILE "
            "--scheduler ADDR",
        )


def _as_planned(config: RunConfig) -> Iterator[CrossFieldProblem]:
    """Whoever changes a planned setting by hand says that it is no plan any more."""
    planned, cluster = config.planner.planned, config.cluster
    assert planned is not None
    engines = sorted((group.tp, group.count, group.slots or config.rollout.slots) for group in cluster.engines)
    for name, has, wanted in (
        ("cluster.train_workers", cluster.train_workers, planned.train_gpus),
        ("trainer.micro_batch_tokens", config.trainer.micro_batch_tokens, planned.micro_batch_tokens),
        ("cluster.engines", _engine_words(engines), _engine_words(sorted(e.key for e in planned.engines))),
        ("policy.boundaries_tokens", config.policy.boundaries_tokens, planned.route),
    ):
        if has != wanted and not (name.startswith("policy.") and config.policy.name != "cmlfq"):
            yield CrossFieldProblem(
                (name, "planner.planned"),
                f"{name}: {has}, and planner.planned has {wanted}; leave {name} as it was planned, or type planner.planned=null "
                "to start another layout",
            )
    gpus = planned.train_gpus + sum(engines.tp * engines.count for engines in planned.engines)
    if gpus > planned.num_gpus:
        yield CrossFieldProblem(
            ("planner.planned",),
            f"planner.planned: its training and engines take {gpus} GPUs, and it is for {planned.num_gpus}; type libra plan CONFIG "
            "--write FILE for a plan that fits",
        )
    if len(planned.boundaries_tokens) != len(planned.engines) - 1:
        yield CrossFieldProblem(
            ("planner.planned",),
            f"planner.planned: {len(planned.engines)} degrees have {len(planned.engines) - 1} boundaries, got "
            f"{len(planned.boundaries_tokens)}; type libra plan CONFIG --write FILE, which writes it",
        )


def _engine_words(engines: list[tuple[int, int, int]]) -> str:
    """Engines, each (degree, number, slots), in words."""
    return ", ".join(f"{count} x TP{tp} with {slots} slots" for tp, count, slots in engines) or "none"
