"""Versions published beside the next step, live: the passes do not wait, weights do, and a kill in between changes no bit."""

import os
import signal
import threading

import pytest
from streamed_runs import check_taken_again, events_of, replayed_differences
from whole_run import address_of, keep_groups

from libra.driver.run_session import Session
from libra.facts import OpenWave, StepFinished, VersionPublished, WorkerLost
from libra.observe.metrics import read_metrics

pytestmark = pytest.mark.timeout(600)


def waits_for_the_passes(run, version, dies, dask_worker):
    """The publication of ``version`` begins only when the passes of its step are over; or its worker dies as they begin."""
    from libra.worker.training import publications

    replica = dask_worker.plugins[f"libra-{run}"].trainer.replica
    loss, change, publish = replica.gradient.micro_batch_loss, replica.before_change, publications.publish_checked
    begun, over = threading.Event(), threading.Event()

    def told(*arguments):
        if replica.steps_done == version:
            begun.set()
        return loss(*arguments)

    def changes(step):
        if step == version:
            over.set()
        return change(step)

    def held(store, replica, number, *more):
        if number == version:
            begun.wait()
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            over.wait()
        published = publish(store, replica, number, *more)
        assert replica.steps_done == number, "the weights changed while they were published"
        return published

    held.whole = publish
    replica.gradient.micro_batch_loss, replica.before_change, publications.publish_checked = told, changes, held


def run_held(config, client, *, dies):
    """A whole run whose version 2 is held, and the address of its trainer."""
    with Session(config, client=client) as session:
        address = address_of(client, "train-0")
        client.run(waits_for_the_passes, run="demo", version=2, dies=dies, workers=[address])
        try:
            list(session.iterations())
        finally:
            client.run(let_go)
    return session.directory, address


def let_go():
    """Other tests use this worker too."""
    from libra.worker.training import publications

    held = publications.publish_checked
    publications.publish_checked = getattr(held, "whole", held)


@pytest.mark.parametrize(("streaming", "dies"), [("on", False), ("off", True)])
def test_the_next_step_begins_while_a_version_is_published(streaming, dies, make_config, client, monkeypatch):
    keep_groups(monkeypatch)
    trainer = {"prompts": 3, "lr": 1e-3, "streaming": streaming}
    run = {"iterations": 4, "eta": 1}
    config = make_config(run=run, trainer=trainer, store={"keep_versions": 9}, checkpoint={"every": 0})
    directory, address = run_held(config, client, dies=dies)  # which would never end if step 2 waited for version 2
    events = events_of(directory)
    published = [event.version for event in events if isinstance(event, VersionPublished)]
    assert sorted(set(published)) == [0, 1, 2, 3, 4] and published == sorted(published)
    assert [event.address for event in events if isinstance(event, WorkerLost)] == [address] * dies
    if not dies:
        opened = next(n for n, e in enumerate(events) if isinstance(e, OpenWave) and e.batch == 2)
        ended = next(n for n, e in enumerate(events) if isinstance(e, StepFinished) and e.step == 2)
        whole = next(n for n, e in enumerate(events) if isinstance(e, VersionPublished) and e.version == 2)
        assert opened < whole < ended
    assert replayed_differences(events) == []
    rows = [row for row in read_metrics(directory) if "lag_max" in row]
    assert len(rows) == 4 and all(row["lag_max"] <= 1 and row["publish_wait_s"] >= 0 for row in rows)
    check_taken_again(directory, config, 4)
