"""What a new user may give to ``libra.train``: each wrong argument is one clear error, before any worker starts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from dask import delayed

import libra
from libra.envs import Environment, FunctionEnvironment
from libra.envs.tool_arithmetic import ToolArithmetic
from libra.errors import LibraError
from libra.types import Episode

PROMPTS = [f"What is {n} + 1?" for n in range(20)]


def reward(completion: str) -> float:
    return 0.0


def search(query: str) -> str:
    """Searches.

    Args:
        query: Words.
    """
    return query


def undocumented(query):  # type: ignore[no-untyped-def]
    return query


class Reward:
    def __call__(self, completion: str) -> float:
        return 0.0


def judge(episodes: Sequence[Episode]) -> list[float]:
    """One number for each; it runs on finished groups only."""
    assert len(episodes) > 0
    return [0.0 for _ in episodes]


def own() -> FunctionEnvironment:
    return FunctionEnvironment(prompts=PROMPTS, reward=reward)


GIVEN: tuple[tuple[dict[str, Any], str, str, str], ...] = (
    ({"prompts": PROMPTS}, "reward", "missing", "give prompts and reward"),
    ({"reward": reward}, "prompts", "missing", "give prompts and reward"),
    ({"prompts": "What is 1 + 1?", "reward": reward}, "prompts", "str", "prompts=[...]"),
    ({"prompts": [], "reward": reward}, "prompts", "none", "at least one"),
    ({"prompts": [{"question": "a"}], "reward": reward}, "prompts[0]", "'question'", "'prompt'"),
    ({"prompts": [{"prompt": "a", "episode": 1}], "reward": reward}, "prompts[0]", "'episode'", "rename it"),
    ({"prompts": PROMPTS, "reward": 1.0}, "reward", "1.0", "give a function"),
    ({"prompts": PROMPTS, "reward": "gsm9k"}, "reward", "'gsm9k'", "gsm8k"),
    ({"prompts": PROMPTS, "reward": Reward}, "reward", "class Reward", "reward=Reward()"),
    ({"prompts": PROMPTS, "reward": lambda answer: 0.0}, "reward", "'answer'", "add the column"),
    ({"prompts": PROMPTS, "reward": reward, "tools": search}, "tools", "search", "tools=[FUNCTION]"),
    ({"prompts": PROMPTS, "reward": reward, "tools": [Reward]}, "tools[0]", "class Reward", "tools=[Reward()]"),
    ({"prompts": PROMPTS, "reward": reward, "tools": [undocumented]}, "undocumented", "query", "query: str"),
    ({"prompts": PROMPTS, "reward": reward, "tools": [search, search]}, "tools", "search", "name=..."),
    ({"environment": ToolArithmetic}, "environment", "class ToolArithmetic", "environment=ToolArithmetic(...)"),
    ({"environment": "tool_arithmetic"}, "environment", "'tool_arithmetic'", "environment__name='tool_arithmetic'"),
    ({"environment": 3}, "environment", "int", "libra.envs.Environment"),
    ({"environment": own(), "prompts": PROMPTS, "reward": reward}, "prompts, reward", "environment", "leave either out"),
    ({"environment": own(), "environment__name": "jsonl"}, "environment__name", "Python objects", "leave either out"),
    ({"environment": own(), "evaluation__prompts": 3}, "evaluation.prompts", "3", "evaluation.prompts=2"),
    ({"score": judge}, "score", "build its node", "dask.delayed(judge)"),
    ({"score": lambda episodes: [0.0]}, "score", "list", "dask.delayed(judge)"),
    ({"model": "org/none-such"}, "model.path", "'org/none-such'", "libra/tiny-arithmetic"),
    ({"client": "tls://127.0.0.1:8786"}, "client", "'tls://127.0.0.1:8786'", "cluster__scheduler=ADDRESS"),
    ({"config": {"run": {}}}, "config", "dict", "path of a YAML file"),
    ({"model": 3}, "model.path", "3", "model.path=libra/tiny-arithmetic"),
    ({"iterations": 3}, "iterations", "'iterations'", "run__iterations"),
    ({"runs__iterations": 3}, "runs__iterations", "'runs'", "sections are run"),
)  # fmt: skip


@pytest.mark.parametrize(("given", "field", "value", "typed"), GIVEN)
def test_a_wrong_argument_is_one_clear_error(given, field, value, typed, tmp_path, monkeypatch):
    def started(*given: Any) -> None:
        raise AssertionError("workers were started")

    monkeypatch.setattr("libra.driver.run_client.local_cluster", started)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LibraError) as raised:
        libra.train(**given)
    message = str(raised.value)
    assert len(message.splitlines()) == 1
    for wanted in (field, value, typed):
        assert wanted in message
    assert not list(tmp_path.iterdir())


def test_an_environment_that_is_right_reaches_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Started(Exception):
        """Instead of workers."""

    def start(*given: Any) -> None:
        raise Started

    monkeypatch.setattr("libra.driver.run_client.local_cluster", start)
    monkeypatch.chdir(tmp_path)
    environment: Environment = own()
    model = Path(libra.__file__).parent / "assets/tiny_arithmetic"
    with pytest.raises(Started):
        libra.train(environment=environment, score=lambda episodes: delayed(judge)(episodes), model=model)
    assert not list(tmp_path.iterdir()), "a start that fails leaves nothing"
