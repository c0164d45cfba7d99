"""Live actions on leased cores, and a slow judge: workers, leases and the processes of calls are
real.

Generations take the emulated seconds of `benchmarks.live.tailed_engines.PacedEngine`, and actions
sleep, so that two cores are not the bottleneck of what is measured: everything around an action,
from its lease to its report.
"""

from __future__ import annotations

import hashlib
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from distributed import Client

from benchmarks.report import Figure, Pairs, alternate
from benchmarks.virtual.action_loads import ActionSimulation, Step
from libra import facts
from libra.cluster.local import local_cluster
from libra.config import RunConfig, config_from_dict
from libra.driver.run_session import Session
from libra.envs import FunctionEnvironment, tool
from libra.facts import Priority
from libra.store.event_log import EventReader
from libra.testing import FixedTurns
from libra.types import ToolCall

CORES = 2
GROUPS, GROUP_SIZE, TURNS = 8, 8, 6
LEAST_S, MOST_S = 0.05, 0.15
"""Seconds of an action."""
JUDGE_S = 2.0
"""Seconds of a slow judge for one batch: several steps."""
JUDGED_STEPS = 6


def work_s(name: str) -> float:
    drawn = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest()) / 2**32
    return LEAST_S + drawn * (MOST_S - LEAST_S)


def work(text: str, action_id: str) -> str:
    """Work for a while.

    Args:
        text: Anything.
    """
    time.sleep(work_s(action_id))
    return text


class LeasedSleep(FixedTurns):
    """Every turn calls ``work`` on a core of its own."""

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.tools = (tool(work, cores=1),)

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        return (ToolCall("work", {"text": "y"}),)


def slow_judge(inputs: Sequence[Any]) -> list[float]:
    threading.Event().wait(JUDGE_S)
    return [0.5] * len(inputs)


def quick(completion: str) -> float:
    return 0.5


class LiveAction(NamedTuple):
    """One action of a live run in seconds of the log, and its policy's priority."""

    key: str
    priority: Priority
    asked_s: float
    ended_s: float
    queued_s: float
    ran_s: float
    overhead_s: float

    @property
    def act_s(self) -> float:
        return self.queued_s + self.ran_s + self.overhead_s


def _config(directory: Path, name: str, **sections: dict[str, Any]) -> RunConfig:
    values: dict[str, dict[str, Any]] = {
        "run": {"name": name, "dir": str(directory), "iterations": 1},
        "environment": {"name": "benchmarks.live.actions_live:LeasedSleep"},
        "rollout": {
            "engine": "benchmarks.live.tailed_engines:PacedEngine", "slots": GROUPS * GROUP_SIZE, "max_turns": TURNS,
            "max_new_tokens": 32, "ignore_eos": True, "max_context_tokens": 1024,
        },
        "trainer": {"prompts": GROUPS, "group_size": GROUP_SIZE, "lr": 0.0}, "evaluation": {"prompts": 0},
        "checkpoint": {"every": 0}, "observe": {"progress": False, "trackers": []},
        "cluster": {"dashboard_port": 0, "threads": 1, "tool_supply": {"cores": CORES}},
    }  # fmt: skip
    for section, changes in sections.items():
        values.setdefault(section, {}).update(changes)
    return config_from_dict(values)


def live_actions(config: RunConfig, client: Client) -> list[LiveAction]:
    with Session(config, client=client) as session:
        for _ in session.iterations():
            pass
    asked: dict[str, float] = {}
    priorities: dict[str, Priority] = {}
    granted: dict[str, Priority] = {}
    found = []
    for _, line in EventReader(session.directory / "events.jsonl"):
        _, t_s, event = facts.from_dict(line)
        if isinstance(event, facts.ActionRequested):
            asked[event.key] = t_s
        elif isinstance(event, facts.SetPriority):
            priorities[event.key] = event.priority
        elif isinstance(event, facts.LeaseGranted):
            granted[event.key] = priorities[event.key]
        elif isinstance(event, facts.ActionFinished):
            parts = event.queued_s, event.ran_s, event.overhead_s
            found.append(LiveAction(event.key, granted[event.key], asked[event.key], t_s, *parts))
    return found


def simulated_again(actions: Sequence[LiveAction]) -> float:
    """Mean completion time of the same actions in virtual time, in the order of the run's policy.

    The order matters: under turn-taking all wait until the end, under C-MLFQ trajectories end one
    after the other.
    """
    turns: dict[str, list[LiveAction]] = {}
    for action in actions:
        turns.setdefault(action.key, []).append(action)
    begin_s = min(action.asked_s for action in actions)
    load = []
    for mine in turns.values():
        steps, before_s = [], begin_s
        for action in mine:
            steps.append(Step(action.asked_s - before_s, action.ran_s, "work", action.priority))
            before_s = action.ended_s
        load.append(steps)
    return ActionSimulation(load, CORES, "leases").run().mean_act_s


def _steps_s(config: RunConfig, client: Client, reward: Any) -> float:
    prompts = [f"question {number}" for number in range(40)]
    environment = FunctionEnvironment(prompts=prompts, reward=reward)
    with Session(config, environment=environment, client=client) as session:
        iterations = session.iterations()
        next(iterations)
        began_s = time.perf_counter()
        done = sum(1 for _ in iterations)
        return (time.perf_counter() - began_s) / done


def judged(directory: Path, client: Client, pairs: int) -> Pairs:
    """Seconds of a step whose judge is slow and late, and of one whose reward is there at once."""
    taken = iter(range(10**6))

    def of(reward: Any, **sections: dict[str, Any]) -> float:
        config = _config(
            directory, f"judged{next(taken)}", run={"iterations": JUDGED_STEPS}, rollout={"max_turns": 1},
            trainer={"late": "correct", "late_args": {"versions": 50}}, **sections,
        )  # fmt: skip
        return _steps_s(config, client, reward)

    service = {"named": {"judge": {"function": "benchmarks.live.actions_live:slow_judge", "max_batch": 64}}}
    return alternate(
        lambda: of({"service": "judge", "late": True, "fast": 0.5}, services=service), lambda: of(quick), pairs=pairs
    )


def live_figures(pairs: int = 5) -> dict[str, Figure]:
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = stack.enter_context(local_cluster(_config(directory, "cluster")))
        client = stack.enter_context(Client(cluster))
        live_actions(_config(directory, "warm"), client)
        actions = live_actions(_config(directory, "measured"), client)
        act_s, again_s = statistics.mean(each.act_s for each in actions), simulated_again(actions)
        print(f"  live, {len(actions)} actions: ACT {act_s:.3f} s, simulated {again_s:.3f} s", flush=True)
        slow = judged(directory, client, pairs)
    return {
        "live_overhead_ms": Figure(1e3 * statistics.median(each.overhead_s for each in actions), "ms", "lower", 5.0),
        "live_over_simulated": Figure(act_s / again_s, "ratio", "lower", 1.15),
        "judge_hold_frac": Figure(slow.ratio - 1.0, "share", "lower", 0.05),
    }
