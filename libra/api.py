"""``libra.train``: a run from plain Python objects."""

from __future__ import annotations

import functools
import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from libra.config import RunConfig, config_from_dict, load_config
from libra.config.effects import Situation, ignored_settings, warning_lines
from libra.config.load import check_unchanged
from libra.driver.damage import refuse_damaged
from libra.driver.early_checks import check_early, check_main, first_line
from libra.driver.run_console import Interruption, RunSummary, resume_words
from libra.driver.rundir import is_finished, named, run_directory
from libra.envs.grader import plain_number
from libra.errors import CallbackError, ConfigError, LibraError
from libra.named_parts import name_of
from libra.observe.progress import StartStages

if TYPE_CHECKING:
    from distributed import Client

    from libra.driver.callbacks import OnBatch, OnEvaluation, OnIteration
    from libra.envs import Environment, FunctionEnvironment
    from libra.envs.tool import SessionKind
    from libra.graph.iteration import Score

logger = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")

# In a notebook without ipywidgets tqdm, which transformers imports, would warn of bars that nothing draws.
warnings.filterwarnings("ignore", message="IProgress not found")


def _own_frames_hidden(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, whose `LibraError` shows only the caller's frames and one more.
    LIBRA_TRACEBACK=1 keeps all frames."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except LibraError as error:
            if os.environ.get("LIBRA_TRACEBACK") == "1" or isinstance(
                error, CallbackError
            ):  # its cause is the user's code
                raise
            raise error.with_traceback(None) from None

    return called


@_own_frames_hidden
def train(
    model: str | Path = "libra/tiny-arithmetic",
    prompts: Sequence[Any] | None = None,
    reward: Callable[..., Any] | str | Mapping[str, Any] | Sequence[Any] | None = None,
    tools: Sequence[Callable[..., Any]] = (),
    *,
    session: SessionKind | None = None,
    agent: str | Callable[..., Any] | None = None,
    services: Mapping[str, Mapping[str, Any]] | None = None,
    environment: Environment | None = None,
    config: str | Path | None = None,
    score: Score | None = None,
    client: Client | None = None,
    resume: bool = False,
    on_iteration: OnIteration | None = None,
    on_batch: OnBatch | None = None,
    on_evaluation: OnEvaluation | None = None,
    **settings: Any,
) -> RunSummary:
    """Train a model on your prompts, graded by your function, with Python functions as its tools.

    Parameters
    ----------
    model : str or Path
        A Hugging Face id, a directory, or a model that ships ("libra/tiny-arithmetic").
    prompts : sequence of str, list of messages, or dict with "prompt" and further columns
        Or a table with such columns, of pandas, polars, pyarrow, datasets or Dask.
    reward : callable, name of a reward, or a list of them
        ``reward(completion, ...)`` takes by name any of prompt, completion, episode and the columns
        of a row, and returns one finite number. Also a function for TRL or verifiers, with a weight
        as ``{"function": f, "weight": 0.5}`` (`libra.envs.rewards.reward_calls`); a name such as
        "gsm8k", or a mapping with "name" and options (`libra.envs.rewards`); ``{"service":
        "judge"}``, the number that a service answers.
    tools : sequence of callables
        Python functions with type hints and a docstring; the model sees names, schemas and
        docstrings.
    session : SessionKind, optional
        A return of `libra.session`: a browser or shell that a trajectory has from its first action
        to its end. A tool with a keyword ``session`` gets it.
    agent : str or callable, optional
        Your own agent, started for each prompt, which queries the model over OpenAI's or
        Anthropic's API (docs/agents.md): a command line, or a function at the top of a module. It
        has its own tools. With ``prompts`` and without a ``reward`` the agent grades itself: it
        returns a number, or a dict with "reward", or posts a reward to its gateway. Without
        ``prompts`` the ``environment`` or ``config`` gives questions and grader.
    services : mapping of str to `libra.service`, optional
        Models and functions that rewards and tools query (docs/rewards.md).
    environment : Environment, optional
        Replaces prompts, reward, tools and session. Otherwise prompts and reward are required.
    config : path, optional
        A YAML file to start from, or "libra/NAME" for a configuration that ships.
    score : callable, optional
        Adds your own node to the graph; see ``workflows/custom_reward.py``.
    client : distributed.Client, optional
        A cluster to use; by default local processes are started.
    resume : bool
        Continue the run of this ``run__name`` and ``run__dir`` from its last committed state; all
        other arguments must be the same.
    on_iteration, on_batch, on_evaluation : callable, optional
        Called in this process during the run: ``on_iteration(values)``, ``on_batch(batch,
        trajectories)``, ``on_evaluation(result)``; see `libra.driver.callbacks`.
    **settings
        Any setting, its dot written as two underscores: ``run__iterations=20, trainer__lr=1e-3``.
        For ``package.module:attribute`` you may give the function or class itself, if it is defined
        at the top of a module.

    Returns
    -------
    RunSummary
        Rewards, run directory and checkpoint. ConfigError if a setting or an argument is wrong.

    Notes
    -----
    Local workers are processes: a script must call this under ``if __name__ == "__main__":``.
    """
    if environment is not None:
        from libra.driver.part_checks import check_environment

        check_environment(environment)
    if services is not None:
        settings = {**settings, "services__named": _given_services(services)}
    _check_started_by(config, client)
    if agent is not None:
        settings = {**settings, _agent_field(agent, tools): agent}
    values = _sections(settings)
    values.setdefault("model", {})["path"] = settings.get(
        "model__path", str(model) if isinstance(model, Path) else model
    )
    given = _is_given(values, environment, prompts=prompts, reward=reward, tools=tools, session=session)
    checked = config_from_dict(values) if config is None else load_config(config, values=values)
    typed = frozenset(f"{section}.{key}" for section, keys in values.items() for key in keys)
    checked = named(checked)
    starts_workers = client is None and checked.cluster.scheduler is None
    if starts_workers:
        check_main()
    directory = run_directory(checked)
    with Interruption() as interruption:
        interruption.of(directory, resume_words(directory, given))
        stages = StartStages(enabled=checked.observe.progress)
        stages.say(first_line(checked))
        check_early(checked, resume=resume, starts_workers=starts_workers, given=given)
        if resume and is_finished(directory, checked):
            refuse_damaged(directory)
            check_unchanged(directory, checked)
            stages.say(
                "all its iterations have ended, and nothing is left to do; for more of them, give run__iterations"
            )
            return RunSummary.of_finished(directory, checked)
        for line in warning_lines(ignored_settings(checked, Situation("run", typed, client=client is not None))):
            logger.warning("%s", line)
        if given and environment is None:
            from libra.envs.grader import own_reward

            reward = own_reward if reward is None and checked.agent.given else reward
            environment = _own_environment(prompts, reward, tools=tools, session=session, seed=checked.run.seed)
        callbacks = {"on_iteration": on_iteration, "on_batch": on_batch, "on_evaluation": on_evaluation}
        stages.begin("libraries")
        from libra.driver.run_session import run

        return run(
            checked, environment=environment, score=score, client=client, resume=resume, callbacks=callbacks, stages=stages,
            interruption=interruption,
        )  # fmt: skip


def _own_environment(prompts: Any, reward: Any, **more: Any) -> FunctionEnvironment:
    from libra.envs import FunctionEnvironment

    if prompts is None or reward is None:
        missing = "prompts" if prompts is None else "reward"
        raise ConfigError(f"libra.train: {missing} is missing; give prompts and reward, or an environment")
    return FunctionEnvironment(prompts=prompts, reward=reward, **more)


def _given_services(services: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(services, Mapping) or not all(isinstance(each, Mapping) for each in services.values()):
        raise ConfigError(
            'services: got something else than services by name; type services={"judge": libra.service("judge", model=MODEL)}'
        )
    return {str(name): dict(each) for name, each in services.items()}


def _check_started_by(config: Any, client: Any) -> None:
    if client is not None and not isinstance(client, _client_class()):
        raise ConfigError(
            f"client: got {client!r} ({type(client).__name__}); give a distributed.Client, or type cluster__scheduler=ADDRESS"
        )
    if config is not None and not isinstance(config, str | Path):
        raise ConfigError(
            f"config: got {type(config).__name__}; give the path of a YAML file, or settings as run__iterations=20"
        )


def _agent_field(agent: str | Callable[..., Any], tools: Sequence[Callable[..., Any]]) -> str:
    if tools:
        raise ConfigError("libra.train: tools are given, and agent, which has its own; leave either out")
    return "agent__command" if isinstance(agent, str) else "agent__function"


def _is_given(values: Mapping[str, Any], environment: Environment | None, **parts: Any) -> bool:
    _check_given(environment, **parts)
    tools = parts.pop("tools")
    own = environment is not None or bool(tools) or any(part is not None for part in parts.values())
    named = [key for key in values.get("environment", {}) if key in ("name", "args")]
    if own and named:
        raise ConfigError(
            f"libra.train: environment__{named[0]} names an environment, and one was given as Python "
            "objects; leave either out"
        )
    return own


def _client_class() -> type[Client]:
    from distributed import Client

    return Client


def _check_given(environment: Environment | None, **parts: Any) -> None:
    given = [name for name, value in parts.items() if value is not None and not (name == "tools" and not value)]
    if environment is not None and given:
        raise ConfigError(
            f"libra.train: environment={environment.name}(...) brings its own prompts, reward and tools, and {', '.join(given)} "
            f"{'is' if len(given) == 1 else 'are'} given too; leave either out"
        )


def _sections(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    values: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        section, separator, key = name.partition("__")
        if not separator:
            homes = [
                f"{each}__{name}"
                for each, info in RunConfig.model_fields.items()
                if name in getattr(info.annotation, "model_fields", ())
            ]
            hint = (
                f"did you mean {' or '.join(homes)}?"
                if homes
                else "a setting is section__name, e.g. run__iterations=20"
            )
            raise ConfigError(f"libra.train: got the setting {name!r}; {hint}")
        if section not in RunConfig.model_fields:
            raise ConfigError(
                f"libra.train: {name}: there is no section {section!r}; sections are {', '.join(RunConfig.model_fields)}"
            )
        values.setdefault(section, {})[key] = name_of(name, plain_number(value))
    return values
