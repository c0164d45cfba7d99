"""Functions of the user's own that the driver calls while a run goes on.

Invariants
----------
1. They run in the driver, one after the other: first the configured ones, then the given ones.
2. ``on_batch`` of iteration k comes before its ``on_iteration``, and both before any call for iteration k + 1.
3. A callback that raises ends the run after the iteration; `libra resume` continues it.
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
    """``on_iteration``: called when an iteration has ended."""

    def __call__(self, values: Mapping[str, Any], /) -> object:
        """``values`` are the numbers of the iteration, as `libra.driver.run_session.Session.iterations` yields them: ``iteration``,
        ``reward`` (mean), ``loss``, ``lr``, ``iteration_s`` (seconds), ``tokens_per_s``, ``failures``, ...
        The return is ignored."""


class OnBatch(Protocol):
    """``on_batch``: called when the step on a batch is done."""

    def __call__(self, batch: int, trajectories: Sequence[Trajectory], /) -> object:
        """Number of the batch, from 0, and its trajectories, graded and with their advantages; they may be changed."""


class OnEvaluation(Protocol):
    """``on_evaluation``: called after each evaluation."""

    def __call__(self, result: Mapping[str, Any], /) -> object:
        """``version`` (of the weights), ``reward`` (mean), ``num`` (questions), ``failures`` and ``left_out``, among others.
        The return is ignored."""


class Callbacks:
    """The configured and the ``given`` callbacks of a run; ConfigError if a name cannot be imported or called so."""

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
        """Whether there is a callback of a kind."""
        return bool(self._functions[kind])

    def call(self, kind: str, *given: object) -> None:
        """Call each of a kind; CallbackError if one raises."""
        for name, function in self._functions[kind]:
            try:
                returned = function(*given)
                if inspect.iscoroutine(returned):  # in a thread: a notebook's has an event loop that runs
                    with ThreadPoolExecutor(1) as thread:
                        thread.submit(asyncio.run, returned).result()
            except LibraError:
                raise
            except Exception as error:  # the boundary to a user's function
                raise CallbackError(f"{name}: the callback raised {type(error).__name__}: {error}") from error
