"""Checks of a run's prompts in the driver: their form, their length with the chat template, and how many there are.

An environment may need what only its workers have. So what it cannot give here is refused only where the workers are started
on this machine, and never for an environment that has a ``setup`` of its own, which has not run yet.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterator, Mapping

from libra.config import RunConfig
from libra.driver.chat_template import ChatTemplate, LoadedTemplate
from libra.envs import Environment
from libra.errors import ConfigError, LibraError
from libra.graph.batch_nodes import question_chars
from libra.types import Prompt
from libra.untrusted import error_text

logger = logging.getLogger(__name__)

MAX_READ = 20_000
"""Prompts of an environment with a known number of them that are read here."""
LONGEST = 8
"""Prompts whose tokens are counted: those with the most characters."""


def check_evaluation(config: RunConfig, environment: Environment) -> None:
    """ConfigError if more held-out questions are wanted than there are."""
    wanted, there = config.evaluation.prompts, environment.num_prompts("eval")
    if there is not None and wanted > there:
        more = f"or give it more than {there} held-out questions" if there else "or give it held-out questions"
        raise ConfigError(
            f"evaluation.prompts: {wanted}, and environment {environment.name} has {there} to evaluate on; type "
            f"evaluation.prompts={there}, {more}"
        )


def check_prompts(
    config: RunConfig, environment: Environment, template: ChatTemplate | LoadedTemplate | None, *, started_here: bool
) -> None:
    """ConfigError if no prompt of the first batch can be made, if one has a wrong form, or if the longest fill the context."""
    if type(environment).setup is not Environment.setup:
        return
    first_error, found = "", list[Prompt]()
    number = environment.num_prompts("train")
    for index in range(min(number or config.trainer.prompts, MAX_READ)):
        try:
            prompt = environment.prompt("train", index)
        except LibraError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the boundary to the user's environment
            first_error = first_error or f"prompt('train', {index}) raised {error_text(error)}"
            continue
        check_form(environment, prompt, index)
        found.append(prompt)
    if not found:
        if started_here:
            raise ConfigError(
                f"environment.name: {config.environment.name}: {first_error}; correct {environment.name}.prompt, or load what it "
                "needs in its setup()"
            )
        logger.info("prompts are not checked here: %s", first_error)
        return
    if template is None:
        return
    limit, schemas = config.rollout.max_context_tokens, environment.tool_schemas
    for prompt in _longest(found):
        num = template.tokens_beyond(prompt.messages, schemas, limit)
        if num is not None:
            raise ConfigError(
                f"rollout.max_context_tokens: {limit}, and the prompt {prompt.prompt_id!r} of {environment.name} has {num} tokens "
                f"with the chat template; type rollout.max_context_tokens={num + config.rollout.max_new_tokens} or more, "
                "or leave that prompt out"
            )


def check_form(environment: Environment, prompt: object, index: int) -> None:
    """ConfigError if a prompt is not a `Prompt` with at least one message of role and content."""
    where = f"environment: {environment.name}.prompt('train', {index})"
    example = "a libra.types.Prompt(id, ({'role': 'user', 'content': TEXT},))"
    if not isinstance(prompt, Prompt):
        raise ConfigError(f"{where} gave {type(prompt).__name__}; return {example}")
    if not prompt.messages:
        raise ConfigError(f"{where} gave a prompt with no messages; return {example}, each with role and content")
    for message in prompt.messages:
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise ConfigError(
                f"{where} gave the message {str(message)[:80]}, without role and content; return {example}"
            )


def _longest(prompts: list[Prompt]) -> Iterator[Prompt]:
    yield from heapq.nlargest(LONGEST, prompts, key=question_chars)
