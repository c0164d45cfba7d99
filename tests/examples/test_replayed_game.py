"""Games that go on where they are, or are repeated in another process."""

import asyncio

import pytest

from examples.games.replayed_game import Observed, ReplayedGame
from libra.errors import EnvironmentFault
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
