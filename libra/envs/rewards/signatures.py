"""Reward functions in the form of Libra, TRL or verifiers, recognised by their parameters and
called like in their library.

Three forms
-----------
libra
    ``reward(completion, ...)`` takes any of prompt, completion (text of the last turn), episode and
    columns by name, and returns one number.
trl
    ``reward(prompts, completions, completion_ids, **columns)`` of TRL's GRPOTrainer (1.16):
    arguments and result are lists with one entry per completion, where None does not apply.
    Recognised by ``completions``.
verifiers
    ``reward(prompt, completion, answer, state, info, task)`` of verifiers' rubrics takes messages
    and returns one number. Recognised by a parameter ``state``, ``info`` or ``task`` that is not a
    column and has no default, by ``completion`` annotated as messages or a list, or by the mark of
    ``@vf.reward`` (0.4.0), whose weight counts.

All may be ``async``. Ambiguous parameters are an error that names ``form``.

Unlike in TRL, a function gets one completion per call, because groups are graded as they finish;
``completion_ids`` has generated tokens alone; there is no ``trainer_state`` and no
``environments``. Unlike in verifiers, group rewards are refused, and ``state`` is a plain dict with
the keys of `_state`. In both, the text of a call stays in ``content``.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from libra.envs.asked_services import ServiceReward, ServiceUse, service_reward
from libra.envs.grader import plain_number
from libra.envs.rewards import REWARDS, NamedReward, make_reward
from libra.errors import ConfigError
from libra.types import EndReason, Episode
from libra.untrusted import repr_text, shown_line

logger = logging.getLogger(__name__)

FORMS = ("libra", "trl", "verifiers")
OWN = ("prompt", "completion", "episode")
"""Arguments of rewards in Libra's form, beside columns."""
_TRL = ("prompts", "completions", "completion_ids", "log_extra", "log_metric")
_VERIFIERS = ("prompt", "completion", "answer", "state", "info", "task")
_TELLTALE = ("state", "info", "task")

Given = Callable[..., Any] | str | Mapping[str, Any] | Sequence[Any]


@dataclass(frozen=True, slots=True)
class Term:
    """One reward function of a sum: names of its arguments, and constant arguments, such as a
    rubric's parser."""

    function: Callable[..., Any]
    form: str
    weight: float
    names: tuple[str, ...]
    objects: Mapping[str, Any]


@dataclass(frozen=True)
class RewardSum:
    """A weighted sum of reward functions. ``plain`` prompts were given as text, which functions in
    TRL's form then get."""

    terms: tuple[Term, ...]
    plain: bool

    def __call__(self, episode: Episode) -> Any:
        """The weighted sum of the functions' values; the value of a single one stays unchanged.

        ValueError if every function returned None, or one in TRL's form did not return a list of
        one.
        """
        values = [term.function(**self._arguments(term, episode)) for term in self.terms]
        if any(inspect.isawaitable(value) for value in values):
            values = asyncio.run(_all(values))
        told = [plain_number(_one(term, value)) for term, value in zip(self.terms, values, strict=True)]
        if len(told) == 1 and self.terms[0].weight == 1.0 and self.terms[0].form != "trl":
            return told[0]
        known = [term.weight * value for term, value in zip(self.terms, told, strict=True) if value is not None]
        if not known:
            raise ValueError(f"no reward: {', '.join(_name(term.function) for term in self.terms)} returned None")
        return sum(known)

    def check_truths(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """ConfigError if a named reward can read the answer of none of these rows."""
        for term in self.terms:
            if isinstance(term.function, NamedReward):
                term.function.check_truths([row.get("answer") for row in rows])

    @property
    def services(self) -> tuple[ServiceUse, ...]:
        """Services that the terms ask."""
        asked = [term.function for term in self.terms if isinstance(term.function, ServiceReward)]
        return tuple(ServiceUse(each.service, "reward", each.late) for each in asked)

    def _arguments(self, term: Term, episode: Episode) -> dict[str, Any]:
        facts = episode.prompt.facts
        if term.form == "trl":
            known = {name: [value] for name, value in facts.items()} | self._of_trl(episode)
        elif term.form == "verifiers":
            state = _state(episode)
            known = {**facts, **{name: state[name] for name in _VERIFIERS if name != "state"}, "state": state}
        else:
            known = {**facts, "prompt": episode.prompt, "completion": episode.answer, "episode": episode}
        return {name: known[name] for name in term.names} | dict(term.objects)

    def _of_trl(self, episode: Episode) -> dict[str, Any]:
        messages = [dict(message) for message in episode.prompt.messages]
        return {
            "prompts": [messages[-1]["content"] if self.plain else messages],
            "completions": [episode.answer if self.plain else completion_messages(episode)],
            "completion_ids": [[token for turn in episode.turns for token in turn.token_ids]],
            "log_extra": _log_extra,
            "log_metric": _log_metric,
        }


def read_rewards(given: Given, columns: Collection[str], *, plain: bool) -> RewardSum:
    """The rewards given by a user.

    Parameters
    ----------
    given : callable, str, mapping, rubric, or a list of them
        A function of any form; a name of `REWARDS` or "module:function"; ``{"name": ...}`` with
        options; ``{"function": f, "weight": 0.5, "form": "trl"}``; ``{"service": "judge"}`` with
        ``weight``, ``late`` and ``fast`` (`libra.envs.asked_services`); an object with ``funcs``
        and ``weights``, such as verifiers' Rubric.
    columns : collection of str
        Columns that every prompt has.

    Raises
    ------
    ConfigError
        No reward; a parameter without a value; ambiguous parameters.
    """
    if hasattr(given, "funcs") and hasattr(given, "weights"):
        return RewardSum(_of_rubric(given, columns), plain)
    several = [given] if isinstance(given, str | Mapping) or not isinstance(given, Sequence) else list(given)
    named_ones = [each for each in several if isinstance(each, str | Mapping) and not _is_function(each)]
    if len(named_ones) == len(several):
        named = make_reward(named_ones)  # checks the options of each, and refuses an empty list
        return RewardSum((_term(named, columns, form="libra", weight=1.0),), plain)
    return RewardSum(tuple(_read(each, columns) for each in several), plain)


def completion_messages(episode: Episode) -> list[dict[str, Any]]:
    """The trajectory after its prompt as chat messages: assistant turns with their calls, and
    returns of tools."""
    messages: list[dict[str, Any]] = []
    for turn in episode.turns:
        said: dict[str, Any] = {"role": "assistant", "content": turn.text}
        calls = [call for call in turn.calls if call.error is None]
        if calls:
            said["tool_calls"] = [
                {"type": "function", "function": {"name": c.name, "arguments": json.dumps(dict(c.arguments))}}
                for c in calls
            ]
        messages.append(said)
        messages += [{"role": "tool", "name": each.tool, "content": each.content} for each in turn.returns]
    return messages


def _state(episode: Episode) -> dict[str, Any]:
    facts = dict(episode.prompt.facts)
    return {
        **facts,
        "prompt": [dict(message) for message in episode.prompt.messages],
        "completion": completion_messages(episode),
        "answer": facts.get("answer", ""),
        "info": facts.get("info", {}),
        "task": facts.get("task", "default"),
        "trajectory_id": episode.trajectory_id,
        "turn": len(episode.turns),
        "num_tokens": episode.num_tokens,
        "is_completed": True,
        "is_truncated": episode.end_reason is EndReason.LENGTH,
        "stop_condition": str(episode.end_reason),
    }


def _read(given: Any, columns: Collection[str]) -> Term:
    options: dict[str, Any] = {"function": given}
    if isinstance(given, Mapping) and "service" in given:
        return _term(service_reward(given), columns, form="libra", weight=given.get("weight"))
    if isinstance(given, str | Mapping):
        if not _is_function(given):
            return _term(make_reward(given), columns, form="libra", weight=1.0)
        options = {"function": given} if isinstance(given, str) else dict(given)
    function, form, weight = options.pop("function"), options.pop("form", None), options.pop("weight", None)
    if options:
        raise ConfigError(
            f"reward: no option {next(iter(options))!r} of a function; it takes function, form and weight"
        )
    if isinstance(function, str):
        function = _imported(function)
    return _term(function, columns, form=form, weight=weight)


def _term(
    function: Any, columns: Collection[str], *, form: str | None, weight: Any, objects: Mapping[str, Any] | None = None
) -> Term:
    if inspect.isclass(function):
        raise ConfigError(
            f"reward: got the class {function.__name__}; give a function, or an instance: reward={function.__name__}()"
        )
    if not callable(function):
        raise ConfigError(
            f"reward: got {function!r}; give a function, e.g. def reward(completion, answer): ..., or a name such as 'gsm8k'"
        )
    if form is not None and form not in FORMS:
        raise ConfigError(f"reward {_name(function)}: form is {form!r}; it is one of {', '.join(FORMS)}")
    if weight is None:
        weight = getattr(function, "_vf_weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise ConfigError(f"reward {_name(function)}: weight is {weight!r}; it must be a number")
    form = form or _form(function, columns)
    names = _names(function, form, columns, set(objects or ()))
    bound = {name: value for name, value in (objects or {}).items() if name in inspect.signature(function).parameters}
    return Term(function, form, float(weight), names, bound)


def _form(function: Callable[..., Any], columns: Collection[str]) -> str:
    parameters = inspect.signature(function).parameters
    if "completions" in parameters:
        return "trl"
    telltale = [n for n in _TELLTALE if n in parameters and parameters[n].default is inspect.Parameter.empty]
    if hasattr(function, "_vf_weight") or _takes_messages(parameters) or any(n not in columns for n in telltale):
        return "verifiers"
    if telltale:
        raise ConfigError(
            f"reward {_name(function)}: {telltale[0]!r} is a column of the prompts and also an argument of verifiers' rewards, "
            "where 'completion' is a list of messages; type reward={'function': f, 'form': 'libra'} or 'verifiers'"
        )
    return "libra"


def _takes_messages(parameters: Mapping[str, inspect.Parameter]) -> bool:
    if "completion" not in parameters:
        return False
    annotation = parameters["completion"].annotation
    shown = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return "Messages" in shown or shown.lower().removeprefix("typing.").startswith("list")


def _names(function: Callable[..., Any], form: str, columns: Collection[str], bound: set[str]) -> tuple[str, ...]:
    own = {"trl": _TRL, "verifiers": _VERIFIERS}.get(form, OWN)
    known = [*own, *sorted(set(columns) - set(own))]
    names: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            names.extend(each for each in known if each not in names and each not in bound)
        elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise ConfigError(f"reward: parameter {parameter} cannot be passed by name; use plain named parameters")
        elif name in known and name not in bound:
            names.append(name)
        elif parameter.default is parameter.empty and name not in bound:
            raise ConfigError(
                f"reward: its parameter {name!r} is not one of {', '.join(own)}, and not a column of every prompt "
                f"(columns: {', '.join(sorted(columns)) or 'none'}); rename it, or add the column to the prompts"
            )
    return tuple(dict.fromkeys(names))


def _of_rubric(rubric: Any, columns: Collection[str]) -> tuple[Term, ...]:
    functions, weights = list(rubric.funcs), list(rubric.weights or [1.0] * len(rubric.funcs))
    if not functions or len(functions) != len(weights):
        raise ConfigError(
            f"reward: a rubric with {len(functions)} functions and {len(weights)} weights; give one weight each"
        )
    objects = dict(getattr(rubric, "class_objects", None) or {})
    if getattr(rubric, "parser", None) is not None:
        objects.setdefault("parser", rubric.parser)
    return tuple(
        _term(function, columns, form="verifiers", weight=weight, objects=objects)
        for function, weight in zip(functions, weights, strict=True)
    )


def _is_function(given: str | Mapping[str, Any]) -> bool:
    return ":" in given if isinstance(given, str) else "function" in given or "service" in given


def _imported(path: str) -> Any:
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the boundary to the user's module: importing it may raise anything
        raise ConfigError(
            f"reward: {path!r} cannot be imported ({type(error).__name__}: {error}); type package.module:function, or "
            f"one of {', '.join(REWARDS)}"
        ) from error


def _one(term: Term, value: Any) -> Any:
    if term.form != "trl":
        return value
    if isinstance(value, str) or not hasattr(value, "__len__") or len(value) != 1:
        raise ValueError(
            f"{_name(term.function)} was given one completion and returned {str(value)[:80]}; a function of TRL's form returns a "
            "list with one number or None for each"
        )
    return value[0]


async def _all(values: Sequence[Any]) -> list[Any]:
    async def awaited(value: Any) -> Any:
        return await value if inspect.isawaitable(value) else value

    return await asyncio.gather(*map(awaited, values))


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _log_extra(column: str, values: Sequence[Any]) -> None:
    logger.info("reward column %s: %s", shown_line(str(column)), shown_line(repr_text(list(values))))


def _log_metric(name: str, value: float) -> None:
    logger.info("reward metric %s: %s", shown_line(str(name)), shown_line(repr_text(value)))
