"""Environments that cannot be imported, made or used, and their data."""

from __future__ import annotations

from pathlib import Path

from bad_inputs.case import BadInput, setting, settings, write

OWN = """
from libra.envs import Environment, FunctionEnvironment
from libra.types import Prompt

def constant(completion): return 0.0
def function(seed): return FunctionEnvironment(prompts=["a"], reward=constant)
def not_an_environment(): return 3
number = 3

class NoGrade(Environment):
    def prompt(self, split, index): return Prompt("a", ({"role": "user", "content": "a"},))

class NoPrompt(Environment):
    def grade(self, episode): return 0.0

class Nothing: pass

class Raises(Environment):
    def __init__(self): raise OSError("no licence file at /opt/x")
    def prompt(self, split, index): return Prompt("a", ({"role": "user", "content": "a"},))
    def grade(self, episode): return 0.0

class Late(NoGrade):
    def grade(self, episode): return 0.0
    def prompt(self, split, index): raise KeyError("question")

class Text(Late):
    def prompt(self, split, index): return "What is 1+1?"

class Empty(Late):
    def prompt(self, split, index): return Prompt("a", ())

class Words(Late):
    def prompt(self, split, index): return Prompt("a", ({"role": "user", "text": "a"},))

class Long(Late):
    def prompt(self, split, index): return Prompt("a", ({"role": "user", "content": "1 + 1 " * 500},))

class TextTools(Late):
    tools = ("calculator",)
    def prompt(self, split, index): return Prompt("a", ({"role": "user", "content": "a"},))

class Needs(Late):
    def __init__(self, path): pass
"""

ROW = '{"prompt": "1+1", "answer": "2"}\n'
JSONL = ("environment.name=jsonl", "environment.args.reward=gsm8k")


def _own(directory: Path) -> None:
    write(
        directory,
        {"mine.py": OWN, "broken.py": "def f(:\n", "raises.py": "1 / 0\n", "needs.py": "import no_such_module\n"},
    )


def own(attribute: str, value: str, typed: str, field: str = "environment.name") -> BadInput:
    """A module of the user's, in the working directory."""
    return setting(f"environment.name={attribute}", value, typed, field)._replace(make=_own)


def jsonl(text: str, field: str, value: str, typed: str, *more: str) -> BadInput:
    """The environment ``jsonl`` on a file with this text."""
    given = (*JSONL, "environment.args.path=data.jsonl", "evaluation.prompts=0", *more)
    return BadInput(
        ("run", "libra/quickstart", *given), field, value, typed, lambda at: write(at, {"data.jsonl": text})
    )


NAMES = (
    setting("environment.name=tool_arithmetik", "'tool_arithmetik'", "tool_arithmetic"),
    setting("environment.name=gsm8k", "'gsm8k'", "package.module:attribute"),
    setting("environment.name=no_such_module:Env", "'no_such_module'", "PYTHONPATH"),
    setting("environment.name=libra.envs.tool_arithmetic:ToolArithmetik", "'ToolArithmetik'", "ToolArithmetic"),
    setting("environment.name=:Env", "':Env'", "package.module:attribute"),
    setting("environment.name=mine:", "'mine:'", "package.module:attribute"),
    own("mine:Missing", "'Missing'", "it defines"),
    own("mine:number", "int", "a class or a function"),
    own("mine:Nothing", "Nothing", "libra.envs.Environment"),
    own("mine:not_an_environment", "int", "libra.envs.Environment"),
    own("mine:NoGrade", "grade", "def grade(self, episode)"),
    own("mine:NoPrompt", "prompt", "def prompt(self, split, index)"),
    own("mine:Raises", "no licence file", "mine:Raises"),
    own("mine:Late", "KeyError", "prompt('train', 0)"),
    own("mine:Text", "str", "libra.types.Prompt", field="environment"),
    own("mine:Empty", "no messages", "role", field="environment"),
    own("mine:Words", "text", "content", field="environment"),
    own("mine:Long", "rollout.max_context_tokens=", "512", field="rollout.max_context_tokens"),
    own("mine:TextTools", "'calculator'", "type libra.tool(f)", field="environment"),
    own("mine:Needs", "path", "environment.args.path=", field="environment.args"),
    own("broken:f", "broken.py", "line 1"),
    own("raises:f", "ZeroDivisionError", "raises"),
    own("needs:f", "no_such_module", "install"),
)

ARGUMENTS = (
    setting("environment.args.max_op=3", "max_op", "max_operations", "environment.args"),
    setting("environment.args.max_operations=many", "many", "environment.args"),
    setting("environment.args.max_operations=0", "0", "environment.args"),
    jsonl(ROW, "environment.args.reward", "'gsm9k'", "gsm8k", "environment.args.reward=gsm9k"),
    jsonl(ROW * 2, "environment.args.path", "'other.jsonl'", "type", "environment.args.path=other.jsonl"),
    jsonl("", "environment.args.path", "data.jsonl", "at least one"),
    jsonl("not json\n", "data.jsonl, line 1", "not JSON", "one JSON object"),
    jsonl("[1]\n", "data.jsonl, line 1", "list", "one JSON object"),
    jsonl('{"question": "1"}\n', "data.jsonl, line 1", "'question'", "environment.args.prompt=NAME"),
    jsonl('{"prompt": "1"}\n', "data.jsonl, line 1", "'answer'", "environment.args.answer=NAME"),
    jsonl('{"prompt": 3, "answer": 3}\n', "prompts[0]", "3", "a prompt is a str"),
    jsonl(ROW, "environment.args.eval_path", "'held.jsonl'", "type", "environment.args.eval_path=held.jsonl"),
    jsonl(ROW * 40, "evaluation.prompts", "20", "evaluation.prompts=4", "evaluation.prompts=20"),
    jsonl(ROW * 5, "evaluation.prompts", "20", "evaluation.prompts=0", "evaluation.prompts=20"),
    jsonl('{"prompt": "' + "1 + 1 " * 300 + '", "answer": "2"}\n', "rollout.max_context_tokens", "512", "="),
    settings(
        "environment.name=reasoning_gym & environment.args.dataset=chain_sumn",
        "environment.args.dataset",
        "chain_sumn",
        "chain_sum",
    ),
)
