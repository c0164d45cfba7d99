"""Workloads: trajectories as turns with tokens and tool seconds, sampled from traces with a seed.

The simulator and the engines emulated on a real Dask cluster run the same keys, so that dispatch
orders can be compared. A workload file is JSON; equal seeds give equal bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from libra import keys
from libra.errors import ConfigError
from libra.facts import PromptsNamed
from libra.planner.agent_turns import AgentTurn, read_agent_turns
from libra.types import NO_TOOL, ToolOutcome, ToolStatus, tool_outcome

SIMULATED = "sim"
"""Run name of a simulated workload."""
SCHEMA = 1
"""Version of the workload file format."""


class TurnPlan(NamedTuple):
    """One generation and its tool call."""

    new_tokens: int  # generated, >= 1
    tool: str  # empty if no tool runs, or a malformed call named none
    status: ToolOutcome  # NO_TOOL: the trajectory ends here
    payload_tokens: int  # added to the context by the tool
    tool_s: float


class TrajectoryPlan(NamedTuple):
    """One sample of one prompt."""

    iteration: int
    group: int
    sample: int
    prompt_tokens: int
    turns: tuple[TurnPlan, ...]
    family: str = ""
    prompt: str = ""  # name of the prompt if several iterations use it
    contexts: tuple[int, ...] = ()  # before each turn; equal numbers are equal tokens. Empty: only prompts are shared

    @property
    def new_tokens(self) -> int:
        """Tokens generated over all turns."""
        return sum(turn.new_tokens for turn in self.turns)

    @property
    def final_tokens(self) -> int:
        """Context tokens at the end."""
        return self.prompt_tokens + sum(turn.new_tokens + turn.payload_tokens for turn in self.turns)


class Workload(NamedTuple):
    """Trajectories of one or more iterations, and their run's name."""

    name: str
    trajectories: tuple[TrajectoryPlan, ...]

    def key(self, plan: TrajectoryPlan) -> str:
        """The trajectory's Dask key."""
        return keys.make("trajectory", (plan.iteration, plan.group, plan.sample), epoch=0, run=self.name)

    def group_key(self, plan: TrajectoryPlan) -> str:
        """The group's name in events."""
        return f"{plan.iteration}-{plan.group}"

    def totals(self) -> dict[str, int]:
        """Generated tokens by key, for an oracle of lengths."""
        return {self.key(plan): plan.new_tokens for plan in self.trajectories}

    @property
    def num_turns(self) -> int:
        """Total turns of all trajectories."""
        return sum(len(plan.turns) for plan in self.trajectories)

    def to_json(self) -> str:
        """One JSON object, read by `from_json`."""
        rows = [(*plan[:4], plan.family, plan.turns, plan.prompt, plan.contexts) for plan in self.trajectories]
        return msgspec.json.encode({"schema": SCHEMA, "name": self.name, "trajectories": rows}).decode()

    @classmethod
    def from_json(cls, text: str, where: str = "workload") -> Workload:
        """The workload in ``text``; ConfigError if malformed, or if it breaks a rule of `checked`."""
        again = "write one with libra simulate ... --save-workload FILE"
        try:
            file = msgspec.json.decode(text, type=_File)
            plans = tuple(
                TrajectoryPlan(
                    *row[:4], tuple(TurnPlan(*turn[:2], tool_outcome(turn.status), *turn[3:]) for turn in row.turns), row.family,
                    row.prompt, row.contexts,
                )
                for row in file.trajectories
            )  # fmt: skip
            name = keys.check_run_name(file.name)
        except (msgspec.MsgspecError, ValueError) as error:
            raise ConfigError(f"{where}: not a workload ({error}); {again}") from error
        if file.schema != SCHEMA:
            raise ConfigError(f"{where}: schema {file.schema!r}, this Libra reads {SCHEMA}; {again}")
        return checked(cls(name, plans), where)


class _Turn(NamedTuple):
    new_tokens: int
    tool: str
    status: str
    payload_tokens: int
    tool_s: float


class _Row(NamedTuple):
    iteration: int
    group: int
    sample: int
    prompt_tokens: int
    family: str
    turns: tuple[_Turn, ...]
    prompt: str = ""
    contexts: tuple[int, ...] = ()


class _File(msgspec.Struct):
    schema: int
    name: str
    trajectories: tuple[_Row, ...]


def checked(workload: Workload, where: str) -> Workload:
    """``workload``; ConfigError if two trajectories share a place, or a turn cannot be run.

    A turn needs a tool if another turn follows; no turn reads the result of the last turn's tool.
    """
    seen = set()
    for plan in workload.trajectories:
        place = plan[:3]
        if place in seen:
            raise ConfigError(f"{where}: two trajectories at (iteration, group, sample) = {place}; number them apart")
        seen.add(place)
        if not plan.turns or min(*place, plan.prompt_tokens) < 0:
            raise ConfigError(
                f"{where}: trajectory {place} has {len(plan.turns)} turns and {plan.prompt_tokens} prompt tokens"
            )
        if plan.contexts and len(plan.contexts) != len(plan.turns):
            raise ConfigError(
                f"{where}: trajectory {place} has {len(plan.turns)} turns and {len(plan.contexts)} contexts; one each, or none"
            )
        for index, turn in enumerate(plan.turns):
            if turn.new_tokens < 1 or turn.payload_tokens < 0 or not 0.0 <= turn.tool_s < float("inf"):
                raise ConfigError(
                    f"{where}: turn {index} of trajectory {place}: {turn}; tokens are >= 1, seconds finite"
                )
            if turn.status == NO_TOOL and (turn.tool or index + 1 < len(plan.turns)):
                raise ConfigError(
                    f"{where}: turn {index} of trajectory {place}: {turn}; its tool needs a status "
                    f"({', '.join(ToolStatus)}), and only the last turn may be without a tool"
                )
    return workload


def load_workload(path: Path) -> Workload:
    """Read a workload file; ConfigError if invalid."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(
            f"--workload {path}: {error.strerror or error}; type a file that libra simulate --save-workload FILE wrote"
        ) from error
    return Workload.from_json(text, str(path))


class Trace(NamedTuple):
    """A recorded trajectory from which workloads are sampled."""

    task: str
    prompt_tokens: int
    turns: tuple[TurnPlan, ...]
    family: str = ""


def draw(traces: Sequence[Trace], *, num_groups: int, group_size: int, seed: int, iterations: int = 1) -> Workload:
    """A workload of ``iterations`` x ``num_groups`` groups sampled from traces (`groups_of`)."""
    groups = groups_of(traces, group_size, seed)
    return workload_of_groups(groups, num_groups=num_groups, iterations=iterations, name=SIMULATED)


def workload_of_groups(groups: Iterator[list[Trace]], *, num_groups: int, iterations: int, name: str) -> Workload:
    """The first ``iterations`` x ``num_groups`` of these groups."""
    return Workload(
        name,
        tuple(
            TrajectoryPlan(*divmod(index, num_groups), sample, trace.prompt_tokens, trace.turns, trace.family)
            for index, chosen in zip(range(iterations * num_groups), groups, strict=False)
            for sample, trace in enumerate(chosen)
        ),
    )


def groups_of(traces: Sequence[Trace], group_size: int, seed: int) -> Iterator[list[Trace]]:
    """Endless groups, each of samples of one task recorded at least ``group_size`` times.

    Without such a task, a group mixes tasks: independent samples, the worst case for a policy that
    learns from siblings. Every task (or trace) occurs once before any repeats. ConfigError without
    traces.
    """
    if not traces:
        raise ConfigError("traces: none to draw from; name a directory with agent_turns/*.csv")
    rng = np.random.default_rng([seed, 0x5EED])
    by_task: dict[str, list[Trace]] = {}
    for trace in traces:
        by_task.setdefault(trace.task, []).append(trace)
    repeated = [samples for _, samples in sorted(by_task.items()) if len(samples) >= group_size]
    if repeated and group_size > 1:
        return _of_one_task(repeated, group_size, rng)
    endless = (traces[int(i)] for _ in count() for i in rng.permutation(len(traces))[::-1])
    return ([*islice(endless, group_size)] for _ in count())


def _of_one_task(repeated: list[list[Trace]], group_size: int, rng: np.random.Generator) -> Iterator[list[Trace]]:
    while True:
        for task in rng.permutation(len(repeated))[::-1]:
            samples = repeated[int(task)]
            yield [samples[int(i)] for i in rng.permutation(len(samples))[:group_size]]


def prompts_of(workload: Workload, plans: Sequence[TrajectoryPlan]) -> PromptsNamed:
    """Prompts of the groups of ``plans``, if prompts repeat."""
    return PromptsNamed(tuple({workload.group_key(plan): plan.prompt for plan in plans if plan.prompt}.items()))


REQUIRED = ("task", "turn", "tool", "status", "completion_tokens")
"""Required columns of an agent trace file."""


def tool_seconds(rng: np.random.Generator, count: int) -> np.ndarray:
    """Tool call seconds of a coding agent: 3/4 file tools (0.04 s), else mean 10 s.

    Shaped after agentcgroup's runs without timeouts: median 0.04 s, P90 9.1 s, P99 21 s.
    """
    return np.where(rng.random(count) < 0.75, 0.04, np.minimum(rng.gamma(2.0, 5.0, count), 60.0))


def load_traces(path: Path, *, seed: int = 0) -> list[Trace]:
    """Trajectories of one file, in file order; each pair of source and model is a family.

    Untimed tool calls get drawn seconds (`tool_seconds`). ConfigError for a missing column, or a
    field that is not a number or status.
    """
    rng = np.random.default_rng([seed, 0x7001])
    return [
        _trace(f"{one.model}/{one.task}" if one.model else one.task, one.source, one.turns, rng)
        for one in read_agent_turns(path, REQUIRED, "planner.trace")
    ]


def _trace(task: str, source: str, recorded: tuple[AgentTurn, ...], rng: np.random.Generator) -> Trace:
    prompts = [turn.prompt_tokens or 0 for turn in recorded]
    new = [max(1, turn.completion_tokens) for turn in recorded]
    drawn = tool_seconds(rng, len(recorded))
    turns = []
    for i, turn in enumerate(recorded):
        last = i + 1 == len(recorded)
        payload = prompts[i + 1] - prompts[i] - new[i] if not last and prompts[i] and prompts[i + 1] else 0
        if payload <= 0:
            payload = turn.payload_tokens
        tool_s = float(drawn[i]) if turn.tool_s is None else turn.tool_s
        turns.append(
            TurnPlan(new[i], "", NO_TOOL, 0, 0.0)
            if last  # no turn reads the tool's result
            else TurnPlan(new[i], turn.tool or "tool", turn.status, payload, tool_s)
        )
    return Trace(task, next((prompt for prompt in prompts if prompt), 1), tuple(turns), source)
