"""Checks of the Python objects that a run is given beside its configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from dask import delayed
from dask.delayed import Delayed

from libra.envs import Environment
from libra.errors import ConfigError
from libra.untrusted import error_text


def check_environment(environment: object) -> None:
    """ConfigError unless it is None or an instance of `Environment`."""
    if environment is None or isinstance(environment, Environment):
        return
    if inspect.isclass(environment):
        raise ConfigError(
            f"environment: got the class {environment.__name__}; give an instance: environment={environment.__name__}(...)"
        )
    if isinstance(environment, str):
        raise ConfigError(
            f"environment: got the text {environment!r}; give an object, or type environment__name={environment!r}"
        )
    raise ConfigError(
        f"environment: got {type(environment).__name__}; give an instance of libra.envs.Environment, or prompts and reward"
    )


def check_score(score: Callable[..., Any] | None) -> None:
    """ConfigError unless it is None or builds a Dask node. The node runs on finished groups only: there it is checked."""
    if score is None:
        return
    example = "score=lambda episodes: dask.delayed(judge)(episodes), where judge returns one number for each episode"
    if inspect.isclass(score) or not callable(score):
        name = score.__name__ if inspect.isclass(score) else type(score).__name__
        raise ConfigError(
            f"score: got {'the class ' if inspect.isclass(score) else ''}{name}; give a function: {example}"
        )
    try:
        node = score(delayed(list)())
    except Exception as error:  # the boundary to the user's function
        raise ConfigError(f"score: it could not build its node ({error_text(error)}); type {example}") from error
    if not isinstance(node, Delayed):
        raise ConfigError(f"score: it returned {type(node).__name__}, not a Dask node; type {example}")
