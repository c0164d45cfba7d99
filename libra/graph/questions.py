"""Questions as the planner sees them: how long they are, known before anything is generated."""

from __future__ import annotations

import logging

from libra.envs import Environment
from libra.types import Prompt

logger = logging.getLogger(__name__)


def question_chars(prompt: Prompt) -> int:
    """Characters of all messages before the first generation."""
    return sum(len(message["content"]) for message in prompt.messages)


class Questions:
    """Lengths of the questions that are still to be asked; None from the first one on that the environment does not give here.

    An environment may want what only its workers have (files, a service): then the planner does without.
    """

    def __init__(self, environment: Environment, per_batch: int) -> None:
        self._environment: Environment | None = environment
        self._per_batch = per_batch

    def lengths(self, iteration: int) -> list[float] | None:
        """Characters of each question of an iteration."""
        if self._environment is None:
            return None
        first = iteration * self._per_batch
        try:
            asked = [self._environment.prompt("train", index) for index in range(first, first + self._per_batch)]
            return [float(question_chars(prompt)) for prompt in asked]
        except Exception as error:  # noqa: BLE001 - the boundary to the user's environment, whose faults are data
            logger.info("lengths are expected without the questions: %s: %s", type(error).__name__, error)
            self._environment = None
            return None
