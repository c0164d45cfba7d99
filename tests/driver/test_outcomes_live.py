"""What a live run's forecaster makes of its tools' outcomes is what the same run makes as a trace."""

from __future__ import annotations

import csv
import zlib
from collections.abc import Callable
from pathlib import Path

from distributed import Client

from libra import events, keys
from libra.config import RunConfig
from libra.driver.session import Session
from libra.envs import tool
from libra.hardware import engine_seconds
from libra.hardware.virtual_engine import EngineTables
from libra.policy import CMLFQ, QuantumFinished, TrajectoryEnded, TrajectoryParked, VersionPublished
from libra.policy.posterior import Posterior
from libra.scheduler import LibraPlugin
from libra.sim import SimulationOptions, Simulator, fleet
from libra.sim.from_run import workload_of_run
from libra.store.event_log import read_events
from libra.store.trajectories import TrajectoryStore
from libra.testing import FixedTurns
from libra.traces.agent_turns import AgentTurn, read_agent_turns
from libra.types import NO_TOOL, Phase, ToolCall, ToolStatus

WORDS = {"ok": "success", "truncated": "success", "error": "failure", "": "end"}
"""How a recorded agent would have said it."""
AROUND = SimulationOptions(tool_slots=8)
COLUMNS = ("source", "task", "sample", "turn", "tool", "status", "payload_chars", "completion_tokens")


class FailureIsLong(FixedTurns):
    """Half of the trajectories are over after their tool fills the context at the third call; the others go on to
    ``rollout.max_turns``, and their tool fails. Nothing but the outcome tells one from the other: all else is alike.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tools = (tool(self.work, max_payload_chars=2000),)

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        return (ToolCall("work", {"text": "y"}),)

    async def work(self, text: str, action_id: str) -> str:
        """Do something.

        Args:
            text: What to do.
        """
        trajectory, turn, _ = action_id.split("/")
        if zlib.crc32(trajectory.encode()) % 2:
            raise OSError("it is broken")
        return "done, all of it is fine" if turn in "01" else "z" * 700


def exported(directory: Path, path: Path) -> None:
    """Write a run's trajectories as a trace of agents' turns, in the words that such traces have."""
    with TrajectoryStore.open(directory / "trajectories.zarr") as store:
        whole, turns = store.columns(), store.columns("turn")
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        for row in range(len(whole["group"])):
            start, count = int(whole["turn_offset"][row]), int(whole["num_turns"][row])
            place = (
                f"{whole['split'][row]}-{whole['iteration'][row]}-{whole['group'][row]}",
                int(whole["sample"][row]),
            )
            for i in range(start, start + count):
                numbers = (int(turns["payload_chars"][i]), int(turns["generated_tokens"][i]))
                rows.writerow(("run", *place, i - start, turns["tool"][i], WORDS[str(turns["status"][i])], *numbers))


def skill_of_trace(path: Path, log: list[events.Event], *, tells_outcomes: bool = True) -> float:
    """Skill of a forecaster that is told, in the order of the log, what the trace says of each turn."""
    turns: dict[str, list[AgentTurn]] = {}
    for one in read_agent_turns(path, COLUMNS):
        turns[f"{one.task}-{one.sample}"] = list(one.turns)
    forecaster, family = Posterior(), next(e.family for e in log if isinstance(e, events.RunStarted))

    def place(key: str) -> str:
        parsed = keys.parse(key)
        assert parsed is not None
        return "-".join(map(str, (parsed.split, *parsed.indices)))

    for event in log:
        match event:
            case events.TrajectoryParked(key=key, quanta=quanta):
                group = place(key).rpartition("-")[0]
                forecaster.handle(TrajectoryParked(key, 0, Phase.ROLLOUT, quanta, group, family))
            case events.QuantumFinished(key=key, phase="ROLLOUT"):
                tokens = turns[place(key)][0].completion_tokens
                forecaster.handle(QuantumFinished(key, Phase.ROLLOUT, tokens, "", NO_TOOL, 0.0))
            case events.QuantumFinished(key=key, phase="TOOL"):
                turn = turns[place(key)].pop(0)
                status = turn.status if tells_outcomes else ToolStatus.OK
                forecaster.handle(QuantumFinished(key, Phase.TOOL, 0, turn.tool, status, 0.0, turn.payload_tokens))
            case events.TrajectoryEnded(key=key, completed=completed):
                forecaster.handle(TrajectoryEnded(key, completed))
            case events.PolicyLearned():
                forecaster.learn()
            case events.VersionPublished(version=version):
                forecaster.handle(VersionPublished(version))
    return forecaster.skill


def test_a_live_run_forecasts_as_well_as_its_trace(
    make_config: Callable[..., RunConfig], client: Client, tmp_path: Path
) -> None:
    config = make_config(
        run={"iterations": 4},
        rollout={"max_new_tokens": 4, "max_turns": 10, "max_context_tokens": 700},
        trainer={"prompts": 10, "group_size": 4},
    )
    with Session(config, environment=FailureIsLong(), client=client) as session:
        rows = list(session.iterations())
        scheduler = client.cluster.scheduler
        live = scheduler.plugins[LibraPlugin.name].runs["demo"].policy.forecaster.skill
        directory = session.directory
    assert [row["sequences"] for row in rows] == [40] * 4
    log = [events.from_dict(values) for values in read_events(directory / "events.jsonl").events]
    returns = [e.status for e in log if isinstance(e, events.QuantumFinished) and e.phase == Phase.TOOL]
    assert set(returns) == {ToolStatus.OK, ToolStatus.ERROR, ToolStatus.TRUNCATED}  # cut to what the context holds
    assert {e.status for e in log if isinstance(e, events.QuantumFinished) and e.phase == Phase.ROLLOUT} == {NO_TOOL}

    exported(directory, tmp_path / "trace.csv")
    replayed = skill_of_trace(tmp_path / "trace.csv", log)
    told_nothing = skill_of_trace(tmp_path / "trace.csv", log, tells_outcomes=False)
    ordering = CMLFQ()
    tables = {1: EngineTables(engine_seconds("A800-80G", "Qwen3-14B", 1))}  # other seconds, so another order of events
    Simulator(workload_of_run(directory), fleet({1: 1}, tables, {1: 8}), ordering, options=AROUND).run()
    assert isinstance(ordering.forecaster, Posterior)
    assert abs(live - replayed) <= 0.05
    assert min(live, ordering.forecaster.skill) > told_nothing + 0.03  # outcomes tell, and so does the cut return
