"""The state of a trajectory: copies, bounds, types, and what is left of a call that failed."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from libra.envs import (
    Environment,
    StateCopy,
    begin_state,
    check_state,
    decode_state,
    has_state,
    has_steps,
    run_action,
    run_step,
    tool,
)
from libra.errors import ConfigError, EnvironmentFault, ToolTimeout
from libra.testing import FixedTurns
from libra.types import Episode, Prompt, ToolCall, ToolStatus

PROMPT = Prompt("p", ({"role": "user", "content": "go"},), {"size": 3})


@dataclass
class Board:
    size: int
    moves: list[tuple[int, int]] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)


class Game(Environment):
    """A board with one tool; `step` ends after three moves."""

    max_state_bytes = 200
    step_timeout_s = 5.0

    def __init__(self):
        self.tools = (tool(self.move), tool(self.look))

    def prompt(self, split: str, index: int) -> Prompt:
        return PROMPT

    def grade(self, episode: Episode) -> float:
        return float(len(episode.state.moves))

    def reset(self, prompt: Prompt) -> Board:
        return Board(prompt.facts["size"])

    async def move(self, x: int, y: int, trajectory_state: Board) -> str:
        """Move.

        Args:
            x: Column.
            y: Row.
        """
        trajectory_state.moves.append((x, y))
        if x > trajectory_state.size:
            raise ValueError("off the board")
        if x == -1:
            trajectory_state.seen |= {str(number) for number in range(100)}
        return str(len(trajectory_state.moves))

    def look(self) -> str:
        """Look."""
        return "nothing"

    def step(self, text: str, state: Board) -> str | None:
        state.moves.append((0, len(text)))
        return None if len(state.moves) == 3 else "on" * len(text)


def act(environment, copy, **arguments):
    call = ToolCall("move", arguments)
    return asyncio.run(run_action(environment, PROMPT, call, action_id="a", state=copy))


def begun(environment):
    return StateCopy(environment, asyncio.run(begin_state(environment, PROMPT, "train-0-0-0")), "train-0-0-0")


def test_a_tool_changes_a_copy_that_stays_only_if_it_returned():
    game = check_state(Game())
    copy = begun(game)
    first = copy.data
    assert act(game, copy, x=1, y=2).content == "1"
    assert decode_state(game, copy.data) == Board(3, [(1, 2)])
    assert decode_state(game, first) == Board(3)  # what a worker that begins again finds
    assert act(game, copy, x=9, y=0).status is ToolStatus.ERROR
    assert decode_state(game, copy.data) == Board(3, [(1, 2)])
    again = StateCopy(game, first, "retried")
    assert act(game, again, x=1, y=2).content == "1"
    assert again.data == copy.data


def test_the_model_cannot_pass_a_state():
    game = Game()
    given = act(game, begun(game), x=1, y=2, trajectory_state={"size": 99})
    assert given.status is ToolStatus.MALFORMED


def test_steps_answer_and_end():
    game = Game()
    copy = begun(game)
    replies = [asyncio.run(run_step(game, "ab", copy, "t")) for _ in range(3)]
    assert replies == ["onon", "onon", None]
    assert decode_state(game, copy.data).moves == [(0, 2)] * 3
    long = asyncio.run(run_step(game, "x" * 5000, begun(game), "t"))
    assert long is not None and 8000 <= len(long) < 8100, "as a tool's return"


def test_a_state_that_grows_too_large_is_an_error_that_says_what_to_do():
    game = Game()
    copy = begun(game)
    before = copy.data
    with pytest.raises(EnvironmentFault, match="max_state_bytes"):
        act(game, copy, x=-1, y=0)
    assert copy.data == before


def failing(**methods):
    return type("Failing", (FixedTurns,), methods)()


@pytest.mark.parametrize("state", [(1, 2), {1: {2, 3}}, object(), 2**80], ids=["tuple", "set", "object", "int"])
def test_what_has_no_form_is_refused_when_the_trajectory_begins(state):
    environment = failing(reset=lambda self, prompt: state)
    with pytest.raises(EnvironmentFault):
        asyncio.run(begin_state(environment, PROMPT, "train-0-0-0"))


def test_faults_of_reset_and_step_name_the_environment():
    def broken(self: Any, *given: Any) -> Any:
        raise KeyError("level")

    async def hangs(self, text, state):
        await asyncio.Event().wait()
        return

    with pytest.raises(EnvironmentFault):
        asyncio.run(begin_state(failing(reset=broken), PROMPT, "t"))
    none = StateCopy(FixedTurns(), None, "t")
    with pytest.raises(EnvironmentFault):
        asyncio.run(run_step(failing(step=lambda self, text, state: 3), "", none, "t"))
    with pytest.raises(ToolTimeout):
        asyncio.run(run_step(failing(step=hangs, step_timeout_s=0.01), "", none, "t"))


def test_an_environment_without_a_state_has_none():
    plain = check_state(FixedTurns())
    assert not has_state(plain) and not has_steps(plain)
    assert asyncio.run(begin_state(plain, PROMPT, "t")) is None
    assert decode_state(plain, None) is None
    talks = failing(step=lambda self, text, state: None if state is None else "?")
    assert asyncio.run(run_step(talks, "", StateCopy(talks, None, "t"), "t")) is None


def test_a_tool_that_takes_a_state_needs_a_reset_and_its_type_must_be_known():
    class NoReset(FixedTurns):
        def __init__(self):
            self.tools = Game().tools

    with pytest.raises(ConfigError):
        check_state(NoReset())

    def reset(self: Any, prompt: Any) -> Any: ...

    reset.__annotations__["return"] = "Elsewhere"
    with pytest.raises(ConfigError):
        check_state(failing(reset=reset))
    with pytest.raises(ConfigError):
        check_state(failing(max_state_bytes=0))
