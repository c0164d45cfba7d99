"""A run whose tool returns megabytes: kept by reference, read back by the grader, shown by inspect, and damage named."""

from __future__ import annotations

from collections.abc import Callable

from click.testing import CliRunner
from distributed import Client
from large_returns import SIZE

from libra.cli.main import cli
from libra.config import RunConfig
from libra.driver.damage import check_run
from libra.driver.session import run
from libra.store.observations import read_observation


def test_large_returns_are_files_and_not_in_the_journal(make_config: Callable[..., RunConfig], client: Client) -> None:
    config = make_config(environment={"name": "large_returns:LargeReturns"}, run={"iterations": 2})
    summary = run(config, client=client)
    assert [row["reward"] for row in summary.iterations] == [1.0, 1.0] and not summary.iterations[0]["failures/reward"]
    files = sorted((summary.directory / "observations").glob("*/*.txt"))
    assert len(files) == 2 * 4 * 2  # iterations, members, turns with an action
    assert all(path.stat().st_size == SIZE + 8 for path in files)
    others = [path for path in summary.directory.rglob("*") if path.is_file() and "observations" not in path.parts]
    assert all(b"a" * 10_000 not in path.read_bytes() for path in others)

    reference = str(files[0].relative_to(summary.directory))
    assert read_observation(summary.directory, reference).endswith("yyyyyyyy")
    shown = CliRunner().invoke(cli, ["inspect", str(summary.directory), "--index", "0"]).output
    assert "returned3,000,008bytes:observations/train-0-0-0/" in "".join(shown.split())
    assert not check_run(summary.directory).damages

    files[0].write_bytes(b"b" + files[0].read_bytes()[1:])
    (damage,) = check_run(summary.directory).damages
    assert damage.name == reference and "torn or altered" in damage.what
    assert "DAMAGED" in CliRunner().invoke(cli, ["inspect", str(summary.directory), "--index", "0"]).output
    assert "set aside" in CliRunner().invoke(cli, ["repair", str(summary.directory)]).output
    assert not check_run(summary.directory).damages and not files[0].exists()
