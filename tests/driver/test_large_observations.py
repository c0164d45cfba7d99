"""A run whose tool returns megabytes: kept by reference, read back by the grader, shown by inspect, and damage named."""

from typing import Any

from click.testing import CliRunner

import libra
from libra.cli.main import cli
from libra.driver.damage import check_run
from libra.driver.session import run
from libra.store.observations import read_observation
from libra.testing import FixedTurns

SIZE = 3_000_000


class LargeReturns(FixedTurns):
    """The reward is 1 if the last characters of the first return are there, by `libra.observation`."""

    def __init__(self) -> None:
        super().__init__()
        self.tools = (libra.tool(self.echo, max_payload_chars=100),)

    async def echo(self, text: str) -> str:
        """Return much text.

        Args:
            text: Its end.
        """
        return "a" * SIZE + text

    def grade(self, episode: Any) -> float:
        returned = episode.turns[0].returns[0]
        assert len(returned.content) < 9000
        whole = libra.observation(returned)
        return float(len(whole) == SIZE + 8 and whole.endswith("yyyyyyyy"))


LargeReturns.__module__ = "__main__"  # by value to the workers, which cannot import this file


def test_large_returns_are_files_and_not_in_the_journal(make_config, client):
    summary = run(make_config(run={"iterations": 2}), environment=LargeReturns(), client=client)
    assert [row["reward"] for row in summary.iterations] == [1.0, 1.0] and not summary.iterations[0]["failures/reward"]
    files = sorted((summary.directory / "observations").glob("*/*.txt"))
    assert len(files) == 2 * 4 * 2  # iterations, members, turns with an action
    assert all(path.stat().st_size == SIZE + 8 for path in files)
    others = [path for path in summary.directory.rglob("*") if path.is_file() and "observations" not in path.parts]
    assert all(b"a" * 10_000 not in path.read_bytes() for path in others)

    reference = str(files[0].relative_to(summary.directory))
    assert read_observation(summary.directory, reference).endswith("yyyyyyyy")
    inspected = ["inspect", str(summary.directory), "--index", "0"]
    assert reference.rpartition("/")[0] in "".join(CliRunner().invoke(cli, inspected).output.split())
    assert not check_run(summary.directory).damages

    files[0].write_bytes(b"b" + files[0].read_bytes()[1:])
    (damage,) = check_run(summary.directory).damages
    assert damage.name == reference
    assert "DAMAGED" in CliRunner().invoke(cli, inspected).output
    assert CliRunner().invoke(cli, ["repair", str(summary.directory)]).exit_code == 0
    assert not check_run(summary.directory).damages and not files[0].exists()
