"""The environments of examples/: each is made by its name in a configuration, played and graded."""

import json
import random
import tarfile

import pytest

from examples.repair import build
from examples.repair.bugs import bugs_of
from examples.repair.library import from_folder
from examples.repair.tampering import tampering
from examples.repair.tasks import SHIPPED
from libra.envs import make_environment
from libra.testing.parts import EnvironmentContract
from libra.types import EndReason, Episode, Turn

REPAIR, SEARCH = "examples.repair.software:SoftwareRepair", "examples.search.corpus:CorpusSearch"
GYMNASIUM, TEXTARENA = "examples.games.gymnasium_text:GymnasiumText", "examples.games.textarena_game:TextArenaGame"
LAKE = {"id": "FrozenLake-v1", "args": {"is_slippery": False}, "actions": ["left", "down", "right", "up"]}
sandboxed = [pytest.mark.live, pytest.mark.usefixtures("needs_sandbox")]


def repair(**args):
    return make_environment(REPAIR, {**args}, 0)


def solved(world):
    """A training prompt whose line can be replaced alone, with its task."""
    prompts = (world.prompt("train", number) for number in range(500))
    return next((p, task) for p in prompts if (task := world.tasks[p.facts["task"]]).repair is not None)


def answered(prompt, text):
    return Episode("train-0-0-0", prompt, (Turn(text),), EndReason.ANSWERED)


def graded(world, prompt, state):
    return world.grade(Episode("train-0-0-0", prompt, (Turn("done"),), EndReason.ANSWERED, state))


class TestRepair(EnvironmentContract):
    pytestmark = sandboxed
    turns = ('<tool_call>{"name": "run_tests", "arguments": {}}</tool_call>', "It is repaired.")

    def make_environment(self):
        return repair()

    def test_the_repair_earns_one_and_nothing_else_does(self):
        world = repair(timeout_s=2.0)
        prompt, task = solved(world)
        state = world.reset(prompt)
        assert graded(world, prompt, state) == 0.0
        world.edit(*task.repair, trajectory_state=state)
        assert graded(world, prompt, state) == 1.0
        text, (test,) = task.files[task.path], task.library.tests
        for edited in (
            {task.path: text + "\nimport os\nos.write(3, b'{}')\nos._exit(0)\n"},
            {task.path: "while True:\n    pass\n" + text},
            {**task.files, test: "def test_all():\n    pass\n"},
        ):
            assert graded(world, prompt, {**world.reset(prompt), "edited": edited}) == 0.0

    def test_the_shipped_tasks_are_what_the_builder_makes_of_the_libraries(self, repository):
        made = build.tasks_of(from_folder(repository / "workflows" / "repair_libraries" / "words"))
        ours, shipped = map(json.dumps, made), SHIPPED.read_text().splitlines()
        rows = [[json.loads(line) for line in lines] for lines in (ours, shipped)]
        for each in (row for of in rows for row in of if "failing" in row):
            each["failing"] = sorted(each["failing"])
        assert rows[0] == [row for row in rows[1] if row["library"] == "words"]

    def test_a_source_package_of_pypi_becomes_tasks(self, tmp_path):
        files = {
            "src/counting/core.py": "\n\n".join(f"def plus{n}(x):\n    return x + {n}\n" for n in range(1, 17)),
            "src/counting/__init__.py": "from counting.core import *  # noqa\n",
            "tests/test_core.py": "from counting import *\n"
            + "\n".join(f"def test_{n}():\n    assert plus{n}(2) == {n + 2}\n" for n in range(1, 17)),
        }
        path, out = tmp_path / "counting-1.0.tar.gz", tmp_path / "tasks.jsonl"
        with tarfile.open(path, "w:gz") as archive:
            for name, text in files.items():
                (tmp_path / "file").write_text(text)
                archive.add(tmp_path / "file", f"counting-1.0/{name}")
        build.main(["--sdist", str(path), "--out", str(out)])
        world = repair(tasks=str(out), edits="line", show="function", examples=1)
        prompt, task = solved(world)
        state, (old, new) = world.reset(prompt), task.repair
        world.edit_line(task.bug.line, old, new, trajectory_state=state)
        assert graded(world, prompt, state) == 1.0


def test_a_bug_changes_its_place_and_an_edit_that_reaches_the_tests_is_found():
    source = "import math\n\n\ndef f(x):\n    return math.floor(x) if x >= 10 else -1\n"
    assert {(bug.old, bug.new) for bug in bugs_of(source)} >= {(">=", ">"), ("10", "11")}
    for bug in bugs_of(source):
        lines = zip(bug.put_in(source).split("\n"), source.split("\n"), strict=True)
        assert sum(one != other for one, other in lines) == 1
    assert tampering({"a.py": source}, {"a.py": source.replace("floor", "ceil")}) is None
    for reach in ("import sys", "getattr(math, 'f')", "().__class__", "'{0.a}'.format(f)", "x.f_builtins"):
        assert tampering({"a.py": source}, {"a.py": f"{source}\n{reach}\n"}) is not None


class TestSearch(EnvironmentContract):
    turns = ('<tool_call>{"name": "search", "arguments": {"query": "a"}}</tool_call>', "<answer>b</answer>")

    def make_environment(self):
        pytest.importorskip("bm25s", reason="pip install -e '.[search]'")
        return make_environment(SEARCH, {}, 0)

    def test_every_question_can_be_answered_by_searching(self):
        self.make_environment()
        world = make_environment(SEARCH, {"size": 60, "hops": [1, 2, 3]}, 0)
        for index in range(30):
            prompt = world.prompt("train", index)
            name = prompt.facts["start"]
            for relation in prompt.facts["relations"]:
                assert world.passages[name].text in world.search(name)
                name = world.passages[name].facts[relation]
            assert world.grade(answered(prompt, f"It is <answer> the {name.upper()}. </answer>")) == 1.0
            assert world.grade(answered(prompt, name)) == 0.0, "not between tags"


class TestFrozenLake(EnvironmentContract):
    turns = ("down", "down", "right", "right", "down", "right")

    def make_environment(self):
        pytest.importorskip("gymnasium", reason="pip install -e '.[games]'")
        return make_environment(GYMNASIUM, LAKE, 0)

    def test_it_is_read_and_won_on_two_workers(self):
        world, other = self.make_environment(), self.make_environment()
        prompt = world.prompt("train", 0)
        assert "[S]FFF" in prompt.messages[-1]["content"]
        state = world.reset(prompt)
        said = [(other if turn == 3 else world).step(text, state) for turn, text in enumerate(self.turns)]
        assert said[-1] is None and state["reward"] == 1.0


class TestTextArena(EnvironmentContract):
    turns = ("[3]", "[17]", "no number")

    def make_environment(self):
        pytest.importorskip("textarena", reason="pip install -e '.[games]'")
        return make_environment(TEXTARENA, {"id": "GuessTheNumber-v0"}, 0)

    def test_the_global_generator_is_left_alone(self):
        world, outside = self.make_environment(), random.getstate()
        world.step("[3]", world.reset(world.prompt("train", 0)))
        assert random.getstate() == outside
