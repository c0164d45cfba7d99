"""A run with `trainer.streaming` auto streams its steps exactly while that is its choice, live; log, page and report say why."""

from __future__ import annotations

import json
from collections.abc import Callable
from html import escape
from typing import Any

import pytest
from click.testing import CliRunner
from distributed import Client
from msgspec.structs import replace
from streamed_runs import check_whole, events_of, replayed_differences, waves_of

from libra import events
from libra.cli.main import cli
from libra.cli.plan import lengths_of_run
from libra.config import RunConfig
from libra.driver.session import Session
from libra.errors import ConfigError
from libra.hardware.prices import load_prices
from libra.observe.report import write_report
from libra.policy import MeasuredStep
from libra.scheduler.step_clock import StepClock

PROMPTS = 6
ALIKE = {"complete_s": (9.0,) * PROMPTS}
LATE = {"complete_s": (*(1.0,) * (PROMPTS - 1), 9.0)}
TAKES_LONG = {"waves": ((1, 1.0), (PROMPTS - 1, 5.0)), "update_s": 0.5}
SEEN = {0: LATE, 1: ALIKE, 2: LATE}
"""When groups were complete, by step."""


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[MeasuredStep]:
    """Steps as they were measured; the scheduler is told that their groups were complete as `SEEN` says, on trainers that take
    long."""
    found, published = [], StepClock.published

    def told(clock: StepClock, *given: Any) -> MeasuredStep | None:
        step = published(clock, *given)
        if step is None:
            return None
        found.append(step)
        return replace(step, **(SEEN.get(step.step, LATE) | TAKES_LONG))

    monkeypatch.setattr(StepClock, "published", told)
    return found


@pytest.mark.timeout(300)
def test_steps_are_streamed_while_that_is_the_choice(
    make_config: Callable[..., RunConfig], client: Client, measured: list[MeasuredStep]
) -> None:
    config = make_config(
        run={"iterations": 4},
        trainer={"prompts": PROMPTS, "group_size": 3, "lr": 1e-4, "streaming": "auto"},
        store={"keep_versions": 9},
        checkpoint={"every": 0},
    )
    with Session(config, client=client) as session:
        iterations = session.iterations()
        rows = [next(iterations), next(iterations)]
        (page,) = session.client.run_on_scheduler(snapshots)
        rows += iterations
    directory = session.directory
    waves = {batch: waves_of(directory, batch) for batch in range(4)}
    assert len(waves[2]) == 1 and len(waves[2][0]) == PROMPTS  # after step 1, whose groups were complete at once
    assert all(len(waves[batch]) > 1 for batch in (0, 1, 3))
    assert [row["waves"] for row in rows] == [len(waves[batch]) for batch in range(4)]
    log = events_of(directory)
    (planned,) = (event for event in log if isinstance(event, events.StepsPlanned))
    assert (planned.ways, planned.way) == (("split", "streaming"), "streaming") and "not planned" in planned.reason
    chosen = [event for event in log if isinstance(event, events.StepsChosen)]
    assert [event.way for event in chosen] == ["streaming", "split", "streaming"]
    assert chosen[1].reason.startswith("as step 1 was measured: 15.5 s a step, streaming 15.5 s")
    assert [event.step for event in log if isinstance(event, events.StepMeasured)] == [0, 1, 2, 3]
    assert replayed_differences(log) == []
    check_whole(directory, 4, config)

    step = measured[0]
    trained = [event for event in log if isinstance(event, events.WaveTrained) and event.batch == 0]
    assert step.waves == tuple((event.groups, event.train_s) for event in trained)
    (gate,) = (event.t_s for event in log if isinstance(event, events.GateOpened) and event.iteration == 0)
    ready = sorted(e.t_s - gate for e in log if isinstance(e, events.GroupCommitted) and e.iteration == 0)
    assert step.complete_s == pytest.approx(ready, abs=1e-5)
    assert 0 < step.beside_s <= step.update_s and step.rollout_gpu_s > 0 and step.rollout_gpus > 0

    assert ["steps begin by streaming, of split, streaming", planned.reason] in [line[1:] for line in page["decisions"]]
    write_report([directory], directory / "report.html", load_prices())
    report = (directory / "report.html").read_text()
    assert all(f"<td>{escape(event.reason)}</td>" in report for event in (planned, *chosen))
    history = CliRunner().invoke(cli, ["replay", str(directory), "--key", "steps"], catch_exceptions=False).output
    totals, trained_frac = lengths_of_run(directory)
    assert len(totals) == 4 * PROMPTS * 3
    assert (
        trained_frac == pytest.approx(sum(row["forwarded_sequences"] for row in rows) / len(totals))
        and trained_frac < 1
    )
    given = ["plan", "libra/quickstart", "--from-run", str(directory), "--json"]
    plan = json.loads(CliRunner().invoke(cli, given, catch_exceptions=False).stdout)
    assert plan["bounds"]["longest_s"] > 0 and plan["regime"]["choice"] in ("split", "streaming", "turning")
    both = CliRunner().invoke(cli, [*given, "--trace", "turns.csv"])
    assert isinstance(both.exception, ConfigError)
    assert "steps are taken by split: as step 1 was measured" in history and "step 2 was measured: groups" in history


def snapshots(dask_scheduler: Any) -> list[dict[str, Any]]:
    """What the live page shows."""
    return dask_scheduler.plugins["libra"].snapshots()  # type: ignore[no-any-return]


snapshots.__module__ = "__main__"
