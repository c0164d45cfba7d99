"""Checks that concern more than one field of a configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from libra.config.models import RunConfig


@dataclass(frozen=True, slots=True)
class CrossFieldProblem:
    """Fields that contradict each other.

    Attributes
    ----------
    fields : tuple of str
        Dotted names of all fields involved; the first is the one to look at.
    message : str
        What is wrong and what to type, beginning with a field's name.
    """

    fields: tuple[str, ...]
    message: str


def cross_field_problems(config: RunConfig) -> tuple[CrossFieldProblem, ...]:
    """Every contradiction between fields, in the order of the sections; empty where there is none."""
    return (*_rollout(config), *_trainer(config), *_evaluation(config), *_watchdog(config))


def _rollout(config: RunConfig) -> Iterator[CrossFieldProblem]:
    rollout, trainer = config.rollout, config.trainer
    if rollout.max_new_tokens > rollout.max_context_tokens:
        yield CrossFieldProblem(
            ("rollout.max_new_tokens", "rollout.max_context_tokens"),
            f"rollout.max_new_tokens: {rollout.max_new_tokens} tokens of one turn do not fit into a context of "
            f"rollout.max_context_tokens={rollout.max_context_tokens}; type "
            f"rollout.max_new_tokens={rollout.max_context_tokens} or less, or raise rollout.max_context_tokens",
        )
    if rollout.max_context_tokens > trainer.micro_batch_tokens:
        yield CrossFieldProblem(
            ("trainer.micro_batch_tokens", "rollout.max_context_tokens"),
            f"trainer.micro_batch_tokens: a trajectory of rollout.max_context_tokens={rollout.max_context_tokens} does not "
            f"fit into a micro-batch of {trainer.micro_batch_tokens}; type "
            f"trainer.micro_batch_tokens={rollout.max_context_tokens}",
        )


def _trainer(config: RunConfig) -> Iterator[CrossFieldProblem]:
    trainer = config.trainer
    if config.rollout.temperature == 0:
        yield CrossFieldProblem(
            ("rollout.temperature",),
            "rollout.temperature: at 0 all samples of a group are the same, and nothing can be learnt; type "
            "rollout.temperature=1.0 (evaluation.temperature=0 asks the held-out questions greedily)",
        )
    if trainer.group_size == 1 and trainer.normalize_std:
        yield CrossFieldProblem(
            ("trainer.group_size", "trainer.normalize_std"),
            "trainer.group_size: group size 1 has no standard deviation; type trainer.group_size=8 or "
            "trainer.normalize_std=false",
        )
    batch = trainer.prompts * trainer.group_size
    if trainer.minibatches > batch:
        yield CrossFieldProblem(
            ("trainer.minibatches", "trainer.prompts", "trainer.group_size"),
            f"trainer.minibatches: {trainer.minibatches} minibatches cannot be cut from a batch of {batch} trajectories "
            f"(trainer.prompts={trainer.prompts} x trainer.group_size={trainer.group_size}); type "
            f"trainer.minibatches={batch} or less",
        )
    if trainer.micro_batch_tokens < trainer.max_row_tokens:
        yield CrossFieldProblem(
            ("trainer.micro_batch_tokens", "trainer.max_row_tokens"),
            f"trainer.micro_batch_tokens: a micro-batch of {trainer.micro_batch_tokens} tokens does not hold one row of "
            f"trainer.max_row_tokens={trainer.max_row_tokens}; type trainer.micro_batch_tokens={trainer.max_row_tokens}",
        )


def _evaluation(config: RunConfig) -> Iterator[CrossFieldProblem]:
    evaluation = config.evaluation
    if evaluation.every > 0 and evaluation.prompts == 0:
        yield CrossFieldProblem(
            ("evaluation.every", "evaluation.prompts"),
            f"evaluation.every: an evaluation every {evaluation.every} iterations asks no question while "
            "evaluation.prompts=0; type evaluation.prompts=256, or evaluation.every=0",
        )


def _watchdog(config: RunConfig) -> Iterator[CrossFieldProblem]:
    if config.watchdog.restart and config.watchdog.timeout_s is None:
        yield CrossFieldProblem(
            ("watchdog.restart", "watchdog.timeout_s"),
            "watchdog.restart: nothing is restarted while watchdog.timeout_s=null says that nobody looks; type "
            "watchdog.timeout_s=600, or watchdog.restart=false",
        )
