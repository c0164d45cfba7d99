"""Does the order of trajectories matter on your machine? C-MLFQ and FIFO on repair-like turns of very different lengths.

    python workflows/repair_lengths.py                       # one engine, eight slots
    python workflows/repair_lengths.py --engines 0.01 0.03   # two engines, one three times slower

Each task is a library with some failing tests. A turn repairs one; then the test command prints one
mark per test that still fails, as test runners do. So the length of the tool's return forecasts how
many turns are left, and C-MLFQ learns that from the first trajectories that end. Nothing is trained:
the engines generate a scripted number of tokens per turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from libra import keys
from libra.config import load_config
from libra.driver.run_session import Session
from libra.envs import Environment, tool
from libra.envs.environment import ScriptedTurn
from libra.facts import Fact, QuantumDispatched, SetPriority, TrajectoryEnded, from_dict
from libra.store.event_log import EventReader
from libra.types import Episode, Prompt, ToolCall, TrajectoryId

TASKS, SAMPLES, MOST_FAILING, TURN_TOKENS = 20, 4, 28, 10


class RepairLengths(Environment):
    """Tasks with 1 to 28 failing tests, lognormal; samples of a task differ by up to a fifth."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.tools = (tool(self.run_tests),)

    def turns(self, task: int, sample: int) -> int:
        """Turns of a trajectory: one per failing test of its task, a fifth more or fewer."""
        failing = min(MOST_FAILING, random.Random(f"{self.seed} {task}").lognormvariate(1.0, 1.3))
        return max(1, round(failing * random.Random(f"{self.seed} {task} {sample}").uniform(0.8, 1.2)))

    def prompt(self, split: str, index: int) -> Prompt:
        return Prompt(f"{split}-{index}", ({"role": "user", "content": f"repair {index}"},), {"task": index})

    def scripted(self, tid: TrajectoryId, prompt: Prompt, turn: int) -> ScriptedTurn:
        left = self.turns(prompt.facts["task"], tid.sample) - turn - 1
        return ScriptedTurn(TURN_TOKENS, (ToolCall("run_tests", {"failing": left}),) if left else ())

    async def run_tests(self, failing: int) -> str:
        """Run the tests.

        Args:
            failing: How many still fail.
        """
        await asyncio.sleep(0.02)
        return "F" * failing

    def grade(self, episode: Episode) -> float:
        return 1.0


def settings(directory: Path, policy: str, pass_s: list[float], iterations: int) -> Any:
    """The quick start's model with this environment, and one engine for each time of a forward pass."""
    engines = ", ".join(f"{{threads: 1, slots: 8, min_pass_s: {each}}}" for each in pass_s)
    changes = (
        f"run.dir={directory}", f"run.name={policy}", f"run.iterations={iterations}", f"policy.name={policy}",
        f"cluster.engines=[{engines}]", "rollout.ignore_eos=true", "rollout.max_turns=64", "rollout.max_context_tokens=1024",
        "trainer.max_row_tokens=1024", f"trainer.prompts={TASKS}", f"trainer.group_size={SAMPLES}", "trainer.lr=0",
        "evaluation.prompts=0", "checkpoint.every=0", "observe.progress=false", "cluster.dashboard_port=0",
    )  # fmt: skip
    return load_config("libra/quickstart", changes)


def run(config: Any, seed: int = 0) -> Path:
    """Run it; its directory."""
    with Session(config, environment=RepairLengths(seed)) as session:
        for _ in session.iterations():
            pass
    return session.directory


def skills(directory: Path) -> list[float]:
    """Skill of the forecasts after each iteration; none under a policy without forecasts."""
    rows = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [row["forecast_skill"] for row in rows if "forecast_skill" in row]


def makespans_s(directory: Path) -> list[float]:
    """For each iteration, seconds from its first generation to the end of its last trajectory."""
    spans: dict[int, list[float]] = {}
    for t_s, fact in logged(directory):
        if isinstance(fact, QuantumDispatched | TrajectoryEnded):
            key = keys.parse(fact.key)
            if key is not None and key.node == "trajectory":
                spans.setdefault(key.indices[0], []).append(t_s)
    return [max(times) - min(times) for times in spans.values()]


def rewritten(directory: Path) -> int:
    """Trajectories that got another place while they waited for their first generation."""
    places: dict[str, int] = {}
    begun, found = set(), set()
    for _, fact in logged(directory):
        if isinstance(fact, QuantumDispatched):
            begun.add(fact.key)
        elif isinstance(fact, SetPriority) and fact.key not in begun:
            level = fact.priority.level
            if places.setdefault(fact.key, level) != level:
                found.add(fact.key)
    return len(found)


def logged(directory: Path) -> list[tuple[float, Fact]]:
    return [(t_s, fact) for _, t_s, fact in (from_dict(e) for _, e in EventReader(directory / "events.jsonl"))]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--engines", type=float, nargs="+", default=[0.01], help="seconds of each engine's pass, at least"
    )
    parser.add_argument("--iterations", type=int, default=6)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        for policy in ("fifo", "cmlfq"):
            found = run(settings(Path(directory), policy, asked.engines, asked.iterations))
            spans = makespans_s(found)
            each = ", ".join(f"{span_s:.2f}" for span_s in spans)
            print(f"{policy}: {sum(spans):.1f} s in all ({each}); {rewritten(found)} re-ordered; skill {skills(found)}")
