"""Two training workers in one group: the run of one, and a rank that is killed in the midst of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from libra.config import RunConfig
from libra.graph.driver import Session
from libra.store.event_log import read_events

Config = Callable[..., RunConfig]
TWO = {"train_workers": 2}
SAME = ("loss", "grad_norm", "reward", "action_tokens", "sequences", "lr", "entropy", "ratio_mean")


def events(session: Session, name: str) -> list[dict[str, Any]]:
    return [event for event in read_events(session.directory / "events.jsonl").events if event["name"] == name]


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_two_training_workers_take_the_steps_of_one(make_config: Config, layout: str) -> None:
    runs = {}
    for name, cluster in (("one", {}), ("two", TWO)):
        trainer = {"layout": layout, "normalize_std": False}
        with Session(make_config(run={"name": name}, cluster=cluster, trainer=trainer)) as session:
            runs[name] = list(session.iterations())
    assert [row["replicas"] for row in runs["two"]] == [2, 2]
    for one, two in zip(runs["one"], runs["two"], strict=True):
        for name in SAME:
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
    assert events(session, "gang_formed")[0]["members"] == ("train-0", "train-1")
    assert not events(session, "gang_lost")
