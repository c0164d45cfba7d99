"""When each setting is read: one table of all of them, and the check that tells of settings that change nothing.

Contradictions are errors (`libra.config.cross_field_checks`). This is about what contradicts nothing and does nothing: it is
told in one line
before anything starts, and never refused. Judged is what somebody gave, in a file, an override or a keyword argument, with
another value than it would have had: neither defaults nor what an algorithm's preset fills in.

One file may serve several commands, so what stands in a file is judged by the commands that read it at all: `planner` as `libra
plan` reads it, `simulation` as `libra simulate` does. What is typed for a command is judged by that command.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from libra.config.algorithms import preset_values
from libra.config.effect_conditions import (
    GPU,
    LOCAL,
    NO_CLIENT,
    CommandName,
    Need,
    Situation,
    above,
    either,
    given,
    is_,
    is_not,
    missing,
    value_of,
    without,
)
from libra.config.field_help import one_line_yaml, sections
from libra.config.models import RunConfig

Reading = Mapping[CommandName, tuple[Need, ...]]
"""Who reads a setting, and what each of them needs for it; a command that is not there never reads it."""

CALLED: Mapping[CommandName, str] = MappingProxyType(
    {"run": "libra run", "plan": "libra plan", "simulate": "libra simulate", "slurm": "libra cluster slurm"}
)


def _of(*commands: CommandName, needs: tuple[Need, ...] = ()) -> Reading:
    return dict.fromkeys(commands, needs)


def _run(*needs: Need) -> Reading:
    return _of("run", needs=needs)


def _plan(*needs: Need) -> Reading:
    """Of `libra plan`, and of a run that starts what is planned."""
    return {"plan": needs, "run": (*needs, is_("planner.layout", "auto"))}


def _planned(*needs: Need) -> Reading:
    """Of `libra plan`, and of a run that plans before it begins or while it goes on."""
    return {"plan": needs, "run": (*needs, either(is_("planner.replan", True), is_("planner.layout", "auto")))}


def _simulated(*needs: Need) -> Reading:
    return _of("simulate", needs=needs)


def _slurm() -> Reading:
    return _of("slurm")


_LEARNS = above("trainer.lr", 0)
_CLIPS = is_not("trainer.loss", "sapo", "reinforce")
_CORRECTS = is_not("trainer.correction", "none")
_HAS_KL = above("trainer.kl_coef", 0)
_SCALES = (is_("trainer.advantage", "grpo"), is_("trainer.normalize_std", True))
_REPLICAS = either(above("cluster.train_workers", 1), is_("planner.layout", "auto"))
_VLLM = is_("rollout.engine", "vllm")
_NO_TRACE = (missing("planner.trace"), without("--trace"))
_DRAWN = without("--from-run", "--workload")
_CALIBRATED = given("simulation.calibration")
_SOME_SLOTS = Need(
    ("cluster.engines",),
    "an entry of cluster.engines without slots, or none",
    lambda config, _: not config.cluster.engines or any(group.slots is None for group in config.cluster.engines),
)
_ALIKE = either(
    missing("cluster.engines"),
    Need(("cluster.scheduler",), "--scheduler", lambda config, situation: not LOCAL.met(config, situation)),
)

READ: Mapping[str, Reading] = MappingProxyType(
    {
        "run.name": _run(),
        "run.dir": _run(),
        "run.seed": {"run": (), "plan": (given("planner.trace"),), "simulate": ()},
        "run.iterations": _run(),
        "run.eta": _of("run", "plan", "simulate"),
        "run.from_checkpoint": _run(),
        "model.path": {"run": (), "plan": (), "simulate": (_CALIBRATED,)},
        "model.dtype": _of("run", "plan"),
        "model.master_dtype": {"run": (is_("model.dtype", "bfloat16"),), "plan": ()},
        "environment.name": _run(),
        "environment.args": _run(),
        "rollout.engine": _of("run", "plan"),
        "rollout.tp": _run(_VLLM, _ALIKE),
        "rollout.keep_kv": _run(_VLLM),
        "rollout.kv_cache_gib": _run(is_("rollout.engine", "transformers")),
        "rollout.slots": {"run": (_SOME_SLOTS, either(LOCAL, given("cluster.engines"))), "slurm": (_SOME_SLOTS,)},
        "rollout.tool_format": _run(),
        "rollout.max_new_tokens": {"run": (), "plan": _NO_TRACE},
        "rollout.max_turns": _run(),
        "rollout.max_context_tokens": _of("run", "plan"),
        "rollout.temperature": _run(),
        "rollout.top_p": _run(),
        "rollout.ignore_eos": _run(),
        "rollout.exact_logprobs": _run(is_("rollout.engine", "transformers")),
        "vllm.kv_cache_gib": _run(_VLLM),
        "vllm.gpu_memory_frac": _run(_VLLM, GPU),
        "vllm.eager": _run(_VLLM),
        "trainer.algorithm": _run(),
        "trainer.prompts": _of("run", "plan", "simulate"),
        "trainer.group_size": _of("run", "plan", "simulate"),
        "trainer.resample": _run(),
        "trainer.lr": _run(),
        "trainer.betas": _run(_LEARNS),
        "trainer.weight_decay": _run(_LEARNS),
        "trainer.warmup_steps": _run(_LEARNS),
        "trainer.max_grad_norm": _run(_LEARNS),
        "trainer.advantage": _run(),
        "trainer.normalize_std": _run(_SCALES[0]),
        "trainer.std_eps": _run(*_SCALES),
        "trainer.drop_uniform_groups": _run(),
        "trainer.drop_truncated": _run(),
        "trainer.loss": _run(),
        "trainer.aggregation": _run(),
        "trainer.loss_divisor": _run(is_("trainer.aggregation", "seq-mean-token-sum-norm", "constant")),
        "trainer.old_logp": {"run": (either(is_not("trainer.loss", "reinforce"), _CORRECTS),), "plan": ()},
        "trainer.clip_low": _run(_CLIPS),
        "trainer.clip_high": _run(_CLIPS),
        "trainer.dual_clip": _run(is_("trainer.loss", "ppo", "gspo")),
        "trainer.tau_positive": _run(is_("trainer.loss", "sapo")),
        "trainer.tau_negative": _run(is_("trainer.loss", "sapo")),
        "trainer.log_ratio_coef": _run(is_("trainer.loss", "dppo")),
        "trainer.correction": _run(is_not("trainer.old_logp", "behaviour")),
        "trainer.correction_level": _run(_CORRECTS),
        "trainer.correction_low": _run(_CORRECTS),
        "trainer.correction_high": _run(_CORRECTS),
        "trainer.kl_coef": _of("run", "plan"),
        "trainer.kl_estimator": _run(_HAS_KL),
        "trainer.kl_bound": _run(_HAS_KL),
        "trainer.entropy_coef": _of("run", "plan"),
        "trainer.epochs": _of("run", "plan"),
        "trainer.minibatches": _of("run", "plan"),
        "trainer.max_row_tokens": _of("run", "plan"),
        "trainer.share_prompts": _run(),
        "trainer.logit_chunk_tokens": _of("run", "plan"),
        "trainer.micro_batch_tokens": _of("run", "plan"),
        "trainer.mismatch_alarm": _run(),
        "trainer.mismatch_action": _run(given("trainer.mismatch_alarm")),
        "trainer.layout": {"run": (_REPLICAS,), "plan": ()},
        "trainer.dispatch": _run(),
        "trainer.gradient_checkpointing": _of("run", "plan"),
        "trainer.offload": {
            "run": (is_("trainer.layout", "fsdp2"), _REPLICAS, GPU),
            "plan": (),
        },
        "checkpoint.every": _run(),
        "checkpoint.keep": _run(),
        "checkpoint.keep_best": _run(),
        "evaluation.prompts": _run(),
        "evaluation.every": _run(above("evaluation.prompts", 0)),
        "evaluation.temperature": _run(above("evaluation.prompts", 0)),
        "policy.name": _run(),
        "policy.objective": _run(is_("policy.name", "cmlfq")),
        "policy.boundaries_tokens": {
            "run": (is_("policy.name", "cmlfq"),),
            "simulate": (is_("simulation.policy", "cmlfq", "predictor", "oracle"),),
        },
        "policy.patience": _run(is_not("policy.name", "fifo", "paper")),
        "cluster.scheduler": _run(NO_CLIENT),
        "cluster.rollout_workers": {"run": (LOCAL,), "slurm": (missing("slurm_rollout.jobs"),)},
        "cluster.engines": _of("run", "slurm"),
        "cluster.train_workers": _of("run", "plan", "slurm"),
        "cluster.hybrid_workers": _of("run", "slurm"),
        "cluster.drain_timeout_s": _run(above("cluster.hybrid_workers", 0)),
        "cluster.tool_workers": {"run": (LOCAL,), "slurm": (missing("slurm_tool.jobs"),)},
        "cluster.tool_slots": {"run": (LOCAL,), "slurm": ()},
        "cluster.threads": _of("run", "slurm"),
        "cluster.device": _run(),
        "cluster.dashboard_port": {"run": (LOCAL,), "slurm": ()},
        "observe.tensorboard": _run(),
        "observe.event_log": _run(),
        "observe.progress": _run(),
        "store.keep_versions": _run(),
        "store.keep_journals": _run(),
        "weights.transfer": _run(),
        "watchdog.timeout_s": _run(),
        "watchdog.restart": _run(given("watchdog.timeout_s")),
        "slurm.dir": _slurm(),
        "slurm.host": _slurm(),
        "slurm.port": _slurm(),
        "slurm.account": _slurm(),
        "slurm.setup": _slurm(),
        "slurm.python": _slurm(),
        "slurm.reconcile_s": _slurm(),
        "slurm.drain_s": _slurm(),
        **{
            f"slurm_{role}.{name}": _slurm()
            for role in ("rollout", "train", "tool")
            for name in ("jobs", "partition", "gpus", "cpus", "memory", "walltime", "directives")
        },
        "simulation.gpu": _simulated(missing("simulation.calibration")),
        "simulation.calibration": _simulated(),
        "simulation.model": _simulated(missing("simulation.calibration")),
        "simulation.layout": _simulated(),
        "simulation.slots": _simulated(),
        "simulation.policy": _simulated(),
        "simulation.objective": _simulated(is_("simulation.policy", "cmlfq", "predictor", "oracle")),
        "simulation.accuracy": _simulated(is_("simulation.policy", "predictor")),
        "simulation.traces": _simulated(_DRAWN),
        "simulation.turns": _simulated(missing("simulation.traces"), _DRAWN),
        "simulation.iterations": _simulated(_DRAWN),
        "simulation.train_s": _simulated(),
        "simulation.load_s": _simulated(),
        "simulation.tool_slots": _simulated(),
        "simulation.noise": _simulated(),
        "planner.layout": _of("run", "slurm"),
        "planner.planned": _run(),
        "planner.replan": _run(),
        "planner.apply": _run(is_("planner.replan", True)),
        "planner.change_cost_s": _run(is_("planner.replan", True)),
        "planner.gpu": _planned(),
        "planner.calibration": _plan(),
        "planner.num_gpus": _plan(),
        "planner.gpus_per_node": _plan(),
        "planner.tp": _planned(),
        "planner.trace": _plan(),
        "planner.trajectories": _plan(),
        "planner.prompt_tokens": _plan(*_NO_TRACE),
        "planner.generated_p50_tokens": _plan(*_NO_TRACE),
        "planner.generated_p99_tokens": _plan(*_NO_TRACE),
        "planner.observation_tokens": _plan(*_NO_TRACE),
        "planner.turns": _plan(*_NO_TRACE),
        "planner.tool_s": _plan(),
        "planner.max_concurrency": _plan(),
        "planner.update_s": _plan(),
        "planner.min_train_gpus": _plan(),
        "planner.min_rollout_gpus": _plan(),
        "planner.fixed_train_gpus": _plan(),
        "planner.fixed_engines": _plan(),
    }
)
"""Every field of `RunConfig`; a test fails where one is not here, and compares the claims with what the code does."""


@dataclass(frozen=True, slots=True)
class Ignored:
    """A setting that was given and changes nothing.

    Attributes
    ----------
    field : str
    given : str
        The field with its value, as it would be typed.
    why : str
        Where it changes nothing, and what would make it effective.
    """

    field: str
    given: str
    why: str

    @property
    def message(self) -> str:
        """All of it in one line."""
        return f"{self.given} has no effect {self.why}"


def ignored_settings(config: RunConfig, situation: Situation | None = None) -> tuple[Ignored, ...]:
    """Settings that were given and change nothing in this combination, in the order of the table."""
    return tuple(_ignored(config, situation or Situation()))


def warning_lines(ignored: Iterable[Ignored]) -> list[str]:
    """A line for each reason, with all settings it is the reason of."""
    by_why: dict[str, list[str]] = {}
    for each in ignored:
        by_why.setdefault(each.why, []).append(each.given)
    return [
        f"{', '.join(given)} {'has' if len(given) == 1 else 'have'} no effect {why}" for why, given in by_why.items()
    ]


def _ignored(config: RunConfig, situation: Situation) -> Iterator[Ignored]:
    for name in _given(config):
        reading, command = READ[name], situation.command
        typed = name in situation.typed
        if typed and command is not None and command not in reading:
            yield Ignored(name, _with_value(config, name), f"in {CALLED[command]}; {_readers(reading)}")
            continue
        # An option of the command goes over what stands in a file, as it is meant to.
        around = situation if typed else replace(situation, options=frozenset())
        lacking = [
            [need for need in reading[judge] if not need.met(config, around)] for judge in _judges(name, situation)
        ]
        if all(lacking):
            wanted = " and ".join(need.text for need in lacking[0])
            yield Ignored(name, _with_value(config, name), f"here; needed is {wanted}")


def _judges(name: str, situation: Situation) -> list[CommandName]:
    """Commands by which a setting is judged: the present one where it was typed for it; else all whose setting it is."""
    reading, command = READ[name], situation.command
    if name in situation.typed and command is not None and command in reading:
        return [command]
    planning = name.startswith("planner.")
    return [each for each in reading if planning or each != "plan"] or list(reading)


def _readers(reading: Reading) -> str:
    parts = []
    for command, needs in reading.items():
        needed = f", which needs {' and '.join(need.text for need in needs)}" if needs else ""
        parts.append(f"{CALLED[command]}{needed}")
    return f"only in {' and '.join(parts)}"


def _given(config: RunConfig) -> Iterator[str]:
    """Names of fields that somebody gave another value than they would have had."""
    for name in READ:
        section_name, _, key = name.partition(".")
        section = getattr(config, section_name)
        was_given = section_name in config.model_fields_set and key in section.model_fields_set
        if was_given and value_of(config, name) != default_of(config, name):
            yield name


def default_of(config: RunConfig, name: str) -> Any:
    """The value that a field has where nobody gives it, the algorithm's preset included."""
    section, _, key = name.partition(".")
    preset = preset_values(config.trainer.algorithm) if section == "trainer" else {}
    if key in preset:
        return preset[key]
    return sections()[section].model_fields[key].get_default(call_default_factory=True)


def _with_value(config: RunConfig, name: str) -> str:
    value = getattr(config, name.partition(".")[0]).model_dump(mode="json")[name.partition(".")[2]]
    text = one_line_yaml(value)
    return f"{name}={text if len(text) <= 60 else text[:57] + '...'}"
