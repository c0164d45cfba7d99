"""A whole run whose tool blocks its worker's event loop: the watchdog restarts the worker and the run finishes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import zarr
from distributed import Client

from libra.config import RunConfig
from libra.driver.session import run
from libra.envs import tool
from libra.events import from_dict
from libra.policy.log_replay import replay
from libra.store.event_log import read_events
from libra.testing import FixedTurns
from libra.types import ToolCall


def test_a_tool_that_blocks_its_worker_costs_a_restart_and_nothing_else(
    make_config: Callable[..., RunConfig], client: Client, tmp_path: Path
) -> None:
    marker = tmp_path / "hung once"

    class BlocksOnce(FixedTurns):
        def __init__(self) -> None:
            super().__init__()

            async def block(text: str) -> str:
                """Block the event loop, the first time only.

                Args:
                    text: Anything.
                """
                try:
                    marker.touch(exist_ok=False)
                except FileExistsError:
                    return text
                threading.Event().wait()
                return "never"

            self.tools = (tool(block),)

        def parse(self, text: str) -> tuple[ToolCall, ...]:
            return (ToolCall("block", {"text": "y"}),)

    config = make_config(run={"iterations": 1}, watchdog={"timeout_s": 5.0, "restart": True})
    summary = run(config, environment=BlocksOnce(), client=client)
    columns = zarr.open_group(summary.directory / "trajectories.zarr", mode="r")["trajectory"]
    assert set(columns["failure"][:]) == {"policy"} and len(columns["failure"][:]) == 4
    events = list(read_events(summary.directory / "events.jsonl").events)
    stall = next(event for event in events if event["name"] == "stall_detected")
    assert (stall["worker"], stall["stage"], stall["restarts"]) == ("tool-0", "trajectory, TOOL", True)
    text = (summary.directory / stall["stacks"]).read_text()
    assert "written by faulthandler" in text and "in block" in text
    finished = Counter((event["key"], event["quantum"]) for event in events if event["name"] == "quantum_finished")
    assert len(finished) == 4 * 5 and set(finished.values()) == {1}
    told = list(replay((line, from_dict(event)) for line, event in enumerate(events, start=1)))
    assert [step.difference for step in told if step.difference] == []
