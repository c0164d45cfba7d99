"""What is left of a run's directory: nothing after a start that failed, everything once the run has begun."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import Client

from libra.config import RunConfig
from libra.driver import run_directory
from libra.driver.session import Session
from libra.errors import RunDirectoryError
from libra.observe.metrics import MetricsLog
from libra.testing import FixedTurns

Config = Callable[..., RunConfig]


def test_an_error_at_the_end_of_a_run_leaves_all_that_it_committed(
    make_config: Config, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(make_config(run={"iterations": 1}), environment=FixedTurns(), client=client)
    close = MetricsLog.close

    def full(log: MetricsLog) -> None:
        close(log)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(MetricsLog, "close", full)
    with pytest.raises(OSError, match="No space"), session:
        assert len(list(session.iterations())) == 1
    assert (session.directory / "batches" / "batch-000000.json").is_file()


def test_a_start_that_fails_leaves_nothing(
    make_config: Config, client: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(*given: Any) -> None:
        raise OSError("refused")

    monkeypatch.setattr("libra.driver.session.register_run", refused)
    there = set(tmp_path.iterdir())
    config = make_config(run={"dir": str(tmp_path / "new" / "runs")})
    with pytest.raises(OSError, match="refused"):
        Session(config, environment=FixedTurns(), client=client).__enter__()
    assert set(tmp_path.iterdir()) == there


def test_of_two_starts_at_once_the_second_leaves_the_first_ones_directory_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    directory = tmp_path / "run"

    def there_in_a_moment(path: Path) -> bool:
        if path == directory:
            directory.mkdir()
            (directory / "config.resolved.yaml").write_text("of the first")
            return False
        return path.exists()

    monkeypatch.setattr(run_directory, "_there", there_in_a_moment)
    spec: Any = SimpleNamespace(directory=directory)
    with pytest.raises(RunDirectoryError, match="already has files"):
        run_directory.make_directory(spec, "of the second", {"environment": False, "score": False})
    assert (directory / "config.resolved.yaml").read_text() == "of the first"
