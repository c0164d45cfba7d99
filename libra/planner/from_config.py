"""The planner's snapshot from a configuration: section ``planner``, the batch and the trainer.

With `planner.calibration`, measured engine times replace the GPU's tables for each measured TP
degree. Training keeps the cost model, scaled by the ratio of measured to modelled step seconds.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from libra.config import RunConfig
from libra.config.model_paths import resolve_model
from libra.config.service_devices import (
    asked_models,
    late_services,
    least_of_others,
    service_models,
    service_workers,
    teacher_model,
)
from libra.errors import ConfigError, ModelError, PlanError
from libra.hardware import GPU, ModelShape, load_gpu, load_shape
from libra.hardware.run_calibration import RunCalibration, read_calibration
from libra.hardware.shapes import shape_digest
from libra.planner.cost import Layout, TrajectoryTotals, training_table
from libra.planner.services import PASSES, ServiceModel, ServiceModels
from libra.planner.snapshot import PlanningSnapshot
from libra.seals import parsed_json

FIELD = "planner.calibration"


def calibrated(snapshot: PlanningSnapshot, found: RunCalibration, config: RunConfig) -> tuple[PlanningSnapshot, str]:
    """The snapshot with `planner.calibration`, and sentences on the source of its seconds.

    Unmeasured degrees are left out; PlanError if no degree remains, or none that section `planner`
    names.
    """
    section = config.planner
    missing = [tp for tp in snapshot.tp if tp not in found.degrees]
    known = ", ".join(f"TP{tp}" for tp in found.degrees)
    requested = {*section.fixed_engines, *(section.tp if tuple(section.tp) != DEFAULT_TP else ())}
    if unknown := sorted(requested - set(found.degrees)):
        raise PlanError(
            f"planner.tp, planner.fixed_engines: ask for engines of {', '.join(f'TP{tp}' for tp in unknown)}, and {found.source} "
            f"measured {known} only; ask for {known}, or calibrate from a run that has such an engine"
        )
    if len(missing) == len(snapshot.tp):
        raise PlanError(
            f"{FIELD}: {found.source} measured engines of {known}, and planner.tp with rollout.engine leave "
            f"{', '.join(f'TP{tp}' for tp in snapshot.tp)}; calibrate from a run that has such an engine"
        )
    degrees = tuple(tp for tp in snapshot.tp if tp in found.degrees)
    measured: dict[str, Any] = {}
    if section.update_s is None:
        measured = {"update_s": found.update_s + found.load_s, "beside_s": found.update_s}
    made = replace(
        snapshot,
        tp=degrees,
        engines={tp: found.of_tp(tp, FIELD).seconds for tp in degrees},
        training_factor=training_factor(snapshot, found),
        **measured,
    )
    if found.trainer is not None:
        basis = (
            f"Seconds of engines and training are as {found.source} measured; memory is from the datasheet of "
            f"{snapshot.gpu.name}."
        )
    else:
        basis = (
            f"Seconds of engines are as {found.source} measured. It has too few steps to fit training: its seconds and "
            f"its memory are from the datasheet of {snapshot.gpu.name}; calibrate from a run of more iterations."
        )
    left = ", ".join(f"TP{tp}" for tp in missing)
    return made, f"{basis}\nNot planned, since it did not measure them: engines of {left}." if missing else basis


def rests_on(path: Path, gpu: str) -> str:
    """Source of the seconds in a plan with this calibration; ``gpu`` is the GPU of its datasheet."""
    engines = f"what {path} measured"
    if read_calibration(path, FIELD).trainer is not None:
        return engines
    return f"{engines} of engines; it has too few steps to say what training takes, whose seconds are of the datasheet of {gpu}"


def training_factor(snapshot: PlanningSnapshot, found: RunCalibration) -> float:
    """Measured over modelled seconds of the run's optimizer steps; 1 if no trainer was fitted."""
    if found.trainer is None:
        return 1.0
    tokens, gpus = snapshot.trained_tokens, found.train_gpus
    node = max(snapshot.node_gpus, gpus)
    sheet = replace(snapshot.gpu, gpus_per_node=node)
    modelled = training_table(sheet, snapshot.shape, tokens, [gpus], snapshot.training)[gpus]
    return found.trainer.step_s(float(tokens.sum())) / modelled.step_s


DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes per number of `model.dtype` and `model.master_dtype`."""


DEFAULT_TP = (1, 2, 4, 8)
DEFAULT_UPDATE_S = 10.0
DEFAULT_GPU, DEFAULT_NUM_GPUS = "A800-80G", 8
"""Defaults of section ``planner``."""


def planned_gpu(name: str | None) -> GPU:
    """Datasheet of ``planner.gpu``, or of `DEFAULT_GPU`; ConfigError if unknown."""
    try:
        return load_gpu(name or DEFAULT_GPU)
    except ConfigError as error:
        raise ConfigError(f"planner.gpu: {error}") from error


def snapshot_of(
    config: RunConfig, turns: TrajectoryTotals | None, what_if: bool, *, on_cores: bool = False
) -> tuple[PlanningSnapshot, str]:
    """The snapshot of a configuration, and a sentence on what it leaves out (may be empty).

    The batch is drawn from ``turns``, else it has the lengths of section ``planner``. ``what_if``
    also plans degrees that the configured engine cannot run. With ``on_cores`` or `cluster.device`
    cpu, a "GPU" is a rank on CPU cores.
    """
    section = config.planner
    update_s = DEFAULT_UPDATE_S if section.update_s is None else section.update_s
    degrees, note = section.tp, ""
    if not what_if:
        degrees = check_runnable(config)
        if left := [str(tp) for tp in section.tp if tp not in degrees]:
            more = "; rollout.engine=vllm has them" if config.rollout.engine == "transformers" else ""
            note = (
                f"Not planned, since rollout.engine={config.rollout.engine} has none: engines of TP {', '.join(left)}{more}, and "
                "--what-if plans with them."
            )
    num = config.trainer.prompts * config.trainer.group_size
    if turns is None:
        workload, cut = batch_of(config, num=num, turns=section.lengths["turns"])
    else:
        workload, cut = turns.resampled(num, config.run.seed, config.rollout.max_context_tokens), ""
    note = "\n".join(sentence for sentence in (cut, note, _without_gpu(config)) if sentence)
    snapshot = PlanningSnapshot(
        gpu=planned_gpu(section.gpu),
        shape=shape_of(config),
        num_gpus=section.num_gpus or DEFAULT_NUM_GPUS,
        workload=workload,
        tp=tuple(degrees),
        training=trainer_layout(config, workload),
        eta=config.run.eta,
        update_s=update_s,
        beside_s=update_s,
        fixed_train_gpus=section.fixed_train_gpus,
        fixed_engines=section.fixed_engines,
        trained_frac=section.lengths["trained_frac"],
        services=services_of(config, on_cores=on_cores),
    )
    if (found := configured_calibration(config)) is None:
        return snapshot, note
    measured, basis = calibrated(snapshot, found, config)
    return measured, "\n".join(sentence for sentence in (note, basis) if sentence)


def trainer_layout(config: RunConfig, workload: TrajectoryTotals) -> Layout:
    """Training layout of `libra run` with this configuration, for batches like ``workload``."""
    trainer, model = config.trainer, config.model
    weight_bytes = DTYPE_BYTES[model.dtype]
    master_bytes = None if model.master_dtype is None else DTYPE_BYTES[model.master_dtype]
    several = trainer.epochs * trainer.minibatches > 1
    return Layout(
        kind="ddp" if trainer.layout == "ddp" else "fsdp2",
        gradient_checkpointing=trainer.gradient_checkpointing,
        recompute_logprobs=(trainer.old_logp != "behaviour" and several)
        or trainer.old_logp == "ewma"
        or (trainer.old_logp == "version" and config.run.eta > 0)
        or trainer.reject_args["m2po"] is not None,
        reference=trainer.kl_coef > 0,
        offload=trainer.layout == "fsdp2_offload",
        micro_batch_tokens=trainer.micro_batch_tokens,
        max_row_tokens=trainer.max_row_tokens,
        generated_frac=float(workload.generated_tokens.sum() / workload.final_context_tokens.sum()),
        logit_chunk_tokens=trainer.logit_chunk_tokens,
        entropy_bonus=trainer.entropy_coef > 0,
        epochs=trainer.epochs,
        minibatches=trainer.minibatches,
        weight_bytes=weight_bytes,
        master_bytes=master_bytes if master_bytes is not None and master_bytes > weight_bytes else None,
    )


def check_runnable(config: RunConfig) -> list[int]:
    """Runnable TP degrees of `planner.tp`; PlanError if section ``planner`` requires others."""
    section, engine = config.planner, config.rollout.engine
    if engine == "vllm":
        return list(section.tp)
    runs = f"rollout.engine={engine} runs TP degrees [1] only"
    if 1 not in section.tp:
        raise PlanError(
            f"planner.tp: {runs}, got {list(section.tp)}; type planner.tp=[1], or --what-if with libra plan"
        )
    if wrong := [tp for tp, number in section.fixed_engines.items() if number and tp != 1]:
        raise PlanError(
            f"planner.fixed_engines: {runs}, got {wrong}; leave them out, or type --what-if with libra plan"
        )
    return [1]


def shape_of(config: RunConfig) -> ModelShape:
    """Sizes of the trained model; ModelError if unknown here."""
    return known_shape(config.model.path)


def known_shape(model: str, where: str = "") -> ModelShape:
    """Sizes of a model name or directory; a ModelError begins with ``where``."""
    try:
        return load_shape(model)
    except ModelError:
        pass  # neither a known name nor a local directory
    try:
        return load_shape(resolve_model(model))
    except ModelError as error:
        raise ModelError(f"{where}: {error}" if where else str(error)) from error


def digest_of(model: str) -> str:
    """Digest of a model's sizes; empty if unknown here, or not a dense model."""
    try:
        return shape_digest(known_shape(model))
    except (ModelError, ConfigError):
        return ""


def configured_calibration(config: RunConfig) -> RunCalibration | None:
    """Calibration in `planner.calibration`, or None; ConfigError if unreadable, or of another model."""
    path = config.planner.calibration
    if path is None:
        return None
    found = read_calibration(path, FIELD)
    found.check_model(config.model.path, digest_of(config.model.path), FIELD)
    return found


def services_of(config: RunConfig, *, on_cores: bool = False) -> ServiceModels:
    """Services with models, teacher included; ModelError for a model of unknown size."""
    teacher, path, asked = None, teacher_model(config), asked_models(config)
    if path is not None:
        weight_bytes, waits = DTYPE_BYTES[config.model.dtype], config.distil.wait_s > 0
        shape = known_shape(path, "distil.teacher")
        teacher = ServiceModel(config.distil.service or "", shape, weight_bytes=weight_bytes, waits=waits)
    if not asked and (teacher is None or not teacher.name):
        return ServiceModels((), teacher, of_others=least_of_others(config))
    late, found = late_services(config) if asked else set(), []
    for name, model in asked.items():
        entry = config.services.named[name]
        shape, passes = known_shape(model, f"services.named: {name!r}"), PASSES.get(entry.function, 0)
        found.append(ServiceModel(name, shape, passes, _number_bytes(model), name not in late))
    gib = config.services.device_gib
    return ServiceModels(
        tuple(found),
        teacher,
        None if gib is None else gib * 2**30,
        service_workers(config),
        least_of_others(config),
        on_cores or config.cluster.device == "cpu",
    )


def _number_bytes(model: str) -> int:
    """Bytes per number in a model's files by its config.json; 2 (bfloat16) without an entry."""
    found = resolve_model(model)
    try:
        facts = {} if isinstance(found, str) else parsed_json((found / "config.json").read_text())
    except (OSError, ValueError):
        return DTYPE_BYTES["bfloat16"]
    return DTYPE_BYTES.get(str(facts.get("dtype") or facts.get("torch_dtype")), DTYPE_BYTES["bfloat16"])


def _without_gpu(config: RunConfig) -> str:
    """Why Slurm jobs give a teacher or services no GPU, although a plan counts one; empty if they do."""
    teaches, models = config.distil.teacher is not None, service_models(config)
    if not (teaches or models):
        return ""
    rollout, train, tool = (config.slurm.of_role(role).gpus for role in ("rollout", "train", "tool"))
    if tool or not (rollout or train):
        return ""
    what = "the teacher is with the first tool worker, where it would score"
    if not teaches:
        what = f"services ({', '.join(models)}) are with the tool workers, where they would answer"
    return (
        f"slurm.jobs.tool.gpus: 0, and among jobs of Slurm {what} on CPU cores; the plan assumes a GPU: type "
        "slurm.jobs.tool.gpus=1."
    )


def batch_of(config: RunConfig, *, num: int, turns: int) -> tuple[TrajectoryTotals, str]:
    """``num`` trajectories as in section `planner`, and a sentence on those cut by `rollout` limits."""
    lengths, rollout = config.planner.lengths, config.rollout
    room = rollout.max_context_tokens - lengths["prompt_tokens"] - lengths["observation_tokens"]
    if room < 1:
        raise PlanError(
            f"planner.lengths: prompt_tokens={lengths['prompt_tokens']} and observation_tokens="
            f"{lengths['observation_tokens']} leave nothing to generate in rollout.max_context_tokens="
            f"{rollout.max_context_tokens}; type e.g. planner.lengths.prompt_tokens={max(rollout.max_context_tokens // 4, 1)}"
        )
    most = min(room, rollout.max_new_tokens * turns)
    normal, (median, last) = NormalDist(), (lengths["generated_p50_tokens"], lengths["generated_p99_tokens"])
    quantiles = np.array([normal.inv_cdf((number + 0.5) / num) for number in range(num)])
    wanted = median * np.exp(np.log(last / median) / normal.inv_cdf(0.99) * quantiles)
    workload = TrajectoryTotals.of(
        np.full(num, float(lengths["prompt_tokens"])),
        np.minimum(wanted, most),
        observation_tokens=float(lengths["observation_tokens"]),
        num_turns=float(turns),
        tool_wait_s=lengths["tool_s"] * (turns - 1),
    )
    cut = int((wanted > most).sum())
    limit = (
        f"rollout.max_context_tokens={rollout.max_context_tokens}"
        if most == room
        else f"rollout.max_new_tokens={rollout.max_new_tokens} in planner.lengths.turns={turns}"
    )
    return workload, f"{cut} of {num} trajectories end at {most:,} generated tokens: {limit}." if cut else ""
