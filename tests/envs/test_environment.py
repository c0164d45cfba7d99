import sys
import types

import pytest

from libra.envs import ENVIRONMENTS, Environment, FunctionEnvironment, make_environment
from libra.errors import ConfigError


def own(level: int, extra: str = "") -> Environment:
    return FunctionEnvironment(prompts=[f"{level}{extra}"], reward=lambda completion: 0.0)


class Untold(FunctionEnvironment):
    """A tool that `libra.tool` did not make."""

    def __init__(self):
        super().__init__(prompts=["a"], reward=lambda completion: 0.0)
        self.tools = (own,)


@pytest.fixture
def module(monkeypatch):
    made = types.ModuleType("an_own_module")
    made.own, made.seven = own, 7
    made.untold, made.exits = Untold, lambda: sys.exit(3)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made.__name__


@pytest.mark.parametrize("name", sorted(set(ENVIRONMENTS) - {"python_tests"}))  # whose sandbox is a process
def test_every_registered_name_makes_an_environment_whose_seed_counts(name, tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(f'{{"prompt": "{i} + 1?", "answer": {i + 1}}}\n' for i in range(30)))
    args = {"path": str(path), "reward": "gsm8k"} if name == "jsonl" else {}
    one, same, other = (make_environment(name, args, seed) for seed in (1, 1, 2))
    shown = [[made.prompt("train", index) for index in range(20)] for made in (one, same, other)]
    assert shown[0] == shown[1] != shown[2]


def test_a_factory_of_ones_own_is_found_by_module_and_attribute(module):
    made = make_environment(f"{module}:own", {"level": 3, "extra": "x"}, 0)
    assert made.prompt("train", 0).messages[0]["content"] == "3x"


@pytest.mark.parametrize(("name", "args", "says"), [
    ("TOOL-ARITHMETIK", {}, "'tool_arithmetic'"),
    ("tool_arithmetic", {"timeout_rat": 0.1}, "environment.args.timeout_rat"),
    ("tool_arithmetic", {"timeout_rate": 2}, "environment.args.timeout_rate"),
    ("no_such_module_anywhere:thing", {}, "no_such_module_anywhere"),
    ("an_own_module:owm", {}, "'own'"),
    ("an_own_module:untold", {}, "libra.tool"),
    ("an_own_module:exits", {}, "SystemExit"),
    ("an_own_module:own", {}, "'level'"),
    ("an_own_module:seven", {}, "int"),
])  # fmt: skip
def test_what_cannot_be_made_is_a_config_error_that_names_it(module, name, args, says):
    with pytest.raises(ConfigError, match=says):
        make_environment(name, args, 0)
