"""A table of the conditions under which each setting has an effect, and the check against it.

Given settings without effect are reported in one line before anything starts, never refused;
contradictions are errors (`libra.config.cross_field_checks`). A setting counts as given if a file,
an override or a keyword argument sets it to another value than the default or the preset.

A setting in a file is checked against every command that reads the file: `planner` by `libra plan`,
`simulation` by `libra simulate`. A setting typed for a command is checked against that command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from libra.config.algorithms import DEFAULT_ALGORITHM, GROUP_ADVANTAGES, LOSS_ARGS, preset_values
from libra.config.field_help import sections
from libra.config.sections import RunSections
from libra.config.service_devices import asked_models, service_models
from libra.config.yaml_text import one_line_yaml

CommandName = Literal["run", "plan", "simulate", "slurm"]


@dataclass(frozen=True, slots=True)
class Situation:
    """Facts besides the configuration that decide whether a setting has an effect.

    Attributes
    ----------
    command : {"run", "plan", "simulate", "slurm"} or None
        Command that will read the configuration (``slurm``: `libra cluster slurm`); None if it is
        not known (`libra config`).
    typed : frozenset of str
        Dotted names typed for this command: overrides, or keyword arguments of `libra.train`.
    options : frozenset of str
        Options of the command that replace a setting, e.g. "--workload".
    client : bool
        Whether a connected Dask client was given.
    """

    command: CommandName | None = None
    typed: frozenset[str] = frozenset()
    options: frozenset[str] = frozenset()
    client: bool = False


@dataclass(frozen=True, slots=True)
class Need:
    """A condition: ``fields`` read (empty: command or machine), ``text`` to type, whether
    ``met``."""

    fields: tuple[str, ...]
    text: str
    met: Callable[[RunSections, Situation], bool]


def value_of(config: RunSections, name: str) -> Any:
    """The value of a dotted name."""
    section, _, key = name.partition(".")
    return getattr(getattr(config, section), key)


def is_(name: str, *values: object) -> Need:
    """The field has one of these values."""
    text = " or ".join(f"{name}={one_line_yaml(value)}" for value in values)
    return Need((name,), text, lambda config, _: value_of(config, name) in values)


def is_not(name: str, *values: object) -> Need:
    """The field has none of these values."""
    text = f"a {name} other than {' and '.join(one_line_yaml(value) for value in values)}"
    return Need((name,), text, lambda config, _: value_of(config, name) not in values)


def own(name: str) -> Need:
    """The field names a user's own part, which may read the setting."""
    return Need((name,), f"a {name} of your own", lambda config, _: ":" in str(value_of(config, name)))


def above(name: str, bound: float) -> Need:
    """The field is larger than ``bound``; false for None."""
    text = f"{name} above {bound:g}"
    return Need((name,), text, lambda config, _: (value_of(config, name) or 0) > bound)


def given(name: str) -> Need:
    """The field is neither None nor an empty list."""
    return Need((name,), f"a value of {name}", lambda config, _: value_of(config, name) not in (None, (), [], {}))


def missing(name: str) -> Need:
    """The field is None or an empty list."""
    text = f"no {name}"
    return Need((name,), text, lambda config, _: value_of(config, name) in (None, (), [], {}))


def either(*needs: Need) -> Need:
    """At least one of ``needs`` is met."""
    return Need(
        tuple(name for need in needs for name in need.fields),
        ", or ".join(need.text for need in needs),
        lambda config, situation: any(need.met(config, situation) for need in needs),
    )


def without(*options: str) -> Need:
    """The command has none of these options."""
    return Need((), f"no {' or '.join(options)}", lambda _, situation: not situation.options & set(options))


NO_CLIENT = Need((), "no client, whose cluster is used as it is", lambda _, situation: not situation.client)
LOCAL = Need(
    ("cluster.scheduler",),
    "a local cluster (no --scheduler and no client: a cluster that is there brings its own workers)",
    lambda config, situation: config.cluster.scheduler is None and not situation.client,
)
"""Workers are started for the run."""

Reading = Mapping[CommandName, tuple[Need, ...]]
"""The commands that read a setting, with the conditions under which each does."""

CALLED: Mapping[CommandName, str] = MappingProxyType(
    {"run": "libra run", "plan": "libra plan", "simulate": "libra simulate", "slurm": "libra cluster slurm"}
)


def _of(*commands: CommandName, needs: tuple[Need, ...] = ()) -> Reading:
    return dict.fromkeys(commands, needs)


def _run(*needs: Need) -> Reading:
    return _of("run", needs=needs)


def _plan(*needs: Need) -> Reading:
    """A setting read by `libra plan`, and by a run that starts the plan."""
    return {"plan": needs, "run": (*needs, is_("planner.layout", "auto"))}


def _planned(*needs: Need) -> Reading:
    """A setting read by `libra plan`, and by a run that plans before or after it starts."""
    return {"plan": needs, "run": (*needs, either(is_not("planner.replan", "off"), is_("planner.layout", "auto")))}


def _simulated(*needs: Need) -> Reading:
    return _of("simulate", needs=needs)


_LEARNS = above("trainer.lr", 0)
_CORRECTS = is_not("trainer.correction", "none")
_REJECTS = is_not("trainer.reject", "none")
_M2PO = Need(
    ("trainer.reject_args",),
    "trainer.reject_args.m2po",
    lambda config, _: config.trainer.reject_args["m2po"] is not None,
)
_MASKS = Need(
    ("trainer.reject_args",),
    "trainer.reject_args.off_policy",
    lambda config, _: config.trainer.reject_args["off_policy"] is not None,
)
_HAS_KL = above("trainer.kl_coef", 0)
_SCALES = either(is_("trainer.advantage", "grpo"), own("trainer.advantage"))
_TEACHES = given("distil.teacher")
_SERVICE_TEACHES = Need(
    ("distil.teacher",), "distil.teacher={service: NAME}", lambda config, _: config.distil.service is not None
)
_HAS_SERVICES = Need(("services.named",), "a service in services.named", lambda config, _: bool(config.services.named))
_HAS_MODELS = Need(
    ("services.named",), "a service with a model in services.named", lambda config, _: bool(service_models(config))
)
_HAS_ASKED_MODELS = Need(
    ("services.named",),
    "a service with a model, and another function than teach, in services.named",
    lambda config, _: bool(asked_models(config)),
)
_STREAMS = (
    is_("trainer.late", "off"),
    is_("trainer.epochs", 1),
    is_("trainer.minibatches", 1),
    is_("trainer.advantage", *GROUP_ADVANTAGES),
    Need(
        ("trainer.reject_args",),
        "no trainer.reject_args.m2po",
        lambda config, _: config.trainer.reject_args["m2po"] is None,
    ),
)
_REPLICAS = either(above("cluster.train_workers", 1), is_("planner.layout", "auto"))
_VLLM = is_("rollout.engine", "vllm")
_DIVIDES = Need(
    ("rollout.max_new_tokens", "rollout.max_context_tokens", "rollout.ignore_eos"),
    "a rollout.chunk_tokens below rollout.max_new_tokens",
    # A scripted environment, which needs ignore_eos, has lengths of its own.
    lambda config, _: (
        (config.rollout.chunk_tokens or 1)
        < (config.rollout.max_context_tokens if config.rollout.ignore_eos else config.rollout.max_new_tokens)
    ),
)
_NO_TRACE = (missing("planner.trace"), without("--trace", "--from-run"))
_TRACED = either(
    given("planner.trace"),
    Need((), "--trace or --from-run", lambda _, situation: bool(situation.options & {"--trace", "--from-run"})),
)
_DRAWN = without("--from-run", "--workload")
_LENGTHS_GIVEN = (missing("planner.trace"), _DRAWN)
_NOT_OF_RUN = without("--from-run")  # such a simulation has the sections of that run
_CLUSTER_SIMULATED = (missing("cluster.engines"),)
_FORECASTS = either(is_("policy.name", "cmlfq"), own("policy.name"))
_SOME_SLOTS = Need(
    ("cluster.engines",),
    "an entry of cluster.engines without slots, or none",
    # A file written by `libra plan` lists the slots of its engines over those of the file that it extends.
    lambda config, _: (
        not config.cluster.engines
        or config.planner.planned is not None
        or any(group.slots is None for group in config.cluster.engines)
    ),
)
_SEVERAL_ENGINES = Need(
    ("cluster.engines", "cluster.rollout_workers"),
    "more than one engine",
    lambda config, _: (
        config.planner.layout == "auto"
        or config.cluster.scheduler is not None
        or (sum(group.count for group in config.cluster.engines) or config.cluster.rollout_workers) > 1
    ),
)
_ALIKE = either(
    missing("cluster.engines"),
    Need(("cluster.scheduler",), "--scheduler", lambda config, situation: not LOCAL.met(config, situation)),
)

_TABLE: tuple[tuple[str, str, Reading], ...] = (  # section, keys, who reads them and when
    ("run", "name dir iterations from_checkpoint", _run()),
    ("run", "seed", {"run": (), "plan": (_TRACED,), "simulate": ()}),
    ("run", "eta", _of("run", "plan", "simulate")),
    ("distil", "teacher", _of("run", "plan", "simulate", "slurm")),
    ("distil", "divergence estimator tokens reward_coef", _run(_TEACHES)),
    ("distil", "wait_s", _of("run", "plan", "simulate", needs=(_TEACHES,))),
    ("staleness", "versions", _run(above("run.eta", 0))),
    ("staleness", "engines", _run(above("run.eta", 0), is_("staleness.versions", "one"), _SEVERAL_ENGINES)),
    ("staleness", "window over_age", _of("run", "simulate", needs=(above("run.eta", 0),))),
    (
        "model",
        "path",
        _of("run", "plan", "simulate"),
    ),
    ("model", "dtype", _of("run", "plan")),
    ("model", "master_dtype", {"run": (is_("model.dtype", "bfloat16"),), "plan": ()}),
    ("model", "loader", _run()),
    ("environment", "name quotas retries", _run()),
    ("environment", "args", {"run": (), "plan": (_HAS_ASKED_MODELS,)}),
    ("services", "named", {**_of("run", "plan"), **_of("simulate", "slurm", needs=(_SERVICE_TEACHES,))}),
    ("services", "device_gib", {"run": (_HAS_SERVICES,), "plan": (_HAS_MODELS,)}),
    ("environment", "tools", _run(missing("agent.function"), missing("agent.command"))),
    (
        "environment",
        "tools_env",
        _run(given("environment.tools"), missing("agent.function"), missing("agent.command")),
    ),
    ("agent", "function command", _run()),
    ("agent", "venv env timeout_s idle_s concurrency", _run(either(given("agent.function"), given("agent.command")))),
    ("rollout", "tool_format temperature top_p ignore_eos", _run()),
    ("rollout", "max_turns", {"run": (), "simulate": _LENGTHS_GIVEN}),
    ("rollout", "engine", _of("run", "plan", "simulate")),  # which degrees `cluster.engines` may have
    ("rollout", "max_context_tokens", {**_of("run", "plan"), "simulate": _LENGTHS_GIVEN}),
    ("rollout", "kv_cache_gib", _run()),
    ("rollout", "exact_logprobs kv_host_gib speculate", _run(is_("rollout.engine", "transformers"))),
    ("rollout", "tp", {"run": (is_not("rollout.engine", "transformers"), _ALIKE), "simulate": _CLUSTER_SIMULATED}),
    ("rollout", "keep_kv engine_args", _run(_VLLM)),
    (
        "rollout",
        "slots",
        {"run": (_SOME_SLOTS, either(LOCAL, given("cluster.engines"))), "slurm": (_SOME_SLOTS,)},
    ),
    ("rollout", "chunk_tokens", _of("run", "simulate", needs=(_DIVIDES,))),
    ("rollout", "max_new_tokens", {"run": (), "plan": _NO_TRACE, "simulate": _LENGTHS_GIVEN}),
    ("trainer", "algorithm resample lr drop_uniform_groups train_prompts drop_truncated loss aggregation", _run()),
    ("trainer", "advantage", _of("run", "plan")),
    ("trainer", "lora_rank", _run()),
    ("trainer", "lora_args", _run(given("trainer.lora_rank"))),
    ("trainer", "mismatch_args mismatch_action dispatch no_signal", _run()),
    ("trainer", "prompts group_size", _of("run", "plan", "simulate")),
    ("trainer", "kl_coef entropy_coef epochs minibatches max_row_tokens logit_chunk_tokens", _of("run", "plan")),
    ("trainer", "micro_batch_tokens gradient_checkpointing", _of("run", "plan")),
    ("trainer", "adam_args warmup_steps lr_schedule", _run(_LEARNS)),
    ("trainer", "normalize_std", _run(_SCALES)),
    ("trainer", "old_logp", {"run": (either(is_not("trainer.loss", "reinforce"), _CORRECTS, _REJECTS),), "plan": ()}),
    ("trainer", "loss_args", _run(is_not("trainer.loss", "reinforce"))),
    ("trainer", "reject", _run()),
    ("trainer", "reject_args", {"run": (either(_REJECTS, _M2PO, _MASKS),), "plan": ()}),
    ("trainer", "correction", _run(is_not("trainer.old_logp", "behaviour"))),
    ("trainer", "correction_args", _run(_CORRECTS)),
    ("trainer", "kl_args", _run(_HAS_KL)),
    ("trainer", "gamma", _run(is_("trainer.advantage", "reinforce_pp"))),
    ("trainer", "routes", _run()),
    ("trainer", "layout", {"run": (_REPLICAS,), "plan": ()}),
    ("trainer", "late", _of("run", "plan")),
    ("trainer", "late_args", _run(is_("trainer.late", "correct", "wait"))),
    ("trainer", "streaming", {"run": _STREAMS, "plan": ()}),
    ("trainer", "batches", _run(*_STREAMS, is_not("trainer.streaming", "off"), above("run.eta", 0))),
    (
        "trainer",
        "turning",
        {
            "run": (*_STREAMS, is_not("trainer.streaming", "off"), above("cluster.hybrid_workers", 0)),
            "plan": (is_not("trainer.streaming", "off"),),
        },
    ),
    ("checkpoint", "every keep", _run()),
    ("evaluation", "prompts", _run()),
    ("evaluation", "every temperature", _run(above("evaluation.prompts", 0))),
    ("policy", "name", _of("run", "simulate")),
    ("policy", "objective", _of("run", "simulate", needs=(_FORECASTS,))),
    (
        "policy",
        "boundaries_tokens",
        {"run": (is_("policy.name", "cmlfq"), _SEVERAL_ENGINES), "simulate": (is_("policy.name", "cmlfq"),)},
    ),
    ("policy", "patience", _of("run", "simulate", needs=(is_not("policy.name", "fifo"),))),
    ("cluster", "scheduler", {"run": (NO_CLIENT,), "plan": (_HAS_ASKED_MODELS,)}),
    (
        "cluster",
        "rollout_workers",
        {"run": (LOCAL,), "slurm": (), "simulate": _CLUSTER_SIMULATED},
    ),
    ("cluster", "engines", _of("run", "slurm", "simulate")),
    ("cluster", "hybrid_workers threads", _of("run", "slurm")),
    ("cluster", "train_workers", _of("run", "plan", "slurm")),
    ("cluster", "drain_timeout_s", _run(above("cluster.hybrid_workers", 0))),
    (
        "cluster",
        "tool_workers tool_workers_most",
        {"run": (LOCAL,), "slurm": (), "plan": (_HAS_ASKED_MODELS,)},
    ),
    ("cluster", "tool_slots dashboard_port dashboard_names", {"run": (LOCAL,), "slurm": ()}),
    ("cluster", "device", {"run": (), "plan": (either(_SERVICE_TEACHES, _HAS_ASKED_MODELS),)}),
    ("cluster", "tool_supply", _run()),
    ("observe", "trackers progress callbacks", _run()),
    ("store", "keep_versions keep_journals", _run()),
    ("weights", "transfer", _run()),
    ("watchdog", "timeout_s", _run()),
    ("watchdog", "restart", _run(given("watchdog.timeout_s"))),
    ("slurm", "dir host setup python", _of("slurm")),
    ("slurm", "jobs", {"slurm": (), "plan": (either(_TEACHES, _HAS_MODELS),)}),
    ("simulation", "train_s load_s tool_slots noise", _simulated()),
    ("simulation", "iterations", _simulated(_DRAWN)),
    ("planner", "layout", _of("run", "slurm")),
    ("planner", "planned replan", _run()),
    (
        "planner",
        "change_cost_s",
        {**_run(either(is_not("planner.replan", "off"), is_not("trainer.turning", "off"))), "plan": ()},
    ),
    ("planner", "gpu", {**_planned(), "simulate": (missing("planner.calibration"),)}),
    ("planner", "calibration", {**_planned(), "simulate": ()}),
    ("planner", "tp", _planned()),
    ("planner", "num_gpus", _plan()),
    ("planner", "trace", {**_plan(), "simulate": (_DRAWN,)}),
    ("planner", "update_s fixed_train_gpus fixed_engines", _plan()),
    ("planner", "lengths", {**_plan(), "simulate": _LENGTHS_GIVEN}),
)

READ: Mapping[str, Reading] = MappingProxyType(
    {f"{section}.{key}": reading for section, keys, reading in _TABLE for key in keys.split()}
)
"""Every field of the configuration; a test fails if one is missing, and compares the claims with
the code. What an algorithm sets counts as read by itself here (`_reading`)."""


@dataclass(frozen=True, slots=True)
class Ignored:
    """A given setting without effect, as typed; ``why`` is the change that would give an effect."""

    field: str
    given: str
    why: str

    @property
    def message(self) -> str:
        """Setting and reason in one line."""
        return f"{self.given} has no effect {self.why}"


def ignored_settings(config: RunSections, situation: Situation | None = None) -> tuple[Ignored, ...]:
    """Given settings that have no effect in this combination, in the order of the sections."""
    around = situation or Situation()
    found = ((name, _why_ignored(config, name, around)) for name in _given(config))
    return tuple(Ignored(name, _with_value(config, name), why) for name, why in found if why)


def warning_lines(ignored: Iterable[Ignored]) -> list[str]:
    """One line per reason, with all settings that have it."""
    by_why: dict[str, list[str]] = {}
    for each in ignored:
        by_why.setdefault(each.why, []).append(each.given)
    return [
        f"{', '.join(given)} {'has' if len(given) == 1 else 'have'} no effect {why}" for why, given in by_why.items()
    ]


def _why_ignored(config: RunSections, name: str, situation: Situation) -> str | None:
    """Why a given setting has no effect, and the remedy; None if the setting has an effect."""
    reading, command, typed = _reading(config, name, situation), situation.command, name in situation.typed
    judges: list[CommandName]
    if "slurm" in reading and command != "slurm" and not _is_for_slurm(config):
        reading = {name: needs for name, needs in reading.items() if name != "slurm"} or reading
    if typed and command is not None:
        if command not in reading:
            return f"in {CALLED[command]}; {_readers(reading)}"
        judges = [command]
    else:  # `plan` reads many settings that are for runs, so it does not report them
        judges = [each for each in reading if each != "plan" or name.startswith("planner.")] or list(reading)
    # An option of the command overrides the file, as intended.
    around = situation if typed else replace(situation, options=frozenset())
    lacking = [[need.text for need in reading[judge] if not need.met(config, around)] for judge in judges]
    return f"here; needed is {' and '.join(lacking[0])}" if all(lacking) else None


def _reading(config: RunSections, name: str, situation: Situation) -> Reading:
    """A setting's readers; for an algorithm, readers of every value that its preset or teacher
    changes."""
    if name != "trainer.algorithm":
        return READ[name]
    sets, usual = preset_values(config.trainer.algorithm), preset_values(DEFAULT_ALGORITHM)
    chosen = [key for key, value in sets.items() if value != usual[key] and value == getattr(config.trainer, key)]
    taught = ["distil.teacher"] if config.distil.teacher is not None else []
    found = dict(READ[name])
    for each in (*(f"trainer.{key}" for key in chosen), *taught):
        for command, needs in READ[each].items():
            if all(need.met(config, situation) for need in needs):
                found.setdefault(command, needs)
    return found


def _is_for_slurm(config: RunSections) -> bool:
    """Whether settings of `libra cluster slurm` are given, which may have started the cluster."""
    return any(name.startswith("slurm") for name in _given(config))


def _readers(reading: Reading) -> str:
    parts = []
    for command, needs in reading.items():
        needed = f", which needs {' and '.join(need.text for need in needs)}" if needs else ""
        parts.append(f"{CALLED[command]}{needed}")
    return f"only in {' and '.join(parts)}"


def _given(config: RunSections) -> Iterator[str]:
    for section_name, kind in sections().items():
        section = getattr(config, section_name)
        given_keys = section.model_fields_set if section_name in config.model_fields_set else set()
        for key in kind.model_fields:
            name = f"{section_name}.{key}"
            if key in given_keys and getattr(section, key) != default_of(config, name):
                yield name


def default_of(config: RunSections, name: str) -> Any:
    """A field's value if it is not given, which the algorithm's preset may set."""
    section, _, key = name.partition(".")
    preset = preset_values(config.trainer.algorithm) if section == "trainer" else {}
    if key == "loss_args" and config.trainer.loss != preset["loss"]:
        return LOSS_ARGS[config.trainer.loss]().model_dump() if config.trainer.loss in LOSS_ARGS else {}
    return (
        preset[key] if key in preset else sections()[section].model_fields[key].get_default(call_default_factory=True)
    )


def _with_value(config: RunSections, name: str) -> str:
    section, _, key = name.partition(".")
    text = one_line_yaml(getattr(config, section).model_dump(mode="json")[key])
    return f"{name}={text if len(text) <= 60 else text[:57] + '...'}"
