"""Ten wrong inputs, and more: what a new user may type wrong is one answer of at most three lines, before any worker starts.

Each names the field or option, its value and what to type; nothing is left on disk, and the exit code is 2. These run in this
process and need no mark: the promise "ten wrong inputs" of `make test` is this file. Settings alone are in
tests/config/test_refused.py, models in test_wrong_models.py, `libra.train` in test_wrong_arguments.py.
"""

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from libra.cli.main import main

Make = Callable[[Path], object]
Row = tuple[str, str, str, str] | tuple[str, str, str, str, Make | None]

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


def write(at: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (at / name).parent.mkdir(parents=True, exist_ok=True)
        (at / name).write_text(content)


def holds(name: str, content: str) -> Make:
    return lambda at: write(at, {name: content})


def own(at: Path) -> None:
    """Modules of the user's, in the working directory."""
    write(at, {"mine.py": OWN, "broken.py": "def f(:\n", "raises.py": "1 / 0\n", "needs.py": "import no_such_module\n"})


# What is typed after `libra`, the field that the answer names, the value, a word of what to type, and what makes the files.
NO_RUN: tuple[Row, ...] = (
    ("resume nowhere", "nowhere", "no run", "runs/NAME"),
    ("resume mine", "mine", "no run", "runs/NAME", holds("mine/notes", "")),
    ("resume mine", "mine", "it is gone", "libra repair mine", holds("mine/config.resolved.yaml", "run: 3\n")),
    ("resume nowhere --from-checkpoint -1", "--from-checkpoint", "-1", "libra resume --help"),
    ("resume", "RUN", "Missing argument", "libra resume --help"),
    ("repair nowhere", "nowhere", "no run", "runs/NAME"),
    ("doctor mine", "mine", "no run", "runs/NAME", holds("mine/notes", "")),
    ("inspect nowhere", "nowhere", "does not exist", "libra inspect"),
    ("inspect mine", "mine", "trajectories.zarr", "libra inspect", holds("mine/notes", "")),
    ("inspect mine --order middle", "--order", "'middle'", "'best', 'worst'"),
    ("inspect mine --limit 0", "--limit", "0", "libra inspect --help"),
    ("inspect mine --invariants --tokens", "--tokens", "--invariants", "leave out", holds("mine/trajectories.zarr/x", "")),
    ("replay nowhere", "nowhere", "does not exist", "libra replay"),
    ("replay mine", "mine", "events.jsonl", "libra replay", holds("mine/notes", "")),
    ("replay mine", "mine/events.jsonl", "no event", "nothing to replay", holds("mine/events.jsonl", "")),
    ("replay mine", "mine/events.jsonl", "line 1", "libra doctor", holds("mine/events.jsonl", "hello\n")),
    ("replay mine --key train", "--key", "train", "train-0-0-0", holds("mine/events.jsonl", "")),
    ("replay mine --decision x", "--decision", "'x'", "libra replay --help"),
    ("replay mine --json --key a", "--json", "--key", "leave it out"),
    ("report nowhere", "nowhere", "does not exist", "libra"),
    ("trace nowhere", "nowhere", "does not exist", "libra trace"),
    ("page nowhere", "nowhere", "does not exist", "libra"),
    ("roles nowhere", "nowhere", "run", "libra"),
    ("roles mine a=b", "'a=b'", "rollout", "rollout-0=train"),
    ("roles mine --wait", "--wait", "change", "rollout-0=train"),
    ("roles mine rollout-0=train --cancel 1", "--cancel", "change", "one of them"),
)  # fmt: skip

OTHERS: tuple[Row, ...] = (
    ("rn libra/quickstart", "'rn'", "No such command", "run"),
    ("--iterations 3", "--iterations", "No such option", "libra --help"),
    ("run nowhere.yaml", "nowhere.yaml", "no such configuration file", "libra/quickstart"),
    ("run e.yaml", "e.yaml", "is empty", "libra/quickstart", holds("e.yaml", "")),
    ("run .", ".", "directory", "configs/quickstart.yaml"),
    ("run", "CONFIG", "Missing argument", "libra run --help"),
    ("run libra/quickstart trainer.lrr=3", "trainer.lrr", "override", "trainer.lr"),
    ("run bad.yaml", "run.iterations (bad.yaml:2)", "'ten'", "run.iterations=50", holds("bad.yaml", "run:\n  iterations: ten\n")),
    ("doctor nowhere.yaml", "nowhere.yaml", "no such configuration file", "libra/quickstart"),
    ("doctor libra/quickstart run.seeed=1", "run.seeed", "override", "run.seed"),
    ("config libra/quickstart run.seeed=1", "run.seeed", "override", "run.seed"),
    ("config", "configuration file", "libra config", "--fields"),
    ("plan libra/quickstart planner.gpu=H1000", "planner.gpu", "'H1000'", "H100"),
    ("plan libra/quickstart planner.num_gpus=1", "planner.num_gpus", "1", "planner.num_gpus=2"),
    ("plan libra/quickstart --why fast", "--why", "'fast'", "--why train=16"),
    ("plan libra/quickstart --trace no.csv", "planner.trace", "no.csv", "give a CSV"),
    ("plan libra/quickstart --write /proc/x.yaml", "--write", "/proc/x.yaml", "type"),
    ("plan libra/quickstart --write a.yaml --what-if", "--write", "--what-if", "leave one"),
    ("plan libra/quickstart planner.tp=[1,3,4]", "planner.tp", "[1, 3, 4]", "divide"),
    ("plan libra/quickstart planner.calibration=no.json", "planner.calibration", "no.json", "libra calibrate"),
    ("simulate libra/quickstart --from-run nowhere", "nowhere", "config.resolved.yaml", "name the directory"),
    ("simulate libra/quickstart --workload no.json", "no.json", "--workload", "--save-workload"),
    ("simulate libra/quickstart --workload a --from-run b", "--from-run", "--workload", "leave one out"),
    ("simulate libra/quickstart planner.gpu=H1000", "planner.gpu", "'H1000'", "H100"),
    ("simulate libra/quickstart model.path=Qwen", "model.path", "'Qwen'", "Qwen3"),
    ("simulate libra/quickstart planner.trace=no.csv", "planner.trace", "no.csv", "give a CSV"),
    ("calibrate nowhere", "nowhere", "config.resolved.yaml", "name the directory"),
    ("cluster slurm libra/quickstart start", "'start'", "'up'", "libra cluster slurm --help"),
    ("cluster slurm libra/quickstart status", "slurm", "cluster.json", "libra cluster slurm"),
    ("cluster tls a.yaml", "DIR", "a.yaml", "--help", holds("a.yaml", "")),
    ("run libra/quickstart --scheduler tls://127.0.0.1:99999", "cluster.scheduler", "99999", "cluster.json"),
    ("run libra/quickstart --scheduler tls://127.0.0.1:1", "cluster.scheduler", "127.0.0.1:1", "libra cluster tls DIR"),
    ("run libra/quickstart --scheduler no.json", "cluster.scheduler", "no.json", "libra cluster slurm"),
    ("run libra/quickstart --from nowhere", "run.from_checkpoint", "nowhere", "--from RUN/checkpoints/best"),
)  # fmt: skip

# What follows `libra run libra/quickstart`.
MACHINE: tuple[Row, ...] = (
    ("run.dir=elsewhere", "run.dir", "elsewhere", "run.dir=ANOTHER_PLACE", holds("elsewhere", "a file")),
    ("run.dir=elsewhere run.name=mine", "run.name", "elsewhere/mine", "run.name=ANOTHER_NAME", holds("elsewhere/mine/notes", "")),
    ("run.dir=elsewhere", "run.dir", "elsewhere", "run.dir=ANOTHER_PLACE", lambda at: (at / "elsewhere").symlink_to(at / "gone")),
    ("run.dir=/proc/libra", "run.dir", "/proc/libra", "run.dir=ANOTHER_PLACE"),
    ("cluster.device=cuda", "cluster.device", "cuda", "cluster.device=auto"),
    ("planner.layout=auto", "planner.layout", "auto", "planner.calibration=FILE"),
    ("rollout.kv_cache_gib=0.0001", "rollout.kv_cache_gib", "0.0001", "rollout.kv_cache_gib="),
    ("rollout.kv_host_gib=0.0001", "rollout.kv_host_gib", "0.0001", "rollout.kv_host_gib="),
    ("rollout.kv_host_gib=1000000", "rollout.kv_host_gib", "1e+06", "rollout.kv_host_gib="),
    ("rollout.max_context_tokens=40", "rollout.max_context_tokens", "40", "rollout.max_context_tokens="),
    ("trainer.algorithm=opd distil.teacher=libra/tiny-arithmetic distil.tokens=1000000",
     "distil.tokens", "1000000", "type distil.tokens="),
    ("trainer.algorithm=opd distil.teacher=no/where/here", "distil.teacher", "no/where/here", "there is no directory"),
)  # fmt: skip

ENVIRONMENTS: tuple[Row, ...] = (
    ("environment.name=tool_arithmetik", "environment.name", "'tool_arithmetik'", "tool_arithmetic"),
    ("environment.name=gsm8k", "environment.name", "'gsm8k'", "package.module:attribute"),
    ("environment.name=no_such_module:Env", "environment.name", "'no_such_module'", "PYTHONPATH"),
    ("environment.name=mine:", "environment.name", "'mine:'", "package.module:attribute"),
    ("environment.name=mine:Missing", "environment.name", "'Missing'", "it defines", own),
    ("environment.name=mine:number", "environment.name", "int", "a class or a function", own),
    ("environment.name=mine:Nothing", "environment.name", "Nothing", "libra.envs.Environment", own),
    ("environment.name=mine:not_an_environment", "environment.name", "int", "libra.envs.Environment", own),
    ("environment.name=mine:NoGrade", "environment.name", "grade", "def grade(self, episode)", own),
    ("environment.name=mine:Raises", "environment.name", "no licence file", "mine:Raises", own),
    ("environment.name=mine:Late", "environment.name", "KeyError", "prompt('train', 0)", own),
    ("environment.name=mine:Text", "environment", "str", "libra.types.Prompt", own),
    ("environment.name=mine:Empty", "environment", "no messages", "role", own),
    ("environment.name=mine:Words", "environment", "text", "content", own),
    ("environment.name=mine:Long", "rollout.max_context_tokens", "rollout.max_context_tokens=", "512", own),
    ("environment.name=mine:TextTools", "environment", "'calculator'", "type libra.tool(f)", own),
    ("environment.name=mine:Needs", "environment.args", "path", "environment.args.path=", own),
    ("environment.name=broken:f", "environment.name", "broken.py", "line 1", own),
    ("environment.name=raises:f", "environment.name", "ZeroDivisionError", "raises", own),
    ("environment.name=needs:f", "environment.name", "no_such_module", "install", own),
    ("environment.args.max_op=3", "environment.args", "max_op", "max_operations"),
    ("environment.args.max_operations=0", "environment.args", "max_operations", "0"),
)

# (lines of data.jsonl, field, value, typed, more settings) for the environment `jsonl`.
ROW = '{"prompt": "1+1", "answer": "2"}\n'
DATA = (
    (ROW, "environment.args.reward", "'gsm9k'", "gsm8k", "environment.args.reward=gsm9k"),
    (ROW, "environment.args.path", "'other.jsonl'", "type", "environment.args.path=other.jsonl"),
    ("", "environment.args.path", "data.jsonl", "at least one", ""),
    ("not json\n", "data.jsonl, line 1", "not JSON", "one JSON object", ""),
    ("[1]\n", "data.jsonl, line 1", "list", "one JSON object", ""),
    ('{"question": "1"}\n', "data.jsonl, line 1", "'question'", "environment.args.prompt=NAME", ""),
    ('{"prompt": "1"}\n', "data.jsonl, line 1", "'answer'", "environment.args.answer=NAME", ""),
    ('{"prompt": 3, "answer": 3}\n', "prompts[0]", "3", "a prompt is a str", ""),
    (ROW * 40, "evaluation.prompts", "20", "evaluation.prompts=4", "evaluation.prompts=20"),
    ('{"prompt": "' + "1 + 1 " * 300 + '", "answer": "2"}\n', "rollout.max_context_tokens", "512", "=", ""),
)  # fmt: skip
GIVEN = "environment.name=jsonl environment.args.reward=gsm8k environment.args.path=data.jsonl evaluation.prompts=0"
RUN = "run libra/quickstart"
CASES: list[Row] = [
    *NO_RUN, *OTHERS, *((f"{RUN} {typed}", *rest) for typed, *rest in (*MACHINE, *ENVIRONMENTS)),
    *((f"{RUN} {GIVEN} {more}".strip(), *rest, holds("data.jsonl", text)) for text, *rest, more in DATA),
]  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory whose modules can be imported, as with PYTHONPATH=."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    handlers = list(logging.getLogger().handlers)
    yield tmp_path
    for name in ("mine", "broken", "raises", "needs"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    logging.getLogger().handlers[:] = handlers  # the command logs to the standard error of its test


@pytest.mark.parametrize("case", [pytest.param(row, id=f"{n}-{row[0][-50:]}") for n, row in enumerate(CASES)])
def test_the_answer_names_field_value_and_what_to_type(case: Row, here: Path, capsys: Any) -> None:
    typed, *wanted = case
    if len(wanted) > 3 and (make := wanted.pop()) is not None:
        make(here)
    if "device=cuda" in typed or "layout=auto" in typed:
        import torch

        if torch.cuda.is_available():
            pytest.skip("this machine has a GPU")
    before = sorted(path.relative_to(here) for path in here.rglob("*"))
    with pytest.raises(SystemExit) as stopped:
        main(typed.split(" "))
    told = capsys.readouterr().err
    assert stopped.value.code == 2, told
    assert told.startswith("libra: ") and len(told.splitlines()) <= 3 and "Traceback" not in told, told
    assert not [each for each in wanted if each not in told], told
    after = [path.relative_to(here) for path in here.rglob("*") if "__pycache__" not in path.parts]
    assert sorted(after) == before, "a start that fails leaves nothing"
