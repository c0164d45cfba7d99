"""A run with `trainer.streaming` auto streams its steps exactly while that is its choice, and its log says why."""

import json
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec.structs import replace
from streamed_runs import check_whole, events_of, waves_of

from libra import events
from libra.cli.main import cli
from libra.cli.plan import lengths_of_run
from libra.driver.session import Session
from libra.policy import MeasuredStep
from libra.scheduler.step_clock import StepClock

PROMPTS = 6
ALIKE = {"complete_s": (9.0,) * PROMPTS}
LATE = {"complete_s": (*(1.0,) * (PROMPTS - 1), 9.0)}
TAKES_LONG = {"waves": ((1, 1.0), (PROMPTS - 1, 5.0)), "update_s": 0.5}


@pytest.mark.timeout(300)
def test_steps_are_streamed_while_that_is_the_choice(make_config, client, monkeypatch):
    """The scheduler is told that groups of step 1 were complete at once, those of others not, on trainers that take long."""
    measured, published = [], StepClock.published

    def told(clock: StepClock, *given: Any) -> MeasuredStep | None:
        step = published(clock, *given)
        if step is None:
            return None
        measured.append(step)
        return replace(step, **((ALIKE if step.step == 1 else LATE) | TAKES_LONG))

    monkeypatch.setattr(StepClock, "published", told)
    config = make_config(
        run={"iterations": 4}, trainer={"prompts": PROMPTS, "group_size": 3, "lr": 1e-4, "streaming": "auto"},
        store={"keep_versions": 9}, checkpoint={"every": 0},
    )  # fmt: skip
    with Session(config, client=client) as session:
        rows = list(session.iterations())
    directory = session.directory
    waves = {batch: waves_of(directory, batch) for batch in range(4)}
    assert len(waves[2]) == 1 and len(waves[2][0]) == PROMPTS  # after step 1, whose groups were complete at once
    assert all(len(waves[batch]) > 1 for batch in (0, 1, 3))
    assert [row["waves"] for row in rows] == [len(waves[batch]) for batch in range(4)]
    log = events_of(directory)
    (planned,) = (event for event in log if isinstance(event, events.StepsPlanned))
    assert (planned.ways, planned.way) == (("split", "streaming"), "streaming")
    chosen = [event for event in log if isinstance(event, events.StepsChosen)]
    assert [event.way for event in chosen] == ["streaming", "split", "streaming"]
    assert [event.step for event in log if isinstance(event, events.StepMeasured)] == [0, 1, 2, 3]
    check_whole(directory, 4, config)

    step = measured[0]
    trained = [event for event in log if isinstance(event, events.WaveTrained) and event.batch == 0]
    assert step.waves == tuple((event.groups, event.train_s) for event in trained)
    (gate,) = (event.t_s for event in log if isinstance(event, events.GateOpened) and event.iteration == 0)
    ready = sorted(e.t_s - gate for e in log if isinstance(e, events.GroupCommitted) and e.iteration == 0)
    assert step.complete_s == pytest.approx(ready, abs=1e-5)
    assert 0 < step.beside_s <= step.update_s and step.rollout_gpu_s > 0 and step.rollout_gpus > 0

    totals, trained_frac = lengths_of_run(directory)
    forwarded = sum(row["forwarded_sequences"] for row in rows) / len(totals)
    assert len(totals) == 4 * PROMPTS * 3 and trained_frac == pytest.approx(forwarded) and trained_frac < 1
    given = ["plan", "libra/quickstart", "--from-run", str(directory), "--json"]
    plan = json.loads(CliRunner().invoke(cli, given, catch_exceptions=False).stdout)
    assert plan["bounds"]["longest_s"] > 0 and plan["regime"]["choice"] in ("split", "streaming", "turning")
