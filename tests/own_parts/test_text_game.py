"""A text game whose state travels with its trajectories: over several workers, and through a call that ran twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zarr
from click.testing import CliRunner
from distributed import Client
from text_game import GuessDigit

from libra.config import RunConfig
from libra.driver.session import run
from libra.envs import Environment, decode_state, tool
from libra.errors import EnvironmentFault
from libra.store.trajectory_journal import Journal
from libra.testing.parts import EnvironmentContract
from libra.types import Episode, Prompt, ToolCall


class TestGuessDigit(EnvironmentContract):
    turns = ("5", "no digit", "7 or 8")

    def make_environment(self) -> Environment:
        return GuessDigit()


class Counting(Environment):
    """Every turn calls ``count`` twice and is answered by `step` when it does not; the grade is the number of calls."""

    def __init__(self) -> None:
        self.tools = (tool(self.count),)

    def prompt(self, split: str, index: int) -> Prompt:
        return Prompt(f"{split}-{index}", ({"role": "user", "content": "count"},), {"start": 10 * index})

    def reset(self, prompt: Prompt) -> dict[str, Any]:
        return {"count": prompt.facts["start"], "steps": 0}

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        return (ToolCall("count", {"by": 1}), ToolCall("count", {"by": 2})) if len(text) % 2 else ()

    def count(self, by: int, trajectory_state: dict[str, Any]) -> str:
        """Count.

        Args:
            by: How far.
        """
        trajectory_state["count"] += by
        return str(trajectory_state["count"])

    def step(self, text: str, state: dict[str, Any]) -> str | None:
        state["steps"] += 1
        return f"{state['count']}?"

    def grade(self, episode: Episode) -> float:
        assert episode.state["count"] == episode.prompt.facts["start"] + 3 * sum(
            bool(turn.calls) and bool(turn.returns) for turn in episode.turns
        )
        assert episode.state["steps"] == sum(not turn.calls for turn in episode.turns)
        said = [given.content for turn in episode.turns for given in turn.returns if given.tool == "count"]
        assert said == sorted(said, key=int)
        return float(episode.state["count"])


def test_a_game_is_played_to_its_end_and_its_state_is_in_the_records(
    make_config: Callable[..., RunConfig], client: Client
) -> None:
    from libra.cli.main import cli

    config = make_config(
        rollout={"max_new_tokens": 2, "max_turns": 4}, store={"keep_journals": True}, run={"iterations": 1}
    )
    game = GuessDigit()
    summary = run(config, environment=game, client=client)
    columns = zarr.open_group(summary.directory / "trajectories.zarr", mode="r")["trajectory"]
    assert set(columns["failure"][:]) <= {"none", "policy"}
    journal = Journal(summary.directory / "journal")
    states = [
        decode_state(game, [record for record in journal.read(name) if "state" in record][-1]["state"])
        for name in sorted(journal.trajectories())
    ]
    assert [len(state["guesses"]) for state in states] == columns["num_turns"][:].tolist()
    won = [state["guesses"][-1] == state["secret"] for state in states]
    assert (columns["reward"][:] > 0).tolist() == won
    ends = columns["end_reason"][:]
    assert all(end == ("answered" if right else "max_turns") for end, right in zip(ends, won, strict=True))
    replayed = CliRunner().invoke(cli, ["replay", str(summary.directory)])
    assert "Every decision was reproduced." in replayed.output, replayed.output


def test_tools_and_steps_on_other_workers_see_the_state_of_the_turn_before(
    make_config: Callable[..., RunConfig], client: Client
) -> None:
    summary = run(make_config(run={"iterations": 1, "name": "counting"}), environment=Counting(), client=client)
    group = zarr.open_group(summary.directory / "trajectories.zarr", mode="r")
    assert set(group["trajectory"]["failure"][:]) == {"policy"}, group["trajectory"]["failure_detail"][
        :
    ]  # too many turns
    assert {"count", "step"} <= set(group["turn"]["tool"][:])
    assert np.isfinite(group["trajectory"]["reward"][:]).all()


@pytest.mark.parametrize("fault", ["mutates", "endless", "live"])
def test_an_environment_with_a_fault_fails_its_contract(fault: str) -> None:
    class Faulty(GuessDigit):
        made = 0

        def reset(self, prompt: Prompt) -> Any:
            type(self).made += 1
            state = super().reset(prompt)
            if fault == "mutates":
                state["number"] = self.made
            return {"file": (1, 2)} if fault == "live" else state

        def step(self, text: str, state: Any) -> str | None:
            if fault == "endless":
                state["guesses"] += [text] * 100_000
            return super().step(text, state)

    class Contract(EnvironmentContract):
        turns = ("5",)

        def make_environment(self) -> Environment:
            return Faulty()

    contract = Contract()
    begins, graded = (
        contract.test_a_state_begins_alike_and_survives_its_record,
        contract.test_an_episode_of_given_turns_is_graded,
    )
    with pytest.raises(AssertionError if fault == "mutates" else EnvironmentFault):
        (graded if fault == "endless" else begins)()
