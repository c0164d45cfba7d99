"""Questions as planner and policy see them: how long they are and which come again, known before anything is generated."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from libra.envs import Environment
from libra.graph.batch_lengths import lengths_of
from libra.types import Prompt, Trajectory
from libra.worker.reports import TOPIC

if TYPE_CHECKING:
    from distributed import Client

    from libra.worker.run_spec import RunSpec

logger = logging.getLogger(__name__)


def question_chars(prompt: Prompt) -> int:
    """Characters of all messages before the first generation."""
    return sum(len(message["content"]) for message in prompt.messages)


def generated_for(groups: list[list[Trajectory]], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Tokens that a batch's trajectories were given by each worker, and of each group its question's length and its tokens: those
    generated, and those of trajectories with a gradient by ``rows``, the batch's facts; and the lengths of its trajectories."""
    by_worker: dict[str, int] = {}
    for trajectory in (member for group in groups for member in group):
        for taken in trajectory.turns:
            by_worker[taken["worker"]] = by_worker.get(taken["worker"], 0) + int(taken["generated_tokens"])
    asked = [
        (question_chars(group[0].prompt), sum(member.num_action_tokens for member in group))
        for group in groups
        if group
    ]
    trained = [
        (
            question_chars(group[0].prompt),
            sum(
                len(member.token_ids)
                for member, advantage, trains in zip(group, row["advantages"], row["trains"], strict=True)
                if trains and advantage
            ),
        )
        for group, row in zip(groups, rows, strict=True)
        if group
    ]
    lengths = lengths_of(member for group in groups for member in group)
    return {
        "worker_tokens": by_worker,
        "question_tokens": asked,
        "trained_tokens": trained,
        "trajectory_lengths": lengths,
    }


def tell_names(client: Client, spec: RunSpec, questions: Questions, iteration: int) -> None:
    """Tell the scheduler which questions of an iteration come again in later ones; call it before the iteration is submitted."""
    names = questions.names(iteration)
    if names is not None:
        told = {"kind": "prompts", "run": spec.run, "epoch": spec.epoch, "iteration": iteration, "prompts": names}
        scheduler: Any = client.scheduler
        client.sync(scheduler.log_event, topic=TOPIC, msg=told)


class Questions:
    """Lengths of the questions that are still to be asked; None from the first one on that the environment does not give here.

    An environment may want what only its workers have (files, a service): then the planner does without.
    """

    def __init__(self, environment: Environment, per_batch: int) -> None:
        self._environment: Environment | None = environment
        self._per_batch = per_batch

    def names(self, iteration: int) -> list[str] | None:
        """``prompt_id`` of each question of an iteration, empty for one that never comes again; None where none does."""
        if self._environment is None:
            return None
        first = iteration * self._per_batch
        try:
            names = [self._environment.prompt_id("train", index) for index in range(first, first + self._per_batch)]
        except Exception as error:  # noqa: BLE001 - the boundary to the user's environment, whose faults are data
            logger.info("nothing is remembered of questions that come again: %s: %s", type(error).__name__, error)
            self._environment = None
            return None
        return names if any(names) else None

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
