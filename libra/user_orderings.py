"""Scheduling policies by name: Libra's own, and a user's ``package.module:attribute``.

`libra.policy` is pure and imports nothing by name, so its callers find orderings here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

from libra.errors import ConfigError
from libra.facts import Fact, Prefer, Priority, SetPriority, TrajectoryParked
from libra.named_parts import built, is_named
from libra.policy import Fifo, OnlineLearner, Ordering, make_ordering
from libra.types import Phase

logger = logging.getLogger(__name__)

T = TypeVar("T")
Answers = tuple[SetPriority | Prefer, ...]
FIELD = "policy.name"
CALL = "f(), or f(objective=..., patience=...)"


def ordering_of(name: str, **options: Any) -> Ordering:
    """The ordering ``name``; a user's ordering gets the ``options`` that it takes, and is guarded.

    KeyError for an unknown name; ConfigError if it cannot be made or lacks a method.
    """
    if not is_named(name):
        return make_ordering(name, **options)
    own = own_ordering(name, **options)
    guarded = GuardedLearner(name, own) if isinstance(own, OnlineLearner) else Guarded(name, own)
    return cast(Ordering, guarded)  # its name is not a class variable


def own_ordering(name: str, **options: Any) -> Ordering:
    """The user's ordering ``name``, unguarded; errors as `ordering_of`."""
    ordering = built(FIELD, name, CALL, {}, options)
    lacking = [each for each in ("handle", "snapshot", "restore") if not callable(getattr(ordering, each, None))]
    if lacking:
        raise ConfigError(
            f"{FIELD}: {name!r} made a {type(ordering).__name__} without {', '.join(lacking)}; it must be a "
            "libra.policy.Ordering"
        )
    return ordering  # type: ignore[no-any-return]


class Guarded:
    """A user's ordering; after its first error the order is first come, first served.

    Later decisions have the error as their reason, and a replay meets the same error.
    """

    def __init__(self, name: str, own: Ordering) -> None:
        self.name: Any = name  # by which a replay finds it
        self.own, self._fifo, self._fault = own, Fifo(), ""

    def handle(self, event: Fact) -> Answers:
        instead, nothing = self._fifo.handle(event), cast(Answers, ())
        answers = self._tried(lambda: _checked(event, self.own.handle(event)), nothing)
        return tuple(SetPriority(c.key, c.priority, self._fault) for c in instead) if self._fault else answers

    def snapshot(self) -> dict[str, Any]:
        own = self._tried(self.own.snapshot, cast(dict[str, Any], {}))
        return {"own": own, "instead": self._fifo.snapshot(), "fault": self._fault}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        self._fault = str(snapshot["fault"])
        self._fifo.restore(snapshot["instead"])
        if not self._fault:
            self.own.restore(snapshot["own"])

    def _tried(self, call: Callable[[], T], default: T) -> T:
        if self._fault:
            return default
        try:
            return call()
        except Exception as error:  # noqa: BLE001  the boundary to a user's policy
            self._fault = f"{self.name} raised {type(error).__name__}: {error}; first come, first served since then"
            logger.error("%s: %s", FIELD, self._fault)
            return default


class GuardedLearner(Guarded):
    own: Any

    def learn(self) -> None:
        self._tried(self.own.learn, None)

    def forget_live(self) -> None:
        self._tried(self.own.forget_live, None)


def _checked(event: Fact, answers: Iterable[SetPriority | Prefer]) -> Answers:
    found = tuple(answers)
    if isinstance(event, TrajectoryParked):
        first = found[0] if found else None
        if not (isinstance(first, SetPriority) and first.key == event.key and isinstance(first.priority, Priority)):
            raise TypeError(
                f"it answered TrajectoryParked with {first!r:.200}; the first answer is SetPriority(key, Priority(iteration, "
                "level, order), reason)"
            )
    return found


def check_ordering(name: str, **options: Any) -> None:
    """ConfigError unless ``name`` makes an ordering that answers and whose state survives JSON."""
    if not is_named(name):
        return
    ordering = own_ordering(name, **options)
    parked = TrajectoryParked("trajectory-train-0-0-0-e0-check", 0, Phase.ROLLOUT, 0)
    try:
        _checked(parked, ordering.handle(parked))
        own_ordering(name, **options).restore(json.loads(json.dumps(ordering.snapshot())))
    except Exception as error:  # the boundary to a user's policy
        raise ConfigError(
            f"{FIELD}: {name!r} fails to handle a TrajectoryParked, or to restore its snapshot from JSON: "
            f"{type(error).__name__}: {error}"
        ) from error
