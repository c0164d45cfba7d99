"""What the start model of ``repair`` is shown: copies that are copies, and no held-out bug nor what repairs it."""

from __future__ import annotations

import importlib
import json

import pytest

from libra.config import load_config
from libra.envs.repair.bugs import bugs_of
from libra.types import ToolCall

ELSEWHERE = (
    "def clipped(value, low):\n    if value < low:\n        return low\n    return value\n",
    'def joined(names):\n    return "\\t".join(names)\n',
    "def last(rows):\n    return rows[len(rows) - 1]\n",
)


pytestmark = [pytest.mark.live, pytest.mark.usefixtures("sandbox_level")]


@pytest.fixture
def shown(monkeypatch):
    """The module, with three functions for the standard library's thousands."""
    module = importlib.import_module("repair_demonstrations")
    code = [module.Code("elsewhere", "f", text, bugs_of(text)) for text in ELSEWHERE]
    monkeypatch.setattr(module, "functions", lambda: code)
    return module


@pytest.fixture
def args():
    return dict(load_config(importlib.import_module("software_repair").CONFIG).environment.args)


def called(text):
    """(line, old, new) of each call."""
    bodies = [part.split("\n</tool_call>")[0] for part in text.split("<tool_call>\n")[1:]]
    return [tuple(json.loads(body)["arguments"].values()) for body in bodies]


def made(lines, edit):
    """The lines after an edit, whose old piece has to be in its line."""
    line, old, new = edit
    assert old in lines[line]
    return {**lines, line: lines[line].replace(old, new, 1)}


def by_number(listing):
    return {int(number): text for number, text in (each.split("|", 1) for each in listing.splitlines())}


def test_a_piece_of_every_line_of_a_function_is_copied_after_its_number(shown, args):
    copier = shown.Copier(0, args)
    for index in range(10):
        user, assistant = copier.conversation(index)
        lines, copies = by_number(user["content"]), called(assistant["content"])
        assert sorted(line for line, _, _ in copies) == sorted(lines)
        assert all(made(lines, copy) == lines for copy in copies)


def test_no_held_out_bug_is_shown_and_no_training_bug_is_repaired_but_by_chance(shown, args):
    repairer = shown.Repairer(1, shown.REPAIR_HABITS, args)
    world = repairer.repair
    held_out = {world.prompt("eval", index).messages[-1]["content"] for index in range(world.num_prompts("eval"))}
    training = {}
    for index in range(world.num_prompts("train")):
        prompt = world.prompt("train", index)
        training[prompt.messages[-1]["content"]] = world.tasks[prompt.facts["task"]]
    edits, repaired = 0, 0
    for index in range(300):
        _, user, *rest = repairer.conversation(index)
        assert user["content"] not in held_out
        task = training.get(user["content"])
        if task is None:
            assert "Library elsewhere: " in user["content"]
            continue
        broken = dict(enumerate(task.files[task.path].splitlines(), 1))
        sound = dict(enumerate(task.library.files[task.path].splitlines(), 1))
        for edit in called("".join(message["content"] for message in rest if '"arguments": {' in message["content"])):
            edits += 1
            repaired += made(broken, edit) == sound
    assert edits > 100
    assert 0 < repaired / edits < 0.25, "a function has room for many changes"


def test_every_seeded_bug_is_among_what_a_guess_could_undo_and_its_edit_undoes_it(shown, args):
    for task in shown.made_for_lines(args, 0).tasks:
        broken, sound = (files[task.path] for files in (task.files, task.library.files))
        (undo,) = [guess for guess in shown.guesses(broken) if guess.put_in(broken) == sound]
        after = made(dict(enumerate(broken.splitlines(), 1)), shown.edit_of(broken, undo))
        assert list(after.values()) == sound.splitlines()


def test_a_reply_is_a_copy_if_its_piece_is_in_its_line(shown, args):
    kind_of = importlib.import_module("copy_rate").kind_of
    world = shown.made_for_lines(args, 0)
    task = next(each for each in world.tasks if each.bug.kind == "comparison")
    right, wrong = task.line(task.library.files), task.line(task.files)

    def kind(line, old, new):
        return kind_of(task, [ToolCall("edit_line", {"line": line, "old": old, "new": new})])

    assert kind(task.bug.line, wrong, right) == "repair"
    assert kind(task.bug.line, wrong[4:6], "") == "copy"
    assert kind(task.bug.line + 1, wrong, right) == kind(10_000, "", "") == "no copy"
    assert kind_of(task, []) == "no edit"
