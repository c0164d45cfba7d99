"""User functions that the driver calls during a run.

Invariants
----------
1. Callbacks run in the driver, one after the other: configured ones first, then ``given`` ones.
2. ``on_batch`` of iteration k precedes its ``on_iteration``; both precede any call for iteration
   k+1.
3. A callback that raises ends the run after the iteration; `libra resume` continues the run.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from libra.config import RunConfig
from libra.errors import CallbackError, LibraError
from libra.named_parts import named_function
from libra.types import Trajectory

KINDS: dict[str, tuple[str, int]] = {
    "on_iteration": ("f(values)", 1),
    "on_batch": ("f(batch, trajectories)", 2),
    "on_evaluation": ("f(result)", 1),
}
"""Settings of section ``observe``: how each is called, and with how many arguments."""


class OnIteration(Protocol):
    """``on_iteration``: called at the end of each iteration."""

    def __call__(self, values: Mapping[str, Any], /) -> object:
        """Receive an iteration's metrics, as `Session.iterations` yields them.

        Among them: ``iteration``, ``reward`` (mean), ``loss``, ``lr``, ``iteration_s`` (seconds),
        ``tokens_per_s``, ``failures``. The return is ignored.
        """


class OnBatch(Protocol):
    """``on_batch``: called after the step on each batch."""

    def __call__(self, batch: int, trajectories: Sequence[Trajectory], /) -> object:
        """Receive a batch's number (from 0) and graded trajectories, which may be changed."""


class OnEvaluation(Protocol):
    """``on_evaluation``: called after each evaluation."""

    def __call__(self, result: Mapping[str, Any], /) -> object:
        """Receive an evaluation's result; the return is ignored.

        Keys: ``version``, ``reward`` (mean), ``num`` (questions), ``failures``, ``left_out``.
        """


class Callbacks:
    """The configured and ``given`` callbacks of a run. Raises ConfigError if one is unusable."""

    def __init__(self, config: RunConfig, given: Mapping[str, Callable[..., object] | None] | None = None) -> None:
        self._functions: dict[str, list[tuple[str, Callable[..., object]]]] = {kind: [] for kind in KINDS}
        for kind, name in config.observe.callbacks.items():
            call, count = KINDS[kind]
            function = named_function(f"observe.callbacks.{kind}", name, call, *range(count))
            self._functions[kind].append((f"observe.callbacks.{kind}={name}", function))
        for event, own in (given or {}).items():
            if own is not None:
                self._functions[event].append((event, own))

    def any(self, kind: str) -> bool:
        return bool(self._functions[kind])

    def call(self, kind: str, *given: object) -> None:
        """Call every callback of a kind. Raises CallbackError if one raises."""
        for name, function in self._functions[kind]:
            try:
                returned = function(*given)
                if inspect.iscoroutine(returned):  # in a thread, since a notebook's main thread runs an event loop
                    with ThreadPoolExecutor(1) as thread:
                        thread.submit(asyncio.run, returned).result()
            except LibraError:
                raise
            except Exception as error:  # the boundary to a user's function
                raise CallbackError(f"{name}: the callback raised {type(error).__name__}: {error}") from error
