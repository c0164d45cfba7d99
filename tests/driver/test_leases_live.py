"""Actions on leased cores: real workers and processes, from the declaration of a tool to the replay of its log."""

from __future__ import annotations

import os
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from libra import events
from libra.cluster.local import local_cluster
from libra.config import RunConfig, config_from_dict
from libra.driver.session import Session
from libra.envs import tool
from libra.envs.scripted import ScriptedTurn
from libra.errors import ConfigError
from libra.observe.metrics import read_metrics
from libra.orderings import blank
from libra.policy.log_replay import replay
from libra.store.event_log import EventReader
from libra.store.trajectories import TrajectoryStore
from libra.testing import FixedTurns
from libra.types import Prompt, ToolCall, TrajectoryId

MIB = 2**20
TURNS = 3
LONG_S = 4.0
"""Beginning again costs some seconds; the long action must save more than twice as many, on a slow machine, too."""


class LeasedTurns(FixedTurns):
    """Every turn calls ``work`` on one core; the first call of the first sample of a group takes more memory than it may."""

    def __init__(self) -> None:
        super().__init__()
        self.tools = (tool(work, cores=1, memory_gib=0.25, quota="search"),)

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        return (ToolCall("work", {"text": "y"}),)


class Greedy(LeasedTurns):
    """Its calls need more cores than a machine has."""

    def __init__(self) -> None:
        super().__init__()
        self.tools = (tool(work, cores=4096),)


class LongAndShort(FixedTurns):
    """The first sample of a group has two long actions, which may be stopped; the second one many short ones."""

    def __init__(self, notes: str) -> None:
        super().__init__()
        self.notes = Path(notes)
        self.tools = (
            tool(self.slow, cores=1, revocable=True, timeout_s=60.0),
            tool(self.quick, cores=1, timeout_s=60.0),
        )

    def scripted(self, tid: TrajectoryId, prompt: Prompt, turn: int) -> ScriptedTurn:
        name, count = ("quick", 5) if tid.sample else ("slow", 2)
        return ScriptedTurn(4, (ToolCall(name, {}),) if turn < count else ())

    def slow(self) -> str:
        """Take long."""
        self._note("begin")
        threading.Event().wait(LONG_S)
        self._note("end")
        return "slow"

    def quick(self) -> str:
        """Take no time."""
        return "quick"

    def _note(self, what: str) -> None:
        with self.notes.open("a") as file:
            file.write(f"{what} {os.getpid()}\n")


def work(text: str, action_id: str) -> str:
    """Do something.

    Args:
        text: What to do.
    """
    trajectory, turn, _ = action_id.split("/")
    if trajectory == "train-0-0-1" and turn == "1":  # not its second attempt, whose name ends in .1
        len(bytearray(600 * MIB))
    return f"{sorted(os.sched_getaffinity(0))} {os.environ['OMP_NUM_THREADS']} {os.getpid()}"


def config(model: Path, directory: Path, **environment: Any) -> RunConfig:
    return config_from_dict(
        {
            "run": {"name": "leased", "dir": str(directory), "iterations": 2},
            "model": {"path": str(model)},
            "environment": {"name": f"{__name__}:LeasedTurns", "quotas": {"search": "20/s"}} | environment,
            "rollout": {
                "slots": 8,
                "max_context_tokens": 512,
                "max_turns": TURNS,
                "max_new_tokens": 8,
                "ignore_eos": True,
            },
            "trainer": {"prompts": 2, "group_size": 4, "lr": 0.0, "micro_batch_tokens": 4096, "max_row_tokens": 512},
            "evaluation": {"prompts": 0},
            "checkpoint": {"every": 0},
            "observe": {"progress": False, "tensorboard": False},
            "cluster": {"dashboard_port": 0, "threads": 1, "tool_cores": 1},
        }
    )


@pytest.fixture(scope="module")
def finished(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[events.Event]]:
    """Directory and events of a run, made once."""
    made = config(random_model, tmp_path_factory.mktemp("runs"))
    with local_cluster(made) as cluster, Client(cluster) as client, Session(made, client=client) as session:
        assert [values["iteration"] for values in session.iterations()] == [0, 1]
    return session.directory, [events.from_dict(line) for _, line in EventReader(session.directory / "events.jsonl")]


def test_an_action_has_a_core_to_itself_and_its_process(finished: tuple[Path, list[events.Event]]) -> None:
    directory, log = finished
    with TrajectoryStore.open(directory / "trajectories.zarr") as store:
        turns = store.columns("turn")
    granted = [event for event in log if isinstance(event, events.LeaseGranted)]
    ended = [event for event in log if isinstance(event, events.ActionFinished)]
    assert len(granted) == len(ended) >= 2 * 8 * (TURNS - 1)
    assert {event.cores for event in granted} == {1}
    held = 0
    for event in log:
        held += isinstance(event, events.LeaseGranted)
        held -= isinstance(event, events.QuantumFinished) and event.phase == "TOOL"
        assert 0 <= held <= 1  # one tool worker with one core
    assert set(turns["tool"]) >= {"work"}


def test_too_much_memory_is_a_failure_of_class_tool_and_of_one_action_only(
    finished: tuple[Path, list[events.Event]],
) -> None:
    _, log = finished
    failures = [e for e in log if isinstance(e, events.FailureClassified) and e.failure != "policy"]  # its last turn
    assert [(event.failure, "took more than its 0.25 GiB" in event.detail) for event in failures] == [("tool", True)]
    assert sum(event.killed for event in log if isinstance(event, events.ActionFinished)) == 1


def test_the_quota_holds_and_replay_repeats_every_decision(finished: tuple[Path, list[events.Event]]) -> None:
    directory, log = finished
    at_s = [event.at_s for event in log if isinstance(event, events.LeaseGranted)]
    assert at_s == sorted(at_s)
    assert all(later >= earlier + 1.0 for earlier, later in zip(at_s, at_s[20:], strict=False))
    assert all(earlier <= later for earlier, later in pairwise(at_s))
    lines = [(line, events.from_dict(values)) for line, values in EventReader(directory / "events.jsonl")]
    told = list(replay(lines, blank))
    assert [each.difference for each in told if each.difference] == []
    # a replay that did not follow the leases would not know of these
    wrong = [(n, e) if not isinstance(e, events.ToolCapacity) else (n, _without_cores(e)) for n, e in lines]
    assert any(each.difference for each in replay(wrong, blank))


def test_a_long_action_is_stopped_for_short_ones_and_begun_again(random_model: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    environment = {"name": f"{__name__}:LongAndShort", "args": {"notes": str(notes)}, "quotas": {}}
    made = config(random_model, tmp_path, **environment)
    made = made.model_copy(
        update={
            "run": made.run.model_copy(update={"iterations": 1}),
            "trainer": made.trainer.model_copy(update={"prompts": 1, "group_size": 2}),
            "rollout": made.rollout.model_copy(update={"max_turns": 8}),
        }
    )
    with local_cluster(made) as cluster, Client(cluster) as client, Session(made, client=client) as session:
        assert [values["iteration"] for values in session.iterations()] == [0]
    (metrics,) = read_metrics(session.directory)
    lines = [(n, events.from_dict(values)) for n, values in EventReader(session.directory / "events.jsonl")]
    revoked = [event for _, event in lines if isinstance(event, events.LeaseRevoked)]
    given_back = [event for _, event in lines if isinstance(event, events.QuantumGivenBack)]
    assert revoked and metrics["actions_revoked"] == len(revoked) == len(given_back)
    assert {event.ran_s < LONG_S for event in revoked} == {True}
    noted = [line.split() for line in notes.read_text().splitlines()]
    begun, ended = ({pid for what, pid in noted if what == word} for word in ("begin", "end"))
    # whoever was stopped before its process had begun noted nothing
    assert len(ended) == 2 and ended <= begun and len(begun) <= 2 + len(revoked)
    assert not [event for _, event in lines if isinstance(event, events.FailureClassified | events.QuantumLost)]
    with TrajectoryStore.open(session.directory / "trajectories.zarr") as store:
        turns = store.columns("turn")
    assert [sorted(turns["tool"]).count(name) for name in ("slow", "quick")] == [2, 5]
    assert [told.difference for told in replay(lines, blank) if told.difference] == []
    other = events.from_dict(events.to_dict(revoked[0]) | {"reason": "at will"})
    wrong = [(n, other if event is revoked[0] else event) for n, event in lines]
    assert any("was revoked on tool-0 (at will); now that of" in told.difference for told in replay(wrong, blank))


def _without_cores(event: events.ToolCapacity) -> events.ToolCapacity:
    return events.ToolCapacity(event.run, event.t_s, event.worker, 0, event.memory_bytes, event.gpus)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"name": f"{__name__}:Greedy"}, "a call takes 4096 cores, and the largest tool worker, tool-0, has 1 core"),
        ({"quotas": {}}, "quota 'search' is not configured; type environment.quotas.search=10/s"),
        ({"quotas": {"search": "often"}}, "quota 'search': got 'often'; type a rate such as 10/s"),
    ],
)
def test_what_can_never_run_is_refused_before_anything_does(
    random_model: Path, tmp_path: Path, environment: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message), Session(config(random_model, tmp_path, **environment)):
        pass
    assert not (tmp_path / "leased").exists()
