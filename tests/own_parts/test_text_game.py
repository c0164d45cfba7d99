"""A text game whose state travels with its trajectories: over several workers, and through a call that ran twice."""

import zarr
from click.testing import CliRunner
from text_game import GuessDigit

from libra.driver.run_session import run
from libra.envs import decode_state
from libra.store.trajectory_journal import Journal
from libra.testing.parts import EnvironmentContract


class TestGuessDigit(EnvironmentContract):
    turns = ("5", "no digit", "7 or 8")

    def make_environment(self):
        return GuessDigit()


def test_a_game_is_played_to_its_end_and_its_state_is_in_the_records(make_config, client):
    from libra.cli.main import cli

    rollout, store = {"max_new_tokens": 2, "max_turns": 4}, {"keep_journals": True}
    config = make_config(rollout=rollout, store=store, run={"iterations": 1})
    game = GuessDigit()
    summary = run(config, environment=game, client=client)
    columns = zarr.open_group(summary.directory / "trajectories.zarr", mode="r")["trajectory"]
    assert set(columns["failure"][:]) <= {"none", "policy"}
    journal = Journal(summary.directory / "journal")
    states = [
        decode_state(game, [record for record in journal.read(name) if record.state is not None][-1].state)
        for name in sorted(journal.trajectories())
    ]
    assert [len(state["guesses"]) for state in states] == columns["num_turns"][:].tolist()
    won = [state["guesses"][-1] == state["secret"] for state in states]
    assert (columns["reward"][:] > 0).tolist() == won
    ends = columns["end_reason"][:]
    assert all(end == ("answered" if right else "max_turns") for end, right in zip(ends, won, strict=True))
    replayed = CliRunner().invoke(cli, ["replay", str(summary.directory)])
    assert "Every decision was reproduced." in replayed.output, replayed.output
