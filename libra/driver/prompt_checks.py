"""Checks of a run's prompts in the driver: chat template, form and length.

An environment may need resources that only its workers have. Failing prompts are refused only if
workers start on this machine, and never for an environment with its own ``setup``, which has not
run yet. The template is rendered with jinja2 as in transformers, without importing transformers or
torch.
"""

from __future__ import annotations

import heapq
import json
import logging
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from libra.config import RunConfig
from libra.driver.model_checks import ModelFiles
from libra.envs import Environment
from libra.errors import ConfigError, LibraError, ModelError
from libra.types import Prompt
from libra.untrusted import error_text, valid_unicode
from libra.worker.training.batch_numbers import question_chars

logger = logging.getLogger(__name__)


_GENERATION_TAG = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""Marks of what the assistant wrote, an extension of transformers; they leave no text."""
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_STAND_IN = "LIBRA-STANDS-IN"
_NONE = (
    "its tokenizer has no chat template; take a chat model (-Instruct), or write its template to {}/chat_template.jinja"
)


class _Refused(Exception):
    """The template called raise_exception."""


class ChatTemplate:
    """The compiled chat template of a model directory. Raises ModelError if missing or invalid."""

    def __init__(self, model: ModelFiles) -> None:
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        text, self.source = _text(model)
        self._model = model
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(_GENERATION_TAG.sub("", text))
        except TemplateError as error:
            line = getattr(error, "lineno", None)
            raise ModelError(
                f"model.path: {self.source}{f', line {line}' if line else ''}: its chat template cannot be read ({error}); "
                "correct it"
            ) from error
        self._special = _special_tokens(model)
        self._tokenizer: Any = None

    def text(self, messages: Sequence[Mapping[str, Any]], schemas: Sequence[Mapping[str, Any]]) -> str | None:
        """The prompt as text, None if only transformers can render it. Raises ModelError."""
        try:
            return self._template.render(
                **self._special,
                messages=[dict(message) for message in messages],
                tools=[dict(schema) for schema in schemas] or None,
                documents=None,
                add_generation_prompt=True,
            )
        except _Refused as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ModelError(
                f"model.path: {self.source}: its chat template refuses the messages {roles} ({error}); correct the "
                "template, or take another model"
            ) from error
        except Exception as error:  # noqa: BLE001 - the template is the model's own program, which may raise anything
            logger.info("%s: not rendered in the driver: %s", self.source, error)
            return None

    def check_tools(self, schemas: Sequence[Mapping[str, Any]]) -> None:
        """Raise ModelError if the template refuses or drops messages that tools need."""
        question = {"role": "user", "content": "?"}
        explained = self.text([question], schemas) == self.text([question], ())
        returned = [{"role": "assistant", "content": "!"}, {"role": "tool", "name": "tool", "content": _STAND_IN}]
        shown = self.text([{"role": "system", "content": "?"}] * explained + [question, *returned], schemas)
        if shown is not None and _STAND_IN not in shown:
            raise ModelError(
                f"model.path: {self.source}: its chat template leaves out messages of tools; correct it, or take another model"
            )

    def tokens_beyond(
        self, messages: Sequence[Mapping[str, Any]], schemas: Sequence[Mapping[str, Any]], limit: int
    ) -> int | None:
        """Tokens before the first generation if at least ``limit``; None if fewer or unknown."""
        shown = self.text(messages, schemas)
        if shown is None or not self._model.tokenizer:
            return None
        shown = valid_unicode(shown)  # as workers tokenise it
        extra = json.dumps(list(schemas)) if schemas and shown == valid_unicode(self.text(messages, ()) or "") else ""
        if len((shown + extra).encode()) < limit:  # a token has at least one byte
            return None
        num = self._num(shown + extra)
        if num >= limit and extra:
            from libra.rollout.chat_format import explanation  # here: it imports torch

            num = self._num(shown + explanation(schemas))
        return num if num >= limit else None

    def _num(self, text: str) -> int:
        if self._tokenizer is None:
            from tokenizers import Tokenizer

            path = self._model.directory / "tokenizer.json"
            try:
                self._tokenizer = Tokenizer.from_file(str(path))
            except Exception as error:  # tokenizers raises plain Exception
                raise ModelError(
                    f"model.path: {path}: it cannot be loaded ({' '.join(str(error).split())[:200]}); save it again with "
                    "tokenizer.save_pretrained(...), or fetch it again"
                ) from error
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)


class LoadedTemplate:
    """The chat template of a tokenizer from ``model.loader``. Raises ModelError if unusable."""

    def __init__(self, tokenizer: Any) -> None:
        from libra.rollout.chat_format import ChatFormat  # here: it imports torch

        self._formatted = partial(ChatFormat, tokenizer)
        self._formatted()

    def check_tools(self, schemas: Sequence[Mapping[str, Any]]) -> None:
        self._formatted(schemas)

    def tokens_beyond(
        self, messages: Sequence[Mapping[str, Any]], schemas: Sequence[Mapping[str, Any]], limit: int
    ) -> int | None:
        num = len(self._formatted(schemas).prompt_ids(messages))
        return num if num >= limit else None


def _text(model: ModelFiles) -> tuple[str, Path]:
    file, settings = model.directory / "chat_template.jinja", model.directory / "tokenizer_config.json"
    if file.is_file():
        return file.read_text(encoding="utf-8", errors="replace"), file
    template = model.tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default")
    if not isinstance(template, str):
        raise ModelError(f"model.path: {str(model.directory)!r}: {_NONE.format(model.directory)}")
    return template, settings


def _special_tokens(model: ModelFiles) -> dict[str, str]:
    found = {name: model.tokenizer_config.get(name) for name in _SPECIAL}
    texts = {name: value.get("content", "") if isinstance(value, dict) else value for name, value in found.items()}
    return {name: str(text) for name, text in texts.items() if text is not None}


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    kept = {name: options[name] for name in ("indent", "separators", "sort_keys") if name in options}
    return json.dumps(value, ensure_ascii=ensure_ascii, **kept)


def _raise(message: str) -> NoReturn:
    raise _Refused(message)


MAX_READ = 20_000
"""Prompts of an environment with a known number of them that are read here."""
LONGEST = 8
"""Prompts whose tokens are counted: those with the most characters."""


def check_evaluation(config: RunConfig, environment: Environment) -> None:
    """Raise ConfigError if the environment has fewer held-out questions than configured."""
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
    """Raise ConfigError if no first prompt can be made, or one is malformed or too long."""
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
    for prompt in heapq.nlargest(LONGEST, found, key=question_chars):
        num = template.tokens_beyond(prompt.messages, schemas, limit)
        if num is not None:
            raise ConfigError(
                f"rollout.max_context_tokens: {limit}, and the prompt {prompt.prompt_id!r} of {environment.name} has {num} tokens "
                f"with the chat template; type rollout.max_context_tokens={num + config.rollout.max_new_tokens} or more, "
                "or leave that prompt out"
            )


def check_form(environment: Environment, prompt: object, index: int) -> None:
    """Raise ConfigError unless ``prompt`` is a `Prompt` whose messages have role and content."""
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
