"""``libra plan``: from a configuration to a snapshot, and the plan in words or as JSON."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
import numpy as np

from libra.config import RunConfig
from libra.config.paths import resolve_model
from libra.errors import ConfigError, ModelError, PlanError
from libra.hardware import ModelShape, load_gpu, load_shape
from libra.planner.cost import Layout, Workload
from libra.planner.explain import alternative_line, text
from libra.planner.making import compare, plan
from libra.planner.search import Planner
from libra.planner.snapshot import Snapshot
from libra.planner.trace import drawn, workload_of_turns

RUNNABLE_TP: dict[str, tuple[int, ...]] = {"transformers": (1,)}
"""TP degrees that an engine (`rollout.engine`) can run; one that is not named runs any."""


def snapshot_of(config: RunConfig, trace: Path | None, what_if: bool) -> tuple[Snapshot, str]:
    """What a configuration asks the planner, and what had to be left out of it, as a sentence or empty.

    Parameters
    ----------
    config : RunConfig
    trace : Path or None
        Instead of ``planner.trace``.
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
            workload=_workload(config, trace or section.trace),
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


def _workload(config: RunConfig, trace: Path | None) -> Workload:
    section = config.planner
    num = section.trajectories or config.trainer.prompts * config.trainer.group_size
    if trace is not None:
        try:
            with trace.open(newline="", encoding="utf-8") as file:
                turns = workload_of_turns(csv.DictReader(file), section.tool_s)
        except OSError as error:
            raise PlanError(f"planner.trace: {trace} cannot be read ({error.strerror}); type --trace FILE") from error
    else:
        spread = np.log(section.generated_p99_tokens / section.generated_p50_tokens) / 2.326  # normal quantile of 99 %
        share = (np.arange(num) + 0.5) / num
        tokens = section.generated_p50_tokens * np.exp(spread * _normal_quantiles(share))
        return Workload.of(
            np.full(num, float(section.prompt_tokens)),
            tokens,
            observation_tokens=float(section.observation_tokens),
            num_turns=float(section.turns),
            tool_wait_s=section.tool_s * (section.turns - 1),
        )
    return drawn(turns, num, config.run.seed, config.rollout.max_context_tokens)


def _normal_quantiles(
    share: np.ndarray[tuple[int], np.dtype[np.float64]],
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    from statistics import NormalDist

    normal = NormalDist()
    return np.array([normal.inv_cdf(float(value)) for value in share])


def fixed_by(snapshot: Snapshot, choice: str) -> Snapshot:
    """The snapshot with what ``--why`` asks about: ``train=16``, ``tp=4``, ``engines.2=8``.

    Raises
    ------
    ConfigError
        Another form.
    """
    key, _, value = choice.partition("=")
    degree = key.removeprefix("engines.")
    if not value.isdigit() or not (key in ("train", "tp") or (key != degree and degree.isdigit())):
        raise ConfigError(f"--why: got {choice!r}; type e.g. --why train=16, --why tp=4 or --why engines.2=8")
    number = int(value)
    if key == "train":
        return replace(snapshot, fixed_train_gpus=number)
    if key == "tp":
        return replace(snapshot, tp=(number,))
    return replace(snapshot, fixed_engines={**snapshot.fixed_engines, int(degree): number})


def print_plan(config: RunConfig, *, trace: Path | None, why: Sequence[str], what_if: bool, as_json: bool) -> None:
    """Plan and print."""
    snapshot, note = snapshot_of(config, trace, what_if)
    planner = Planner()
    answer = plan(snapshot, planner)
    asked = [compare(snapshot, fixed_by(snapshot, choice), choice, planner) for choice in why]
    if as_json:
        values = answer.to_dict()
        if note:
            values["left_out"]["engine"] = note
        values["why"] = [
            {
                "choice": other.name,
                "train_gpus": other.train_gpus,
                "engines": dict(other.engines),
                "step_s": other.step_s,
                "slower_frac": other.slower_frac,
                "reason": other.reason,
            }
            for other in asked
        ]
        click.echo(json.dumps(values, allow_nan=False))
        return
    click.echo(text(answer))
    if asked:
        click.echo("\nWhy not")
        for other in asked:
            click.echo(alternative_line(other))
    if note:
        click.echo(f"\n{note}")
