"""Actions on leased cores, live: their limits and quotas, and tool workers that come and go."""

from itertools import pairwise

import pytest
from distributed import Client, Scheduler
from msgspec.structs import replace

from libra import facts
from libra.cluster import local
from libra.cluster.local import local_cluster
from libra.driver.run_session import Session
from libra.envs import session as session_of
from libra.envs import tool
from libra.errors import ConfigError
from libra.policy import tool_fleet
from libra.policy.log_replay import replay
from libra.store.event_log import EventReader
from libra.testing import FixedTurns
from libra.types import ToolCall
from libra.user_orderings import ordering_of

MIB = 2**20
Log = list[tuple[int, facts.Fact]]


class Leased(FixedTurns):
    """Every turn calls ``work`` on one core; one call takes more memory than it may."""

    def __init__(self, cores: int = 1) -> None:
        super().__init__()
        self.tools = (tool(work, cores=cores, memory_gib=0.25, quota="search"),)

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        return (ToolCall("work", {"text": "y"}),)


class WithSession(FixedTurns):
    session = session_of(dict)


def work(text: str, action_id: str) -> str:
    """Do something.

    Args:
        text: What to do.
    """
    trajectory, turn, _ = action_id.split("/")
    if trajectory == "train-0-0-1" and turn == "1":  # not its second attempt, whose name ends in .1
        len(bytearray(600 * MIB))
    return "done"


def log_of(run: Session) -> Log:
    return [(line, facts.from_dict(values).fact) for line, values in EventReader(run.directory / "events.jsonl")]


def differences(log: Log, changed: dict[int, facts.Fact] | None = None) -> list[str]:
    """What a replay decides otherwise, of a log with these lines ``changed``."""
    lines = [(line, (changed or {}).get(line, event)) for line, event in log]
    return [told.difference for told in replay(lines, ordering_of) if told.difference]


@pytest.mark.live
@pytest.mark.timeout(300)
def test_limits_of_memory_cores_and_quotas_hold(make_config):
    environment = {"name": f"{__name__}:Leased", "quotas": {"search": "20/s"}}
    config = make_config(environment=environment, trainer={"group_size": 4}, cluster={"tool_supply": {"cores": 1}})
    with Session(config) as run:  # tool workers of the shared clusters have no cores to lease
        list(run.iterations())
    log = log_of(run)
    granted = [event for _, event in log if isinstance(event, facts.LeaseGranted)]
    ended = [event for _, event in log if isinstance(event, facts.ActionFinished)]
    assert len(granted) == len(ended) >= 2 * 8 * 2 and {event.cores for event in granted} == {1}
    held = 0
    for _, event in log:
        held += isinstance(event, facts.LeaseGranted)
        held -= isinstance(event, facts.QuantumFinished) and event.phase == "TOOL"
        assert 0 <= held <= 1  # one tool worker with one core
    classified = [event for _, event in log if isinstance(event, facts.FailureClassified)]
    failures = [(event.failure, "0.25 GiB" in event.detail) for event in classified if event.failure != "policy"]
    assert failures == [("tool", True)] and sum(event.killed for event in ended) == 1
    at_s = [event.at_s for event in granted]
    assert all(earlier <= later for earlier, later in pairwise(at_s))
    assert all(later >= earlier + 1.0 for earlier, later in zip(at_s, at_s[20:], strict=False))
    assert differences(log) == []
    # a replay that did not follow the leases would not know of these
    without = {line: event for line, event in log if isinstance(event, facts.ToolCapacity)}
    assert differences(log, {n: replace(e, cores=0) for n, e in without.items()})


@pytest.mark.live
@pytest.mark.timeout(300)
def test_a_worker_comes_where_actions_wait_and_goes_where_it_idles(make_config, tmp_path, monkeypatch, until):
    monkeypatch.setattr(tool_fleet, "START_S", 0.01)  # as if workers had always started at once
    monkeypatch.setattr(tool_fleet, "IDLE_S", 0.2)
    monkeypatch.setattr(local, "TOOLS_CHECK_S", 0.05)
    (tmp_path / "workers").mkdir()
    sections = {"run": {"iterations": 1}, "trainer": {"group_size": 3}}
    environment = {"name": "wants_two:WantsTwo", "args": {"path": str(tmp_path / "workers")}}
    cluster = {"tool_supply": {"cores": 1}, "tool_workers_most": 2}
    config = make_config(**sections, environment=environment, cluster=cluster)

    def tools(scheduler: Scheduler) -> set[str]:
        return {str(ws.name) for ws in scheduler.workers.values() if str(ws.name).startswith("tool-")}

    with local_cluster(config) as cluster, Client(cluster) as client:
        assert tools(cluster.scheduler) == {"tool-0"}
        with Session(config, client=client) as run:
            list(run.iterations())
            until(cluster, lambda scheduler: tools(scheduler) == {"tool-0"})
    assert len(list((tmp_path / "workers").iterdir())) == 2
    log = log_of(run)
    orders = {line: event for line, event in log if isinstance(event, facts.ToolWorkersOrdered)}
    found = [(event.wanted, event.ordered, event.give_up) for event in orders.values()]
    assert found[:2] == [(1, 2, ""), (2, 1, "tool-1")]
    assert differences(log) == []
    assert differences(log, {n: replace(e, waiting=0) for n, e in orders.items()})


@pytest.mark.parametrize(("environment", "cluster", "word"), [
    ({"args": {"cores": 4096}, "quotas": {"search": "20/s"}}, {}, "4096 cores"),
    ({"quotas": {}}, {}, r"environment\.quotas\.search"),
    ({"quotas": {"search": "often"}}, {}, "often"),
    ({"name": f"{__name__}:WithSession"}, {"tool_workers_most": 2}, "sessions"),
])  # fmt: skip
def test_what_can_never_run_is_refused_before_anything_does(make_config, tmp_path, environment, cluster, word):
    named = {"name": f"{__name__}:Leased"} | environment
    config = make_config(environment=named, cluster={"tool_supply": {"cores": 1}} | cluster)
    with pytest.raises(ConfigError, match=word):
        Session(config).__enter__()
    assert not (tmp_path / "demo").exists()
