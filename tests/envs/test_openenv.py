"""The client of OpenEnv servers: against the real package, and against answers that a server may give."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import threading
from pathlib import Path

import pytest

pytest.importorskip("websockets", reason="pip install 'libra-rl[openenv]'")

from websockets.sync.client import connect
from websockets.sync.server import serve

from libra.envs.openenv_client import OpenEnvClient
from libra.errors import ConfigError, EnvironmentFault

VENV = Path(os.environ.get("LIBRA_AGENT_VENVS", "~/.cache/libra/agents")).expanduser() / "openenv"
SERVER = Path(__file__).parents[1] / "support" / "openenv_guess.py"


@pytest.fixture(scope="module")
def real_server():
    """Address of a server of openenv-core."""
    if not (VENV / ".installed").exists():
        pytest.skip(f"{VENV} is no virtual environment with openenv-core; make setup-agents makes it")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [str(VENV / "bin" / "python"), str(SERVER), str(port)], env={"PATH": os.environ["PATH"], "HOME": "/tmp"}
    )
    try:
        while True:
            try:
                connect(f"ws://127.0.0.1:{port}/ws", open_timeout=5).close()
                break
            except OSError:
                assert process.poll() is None, "the server ended"
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.mark.agents
def test_a_real_server_is_played_by_two_workers_in_turns(real_server):
    worlds = [OpenEnvClient(url=real_server, action="number", observation="hint") for _ in range(2)]
    prompt = worlds[0].prompt("train", 0)
    assert prompt.messages[-1]["content"] == "0 to 9"
    secret, state = prompt.facts["seed"] % 10, worlds[0].reset(prompt)
    wrong = (secret + 1) % 10
    assert worlds[0].step(json.dumps({"number": wrong}), state) in ("higher", "lower")
    assert worlds[1].step(str(wrong), state) in ("higher", "lower")
    assert "error" in worlds[0].step("no number", state)
    assert worlds[1].step(str(secret), state) is None
    assert state["reward"] == 0.75
    for world in worlds:
        asyncio.run(world.close())


@pytest.fixture
def answering():
    """Address of a server that gives the answers of a list, then ends the connection."""
    answers: list[str] = []

    def handle(websocket):
        for _ in websocket:
            if not answers:
                return
            websocket.send(answers.pop(0))

    with serve(handle, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield answers, f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()


def said(kind="observation", **data):
    return json.dumps({"type": kind, "data": data})


def test_what_a_server_says_about_an_action_is_read_and_what_breaks_is_a_fault(answering):
    answers, url = answering
    world = OpenEnvClient(url=url, action="message")
    answers += [said(observation={"a": 1}, done=False), said("error", message="too long", code="VALIDATION_ERROR")]
    state = world.reset(world.prompt("train", 0))
    assert world.step("x" * 9, state) == "error: too long"
    with pytest.raises(EnvironmentFault, match="broke off a step"):
        world.step("y", state)
    answers += [said("error", message="full", code="CAPACITY")]
    with pytest.raises(EnvironmentFault):
        world.prompt("train", 1)
    for answer in ("no json", "[1]", "null", "[" * 100_000):
        answers.append(answer)
        with pytest.raises(EnvironmentFault):
            world.prompt("train", 1)


def test_addresses_are_checked():
    with pytest.raises(ConfigError, match=r"environment\.args\.url"):
        OpenEnvClient(url="localhost:8000", action="message")
    with pytest.raises(EnvironmentFault, match="does not answer"):
        OpenEnvClient(url="http://127.0.0.1:9", action="message").prompt("train", 0)
