"""Commands, options and settings that the pages name exist. Nothing is run."""

import re
import shlex
from pathlib import Path

import click
import pytest

from libra.cli.main import cli
from libra.config import RunConfig

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def commands(text):
    """Words of each ``libra`` command in the shell blocks of a page, comments left out."""
    lines = [line for kind, block in BLOCK.findall(text) if kind in ("", "sh", "bash") for line in block.splitlines()]
    parts = [part.strip() for line in lines for part in re.split(r"&&|;", re.split(r"\s#", line)[0])]
    return [shlex.split(part)[1:] for part in parts if part.startswith("libra ")]


def unknown_setting(section, key):
    field = RunConfig.model_fields.get(section)
    return field is None or key not in getattr(field.annotation, "model_fields", {})


def faults(words):
    """What a command line names that does not exist."""
    command = cli
    rest = iter(words)
    while isinstance(command, click.Group):
        name = next(rest, "--help")
        if name.startswith("-"):
            return []
        if name not in command.commands:
            return [name]
        command = command.commands[name]
    options = {option for each in command.params for option in (*each.opts, *each.secondary_opts)} | {"--help", "-h"}
    found = []
    for word in rest:
        setting = re.match(r"([a-z_]+)\.([a-z_0-9]+)=", word)
        unknown = word.startswith("-") and word.split("=")[0] not in options
        if unknown or (setting and unknown_setting(*setting.groups())):
            found.append(word)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_settings_on_a_page_exist(page):
    text = (ROOT / page).read_text()
    found = {" ".join(words): wrong for words in commands(text) if (wrong := faults(words))}
    code = "\n".join(block for kind, block in BLOCK.findall(text) if kind == "python")
    settings = re.findall(r"\b([a-z]+)__([a-z_]+)=", code)
    wrong = [f"{section}__{key}" for section, key in settings if unknown_setting(section, key)]
    assert not found and not wrong, (found, wrong)


@pytest.mark.parametrize("page", PAGES)
def test_code_that_a_page_shows_of_a_workflow_is_in_it(page):
    for kind, block in BLOCK.findall((ROOT / page).read_text()):
        name, _, shown = block.partition("\n")
        if kind == "python" and name.startswith("# workflows/"):
            text = (ROOT / name[2:]).read_text()
            assert not [part for part in shown.strip("\n").split("\n\n\n") if part not in text], (page, name)


def test_what_does_not_exist_is_found():
    text = "```sh\nlibra run x.yaml trainer.lrr=3 --fast && libra ruin  # libra none\n```\n`libra x`\n```python\nlibra y\n```\n"
    assert [faults(words) for words in commands(text)] == [["trainer.lrr=3", "--fast"], ["ruin"]]
    assert len(commands((ROOT / "docs/quick_start.md").read_text())) > 5
