"""The repair environment with its shipped tasks, real edits and real runs of tests in a sandbox."""

import asyncio
import json
import tarfile

import pytest

from libra.envs import make_environment, run_action
from libra.envs.repair import build
from libra.envs.repair.environment import SoftwareRepair
from libra.envs.repair.library import from_folder, from_sdist
from libra.envs.repair.tasks import SHIPPED
from libra.envs.state import StateCopy, begin_state
from libra.errors import ConfigError
from libra.testing.parts import EnvironmentContract
from libra.types import EndReason, Episode, ToolCall, ToolStatus, Turn

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("sandbox_level")]


def environment(**args):
    return SoftwareRepair(isolation="best", **args)


@pytest.fixture(scope="module")
def world():
    return environment()


def solved(world):
    """A training prompt whose line can be replaced alone, with its task and repair."""
    prompts = (world.prompt("train", number) for number in range(500))
    prompt, task = next((p, task) for p in prompts if (task := world.tasks[p.facts["task"]]).repair is not None)
    return prompt, task, task.repair


def graded(world, prompt, state):
    return world.grade(Episode("train-0-0-0", prompt, (Turn("done"),), EndReason.ANSWERED, state))


def edited(world, prompt, old, new):
    state = world.reset(prompt)
    world.edit(old, new, trajectory_state=state)
    return state


def test_the_repair_earns_one_and_no_repair_nothing(world):
    prompt, task, (old, new) = solved(world)
    assert graded(world, prompt, edited(world, prompt, old, new)) == 1.0
    assert graded(world, prompt, world.reset(prompt)) == 0.0
    assert graded(world, prompt, {**world.reset(prompt), "edited": task.files}) == 0.0, "undone again"


def test_an_edit_that_breaks_something_else_earns_nothing_beyond_located():
    located = environment(located=0.25)
    prompt, _, (old, _) = solved(located)
    state = edited(located, prompt, old, "raise ValueError" if not old.endswith(":") else "if 1 / 0:")
    assert graded(located, prompt, state) == 0.25
    assert graded(environment(), prompt, state) == 0.0


def test_tests_cannot_be_edited_and_edits_do_not_reach_them(world):
    prompt, task, _ = solved(world)
    state = world.reset(prompt)
    (name,) = task.library.tests
    assert world.read(trajectory_state=state, path=name) == task.library.tests[name]
    with pytest.raises(FileNotFoundError):
        world.edit("assert", "assert True or", trajectory_state=state, path=name)
    state["edited"] = {**task.files, name: "def test_all():\n    pass\n"}
    assert graded(world, prompt, state) == 0.0


def test_a_forged_pass_earns_nothing(world):
    prompt, task, _ = solved(world)
    forged = task.files[task.path] + "\nimport os\nos.write(3, b'{}')\nos._exit(0)\n"
    assert graded(world, prompt, {**world.reset(prompt), "edited": {task.path: forged}}) == 0.0


def test_a_repair_that_never_ends_is_cut_off():
    short = environment(timeout_s=1.0)
    prompt, task, _ = solved(short)
    state = {**short.reset(prompt), "edited": {task.path: "while True:\n    pass\n" + task.files[task.path]}}
    assert graded(short, prompt, state) == 0.0
    assert "did not come to their end" in short.run_tests(trajectory_state=state)


def test_tools_show_files_and_failures_through_run_action(world):
    prompt, task, (old, new) = solved(world)

    async def play():
        data = await begin_state(world, prompt, "train-0-0-0")
        state, said = StateCopy(world, data, "train-0-0-0"), []
        edits = ("edit", {"old": "nowhere", "new": ""}), ("edit", {"old": old, "new": new})
        for call in (("read", {}), ("read", {"path": task.path}), ("run_tests", {}), *edits, ("run_tests", {})):
            said.append(await run_action(world, prompt, ToolCall(*call), action_id="a", state=state))
        return said

    listed, text, before, wrong, right, after = asyncio.run(play())
    assert listed.content.split() == [*task.library.tests, *task.files]
    assert text.content == task.files[task.path]
    assert next(iter(task.failing)) in before.content
    assert wrong.status is ToolStatus.ERROR
    assert "occurs 0 times" in wrong.content
    assert right.content == f"edited {task.path}"
    assert after.content.endswith(", 0 failed")


def test_lines_are_shown_with_the_numbers_that_edit_line_takes():
    by_line = environment(edits="line", show="function", examples=1)
    prompt, task, (old, new) = solved(by_line)
    assert [each.name for each in by_line.tools] == ["read", "edit_line", "run_tests"]
    assert f"{task.bug.line}|{task.line(task.files)}" in prompt.messages[-1]["content"].splitlines()
    assert '"edit_line"' in prompt.messages[2]["content"], "the worked example edits by line, too"
    state = by_line.reset(prompt)
    assert f"\n{task.bug.line}|{task.line(task.files)}\n" in by_line.read(trajectory_state=state, path=task.path)
    by_line.edit_line(task.bug.line, old, new, trajectory_state=state)
    assert graded(by_line, prompt, state) == 1.0
    for line, piece in ((0, old), (1000, old), (1, "nowhere")):
        with pytest.raises(ValueError):
            by_line.edit_line(line, piece, new, trajectory_state=state)
    with pytest.raises(FileNotFoundError):
        by_line.edit_line(1, old, new, trajectory_state=state, path=next(iter(task.library.tests)))


def test_no_bug_is_trained_on_and_held_out_or_shown():
    def seen(world, split):
        return {world.prompt(split, index).facts["task"] for index in range(world.num_prompts(split))}

    world = environment(examples=1)
    train, held_out = seen(world, "train"), seen(world, "eval")
    assert len(train) == world.num_prompts("train") > 40 and len(held_out) == world.num_prompts("eval") > 5
    assert not train & held_out
    assert seen(environment(seed=9), "eval") == held_out


def test_the_shipped_tasks_are_what_the_builder_makes_of_the_libraries(repository):
    """One library is built again: a bug that the tests no longer catch, or another set of bugs, shows."""
    made = build.tasks_of(from_folder(repository / "workflows" / "repair_libraries" / "words"))
    ours, shipped = map(json.dumps, made), SHIPPED.read_text().splitlines()
    rows = [[json.loads(line) for line in lines] for lines in (ours, shipped)]
    for each in (row for of in rows for row in of if "failing" in row):
        each["failing"] = sorted(each["failing"])
    assert rows[0] == [row for row in rows[1] if row["library"] == "words"]


def test_a_source_package_of_pypi_becomes_tasks_and_a_run_can_use_them(tmp_path):
    files = {
        "PKG-INFO": "Metadata-Version: 2.1\nName: counting\nLicense-Expression: MIT\n\ntext",
        "setup.py": "raise SystemExit",
        "src/counting/__init__.py": "from counting.core import *  # noqa\n",
        "src/counting/core.py": "\n\n".join(f"def plus{n}(x):\n    return x + {n}\n" for n in range(1, 17)),
        "tests/test_core.py": "import pytest\nfrom counting import *\n"
        + "\n".join(f"def test_{n}():\n    assert plus{n}(2) == {n + 2}\n" for n in range(1, 17))
        + "\ndef test_fixture(tmp_path):\n    assert False\n",
        "docs/conf.py": "x = 1",
    }
    path, out = tmp_path / "counting-1.0.tar.gz", tmp_path / "tasks.jsonl"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            (tmp_path / "file").write_text(text)
            archive.add(tmp_path / "file", f"counting-1.0/{name}")
    library = from_sdist(path)
    assert (library.name, library.licence) == ("counting-1.0", "MIT")
    assert sorted(library.files) == ["src/counting/__init__.py", "src/counting/core.py"]
    build.main(["--sdist", str(path), "--out", str(out)])
    world = make_environment("repair", {"tasks": str(out), "isolation": "best"}, 0)
    prompt, _, (old, new) = solved(world)
    assert graded(world, prompt, edited(world, prompt, old, new)) == 1.0


@pytest.mark.parametrize("args", [{"tasks": "/nowhere"}, {"show": "all"}, {"edits": "words"}, {"located": 1.0}])
def test_wrong_arguments_are_refused(args):
    with pytest.raises(ConfigError):
        environment(**args)


class TestRepair(EnvironmentContract):
    turns = ('<tool_call>{"name": "run_tests", "arguments": {}}</tool_call>', "It is repaired.")

    def make_environment(self):
        return environment()
