"""Games of gymnasium and textarena: played, moved to another process in mid-game, and graded."""

import asyncio
import importlib.util
import random

import pytest

from libra.envs.gymnasium_text import GymnasiumText
from libra.envs.replayed_game import Observed, ReplayedGame
from libra.envs.textarena_game import TextArenaGame
from libra.errors import ConfigError, EnvironmentFault
from libra.testing.parts import EnvironmentContract
from libra.types import EndReason, Episode


class Countdown(ReplayedGame):
    """Say numbers; the sum leads from the seed's number to 0."""

    system = "Count down."

    forgetful = False

    def __init__(self, *, size=None, seed=0):
        super().__init__(size=size, seed=seed)
        self.begun, self.ended = 0, 0

    def begin(self, seed):
        self.begun += 1
        left = seed % 90 + 10 + 5 * self.forgetful
        return [left], f"{left} left"

    def act(self, game, reply):
        game[0] -= int(reply)
        return Observed(f"{game[0]} left", 0.5, game[0] <= 0)

    def end(self, game):
        self.ended += 1


def test_the_game_goes_on_live_here_and_is_repeated_elsewhere():
    here, elsewhere = Countdown(), Countdown()
    prompt = here.prompt("train", 0)
    state = here.reset(prompt)
    left = int(prompt.messages[-1]["content"].split()[0])
    assert here.step("3", state) == f"{left - 3} left"
    assert here.begun == 1, "the game of the prompt goes on"
    assert elsewhere.step("4", state) == f"{left - 7} left"
    assert here.step(str(left - 7), state) is None
    assert (state["reward"], state["done"]) == (1.5, True)
    assert here.grade(Episode("t", prompt, (), EndReason.ANSWERED, state)) == 1.5
    assert here.ended == 1
    asyncio.run(elsewhere.close())
    assert elsewhere.ended == 1


def test_a_game_that_goes_otherwise_when_it_is_repeated_is_a_fault():
    here, elsewhere = Countdown(), Countdown()
    state = here.reset(here.prompt("train", 0))
    here.step("1", state)
    elsewhere.forgetful = True
    with pytest.raises(EnvironmentFault):
        elsewhere.step("1", state)


def test_a_step_that_fails_leaves_no_game_that_has_seen_it():
    world = Countdown()
    prompt = world.prompt("train", 0)
    state = world.reset(prompt)
    before = dict(state, replies=[])
    with pytest.raises(ValueError, match="x"):
        world.step("x", state)
    assert state == before
    assert world.step("1", state) is not None


LAKE = {"id": "FrozenLake-v1", "args": {"is_slippery": False}, "actions": ["left", "down", "right", "up"]}


needs_gymnasium, needs_textarena = (
    pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name}: pip install 'libra-rl[games]'")
    for name in ("gymnasium", "textarena")
)


@needs_gymnasium
def test_frozen_lake_is_read_and_won():
    world = GymnasiumText(**LAKE)
    prompt = world.prompt("train", 0)
    assert "[S]FFF" in prompt.messages[-1]["content"]
    assert "left, down, right, up" in prompt.messages[0]["content"]
    state = world.reset(prompt)
    assert world.step("I do not know", state).startswith("No action.")
    steps = ["down", "go down.", "Right!", "right", "down", "left or rather: right"]
    worlds = [world, world, world, GymnasiumText(**LAKE), world, world]
    said = [each.step(step, state) for each, step in zip(worlds, steps, strict=True)]
    assert "[F]" in said[0]
    assert said[-1] is None
    assert state["reward"] == 1.0


@needs_gymnasium
@pytest.mark.parametrize(
    "args", [{"id": "FrozenLak-v1"}, {"id": "FrozenLake-v1", "actions": ["left"]}, {"id": "Pendulum-v1"}]
)
def test_what_gymnasium_cannot_give_is_named(args):
    with pytest.raises(ConfigError, match=args["id"]):
        GymnasiumText(**args)


@needs_gymnasium
class TestFrozenLake(EnvironmentContract):
    turns = ("down", "down", "right", "right", "down", "right")

    def make_environment(self):
        return GymnasiumText(**LAKE)


@needs_textarena
def test_a_number_is_guessed_and_the_global_generator_is_left_alone():
    world, elsewhere = TextArenaGame(id="GuessTheNumber-v0"), TextArenaGame(id="GuessTheNumber-v0")
    random.seed(5)
    outside = random.getstate()
    prompt = world.prompt("train", 0)
    state, low, high = world.reset(prompt), 1, 20
    for turn in range(10):
        guess = (low + high) // 2
        said = (elsewhere if turn == 1 else world).step(f"[{guess}]", state)
        if said is None:
            break
        low, high = (guess + 1, high) if "higher" in said else (low, guess - 1)
    assert state["done"]
    assert state["reward"] == 1.0
    assert random.getstate() == outside


@needs_textarena
def test_games_that_are_not_for_one_player_are_named():
    for name in ("NoSuchGame-v0", "TicTacToe-v0"):
        with pytest.raises(ConfigError, match=name):
            TextArenaGame(id=name)


@needs_textarena
class TestTextArena(EnvironmentContract):
    turns = ("[3]", "[17]", "no number")

    def make_environment(self):
        return TextArenaGame(id="GuessTheNumber-v0")
