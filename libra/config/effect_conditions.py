"""What a setting can need in order to be read: conditions on other settings, on the command, and on the machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from libra.config.models import RunConfig

CommandName = Literal["run", "plan", "simulate", "slurm"]


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known beside the configuration when it is judged.

    Attributes
    ----------
    command : {"run", "plan", "simulate", "slurm"} or None
        Who is about to read it (``slurm``: `libra cluster slurm`). None: nobody yet (`libra config`).
    typed : frozenset of str
        Dotted names given for this very command: overrides, or keyword arguments of `libra.train`. A file may serve several
        commands; what is typed serves one.
    options : frozenset of str
        Options of the command that say the same as a setting, e.g. "--workload".
    client : bool
        A connected Dask client was given.
    has_gpu : callable or None
        Whether the machines of the run have GPUs, asked where a setting depends on it. None: not known from here.
    """

    command: CommandName | None = None
    typed: frozenset[str] = frozenset()
    options: frozenset[str] = frozenset()
    client: bool = False
    has_gpu: Callable[[], bool] | None = None


@dataclass(frozen=True, slots=True)
class Need:
    """One condition.

    Attributes
    ----------
    fields : tuple of str
        Dotted names it looks at; empty: the command or the machine.
    text : str
        What makes it true, in the words to type.
    met : callable
        Of a configuration and a situation.
    """

    fields: tuple[str, ...]
    text: str
    met: Callable[[RunConfig, Situation], bool]


def value_of(config: RunConfig, name: str) -> Any:
    """The value of a dotted name."""
    section, _, key = name.partition(".")
    return getattr(getattr(config, section), key)


def is_(name: str, *values: object) -> Need:
    """The field has one of these values."""
    text = " or ".join(f"{name}={_shown(value)}" for value in values)
    return Need((name,), text, lambda config, _: value_of(config, name) in values)


def is_not(name: str, *values: object) -> Need:
    """The field has none of these values."""
    text = f"a {name} other than {' and '.join(_shown(value) for value in values)}"
    return Need((name,), text, lambda config, _: value_of(config, name) not in values)


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


def _shown(value: object) -> str:
    return (
        {True: "true", False: "false", None: "null"}.get(value, str(value))
        if isinstance(value, bool | None)
        else str(value)
    )
