"""The repair environment with its shipped tasks, real edits and real runs of tests in a sandbox."""

from __future__ import annotations

import asyncio
import importlib
import io
import json
import tarfile

import pytest

from libra.config import load_config
from libra.envs import make_environment, run_action
from libra.envs.repair import build
from libra.envs.repair.environment import SoftwareRepair
from libra.envs.repair.library import from_folder, from_sdist
from libra.envs.repair.tampering import tampering
from libra.envs.repair.tasks import SHIPPED, read_tasks
from libra.envs.state import StateCopy, begin_state
from libra.errors import ConfigError
from libra.testing.parts import EnvironmentContract
from libra.types import EndReason, Episode, ToolCall, ToolStatus, Turn


def environment(**args):
    return SoftwareRepair(isolation="best", **args)


@pytest.fixture(scope="module")
def world():
    return environment()


def solved(world, index=0):
    """A training prompt whose line can be replaced alone, with its task and repair."""
    for number in range(index, 500):
        prompt = world.prompt("train", number)
        task = world.tasks[prompt.facts["task"]]
        if task.repair is not None:
            return prompt, task, task.repair
    raise AssertionError("no such task")


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


def test_the_same_files_are_graded_once_unless_the_tests_did_not_end(monkeypatch):
    world = environment()
    prompt, _, (old, new) = solved(world)
    runs = []
    monkeypatch.setattr(world, "_run", lambda state: runs.append(state) or {})
    for state in (edited(world, prompt, old, new), edited(world, prompt, old, new)):
        assert graded(world, prompt, state) == 0.0
    monkeypatch.undo()
    for more in ("", "", "  # so"):
        assert graded(world, prompt, edited(world, prompt, old, new + more)) == 1.0
    assert (len(runs), len(world._verdicts)) == (2, 2)


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
    with pytest.raises(FileNotFoundError, match="may be edited"):
        world.edit("assert", "assert True or", trajectory_state=state, path=name)
    state["edited"] = {**task.files, name: "def test_all():\n    pass\n"}
    assert graded(world, prompt, state) == 0.0


def test_a_right_repair_that_could_reach_the_tests_earns_nothing(world):
    prompt, task, (old, new) = solved(world)
    state = edited(world, prompt, old, new)
    state["edited"][task.path] += "\nimport gc\n"
    assert graded(world, prompt, state) == 0.0


def test_a_forged_pass_earns_nothing(world):
    prompt, task, _ = solved(world)
    forged = task.files[task.path] + "\nimport os\nos.write(3, b'{}')\nos._exit(0)\n"
    assert graded(world, prompt, {**world.reset(prompt), "edited": {task.path: forged}}) == 0.0


@pytest.mark.parametrize(
    ("lines", "brought"),
    [
        ("match f:\n        case object(__globals__=g): pass", "case __globals__"),
        ("match n:\n        case {**__builtins__}: pass", "__builtins__"),
        ("class A: from functools import reduce as __eq__", "__eq__"),
        ("re.functools.update_wrapper(f, f)", ".functools"),
        ("n = [*n.copy()]", None),
        ("n = '{0.gi_frame.f_back}'.format(n)", "{0.gi_frame.f_back}"),
        ("n = ('{0._' + '_dict_' + '_}').format(n)", ".format of '{0._' + '_dict_' + '_}'"),
        ("n = '{:.2f}, {}'.format(n, n)", None),
    ],
)
def test_an_edit_that_reaches_the_runner_by_a_way_round_is_named(lines, brought):
    text = "import re\nfrom functools import reduce\ndef f(n):\n    {}\n    return n\n"
    found = tampering({"a.py": text.format("pass")}, {"a.py": text.format(lines)})
    assert found == (None if brought is None else f"a.py: {brought}")


def test_a_line_more_elsewhere_is_not_the_line_with_the_bug(world):
    _, task, (old, new) = solved(world)
    broken = task.files[task.path]
    repaired = broken.replace(old, new)
    for more in (f"{broken}\n\n", f"\n{broken}", f"\n{broken}\n#\n", broken + "\n" * 100_000):
        assert not task.touched({task.path: more})
    for changed in (repaired, f"\n{repaired}", broken.replace(old, f"{new}  # so\n"), broken.replace(old, "pass")):
        assert task.touched({task.path: changed})
    assert not task.touched(task.files)


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
        for call in (
            ToolCall("read", {}),
            ToolCall("read", {"path": task.path}),
            ToolCall("run_tests", {}),
            ToolCall("edit", {"old": "nowhere", "new": ""}),
            ToolCall("edit", {"old": old, "new": new}),
            ToolCall("run_tests", {}),
        ):
            said.append(await run_action(world, prompt, call, action_id="a", state=state))
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
    by_line.edit_line(1, '"""', '#\n"""', trajectory_state=state, path=task.path)
    assert state["edited"][task.path] == "#\n" + task.library.files[task.path], "the first place in the line"
    for line in (0, 1000):
        with pytest.raises(ValueError, match=f"no line {line}; {task.path} has"):
            by_line.edit_line(line, old, new, trajectory_state=state)
    with pytest.raises(ValueError, match="'nowhere' is not in line 1, which is '#'"):
        by_line.edit_line(1, "nowhere", "", trajectory_state=state)
    with pytest.raises(FileNotFoundError, match="may be edited"):
        by_line.edit_line(1, old, new, trajectory_state=state, path=next(iter(task.library.tests)))


def test_the_question_shows_as_much_as_it_should():
    shown = {show: environment(show=show, examples=2) for show in ("files", "failure", "function")}
    prompts = {show: each.prompt("train", 3) for show, each in shown.items()}
    task = shown["files"].tasks[prompts["files"].facts["task"]]
    texts = {show: prompt.messages[-1]["content"] for show, prompt in prompts.items()}
    assert task.path in texts["files"]
    assert next(iter(task.failing)) not in texts["files"]
    assert next(iter(task.failing)) in texts["failure"]
    assert task.function in texts["function"]
    assert task.function not in texts["failure"]
    assert [message["role"] for message in prompts["files"].messages] == [
        "system",
        *["user", "assistant", "tool", "assistant"] * 2,
        "user",
    ]


def test_no_bug_is_trained_on_and_held_out_or_shown():
    world = environment(examples=1)
    seen = {
        split: {world.prompt(split, index).facts["task"] for index in range(world.num_prompts(split))}
        for split in ("train", "eval")
    }
    assert len(seen["train"]) == world.num_prompts("train") > 40
    assert len(seen["eval"]) == world.num_prompts("eval") > 5
    assert not seen["train"] & seen["eval"]
    other = SoftwareRepair(isolation="best", seed=9)
    assert {other.prompt("eval", index).facts["task"] for index in range(other.num_prompts("eval"))} == seen["eval"]


def test_the_shipped_tasks_are_what_the_builder_makes_of_the_libraries(repository):
    """One library is built again: a bug that the tests no longer catch, or another set of bugs, shows."""
    (row, *tasks) = list(build.tasks_of(from_folder(repository / "workflows" / "repair_libraries" / "words")))
    shipped = [json.loads(line) for line in SHIPPED.read_text().splitlines()]
    (of_library,) = [each for each in shipped if each["library"] == "words" and "files" in each]
    assert json.loads(json.dumps(row)) == of_library
    ours = [{key: value for key, value in each.items() if key != "failing"} for each in tasks]
    theirs = [each for each in shipped if each["library"] == "words" and "kind" in each]
    assert ours == [{key: value for key, value in each.items() if key != "failing"} for each in theirs]
    assert [set(each["failing"]) for each in tasks] == [set(each["failing"]) for each in theirs]


def sdist(path, files):
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            data = text.encode()
            member = tarfile.TarInfo(f"counting-1.0/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


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
    path, out = sdist(tmp_path / "counting-1.0.tar.gz", files), tmp_path / "tasks.jsonl"
    library = from_sdist(path)
    assert (library.name, library.licence) == ("counting-1.0", "MIT")
    assert sorted(library.files) == ["src/counting/__init__.py", "src/counting/core.py"]
    build.main(["--sdist", str(path), "--out", str(out)])
    world = make_environment("repair", {"tasks": str(out), "isolation": "best"}, 0)
    prompt, _, (old, new) = solved(world)
    assert graded(world, prompt, edited(world, prompt, old, new)) == 1.0


def test_the_workflow_takes_source_packages_with_few_bugs_in_long_functions(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    said = '"""' + "What it does, at length.\n" * 20 + '    """'
    files = {
        "counting.py": "\n\n".join(f"def plus{n}(x):\n    {said}\n    return x + {n}\n" for n in range(1, 17)),
        "test_counting.py": "from counting import *\n"
        + "\n".join(f"def test_{n}():\n    assert plus{n}(2) == {n + 2}\n" for n in range(1, 17)),
    }
    workflow = importlib.import_module("software_repair")
    settings = workflow.of_packages([sdist(tmp_path / "counting-1.0.tar.gz", files)], workflow.CONFIG, ["run.seed=1"])
    config = load_config(workflow.CONFIG, overrides=settings)
    assert config.model.path == "runs/start_models/repair_counting-1.0", "a model of other tasks' words is no start"
    world = make_environment("repair", dict(config.environment.args), 0)
    assert config.evaluation.prompts == world.num_prompts("eval") < load_config(workflow.CONFIG).evaluation.prompts
    assert f"evaluation.prompts={config.evaluation.prompts}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"tasks": "/nowhere"}, "environment.args.tasks: /nowhere is not a file of repair tasks"),
        ({"show": "all"}, "environment.args.show: got 'all'; allowed are 'files', 'failure', 'function'"),
        ({"edits": "words"}, "environment.args.edits: got 'words'; allowed are 'text', 'line'"),
        ({"located": 1.0}, "environment.args.located: got 1.0"),
        ({"examples": -1}, "environment.args.examples: got -1"),
        ({"function_lines": 0}, "0 bugs fit"),
    ],
)
def test_wrong_arguments_are_named(args, message):
    with pytest.raises(ConfigError, match=message):
        environment(**args)


def test_a_torn_file_of_tasks_is_named(tmp_path):
    path = tmp_path / "torn.jsonl"
    path.write_text(SHIPPED.read_text()[:5000])
    with pytest.raises(ConfigError, match="not a file of repair tasks"):
        read_tasks(path, None)


class TestRepair(EnvironmentContract):
    turns = ('<tool_call>{"name": "run_tests", "arguments": {}}</tool_call>', "It is repaired.")

    def make_environment(self):
        return environment()
