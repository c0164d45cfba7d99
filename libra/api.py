"""``libra.train``: a run from plain Python objects."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from libra.config import RunConfig, config_from_dict, load_config
from libra.config.effect_conditions import Situation
from libra.config.effects import ignored_settings, warning_lines
from libra.driver.session import RunSummary, run
from libra.envs import Environment, FunctionEnvironment
from libra.errors import ConfigError

if TYPE_CHECKING:
    from distributed import Client

    from libra.graph.iteration import Score

logger = logging.getLogger(__name__)


def train(
    model: str = "libra/tiny-arithmetic",
    prompts: Sequence[Any] | None = None,
    reward: Callable[..., Any] | str | Mapping[str, Any] | Sequence[Any] | None = None,
    tools: Sequence[Callable[..., Any]] = (),
    *,
    environment: Environment | None = None,
    config: str | Path | None = None,
    score: Score | None = None,
    client: Client | None = None,
    resume: bool = False,
    **settings: Any,
) -> RunSummary:
    """Train a model on prompts of yours, graded by a function of yours, with Python functions as its tools.

    Parameters
    ----------
    model : str
        A Hugging Face id, a directory, or a model that ships ("libra/tiny-arithmetic").
    prompts : sequence of str, list of messages, or dict with "prompt" and further columns
        Required unless ``environment`` is given.
    reward : callable, the name of one, or a list of those
        ``reward(completion, ...)``: takes by name any of prompt, completion, episode and the columns of a row; returns
        one finite number. Or one written for TRL (``reward(prompts, completions, **columns) -> list``) or for a rubric of verifiers
        (``reward(prompt, completion, answer, state, info)``), with a weight as ``{"function": f, "weight": 0.5}``
        (`libra.envs.rewards.signatures`). Or a name such as "gsm8k", a mapping with "name" and options, or a list of those
        (`libra.envs.rewards`). Required unless ``environment`` is given.
    tools : sequence of callables
        Python functions with type hints and a docstring; the model sees their names, schemas and docstrings.
    environment : Environment, optional
        Instead of prompts, reward and tools.
    config : path, optional
        A YAML file to start from.
    score : callable, optional
        Adds a node of your own to the graph; see ``workflows/custom_reward.py``.
    client : distributed.Client, optional
        A cluster to use; None: one of local processes is made.
    resume : bool
        Go on with the run of this ``run__name`` and ``run__dir`` from what it committed; everything else as it was.
    **settings
        Any setting with its dot written as two underscores: ``run__iterations=20, trainer__lr=1e-3``.

    Returns
    -------
    RunSummary
        Rewards, run directory and checkpoint.

    Raises
    ------
    ConfigError
        A setting or an argument is wrong; the message says which and what to type.

    Notes
    -----
    Local workers are processes: a script that calls this needs ``if __name__ == "__main__":`` around the call.
    """
    values: dict[str, dict[str, Any]] = {"model": {"path": model}}
    for name, value in settings.items():
        section, separator, key = name.partition("__")
        if not separator:
            raise ConfigError(
                f"libra.train: got the setting {name!r}; a setting is section__name, e.g. run__iterations=20"
            )
        if section not in RunConfig.model_fields:
            raise ConfigError(
                f"libra.train: {name}: there is no section {section!r}; sections are {', '.join(RunConfig.model_fields)}"
            )
        values.setdefault(section, {})[key] = value
    own = environment is not None or prompts is not None or reward is not None or bool(tools)
    if own and "environment" in values:
        raise ConfigError(
            f"libra.train: environment__{next(iter(values['environment']))} names an environment, and one was given as Python "
            "objects; leave either out"
        )
    checked = config_from_dict(values) if config is None else load_config(config, values=values)
    typed = frozenset(f"{section}.{key}" for section, keys in values.items() for key in keys)
    for line in warning_lines(ignored_settings(checked, Situation("run", typed, client=client is not None))):
        logger.warning("%s", line)
    if environment is None and (prompts is not None or reward is not None or tools):
        if prompts is None or reward is None:
            missing = "prompts" if prompts is None else "reward"
            raise ConfigError(f"libra.train: {missing} is missing; give prompts and reward, or an environment")
        environment = FunctionEnvironment(prompts=prompts, reward=reward, tools=list(tools), seed=checked.run.seed)
    return run(checked, environment=environment, score=score, client=client, resume=resume)
