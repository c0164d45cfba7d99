"""The base of all facts, and a fact as the log has it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import msgspec

__all__ = ["Command", "Fact", "Line", "Signal", "kinds", "name_of"]


def _tag(class_name: str) -> str:
    """``TrajectoryParked`` -> ``trajectory_parked``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", class_name).lower()


class Fact(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag=_tag, gc=False):
    """Something that happened in a run, or was decided there; its `Line` has run and time.

    ``words`` is its sentence for people, with fields in braces (`libra.facts.words`). ``subject``
    is the kind of thing whose history it belongs to: trajectory, gate, batch, worker or steps.
    """

    words: ClassVar[str] = ""
    subject: ClassVar[str] = "trajectory"

    @property
    def name(self) -> str:
        """Its name in the log: the class's in snake case, or the tag that the class gives."""
        return name_of(type(self))


def name_of(kind: type[Fact]) -> str:
    return str(kind.__struct_config__.tag)


class Command(Fact, frozen=True):
    """A decision of a policy object, with its ``reason``; ``plural`` names several of them.

    It is imperative as an object; the log names it in the past tense.
    """

    plural: ClassVar[str] = "decisions"

    @property
    def about(self) -> str:
        """The trajectory, iteration, batch or worker that it concerns."""
        return str(getattr(self, self.__struct_fields__[0]))


class Signal(Fact, frozen=True):
    """For the scheduler alone; not in the log."""


class Line(NamedTuple):
    """A fact of ``run``, ``t_s`` seconds after the run started."""

    run: str
    t_s: float
    fact: Fact


def kinds(base: type[Fact] = Fact) -> Iterator[type[Fact]]:
    """Every kind of fact: the classes without subclasses."""
    below = base.__subclasses__()
    if not below:
        yield base
    for cls in below:
        yield from kinds(cls)
