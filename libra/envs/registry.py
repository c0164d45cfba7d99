"""Environments by name: those that ship, or any ``package.module:attribute``."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from libra.config.yaml_text import one_line_yaml
from libra.envs.environment import Environment
from libra.envs.tool import Tool
from libra.errors import ConfigError, LibraError, nearest
from libra.named_parts import is_named, named_part, raised_at
from libra.untrusted import error_text, repr_text

ENVIRONMENTS: dict[str, str] = {
    "tool_arithmetic": "libra.envs.tool_arithmetic:ToolArithmetic",
    "python_tests": "libra.envs.python_tests:PythonTests",
    "jsonl": "libra.envs.function_environment:JsonLines",
    "reasoning_gym": "libra.envs.reasoning_gym:ReasoningGym",
    "openenv": "libra.envs.replayed_games:OpenEnvClient",
}


_METHODS = {"prompt": "def prompt(self, split, index)", "grade": "def grade(self, episode)"}
"""What an environment must define."""


def make_environment(name: str, args: Mapping[str, Any], seed: int) -> Environment:
    """The environment ``name``, constructed with ``args``, and with ``seed`` where its constructor takes one.

    Raises
    ------
    ConfigError
        For a name that is neither registered nor importable, an unknown or missing argument, and a factory that does
        not return an `Environment`.
    """
    factory, arguments = _with_arguments(name, args, seed)
    try:
        environment = factory(**arguments)
    except LibraError:
        raise
    except (Exception, SystemExit) as error:  # the boundary to the user's constructor
        typed = "".join(f" environment.args.{key}={one_line_yaml(value)}" for key, value in args.items())
        raise ConfigError(
            f"environment.name: {name!r} could not be made{' with' if typed else ''}{typed} ({error_text(error)}{raised_at(error)}"
            "); correct it, or type other environment.args"
        ) from error
    if not isinstance(environment, Environment):
        raise ConfigError(
            f"environment.name: {name!r} made a {type(environment).__name__}, not a libra.envs.Environment; write class "
            f"{type(environment).__name__}(libra.envs.Environment)"
        )
    check_tool_types(environment)
    return environment


def check_named(name: str, args: Mapping[str, Any]) -> None:
    """ConfigError where `make_environment` would refuse a name, an argument or a file that a look finds; nothing is made.

    A module of the user's own is imported only where it is not found, for the message.
    """
    top = name.partition(":")[0].partition(".")[0]
    if is_named(name) and (top in sys.modules or importlib.util.find_spec(top) is not None):
        return
    factory, arguments = _with_arguments(name, args, 0)
    getattr(factory, "check_files", lambda **_: None)(**arguments)


def _with_arguments(name: str, args: Mapping[str, Any], seed: int) -> tuple[Callable[..., Any], dict[str, Any]]:
    """What makes an environment, and its arguments; ConfigError if it does not take them."""
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
    _check_arguments(name, parameters, arguments)
    abstract = sorted(getattr(factory, "__abstractmethods__", ()))
    if abstract:
        lines = " and ".join(_METHODS.get(each, f"def {each}(self, ...)") for each in abstract)
        raise ConfigError(f"environment.name: {name!r} does not define {' and '.join(abstract)}; write {lines}")
    return factory, arguments


def check_tool_types(environment: Environment) -> None:
    """ConfigError where something among the tools of an environment is none."""
    for each in environment.tools:
        if not isinstance(each, Tool):
            called = getattr(each, "__name__", "f")
            raise ConfigError(
                f"environment: {environment.name} has {repr_text(each)} among its tools; type libra.tool({called}) in its place"
            )


def _check_arguments(name: str, parameters: Mapping[str, inspect.Parameter], arguments: Mapping[str, Any]) -> None:
    """ConfigError with the first argument that is missing."""
    for key, parameter in parameters.items():
        if (
            parameter.default is parameter.empty
            and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            and key not in arguments
        ):
            raise ConfigError(
                f"environment.args: {name!r} cannot be made with {sorted(arguments)}: missing a required argument: {key!r}; type "
                f"environment.args.{key}=VALUE"
            )


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
