"""The client of OpenEnv servers, against answers that a server may give."""

import asyncio
import json
import threading

import pytest

pytest.importorskip("websockets", reason="pip install -e '.[openenv]'")

from websockets.sync.server import serve

from examples.games.openenv import OpenEnvClient
from libra.errors import ConfigError, EnvironmentFault


@pytest.fixture
def answering():
    """Address of a server that gives the answers of a list, then ends the connection."""
    answers = []

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


def test_a_game_goes_on_on_another_worker_that_repeats_it_and_ends_with_its_reward(answering):
    answers, url = answering
    here, elsewhere = (OpenEnvClient(url=url, action="number", observation="hint") for _ in range(2))
    begin, wrong = said(observation={"hint": "0 to 9"}, done=False), said(observation={"hint": "higher"}, done=False)
    answers += [begin, wrong]
    prompt = here.prompt("train", 0)
    assert prompt.messages[-1]["content"] == "0 to 9"
    state = here.reset(prompt)
    assert here.step("3", state) == "higher"
    answers += [begin, wrong, said(observation={"hint": "right"}, done=True, reward=0.75)]
    assert elsewhere.step("7", state) is None
    assert (state["done"], state["reward"]) == (True, 0.75)
    for world in (here, elsewhere):
        asyncio.run(world.close())


def test_addresses_are_checked():
    with pytest.raises(ConfigError, match=r"environment\.args\.url"):
        OpenEnvClient(url="localhost:8000", action="message")
    with pytest.raises(EnvironmentFault, match="does not answer"):
        OpenEnvClient(url="http://127.0.0.1:9", action="message").prompt("train", 0)
