"""Checks between fields of a configuration.

Each check yields one message per contradiction: ``FIELD: what contradicts what; type A, or B``,
with the dotted name of every field involved. FIELD is the field to change first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from libra.config.sections import RunSections
from libra.config.task_sections import MODEL_FUNCTIONS
from libra.config.trainer_checks import trainer_contradictions

_DOTTED_NAME = re.compile(r"\b[a-z_]+\.[a-z][a-z0-9_]*\b")


def contradictions(config: RunSections) -> list[str]:
    """A message for every contradiction between fields."""
    checks = (
        _agent, _services, _rollout, _vllm_only, _transformers_only, _workers, _boundaries, trainer_contradictions,
        _schedules, _planner, _layout_auto, _as_planned,
    )  # fmt: skip
    return [message for check in checks for message in check(config)]


def fields_of(message: str) -> list[str]:
    """Distinct dotted names in a message, in order."""
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
            "rollout.engine_args has the KV connector of a vllm engine, e.g. "
            "{kv_transfer_config: {kv_connector: OffloadingConnector}}",
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
    median, last = planner.lengths["generated_p50_tokens"], planner.lengths["generated_p99_tokens"]
    if last < median:
        yield (
            f"planner.lengths: generated_p99_tokens={last:g} is below the median, generated_p50_tokens={median:g}; type "
            f"planner.lengths.generated_p99_tokens={4 * median:g}"
        )


def _layout_auto(config: RunSections) -> Iterator[str]:
    """Settings that ``planner.layout=auto`` plans must not be configured."""
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
    return ", ".join(f"{count} x TP{tp} with {slots} slots" for tp, count, slots in engines) or "none"


GATEWAY_VARIABLES = frozenset({
    "OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "LIBRA_GATEWAY_URL",
})  # fmt: skip
"""Variables that each agent is given for itself (`libra.agents.gateway`)."""


def _agent(config: RunSections) -> Iterator[str]:
    agent, rollout = config.agent, config.rollout
    if agent.function is not None and agent.command is not None:
        yield "agent.command: there is an agent.function, and a trajectory has one agent; leave either out"
    if not agent.given:
        return
    if set_here := sorted(set(agent.env) & GATEWAY_VARIABLES):
        yield f"agent.env: {set_here[0]} is what agents find the model by, and set for each of them; leave it out"
    if rollout.ignore_eos:
        yield (
            "rollout.ignore_eos: an agent reads turns that end by themselves; type rollout.ignore_eos=false, or leave "
            "agent.function and agent.command out"
        )
    if agent.idle_s > agent.timeout_s:
        limit = f"agent.timeout_s={agent.timeout_s:g}"
        yield f"agent.idle_s: {agent.idle_s:g} is never reached with {limit}; type agent.idle_s={agent.timeout_s:g}"
    if config.cluster.tool_workers_most is not None:
        yield (
            "cluster.tool_workers_most: an agent lives on its tool worker while it waits for the model, so that none can be ended; "
            "type cluster.tool_workers_most=null, and as many cluster.tool_workers as you want"
        )
    if config.distil.teacher is not None:
        yield (
            "distil.teacher: it scores trajectories of one conversation, and an agent may have several; leave agent.function and "
            "agent.command out"
        )
    if config.trainer.routes != "recompute":
        yield (
            "trainer.routes: replay needs trajectories of one conversation, and an agent may have several; type "
            "trainer.routes=recompute"
        )


def _services(config: RunSections) -> Iterator[str]:
    for name, entry in config.services.named.items():
        if entry.model is None and entry.function in MODEL_FUNCTIONS:
            yield (
                f"services.named: {name!r} has function {entry.function}, which asks a model, and no model; type "
                f"services.named={{{name}: {{model: MODEL}}}} (a directory, a Hugging Face id or libra/NAME), or a function of "
                "your own as package.module:attribute"
            )
