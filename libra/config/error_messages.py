"""Error messages for a configuration, made from pydantic's reports."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from libra.config.algorithms import LOSS_ARGS, AdamArgs, LoraArgs
from libra.config.field_help import (
    FieldReference,
    field_references,
    in_arguments,
    inner_reference,
    reference_of,
    sections,
)
from libra.config.planner import LengthArgs
from libra.config.section import ArgumentError
from libra.config.yaml_text import one_line_yaml
from libra.errors import nearest_name

Origins = Mapping[tuple[str, ...], str]
"""Where each key was set: ``file:line`` or ``override 'a.b=c'``, by path."""

_IN_OTHER_FRAMEWORKS: Mapping[str, str] = {
    "learning_rate": "trainer.lr",
    "batch_size": "trainer.prompts",
    "num_prompts": "trainer.prompts",
    "num_generations": "trainer.group_size",
    "group": "trainer.group_size",
    "num_steps": "run.iterations",
    "max_steps": "run.iterations",
    "steps": "run.iterations",
    "staleness": "run.eta",
    "max_staleness": "run.eta",
    "max_head_offpolicyness": "run.eta",
    "max_off_policy_threshold": "run.eta",
    "output_dir": "run.dir",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "max_tokens": "rollout.max_new_tokens",
    "beta": "trainer.kl_coef",
    "weight_decay": "trainer.adam_args.weight_decay",
}
"""Names of settings in other frameworks."""

_INSIDE: Mapping[str, str] = {
    key: f"{owner}.{key}"
    for owner, kinds in (
        ("trainer.loss_args", LOSS_ARGS.values()), ("trainer.lora_args", [LoraArgs]), ("trainer.adam_args", [AdamArgs]),
        ("planner.lengths", [LengthArgs]),
    )
    for kind in kinds
    for key in kind.model_fields
}  # fmt: skip
"""Keys inside mappings of arguments."""

_SECTIONS_ELSEWHERE: Mapping[str, str] = {
    "env": "environment",
    "data": "environment",
    "sampling": "rollout",
    "generation": "rollout",
    "algorithm": "trainer",
    "optimizer": "trainer",
    "logging": "observe",
}
"""Names of sections in other frameworks."""

_EXAMPLES: Mapping[str, str] = {
    "services.named": "{judge: {model: Qwen/Qwen3-4B}}",
    "environment.tools": "{mcp: python my_server.py}",
}
"""Examples for mappings whose default is empty."""


def problem_message(error: Mapping[str, Any], origins: Origins) -> str:
    """Field, place, value, allowed values and advice for one of pydantic's ``errors()``."""
    path = tuple(str(part) for part in error["loc"] if part != "[key]")  # pydantic's mark of a key that is not allowed
    if error["type"] == "extra_forbidden":
        inside = [str(key) for key in error["input"]] if isinstance(error["input"], Mapping) else []
        return unknown_key_message(path, origin_of(path, origins), inside)
    name, where, got = ".".join(path), origin_of(path, origins), _shown(error["input"])
    if len(path) == 1:
        keys = ", ".join(sections()[path[0]].model_fields)
        return f"{name}{where}: got {got}; a section is a mapping of keys: {keys}"
    field = field_references()[".".join(path[:2])]
    if error["type"] == "value_error" and isinstance(wrong := error["ctx"]["error"], ArgumentError):
        return _argument_message(wrong, path, origins)
    if error["type"] == "value_error":
        return f"{name}{where}: {_without_name(str(error['ctx']['error']), name)}"
    field = inner_reference(path) or field
    return f"{name}{where}: got {got}; allowed: {field.allowed}; {_advice(field, error['input'])}"


def _argument_message(error: ArgumentError, path: tuple[str, ...], origins: Origins) -> str:
    key, report = str(error.report["loc"][0]), error.report
    name, where = ".".join((*path, key)), origin_of((*path, key), origins)
    if report["type"] == "extra_forbidden":
        keys = ", ".join(error.kind.model_fields)
        near = nearest_name(key, error.kind.model_fields)
        meant = f"; did you mean {'.'.join((*path, near))}?" if near else ""
        return f"unknown key {name}{where}: {error.owner} has {f'the keys {keys}' if keys else 'no keys'}{meant}"
    field = reference_of(name, error.kind.model_fields[key])
    return f"{name}{where}: got {_shown(report['input'])}; allowed: {field.allowed}; {_advice(field, report['input'])}"


def unknown_key_message(path: Sequence[str], where: str, inside: Sequence[str] = ()) -> str:
    """Message for an unknown key, with the nearest key; ``inside``: keys of an unknown section."""
    name = ".".join(path)
    nearest = (nearest_key((*path, inside[0])) if len(path) == 1 and inside else None) or nearest_key(path)
    if nearest and len(path) < 3:
        return f"unknown key {name}{where}; did you mean {nearest}? (libra config --fields lists every key)"
    if len(path) == 2 and path[0] in sections():
        allowed = f"{path[0]} has the keys {', '.join(sections()[path[0]].model_fields)}"
    elif len(path) > 2 and (field := field_references().get(".".join(path[:2]))):
        if "a mapping" in field.allowed:
            return f"unknown key {name}{where}; {field.name} is {field.allowed}"
        allowed = f"{field.name} is {field.allowed} and has no keys"
    else:
        allowed = f"the sections are {', '.join(sections())}"
    return f"unknown key {name}{where}; {allowed}"


def nearest_key(path: Sequence[str]) -> str | None:
    """The section or dotted name most similar to an unknown one; None without a similar name."""
    names, last = list(field_references()), path[-1].lower().replace("-", "_")
    same = [name for name in names if name.split(".")[1] == last]
    if len(path) == 2 and _INSIDE.get(last, "").startswith(f"{path[0]}."):
        return _INSIDE[last]
    section = _SECTIONS_ELSEWHERE.get(path[0].lower())
    if section is not None:
        return section if len(path) == 1 else nearest_key((section, *path[1:])) or section
    elsewhere = _IN_OTHER_FRAMEWORKS.get(last, "")
    if len(path) == 1:
        if same or elsewhere:
            return same[0] if same else elsewhere
        close = nearest_name(last, sections())
        if close:
            return close
    elif path[0] in sections():
        keys = sections()[path[0]].model_fields
        if elsewhere.startswith(f"{path[0]}.") and last not in keys:
            return elsewhere
        close = nearest_name(last, keys)
        if close:
            return f"{path[0]}.{close}"
    if len(same) == 1:
        return same[0]
    if elsewhere:
        return elsewhere
    return nearest_name(".".join(path), names, cutoff=0.75)


def origin_of(path: Sequence[str], origins: Origins) -> str:
    """`` (file:line)`` of a key, its nearest parent or its first key; "" if set in Python."""
    for length in range(len(path), 0, -1):
        if tuple(path[:length]) in origins:
            return f" ({origins[tuple(path[:length])]})"
    inside = [origin for key, origin in origins.items() if key[: len(path)] == tuple(path)]
    return f" ({inside[0]})" if inside else ""


def _advice(field: FieldReference, got: object) -> str:
    """The text to type: a correctly typed number, the nearest allowed name, or the default."""
    if isinstance(got, str | float) and field.allowed.startswith(("a whole number", "a number")):
        try:
            number = float(got)
        except ValueError:
            number = math.nan
        if number.is_integer() or (math.isfinite(number) and field.allowed.startswith("a number")):
            typed = int(number) if number.is_integer() else number
            if typed != got or isinstance(got, str):
                return f"type {_typed(field, one_line_yaml(typed))}, without quotes"
            if isinstance(got, float) and field.allowed.startswith("a whole number"):
                return f"type {_typed(field, str(typed))}"
    if isinstance(got, str) and field.allowed.startswith("one of "):
        names = [name for name in field.allowed.removeprefix("one of ").split(", ") if " " not in name]
        if (near := nearest_name(got, names, cutoff=0.7)) is not None:
            return f"type {_typed(field, near)}"
    return f"type e.g. {_typed(field, _EXAMPLES.get(field.name, field.default))}"


def _typed(field: FieldReference, value: str) -> str:
    inside = field.name.count(".") > 1 and not in_arguments(field.name.split("."))
    return f"{field.name.rpartition('.')[2]}: {value}" if inside else f"{field.name}={value}"


def _shown(value: object) -> str:
    text = one_line_yaml(value) if isinstance(value, dict | list | tuple) else repr(value)
    kind = {
        str: "text",
        int: "a whole number",
        float: "a number",
        bool: "a truth value",
        list: "a list",
        dict: "a mapping",
    }
    text = "null" if value is None else text if len(text) <= 80 else text[:77] + "..."
    return f"{text} ({kind[type(value)]})" if type(value) in kind else text


def _without_name(message: str, name: str) -> str:
    return message.removeprefix(f"{name}: ")
