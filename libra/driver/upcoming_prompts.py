"""Lengths and ids of the prompts of upcoming iterations, for planner and policy, before anything is generated."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from libra.envs import Environment
from libra.graph.batch_nodes import question_chars

logger = logging.getLogger(__name__)

T = TypeVar("T")


class UpcomingPrompts:
    """The prompts of upcoming iterations; None from the first one that the environment fails to give.

    An environment may need resources that only its workers have (files, a service): planner and policy then work without
    prompts.
    """

    def __init__(self, environment: Environment, per_batch: int) -> None:
        self._environment: Environment | None = environment
        self._per_batch = per_batch

    def names(self, iteration: int) -> list[str] | None:
        """``prompt_id`` of each prompt of an iteration, "" for one that no later iteration has; None if all are ""."""
        names = self._each(iteration, lambda environment, index: environment.prompt_id("train", index))
        return names if names is not None and any(names) else None

    def lengths(self, iteration: int) -> list[float] | None:
        """Characters of each prompt of an iteration."""
        return self._each(
            iteration, lambda environment, index: float(question_chars(environment.prompt("train", index)))
        )

    def _each(self, iteration: int, read: Callable[[Environment, int], T]) -> list[T] | None:
        if self._environment is None:
            return None
        first = iteration * self._per_batch
        try:
            return [read(self._environment, index) for index in range(first, first + self._per_batch)]
        except Exception as error:  # noqa: BLE001 - the boundary to the user's environment, whose faults are data
            logger.info("no forecast by prompts, the driver cannot read them: %s: %s", type(error).__name__, error)
            self._environment = None
            return None
