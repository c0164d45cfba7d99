"""Every command of the images is one that `make` offers, or that these tests run; test_steps.py runs the images' own steps."""

import json
import re
import shlex
from importlib import import_module

import click
import pytest
import yaml

from libra import keys
from libra.cli.main import cli
from libra.cluster.readiness import NEEDED
from libra.config import load_config

DASK_COMMANDS = {"scheduler": "distributed.cli.dask_scheduler", "worker": "distributed.cli.dask_worker"}


def dockerfile_commands(text):
    """Words of every RUN and CMD; one that joins commands by shell operators is not simple enough to be checked."""
    found = []
    for instruction, rest in re.findall(r"^(RUN|CMD|ENTRYPOINT)\s+(.*)$", text, re.MULTILINE):
        assert not re.search(r"&&|\|\||;|\\$", rest), f"{instruction} {rest}: one command each"
        found.append(json.loads(rest) if rest.startswith("[") else shlex.split(rest))
    return found


def compose_commands(compose):
    """Command of every service, and of every health check."""
    found = {}
    for name, service in compose["services"].items():
        found[name] = service["command"]
        if "healthcheck" in service:
            kind, *words = service["healthcheck"]["test"]
            assert kind == "CMD"
            found[f"{name} health"] = words
    return found


def check_command(words, makefile):
    """Raise where ``words`` is no target of the Makefile, no `libra` command and no `dask` command with these options."""
    if words[0] == "make":
        targets = [word for word in words[1:] if "=" not in word]
        variables = [word.partition("=")[0] for word in words[1:] if "=" in word]
        assert len(targets) == 1
        assert re.search(rf"^{targets[0]}:", makefile, re.MULTILINE), f"no target {targets[0]}"
        assert all(re.search(rf"^{name} \?=", makefile, re.MULTILINE) for name in variables), variables
    elif words[0] == "libra":
        parent = click.Context(cli, info_name="libra", **cli.context_settings)
        command, rest = cli.commands[words[1]], list(words[2:])
        if isinstance(command, click.Group):
            command = command.commands[rest.pop(0)]
        command.make_context(words[1], rest, parent=parent)
    else:
        assert words[0] == "dask", words
        command = import_module(DASK_COMMANDS[words[1]]).main
        context = command.make_context(words[1], list(words[2:]))
        values = (*context.params["preload_argv"], context.params.get("scheduler") or "")
        unknown = [value for value in values if value.startswith("-")]
        if unknown:
            raise click.NoSuchOption(unknown[0])


@pytest.fixture(scope="module")
def compose(repository):
    return yaml.safe_load((repository / "docker/compose.yaml").read_text())


@pytest.fixture(scope="module")
def makefile(repository):
    return (repository / "Makefile").read_text()


MADE = {"Dockerfile.cpu": ["setup"], "Dockerfile.cuda": ["setup", "setup-vllm-cuda"]}


@pytest.mark.parametrize("name", MADE)
def test_every_command_of_an_image_is_known(repository, makefile, name):
    commands = dockerfile_commands((repository / "docker" / name).read_text())
    made = [["make", target] for target in MADE[name]]
    assert [words[:2] for words in commands] == [*made, ["libra", "doctor"], ["libra", "run"]]
    for words in commands:
        check_command(words, makefile)
    load_config(repository / commands[-1][2], commands[-1][3:])


def test_every_command_of_the_cluster_is_known(compose, makefile, repository):
    commands = compose_commands(compose)
    assert set(commands) == {"key", "scheduler", "scheduler health", "rollout", "tool", "train", "driver"}
    for words in commands.values():
        check_command(words, makefile)
    load_config(repository / commands["driver"][2])


def test_workers_are_started_as_libra_says_they_are(compose):
    commands = [" ".join(words) for name, words in compose_commands(compose).items() if words[:2] == ["dask", "worker"]]
    for resource, (_, options) in NEEDED.items():
        if resource in (keys.HYBRID, keys.TEACHER):  # only some runs need them
            continue
        assert sum(options in command for command in commands) == 1, options


def test_only_loopback_sees_the_dashboard_and_nobody_the_scheduler(compose):
    published = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert published == ["127.0.0.1:8787:8787"]


def test_every_process_of_the_cluster_requires_the_key(compose, repository):
    commands = compose_commands(compose)
    docker = (repository / "docker" / "Dockerfile.cpu").read_text()
    (directory,) = re.findall(r"^WORKDIR (\S+)$", docker, re.MULTILINE)
    made = f"{directory}/{commands.pop('key')[-1]}"
    for name, service in compose["services"].items():
        assert service["environment"]["DASK_CONFIG"] == f"{made}/dask.yaml", name
        assert f"tls:{made}" in service["volumes"], name
    assert compose["services"]["key"]["profiles"] == ["key"], "`up` makes no other key beside a cluster that runs"
    for name, words in commands.items():
        assert "tls" in words if name == "scheduler" else any(word.startswith("tls://") for word in words), name
        assert not any(word.startswith("tcp://") for word in words), name
