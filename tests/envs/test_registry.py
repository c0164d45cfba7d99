from __future__ import annotations

import sys
import types

import pytest

from libra.envs import ENVIRONMENTS, Environment, FunctionEnvironment, make_environment
from libra.errors import ConfigError


def own(level: int, extra: str = "") -> Environment:
    return FunctionEnvironment(prompts=[f"{level}{extra}"], reward=lambda completion: 0.0)


class Untold(FunctionEnvironment):
    """A tool that `libra.tool` did not make."""

    def __init__(self) -> None:
        super().__init__(prompts=["a"], reward=lambda completion: 0.0)
        self.tools = (own,)


@pytest.fixture
def module(monkeypatch):
    made = types.ModuleType("an_own_module")
    made.own, made.seven, made.wrong = own, 7, lambda seed: {"seed": seed}
    made.untold, made.exits = Untold, lambda: sys.exit(3)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made.__name__


NEEDED = ("reasoning_gym", "gymnasium", "textarena", "search")


@pytest.mark.parametrize("name", sorted(ENVIRONMENTS))
def test_every_registered_name_makes_an_environment_whose_seed_counts(name, tmp_path):
    if name == "openenv":
        pytest.skip("its server has the prompts; tests/envs/test_openenv.py")
    if name in NEEDED:
        pytest.importorskip({"search": "bm25s"}.get(name, name))
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(f'{{"prompt": "{i} + 1?", "answer": {i + 1}}}\n' for i in range(30)))
    args = {
        "jsonl": {"path": str(path), "reward": "gsm8k"},
        "gymnasium": {"id": "Blackjack-v1"},
        "textarena": {"id": "GuessTheNumber-v0"},
        "repair": {"isolation": "best"},
    }.get(name, {})
    one, same, other = (make_environment(name, args, seed) for seed in (1, 1, 2))
    shown = [[made.prompt("train", index) for index in range(20)] for made in (one, same, other)]
    assert shown[0] == shown[1] != shown[2]


def test_a_factory_of_ones_own_is_found_by_module_and_attribute(module):
    made = make_environment(f"{module}:own", {"level": 3, "extra": "x"}, 0)
    assert made.prompt("train", 0).messages[0]["content"] == "3x"


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        ("tool_arithmetik", {}, "did you mean 'tool_arithmetic'"),
        ("TOOL-ARITHMETIC", {}, "did you mean 'tool_arithmetic'"),
        ("tool_arithmetic", {"timeout_rat": 0.1}, "environment.args.timeout_rat.*did you mean 'timeout_rate'"),
        ("tool_arithmetic", {"timeout_rate": 2}, "environment.args.timeout_rate: got 2"),
        ("tool_arithmetic", {"max_operations": 9}, "environment.args.max_operations: got 9"),
        ("no_such_module_anywhere:thing", {}, "cannot import 'no_such_module_anywhere'"),
        ("an_own_module:owm", {}, "did you mean 'own'"),
        ("an_own_module:untold", {}, r"type libra\.tool\(own\) in its place"),
        ("an_own_module:exits", {}, "could not be made.*SystemExit"),
        ("an_own_module:own", {}, "missing a required argument: 'level'"),
        ("an_own_module:seven", {}, "is a int"),
        ("an_own_module:wrong", {}, "made a dict"),
    ],
)
def test_what_cannot_be_made_is_a_config_error_that_names_it(module, name, args, says):
    with pytest.raises(ConfigError, match=says):
        make_environment(name, args, 0)
