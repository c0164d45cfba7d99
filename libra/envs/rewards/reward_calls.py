"""Reward functions of Libra, TRL or verifiers, recognised by their parameters (docs/rewards.md).

Differences from TRL: a function gets one completion per call, because groups are graded as they
finish; ``completion_ids`` has only generated tokens; ``trainer_state`` and ``environments`` are
missing. Differences from verifiers: group rewards are refused, and ``state`` is a plain dict with
the keys in `Term.called`. In both, ``content`` keeps the text of tool calls.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
    """One reward function of a sum: argument names, and constants such as a rubric's parser."""

    function: Callable[..., Any]
    form: str
    weight: float
    names: tuple[str, ...]
    objects: Mapping[str, Any]

    def called(self, episode: Episode, plain: bool) -> Any:
        """The function's return for an episode, possibly an awaitable."""
        prompt, facts = episode.prompt, episode.prompt.facts
        messages = [dict(message) for message in prompt.messages]
        known: dict[str, Any]
        if self.form == "trl":
            known = {name: [value] for name, value in facts.items()} | {
                "prompts": [messages[-1]["content"] if plain else messages],
                "completions": [episode.answer if plain else completion_messages(episode)],
                "completion_ids": [[token for turn in episode.turns for token in turn.token_ids]],
                "log_extra": partial(_log, "column"),
                "log_metric": partial(_log, "metric"),
            }
        elif self.form == "verifiers":
            state = {
                "answer": "", "info": {}, "task": "default", **facts, "prompt": messages,
                "completion": completion_messages(episode), "trajectory_id": episode.trajectory_id,
                "turn": len(episode.turns), "num_tokens": episode.num_tokens, "is_completed": True,
                "is_truncated": episode.end_reason is EndReason.LENGTH, "stop_condition": str(episode.end_reason),
            }  # fmt: skip
            known = {**state, "state": state}
        else:
            known = {**facts, "prompt": prompt, "completion": episode.answer, "episode": episode}
        return self.function(**{name: known[name] for name in self.names}, **self.objects)

    def value(self, returned: Any) -> Any:
        """The number in a return."""
        if self.form != "trl":
            return plain_number(returned)
        if isinstance(returned, str) or not hasattr(returned, "__len__") or len(returned) != 1:
            raise ValueError(
                f"{_name(self.function)} was given one completion and returned {str(returned)[:80]}; a function of TRL's form "
                "returns a list with one number or None for each"
            )
        return plain_number(returned[0])


@dataclass(frozen=True)
class RewardSum:
    """A weighted sum of reward functions. If ``plain``, TRL's functions get prompts as text."""

    terms: tuple[Term, ...]
    plain: bool

    def __call__(self, episode: Episode) -> Any:
        """The weighted sum of the functions' values; a single function's value unchanged.

        ValueError if every function returned None, or a function of TRL's form did not return a
        list of length 1.
        """
        returned = [term.called(episode, self.plain) for term in self.terms]
        if any(inspect.isawaitable(each) for each in returned):
            returned = asyncio.run(_all(returned))
        values = [term.value(each) for term, each in zip(self.terms, returned, strict=True)]
        if len(values) == 1 and self.terms[0].weight == 1.0 and self.terms[0].form != "trl":
            return values[0]
        known = [term.weight * value for term, value in zip(self.terms, values, strict=True) if value is not None]
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
        """Services that the terms query."""
        asked = [term.function for term in self.terms if isinstance(term.function, ServiceReward)]
        return tuple(ServiceUse(each.service, "reward", each.late) for each in asked)


def read_rewards(given: Given, columns: Collection[str], *, plain: bool) -> RewardSum:
    """The rewards given by a user.

    Parameters
    ----------
    given : callable, str, mapping, rubric, or a list of them
        A function of any form; a name of `REWARDS` or "module:function"; ``{"name": ...}`` with
        options and ``weight``; ``{"function": f, "weight": 0.5, "form": "trl"}``; ``{"service":
        "judge"}`` with ``weight``, ``late`` and ``fast`` (`libra.envs.asked_services`); an object
        with ``funcs`` and ``weights``, such as verifiers' Rubric.
    columns : collection of str
        Columns that every prompt has.

    Raises
    ------
    ConfigError
        No reward; a parameter without a value; ambiguous parameters.
    """
    if hasattr(given, "funcs") and hasattr(given, "weights"):
        return RewardSum(_of_rubric(given, columns), plain)
    several = [given] if isinstance(given, str | Mapping) or not isinstance(given, Sequence) else given
    if not several:
        raise ConfigError(f"reward: got an empty list; give a function, or one of {', '.join(REWARDS)}")
    return RewardSum(tuple(_read(each, columns) for each in several), plain)


def completion_messages(episode: Episode) -> list[dict[str, Any]]:
    """The chat messages after the prompt: assistant turns with calls, and returns of tools."""
    messages: list[dict[str, Any]] = []
    for turn in episode.turns:
        message: dict[str, Any] = {"role": "assistant", "content": turn.text}
        if calls := [call for call in turn.calls if call.error is None]:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": c.name, "arguments": json.dumps(dict(c.arguments))}}
                for c in calls
            ]
        messages.append(message)
        messages += [{"role": "tool", "name": each.tool, "content": each.content} for each in turn.returns]
    return messages


def _read(given: Any, columns: Collection[str]) -> Term:
    options = dict(given) if isinstance(given, Mapping) else {"name" if isinstance(given, str) else "function": given}
    weight, form = options.pop("weight", None), None
    if isinstance(given, str) and ":" in given:
        options = {"function": given}
    if "service" in options:
        return _term(service_reward(options), columns, form="libra", weight=weight)
    if "function" not in options:
        return _term(make_reward(options), columns, form="libra", weight=weight)
    function, form = options.pop("function"), options.pop("form", None)
    for option in options:
        raise ConfigError(f"reward: no option {option!r} of a function; it takes function, form and weight")
    return _term(_imported(function) if isinstance(function, str) else function, columns, form=form, weight=weight)


def _term(
    function: Any, columns: Collection[str], *, form: str | None, weight: Any, objects: Mapping[str, Any] | None = None
) -> Term:
    if inspect.isclass(function):
        raise ConfigError(
            f"reward: got the class {function.__name__}; give a function, or reward={function.__name__}()"
        )
    if not callable(function):
        raise ConfigError(f"reward: got {function!r}; give a function such as reward(completion, answer), or a name")
    where, parameters = f"reward {_name(function)}", inspect.signature(function).parameters
    if form is not None and form not in FORMS:
        raise ConfigError(f"{where}: form is {form!r}; it is one of {', '.join(FORMS)}")
    weight = getattr(function, "_vf_weight", 1.0) if weight is None else weight
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise ConfigError(f"{where}: weight is {weight!r}; it must be a number")
    form = form or _form(where, parameters, columns, hasattr(function, "_vf_weight"))
    bound = {name: value for name, value in (objects or {}).items() if name in parameters}
    own = {"trl": _TRL, "verifiers": _VERIFIERS}.get(form, OWN)
    known = [*own, *sorted(set(columns) - set(own))]
    names: list[str] = []
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            names += [each for each in known if each not in bound]
        elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise ConfigError(f"{where}: parameter {parameter} cannot be passed by name; use plain named parameters")
        elif name in known and name not in bound:
            names.append(name)
        elif parameter.default is parameter.empty and name not in bound:
            raise ConfigError(
                f"{where}: its parameter {name!r} is not one of {', '.join(own)}, and not a column of every prompt "
                f"(columns: {', '.join(sorted(columns)) or 'none'}); rename it, or add the column to the prompts"
            )
    return Term(function, form, float(weight), tuple(dict.fromkeys(names)), bound)


def _form(where: str, parameters: Mapping[str, inspect.Parameter], columns: Collection[str], marked: bool) -> str:
    if "completions" in parameters:
        return "trl"
    telltale = [n for n in _TELLTALE if n in parameters and parameters[n].default is inspect.Parameter.empty]
    annotation = parameters["completion"].annotation if "completion" in parameters else ""
    shown = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    messages = "Messages" in shown or shown.lower().removeprefix("typing.").startswith("list")
    if marked or messages or any(name not in columns for name in telltale):
        return "verifiers"
    if telltale:
        raise ConfigError(
            f"{where}: {telltale[0]!r} is a column of the prompts and also an argument of verifiers' rewards, "
            "where 'completion' is a list of messages; type reward={'function': f, 'form': 'libra'} or 'verifiers'"
        )
    return "libra"


def _of_rubric(rubric: Any, columns: Collection[str]) -> tuple[Term, ...]:
    functions, weights = list(rubric.funcs), list(rubric.weights or [1.0] * len(rubric.funcs))
    if not functions or len(functions) != len(weights):
        raise ConfigError(f"reward: a rubric of {len(functions)} functions has {len(weights)} weights; give one each")
    objects = dict(getattr(rubric, "class_objects", None) or {})
    if getattr(rubric, "parser", None) is not None:
        objects.setdefault("parser", rubric.parser)
    return tuple(
        _term(function, columns, form="verifiers", weight=weight, objects=objects)
        for function, weight in zip(functions, weights, strict=True)
    )


def _imported(path: str) -> Any:
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the boundary to the user's module: importing it may raise anything
        raise ConfigError(
            f"reward: {path!r} cannot be imported ({type(error).__name__}: {error}); type package.module:function, or "
            f"one of {', '.join(REWARDS)}"
        ) from error


async def _all(values: Sequence[Any]) -> list[Any]:
    async def awaited(value: Any) -> Any:
        return await value if inspect.isawaitable(value) else value

    return await asyncio.gather(*map(awaited, values))


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", getattr(function, "name", type(function).__name__)))


def _log(kind: str, name: str, value: Any) -> None:
    logger.info("reward %s %s: %s", kind, shown_line(str(name)), shown_line(repr_text(value)))
