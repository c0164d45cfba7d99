"""From a configuration to the planner's snapshot: section ``planner``, and what other sections say of the batch and the trainer."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from libra.config import RunConfig
from libra.config.paths import resolve_model
from libra.errors import ModelError, PlanError
from libra.hardware import ModelShape, load_gpu, load_shape
from libra.planner.cost import Layout, Workload
from libra.planner.snapshot import Snapshot
from libra.planner.trace import drawn

RUNNABLE_TP: dict[str, tuple[int, ...]] = {"transformers": (1,)}
"""TP degrees that an engine (`rollout.engine`) can run; one that is not named runs any."""

RUNNABLE_TRAIN_GPUS = 1
"""GPUs that the trainer of this Libra runs on: one replica."""


def snapshot_of(config: RunConfig, turns: Workload | None, what_if: bool) -> tuple[Snapshot, str]:
    """What a configuration asks the planner, and what had to be left out of it, as a sentence or empty.

    Parameters
    ----------
    config : RunConfig
    turns : Workload or None
        Trajectories of a trace that the batch is drawn from; None: lengths as section ``planner`` gives them.
    what_if : bool
        Also what engine and trainer of this Libra cannot run.
    """
    section = config.planner
    runnable = RUNNABLE_TP.get(config.rollout.engine)
    degrees = tuple(tp for tp in section.tp if what_if or runnable is None or tp in runnable)
    if not degrees:
        raise PlanError(
            f"planner.tp: rollout.engine={config.rollout.engine} runs TP degrees {list(runnable or ())} only, got "
            f"{list(section.tp)}; type planner.tp={list(runnable or ())}, or --what-if"
        )
    left = [tp for tp in section.tp if tp not in degrees]
    note = (
        f"Without TP {', '.join(map(str, left))}, which rollout.engine={config.rollout.engine} cannot run; --what-if plans "
        "with them."
        if left
        else ""
    )
    return (
        Snapshot(
            gpu=load_gpu(section.gpu),
            shape=_shape(config.model.path),
            num_gpus=section.num_gpus,
            workload=_workload(config, turns),
            tp=degrees,
            gpus_per_node=section.gpus_per_node,
            training=Layout(
                kind=section.training,
                gradient_checkpointing=section.gradient_checkpointing,
                recompute_logprobs=config.trainer.old_logp != "behaviour",
                reference=config.trainer.kl_coef > 0,
                offload_optimizer=section.offload_optimizer,
                micro_batch_tokens=config.trainer.micro_batch_tokens,
                logits_chunk_tokens=section.logits_chunk_tokens,
                epochs=config.trainer.epochs,
                minibatches=config.trainer.minibatches,
            ),
            eta=config.run.eta,
            update_s=section.update_s,
            min_train_gpus=section.min_train_gpus,
            min_rollout_gpus=section.min_rollout_gpus,
            fixed_train_gpus=section.fixed_train_gpus,
            fixed_engines=section.fixed_engines,
            max_concurrency=section.max_concurrency,
        ),
        note,
    )


def _shape(path: str) -> ModelShape:
    try:
        return load_shape(path)
    except ModelError:
        found = resolve_model(path)
        if isinstance(found, str):
            raise
        return load_shape(found)


def _workload(config: RunConfig, turns: Workload | None) -> Workload:
    section = config.planner
    num = section.trajectories or config.trainer.prompts * config.trainer.group_size
    if turns is not None:
        return drawn(turns, num, config.run.seed, config.rollout.max_context_tokens)
    normal, (median, last) = NormalDist(), (section.generated_p50_tokens, section.generated_p99_tokens)
    quantiles = np.array([normal.inv_cdf((number + 0.5) / num) for number in range(num)])
    return Workload.of(
        np.full(num, float(section.prompt_tokens)),
        median * np.exp(np.log(last / median) / normal.inv_cdf(0.99) * quantiles),
        observation_tokens=float(section.observation_tokens),
        num_turns=float(section.turns),
        tool_wait_s=section.tool_s * (section.turns - 1),
    )
