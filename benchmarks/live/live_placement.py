"""C-MLFQ against FIFO on real engines of different speeds, on real workers.

Trajectories are tau-bench's, replayed as fixed turns: engines generate the recorded numbers of
tokens, tools take the recorded times and return the recorded lengths, all scaled. On each set of
engines both policies run the same trajectories A B A B, at least five pairs. A run is one iteration
of an ordinary Libra run. Makespan: first dispatch of a generation to the end of the last
trajectory.

Engines on one machine compete for its cores, so each forward pass takes at least ``min_pass_s``
(the engine's thread waits). In that sense speeds are emulated; engines measure and declare their
own passes. With ``--vllm``: one engine of TP 1 and one of TP 2 instead.

Cells: ``two`` (one fast, one slow), ``five`` (one fast, four slow), ``alike`` (five fast). Figures:

* ``cmlfq_over_fifo_worst``: the largest of the cells' median ratios; ``..._heterogeneous``: of
  ``five`` (``--vllm``: of that cell).
* ``useless_moves_frac``: of C-MLFQ's dispatches, moves that by the true lengths delayed the end by
  more than 5 % (`benchmarks.live.move_review`).
* ``live_over_simulated``: makespan of the C-MLFQ runs over `libra simulate --from-run`.
"""

from __future__ import annotations

import asyncio
import hashlib
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from distributed import Client

from benchmarks.live.move_review import moves
from benchmarks.report import MIN_PAIRS, QUICKSTART, QUIET, Figure, alternate, command_parser, emit
from libra.cluster.local import local_cluster
from libra.config import load_config
from libra.driver.run_session import Session
from libra.envs import Environment, tool
from libra.envs.environment import ScriptedTurn
from libra.facts import Line, QuantumDispatched, TrajectoryEnded, from_dict
from libra.sim.configured import simulator_of_run
from libra.sim.from_run import run_setting
from libra.sim.workload import draw, load_traces
from libra.store.event_log import EventReader
from libra.types import NO_TOOL, Episode, Prompt, ToolCall, ToolStatus, TrajectoryId

TRACES = "agent_turns/tau_airline_gpt4o.csv"
FAST_S, SLOW_S = 0.012, 0.036
TOKENS_FRAC, PAYLOAD_FRAC, TOOL_FRAC = 0.15, 0.02, 0.05
GROUP_SIZE = 4
SLOTS = 8
CELLS: dict[str, tuple[float, ...]] = {"two": (FAST_S, SLOW_S), "five": (FAST_S, *[SLOW_S] * 4), "alike": (FAST_S,) * 5}
HETEROGENEOUS = "five"


class Cell(NamedTuple):
    """Median ratio of makespans, C-MLFQ's moves and dispatches, live over simulated by run."""

    ratio: float
    useless: int
    dispatched: int
    over_simulated: list[float]


class TraceTurns(Environment):
    """Trajectories of recorded agents, replayed turn by turn, with tokens, observations and tool seconds scaled.

    Tools that failed fail again. It needs ``rollout.ignore_eos``. Rewards have no meaning.
    """

    def __init__(self, *, path: str, groups: int, group_size: int, seed: int = 0) -> None:
        self.groups = groups
        drawn = draw(load_traces(Path(path)), num_groups=groups, group_size=group_size, seed=seed)
        self._plans = {(plan.group, plan.sample): plan for plan in drawn.trajectories}
        self.tools = (tool(self.replay),)

    def prompt(self, split: str, index: int) -> Prompt:
        group = index % self.groups
        return Prompt(f"{split}-{group}", ({"role": "user", "content": f"{split} {group}"},), {"group": group})

    def prompt_id(self, split: str, index: int) -> str:
        return f"{split}-{index % self.groups}"

    def scripted(self, tid: TrajectoryId, prompt: Prompt, turn: int) -> ScriptedTurn:
        """The recorded turn, scaled."""
        turns = self._plans[prompt.facts["group"], tid.sample].turns
        plan = turns[turn]
        failed = plan.status not in (NO_TOOL, ToolStatus.OK)
        chars, seconds = round(PAYLOAD_FRAC * plan.payload_tokens), round(TOOL_FRAC * plan.tool_s, 6)
        call = ToolCall("replay", {"chars": chars, "seconds": seconds, "fails": failed})
        return ScriptedTurn(max(1, round(TOKENS_FRAC * plan.new_tokens)), (call,) if turn + 1 < len(turns) else ())

    def grade(self, episode: Episode) -> float:
        return hashlib.blake2b(episode.answer.encode(errors="surrogatepass"), digest_size=1).digest()[0] / 256

    async def replay(self, chars: int, seconds: float, fails: bool = False) -> str:
        """Take as long as the recorded tool, and return as much, or fail as it did.

        Args:
            chars: Length of the observation.
            seconds: Duration.
            fails: Whether to fail with the observation as the message.
        """
        await asyncio.sleep(seconds)
        if fails:
            raise RuntimeError("y" * chars)
        return "y" * chars


@dataclass(frozen=True, slots=True)
class Bench:
    """Settings of all runs."""

    directory: Path
    data: Path
    groups: int
    pairs: int
    vllm: bool

    def engines(self, name: str) -> str:
        if self.vllm:
            return f"[{{tp: 1, threads: 1, slots: {SLOTS}}}, {{tp: 2, threads: 1, slots: {SLOTS}}}]"
        each = (f"{{threads: 1, slots: {SLOTS}, min_pass_s: {pass_s}}}" for pass_s in CELLS[name])
        return f"[{', '.join(each)}]"

    def config(self, *changes: str, seed: int = 0) -> Any:
        args = f"{{path: {self.data / TRACES}, groups: {self.groups}, group_size: {GROUP_SIZE}, seed: {seed}}}"
        asked = (
            f"run.dir={self.directory}", "run.iterations=1", *QUIET, "rollout.ignore_eos=true",
            "environment.name=benchmarks.live.live_placement:TraceTurns", f"environment.args={args}", "rollout.max_turns=64",
            "rollout.max_new_tokens=512", "rollout.max_context_tokens=1024", "trainer.max_row_tokens=1024",
            f"trainer.prompts={self.groups}", f"trainer.group_size={GROUP_SIZE}", "trainer.lr=0",
            f"rollout.engine={'vllm' if self.vllm else 'transformers'}",
        )  # fmt: skip
        return load_config(str(QUICKSTART), (*asked, *changes))


def ran(bench: Bench, name: str, policy: str, seed: int, client: Client) -> Path:
    with Session(bench.config(f"run.name={name}", f"policy.name={policy}", seed=seed), client=client) as session:
        for _ in session.iterations():
            pass
    return session.directory


def log_of(directory: Path) -> list[Line]:
    return [from_dict(event) for _, event in EventReader(directory / "events.jsonl")]


def makespan_s(log: Sequence[Line]) -> float:
    begun = min(t_s for _, t_s, fact in log if isinstance(fact, QuantumDispatched))
    return max(t_s for _, t_s, fact in log if isinstance(fact, TrajectoryEnded)) - begun


def live_over_simulated(directory: Path) -> float:
    """Makespan of a run over its simulation on the same engines, from the first gate on."""
    setting = run_setting(directory)
    assert setting.realised is not None, "the run went through"
    return setting.realised.makespan_s / simulator_of_run(setting)[0].run().makespan_s


def measured(bench: Bench, name: str) -> Cell:
    count = useless = dispatched = 0
    over_simulated: list[float] = []
    with local_cluster(bench.config(f"cluster.engines={bench.engines(name)}")) as cluster, Client(cluster) as client:

        def side(policy: str) -> float:
            nonlocal count, useless, dispatched
            seed, count = count // 2, count + 1
            directory = ran(bench, f"{name}_{policy}_{seed}", policy, seed, client)
            log = log_of(directory)
            if policy == "cmlfq":
                found, of_run = moves(log)
                useless += sum(moved.useless for moved in found)
                dispatched += of_run
                over_simulated.append(live_over_simulated(directory))
            return makespan_s(log)

        ratio = alternate(lambda: side("cmlfq"), lambda: side("fifo"), pairs=bench.pairs).ratio
    cell = Cell(ratio, useless, dispatched, over_simulated)
    print(f"{name}: {cell}", flush=True)
    return cell


def figures_of(cells: dict[str, Cell]) -> dict[str, Figure]:
    heterogeneous = cells.get(HETEROGENEOUS, next(iter(cells.values())))
    useless = sum(cell.useless for cell in cells.values()) / sum(cell.dispatched for cell in cells.values())
    over = statistics.median(value for cell in cells.values() for value in cell.over_simulated)
    return {
        "cmlfq_over_fifo_worst": Figure(max(cell.ratio for cell in cells.values()), "ratio", "lower", 1.0),
        "cmlfq_over_fifo_heterogeneous": Figure(heterogeneous.ratio, "ratio", "lower", 0.9),
        "useless_moves_frac": Figure(useless, "frac", "lower", 0.0),
        "live_over_simulated": Figure(over, "ratio", "lower", 1.1),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("live_placement", __doc__, pairs=MIN_PAIRS, data=True)
    parser.add_argument(
        "--cells", nargs="+", choices=list(CELLS), default=list(CELLS), help="cells to measure (default all)"
    )
    parser.add_argument("--groups", type=int, default=12, help=f"groups of {GROUP_SIZE} trajectories (default 12)")
    parser.add_argument("--vllm", action="store_true", help="a cell of two vLLM engines, TP 1 and TP 2, instead")
    options = parser.parse_args(arguments)
    names = ["vllm"] if options.vllm else options.cells
    with tempfile.TemporaryDirectory(prefix="live_placement-") as directory:
        bench = Bench(Path(directory), options.data.resolve(), options.groups, options.pairs, options.vllm)
        cells = {name: measured(bench, name) for name in names}
    emit("live_placement", figures_of(cells), arguments=arguments, as_json=options.json)
