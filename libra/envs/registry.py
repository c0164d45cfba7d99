"""Environments by name: those that ship, or any ``package.module:attribute``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from libra.envs.choices import nearest
from libra.envs.environment import Environment
from libra.errors import ConfigError
from libra.named_parts import is_named, named_part

ENVIRONMENTS: dict[str, str] = {
    "tool_arithmetic": "libra.envs.tool_arithmetic:ToolArithmetic",
    "python_tests": "libra.envs.python_tests:PythonTests",
    "jsonl": "libra.envs.jsonl_questions:JsonLines",
    "reasoning_gym": "libra.envs.reasoning_gym:ReasoningGym",
}


def make_environment(name: str, args: Mapping[str, Any], seed: int) -> Environment:
    """The environment ``name``, constructed with ``args``, and with ``seed`` where its constructor takes one.

    Raises
    ------
    ConfigError
        For a name that is neither registered nor importable, an unknown or missing argument, and a factory that does
        not return an `Environment`.
    """
    factory = _find(name)
    parameters = inspect.signature(factory).parameters
    arguments = dict(args)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if "seed" not in arguments and ("seed" in parameters or takes_any):
        arguments["seed"] = seed
    for given in arguments:
        if given not in parameters and not takes_any:
            allowed = [each for each in parameters if each != "seed"]
            raise ConfigError(
                f"environment.args.{given}: {name!r} takes no such argument{nearest(given, allowed)}; "
                f"it takes {', '.join(allowed) or 'none'}"
            )
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"environment.args: {name!r} cannot be made with {sorted(args)}: {error}") from error
    environment = factory(**arguments)
    if not isinstance(environment, Environment):
        raise ConfigError(
            f"environment.name: {name!r} made a {type(environment).__name__}, not a libra.envs.Environment"
        )
    return environment


def _find(name: str) -> Callable[..., Any]:
    path = ENVIRONMENTS.get(name, name)
    if not is_named(path):
        raise ConfigError(
            f"environment.name: no environment {name!r}{nearest(name, ENVIRONMENTS)}; "
            f"registered: {', '.join(sorted(ENVIRONMENTS))}; or type package.module:attribute"
        )
    found = named_part("environment.name", path)
    if not callable(found):
        raise ConfigError(
            f"environment.name: {name!r} is a {type(found).__name__}; give a class or a function that makes one"
        )
    return found  # type: ignore[no-any-return]
