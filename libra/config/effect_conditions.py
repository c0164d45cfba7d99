"""Conditions under which a setting has an effect: on other settings, on the command, and on the
machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from libra.config.sections import RunSections
from libra.config.yaml_text import one_line_yaml

CommandName = Literal["run", "plan", "simulate", "slurm"]


@dataclass(frozen=True, slots=True)
class Situation:
    """Facts that decide whether a setting has an effect, besides the configuration.

    Attributes
    ----------
    command : {"run", "plan", "simulate", "slurm"} or None
        The command that is about to read it (``slurm``: `libra cluster slurm`). If null, none yet (`libra config`).
    typed : frozenset of str
        Dotted names given for this very command: overrides, or keyword arguments of `libra.train`.
    options : frozenset of str
        Options of the command that replace a setting, e.g. "--workload".
    client : bool
        A connected Dask client was given.
    has_gpu : callable or None
        Whether the machines of the run have GPUs; called only if a setting depends on it. If null, not known here.
    """

    command: CommandName | None = None
    typed: frozenset[str] = frozenset()
    options: frozenset[str] = frozenset()
    client: bool = False
    has_gpu: Callable[[], bool] | None = None


@dataclass(frozen=True, slots=True)
class Need:
    """One condition: ``fields`` it reads (empty: the command or the machine), ``text`` to type, and
    whether it is ``met``."""

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
    """The field names a part of the user's own, which may read the setting."""
    return Need((name,), f"a {name} of your own", lambda config, _: ":" in str(value_of(config, name)))


def above(name: str, bound: float) -> Need:
    """The field is larger than ``bound``; None is not."""
    text = f"{name} above {bound:g}"
    return Need((name,), text, lambda config, _: (value_of(config, name) or 0) > bound)


def given(name: str) -> Need:
    """The field is not None, and no empty list."""
    return Need((name,), f"a value of {name}", lambda config, _: value_of(config, name) not in (None, (), [], {}))


def missing(name: str) -> Need:
    """The field is None, or an empty list."""
    text = f"no {name}"
    return Need((name,), text, lambda config, _: value_of(config, name) in (None, (), [], {}))


def either(*needs: Need) -> Need:
    """At least one of ``needs``."""
    return Need(
        tuple(name for need in needs for name in need.fields),
        ", or ".join(need.text for need in needs),
        lambda config, situation: any(need.met(config, situation) for need in needs),
    )


def without(*options: str) -> Need:
    """None of these options of the command is given."""
    return Need((), f"no {' or '.join(options)}", lambda _, situation: not situation.options & set(options))


NO_CLIENT = Need((), "no client, whose cluster is used as it is", lambda _, situation: not situation.client)
LOCAL = Need(
    ("cluster.scheduler",),
    "a local cluster (no --scheduler and no client: a cluster that is there brings its own workers)",
    lambda config, situation: config.cluster.scheduler is None and not situation.client,
)
"""Workers are started for the run."""
GPU = Need((), "GPUs", lambda _, situation: situation.has_gpu is None or situation.has_gpu())
