"""Versions published beside the next step, live: the passes do not wait, weights do, and a kill in between changes no bit."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
from distributed import Client
from live_runs import address_of, keep_groups
from streamed_runs import check_taken_again, events_of, replayed_differences

from libra.config import RunConfig
from libra.driver.session import Session, run
from libra.events import StepFinished, VersionPublished, WaveOpened, WorkerLost
from libra.observe.metrics import read_metrics
from libra.store.batch_membership import batch_path
from libra.weights import VersionCheck, WeightStore

pytestmark = pytest.mark.timeout(600)

Config = Callable[..., RunConfig]


@pytest.fixture(autouse=True)
def _kept(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_groups(monkeypatch)


def config_of(make_config: Config, streaming: str, **more: Any) -> RunConfig:
    trainer = {"prompts": 3, "group_size": 2, "lr": 1e-3, "streaming": streaming}
    return make_config(
        **{
            "run": {"iterations": 4, "eta": 1},
            "trainer": trainer,
            "store": {"keep_versions": 9},
            "checkpoint": {"every": 0},
        }
        | more
    )


def waits_for_the_passes(run: str, version: int, dies: bool, dask_worker: Any) -> None:
    """The publication of ``version`` begins only when the passes of its step are over; or its worker dies as they begin."""
    from libra.worker import publications

    replica = dask_worker.plugins[f"libra-{run}"].trainer.replica
    loss, change, publish = replica.gradient.micro_batch_loss, replica.before_change, publications.publish_checked
    begun, over = threading.Event(), threading.Event()

    def told(*arguments: Any) -> Any:
        if replica.steps_done == version:
            begun.set()
        return loss(*arguments)

    def changes(step: int) -> float:
        if step == version:
            over.set()
        return change(step)

    def held(store: Any, replica: Any, number: int, *more: Any) -> Any:
        if number == version:
            begun.wait()
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            over.wait()
        published = publish(store, replica, number, *more)
        assert replica.steps_done == number, "the weights changed while they were published"
        return published

    replica.gradient.micro_batch_loss, replica.before_change, publications.publish_checked = told, changes, held


def run_held(config: RunConfig, client: Client, *, dies: bool) -> tuple[Any, str]:
    """A whole run whose version 2 is held, and the address of its trainer."""
    with Session(config, client=client) as session:
        address = address_of(client, "train-0")
        client.run(waits_for_the_passes, run="demo", version=2, dies=dies, workers=[address])
        try:
            list(session.iterations())
        finally:
            client.run(let_go)
    return session.directory, address


def let_go() -> None:
    """Other tests use this worker too."""
    from libra.worker import publications
    from libra.worker.weight_publishing import publish_checked

    publications.publish_checked = publish_checked


def test_the_next_step_begins_while_a_version_is_published_and_changes_no_weight_before_it_is(
    make_config: Config, client: Client
) -> None:
    config = config_of(make_config, "on")
    directory, _ = run_held(config, client, dies=False)  # which would never end if step 2 waited for version 2
    events = events_of(directory)
    kinds = (WaveOpened, StepFinished, VersionPublished)
    order = [each for each in events if isinstance(each, kinds)]
    opened = next(i for i, each in enumerate(order) if isinstance(each, WaveOpened) and each.batch == 2)
    published = next(i for i, each in enumerate(order) if isinstance(each, VersionPublished) and each.version == 2)
    ended = next(i for i, each in enumerate(order) if isinstance(each, StepFinished) and each.step == 2)
    assert opened < published < ended
    assert [each.version for each in order if isinstance(each, VersionPublished)] == [0, 1, 2, 3, 4]
    assert replayed_differences(events) == []
    rows = [row for row in read_metrics(directory) if "lag_max" in row]
    assert len(rows) == 4 and all(row["lag_max"] <= 1 and row["publish_wait_s"] >= 0 for row in rows)
    check_taken_again(directory, config, 4)


def test_a_trainer_that_is_killed_while_it_publishes_beside_a_step_comes_to_the_same_bits(
    make_config: Config, client: Client
) -> None:
    config = config_of(make_config, "off")
    directory, address = run_held(config, client, dies=True)
    events = events_of(directory)
    assert [event.address for event in events if isinstance(event, WorkerLost)] == [address]
    published = [event.version for event in events if isinstance(event, VersionPublished)]
    assert sorted(set(published)) == [0, 1, 2, 3, 4] and published == sorted(published)
    assert replayed_differences(events) == []
    check_taken_again(directory, config, 4)


def test_a_run_that_was_killed_then_publishes_what_is_missing_before_it_goes_on(
    make_config: Config, client: Client
) -> None:
    """The directory as a kill leaves it when version 3 is half written and batch 3 committed: its step was under way."""
    directory = run(config_of(make_config, "off"), client=client).directory
    store = WeightStore(directory / "weights")
    was = {version: store.get(version).digest for version in (3, 4)}
    for version in was:
        shutil.rmtree(store.directory(version))
    shutil.rmtree(directory / "checkpoints", ignore_errors=True)
    assert batch_path(directory / "batches", 3).exists()
    config = config_of(make_config, "off", run={"iterations": 5, "eta": 1})
    run(config, client=client, resume=True)
    assert {version: store.get(version).digest for version in (3, 4)} == was
    for version in (3, 4, 5):
        check = VersionCheck.from_json(store.check_text(version) or "", version)
        assert check.previous_logp is not None and check.first_logp is not None
    published = [event.version for event in events_of(directory) if isinstance(event, VersionPublished)]
    assert published == [0, 1, 2, 3, 4, 3, 4, 5]
    check_taken_again(directory, config, 5)
