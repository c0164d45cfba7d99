"""Reading a configuration: a YAML file, the files that it extends, and overrides.

Invariants
----------
1. Every key is used or refused; none is dropped.
2. A later layer wins: extended file, file, further files, overrides (the last of two equal keys). A
   layer that changes `environment.name` or `trainer.algorithm` drops the `args` of the other
   environment, or the keys of the other preset, from earlier layers, because a resolved
   configuration gives every key.
3. All problems of a configuration are reported at once, each with its file and line or override.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError, model_validator

from libra.config import yaml_text
from libra.config.algorithms import DEFAULT_ALGORITHM, preset_values
from libra.config.cross_field_checks import contradictions, fields_of
from libra.config.error_messages import origin_of, problem_message, unknown_key_message
from libra.config.field_help import MERGED, field_references, in_arguments, sections
from libra.config.model_paths import packaged_config
from libra.config.sections import RunSections
from libra.errors import ConfigError, RunDirectoryError

EXTENDS = "extends"
"""Key of a file that names the file it is a delta to."""

Path_ = tuple[str, ...]


class RunConfig(RunSections):
    """Every setting of one run. Make it with `load_config` or `config_from_dict`, which raise
    Libra's errors."""

    @model_validator(mode="after")
    def _check_across_sections(self) -> Self:
        if found := contradictions(self):
            raise ValueError("; ".join(found))
        return self


@dataclass(slots=True)
class _Layer:
    """Values set so far, where each was set, and the problems found."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[Path_, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, values: Mapping[str, Any] | None = None
) -> RunConfig:
    """The configuration of a file, with ``values`` over the file and overrides over both.

    Parameters
    ----------
    path : str or Path
        A YAML file, or ``libra/NAME`` for a file that ships with Libra. Its ``extends:`` names the
        file below it, by a relative path or ``libra/NAME``.
    overrides : sequence of str
        ``section.key=value``, the value in YAML: ``trainer.lr=1e-4``, ``run.name=null``,
        ``trainer.loss_args.clip_high=0.3``. Further files (``*.yaml``, ``libra/NAME``) among them
        are merged over ``path`` in their order, below all overrides.
    values : mapping of section to {key: value}, optional

    Raises
    ------
    ConfigError
        With every problem, one a line.
    """
    layer = _Layer()
    further = [text for text in overrides if _names_file(text)]
    for name in (str(path), *further):
        for in_file, origins in _files(name, None, ()):
            _merge(layer, in_file, origins)
    _merge(layer, _plain(values or {}), {})
    _merge_overrides(layer, [text for text in overrides if not _names_file(text)])
    return _validated(layer)


def _names_file(text: str) -> bool:
    return ("=" not in text and text.endswith((".yaml", ".yml"))) or text.startswith("libra/")


def config_from_dict(values: Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of mappings ``{section: {key: value}}``; ConfigError with every problem."""
    layer = _Layer()
    _merge(layer, _plain(values), {})
    _merge_overrides(layer, overrides)
    return _validated(layer)


def typed_settings(overrides: Sequence[str]) -> dict[str, Any]:
    """Overrides ``section.key=value`` as arguments ``section__key`` of `libra.train`, for scripts.
    `libra.train` checks keys and values; ConfigError for an override of another form."""
    layer = _Layer()
    _merge_overrides(layer, overrides)
    if layer.problems:
        raise _config_error(layer.problems)
    return {f"{section}__{key}": value for section, keys in layer.values.items() for key, value in keys.items()}


def dump_config(config: RunConfig) -> str:
    """Every setting as YAML text, which `load_config` reads back to an equal configuration."""
    return yaml_text.write(config.model_dump(mode="json"))


def _files(name: str, parent: Path | None, seen: tuple[Path, ...]) -> list[tuple[dict[str, Any], dict[Path_, str]]]:
    """Values and origins of a file and of all files that it extends, the outermost first."""
    path = packaged_config(name) or (Path(name) if parent is None else parent.parent / name)
    by = f" (extended by {parent})" if parent else ""
    if path.resolve() in seen:
        chain = " -> ".join(str(step) for step in (*seen[seen.index(path.resolve()) :], path.resolve()))
        raise ConfigError(
            f"{EXTENDS}: the files extend each other in a circle: {chain}; take {EXTENDS} out of one of them"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"{path}{by}: there is no such configuration file; type a path such as configs/quickstart.yaml, or "
            "libra/quickstart for the one that ships"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}{by}: cannot be read as text: {error}; save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(
            f"{path}{by}: cannot be read as text: {error.strerror or error}; type the path of a YAML file such as "
            "configs/quickstart.yaml"
        ) from error
    if not text.strip():
        raise ConfigError(f"{path}{by}: is empty; write settings into it, or leave it out for libra/quickstart")
    values, lines = yaml_text.read_mapping(text, str(path))
    origins = {key: f"{path}:{line}" for key, line in lines.items()}
    extended = values.pop(EXTENDS, None)
    if extended is None:
        return [(values, origins)]
    if not isinstance(extended, str):
        raise ConfigError(f"{origins[(EXTENDS,)]}: {EXTENDS} is the path of one file; got {extended!r}")
    return [*_files(extended, path, (*seen, path.resolve())), (values, origins)]


def _merge(layer: _Layer, values: Mapping[str, Any], origins: Mapping[Path_, str]) -> None:
    """Merge ``values`` over ``layer``, per section, and within `environment.args` per key."""
    for section, key, args in (("environment", "name", "args"), ("trainer", "loss", "loss_args")):
        if _has(values, f"{section}.{key}"):
            below = layer.values.get(section)
            if isinstance(below, dict) and below.get(key) != values[section][key]:
                below.pop(args, None)
                _forget(layer, (section, args))
    if isinstance(values.get("trainer"), dict) and "algorithm" in values["trainer"]:
        below = layer.values.get("trainer")
        if isinstance(below, dict) and below.get("algorithm", DEFAULT_ALGORITHM) != values["trainer"]["algorithm"]:
            for key in preset_values(DEFAULT_ALGORITHM):  # keys of the other algorithm
                below.pop(key, None)
                _forget(layer, ("trainer", key))
    _lay_over(layer, values, origins, layer.values, ())


def _has(values: Mapping[str, Any], name: str) -> bool:
    section, key = name.split(".")
    return isinstance(values.get(section), dict) and key in values[section]


def _lay_over(
    layer: _Layer, values: Mapping[str, Any], origins: Mapping[Path_, str], below: dict[str, Any], path: Path_
) -> None:
    for key, value in values.items():
        here = (*path, key)
        old = below.get(key)
        mapping = len(here) == 1 or here in MERGED or here[:-1] == ("slurm", "jobs")
        if mapping and value is None and here in origins:
            value = {}  # a section whose keys are all commented out
        if mapping and isinstance(value, dict):
            if not isinstance(old, dict):
                below[key] = old = {}
                _forget(layer, here)
            if here in origins:
                layer.origins[here] = origins[here]
            _lay_over(layer, value, origins, old, here)
        else:
            _forget(layer, here)
            below[key] = value
            layer.origins.update({where: text for where, text in origins.items() if where[: len(here)] == here})


def _forget(layer: _Layer, path: Path_) -> None:
    for where in [where for where in layer.origins if where[: len(path)] == path]:
        del layer.origins[where]


def _merge_overrides(layer: _Layer, overrides: Sequence[str]) -> None:
    values: dict[str, Any] = {}
    origins: dict[Path_, str] = {}
    for override in overrides:
        origin = f"override {override!r}"
        name, equals, text = override.partition("=")
        path = tuple(name.strip().split("."))
        if not equals or not all(path):
            layer.problems.append(f"{origin}: an override is section.key=value; type e.g. trainer.lr=1e-4")
            continue
        known = ".".join(path[:2]) in field_references()
        if len(path) < 2 or (len(path) > 2 and not in_arguments(path)):
            layer.problems.append(
                f"{origin}: {name} is a section; type one of its keys, e.g. {_first_key(path[0])}"
                if len(path) == 1 and path[0] in sections()
                else unknown_key_message(path, f" ({origin})")
            )
            continue
        if not text.strip():
            example = field_references()[name.strip()].default if known and len(path) == 2 else "VALUE"
            layer.problems.append(f"{origin}: it has no value; type e.g. {name.strip()}={example}")
            continue
        try:
            value = yaml_text.read_value(text, origin)
        except ConfigError as error:
            layer.problems.append(str(error))
            continue
        if known and len(path) == 2 and value is not None and not isinstance(value, str):
            field = field_references()[name.strip()]
            if field.takes_text and not (isinstance(value, dict) and field.takes_mapping):
                value = text.strip()
        node = values
        for part in path[:-1]:
            inner = node.get(part)
            node[part] = node = inner if isinstance(inner, dict) else {}
        node[path[-1]] = value
        origins[path] = origin
    _merge(layer, values, origins)


def _first_key(section: str) -> str:
    return next(
        f"{name}={field.default}" for name, field in field_references().items() if name.startswith(f"{section}.")
    )


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise ConfigError(f"a configuration is a mapping of sections; got {type(values).__name__}")
    return {key: _plain(value) if isinstance(value, Mapping) else value for key, value in values.items()}


def _validated(layer: _Layer) -> RunConfig:
    try:
        config = RunConfig.model_validate(layer.values)
    except ValidationError as error:
        raise _config_error([*layer.problems, *_messages(error, layer)]) from None
    if layer.problems:
        raise _config_error(layer.problems)
    return config


def _messages(error: ValidationError, layer: _Layer) -> list[str]:
    found: list[str] = []
    wrong: set[str] = set()
    for entry in error.errors(include_url=False):
        if entry["loc"]:
            path = tuple(str(part) for part in entry["loc"])
            wrong.add(".".join(path[:2]))
            found.append(problem_message(entry, layer.origins))
            section = layer.values[path[0]]
            if len(path) == 1 or not isinstance(section, dict):
                layer.values.pop(path[0])
            else:
                section.pop(path[1], None)
    for message in contradictions(
        RunSections.model_validate(layer.values)
    ):  # the remaining values are right field by field
        names = fields_of(message)
        if not wrong & {part for name in names for part in (name, name.split(".")[0])}:
            where = next(filter(None, (origin_of(name.split("."), layer.origins) for name in names)), "")
            found.append(message.replace(names[0], f"{names[0]}{where}", 1))
    return found


def _config_error(problems: Sequence[str]) -> ConfigError:
    if len(problems) == 1:
        return ConfigError(problems[0])
    lines = "".join(f"\n  {problem}" for problem in problems)
    return ConfigError(f"{len(problems)} problems in the configuration:{lines}")


RESOLVED_FILE = "config.resolved.yaml"
FREE_SECTIONS = (
    "policy",
    "cluster",
    "observe",
    "checkpoint",
    "store",
    "weights",
    "watchdog",
    "planner",
    "simulation",
    "slurm",
)
"""Sections about execution, display and retention: they do not change the result of a run."""
FREE_FIELDS = (
    "run.iterations",
    "run.dir",
    "run.name",
    "environment.retries",
    "services.device_gib",
    "rollout.tp",
    "rollout.engine_args",
    "trainer.max_row_tokens",
    "trainer.micro_batch_tokens",
    "trainer.mismatch_args",
    "trainer.mismatch_action",
    "trainer.no_signal",
)
"""Further fields that may change."""


def load_resumed(run_dir: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Configuration of the run in ``run_dir``, with overrides of settings that may change.

    RunDirectoryError without a run; ConfigError if an override is wrong or would change the result.
    """
    directory = run_dir.expanduser().absolute()
    file = directory / RESOLVED_FILE
    if not file.is_file():
        raise RunDirectoryError(
            f"{run_dir}: no run here, it has no {RESOLVED_FILE}; type the directory of a run, such as runs/NAME"
        )
    here = {"name": directory.name, "dir": directory.parent}
    config = load_config(file, overrides)
    config = config.model_copy(update={"run": config.run.model_copy(update=here)})
    check_unchanged(directory, config)
    return config


def check_unchanged(directory: Path, config: RunConfig) -> RunConfig:
    """The configuration with which the run in ``directory`` started. ConfigError names the first
    field in which ``config`` differs and must not."""
    file = directory / RESOLVED_FILE
    was = load_config(file)
    before, after = _flat(was.model_dump()), _flat(config.model_dump())
    for name in sorted(before.keys() | after.keys()):
        if name in FREE_FIELDS or name.split(".")[0] in FREE_SECTIONS:
            continue
        if before.get(name) != after.get(name):
            raise ConfigError(
                f"{name}: the run was started with {before.get(name)!r}, got {after.get(name)!r}; a resumed run keeps it. "
                f"For a run with another value type libra run {file} {name}=... run.name=ANOTHER_NAME "
                f"--from {directory / 'checkpoints' / 'best'}"
            )
    return was


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    return {f"{section}.{name}": value for section, fields in values.items() for name, value in fields.items()}
