"""What is to be generated: trajectories as lists of turns with their tokens and tool seconds, drawn from traces with a seed.

A workload is data. The simulator runs it in virtual time, emulated engines run it on a real Dask cluster, and both see the same
keys, so that their dispatch orders can be compared. As a file it is JSON; the same seed gives the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

from libra import keys
from libra.errors import ConfigError
from libra.policy.messages import GroupsNamed
from libra.types import NO_TOOL, ToolOutcome, ToolStatus, tool_outcome

SCHEMA = 1
"""Layout of a workload file."""


class TurnPlan(NamedTuple):
    """One generation, and the tool that answers it."""

    new_tokens: int  # generated, >= 1
    tool: str  # empty where none comes back, and where a malformed call named none
    status: ToolOutcome  # NO_TOOL: none comes back, the trajectory ends here
    payload_tokens: int  # what the tool puts into the context
    tool_s: float


class TrajectoryPlan(NamedTuple):
    """One sample of one prompt."""

    iteration: int
    group: int
    sample: int
    prompt_tokens: int
    turns: tuple[TurnPlan, ...]
    family: str = ""
    prompt: str = ""  # its name, where it comes in more than one iteration
    contexts: tuple[
        int, ...
    ] = ()  # before each turn; equal numbers are equal tokens. Empty: siblings share their prompt alone

    @property
    def new_tokens(self) -> int:
        """Tokens it generates in all its turns."""
        return sum(turn.new_tokens for turn in self.turns)

    @property
    def final_tokens(self) -> int:
        """Its context at the end."""
        return self.prompt_tokens + sum(turn.new_tokens + turn.payload_tokens for turn in self.turns)


class Workload(NamedTuple):
    """Trajectories of one or more iterations, by name of the run that they make up."""

    name: str
    trajectories: tuple[TrajectoryPlan, ...]

    def key(self, plan: TrajectoryPlan) -> str:
        """The key that Dask would know it by."""
        return keys.make("trajectory", (plan.iteration, plan.group, plan.sample), epoch=0, run=self.name)

    def group_key(self, plan: TrajectoryPlan) -> str:
        """What its group is called in events."""
        return f"{plan.iteration}-{plan.group}"

    def totals(self) -> dict[str, int]:
        """Generated tokens by key: the truth that an oracle knows."""
        return {self.key(plan): plan.new_tokens for plan in self.trajectories}

    @property
    def num_turns(self) -> int:
        """Turns of all trajectories."""
        return sum(len(plan.turns) for plan in self.trajectories)

    def to_json(self) -> str:
        """One JSON object; see `from_json`."""
        rows = [
            [
                *plan[:4],
                plan.family,
                [list(turn) for turn in plan.turns],
                *([plan.prompt] if plan.prompt or plan.contexts else []),
                *([list(plan.contexts)] if plan.contexts else []),
            ]
            for plan in self.trajectories
        ]
        return json.dumps({"schema": SCHEMA, "name": self.name, "trajectories": rows}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, where: str = "workload") -> Workload:
        """The workload a text describes; ConfigError where it is none, or breaks a rule of `check_plan`."""
        try:
            values = json.loads(text)
            if values["schema"] != SCHEMA:
                raise ConfigError(f"{where}: schema {values['schema']!r}, this Libra reads {SCHEMA}")
            plans = tuple(_plan_of(where, *row) for row in values["trajectories"])
            return checked(cls(keys.check_run_name(values["name"]), plans), where)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"{where}: no workload ({type(error).__name__}: {error}); write one with Workload.to_json, or "
                "libra simulate ... --save-workload FILE"
            ) from error


def _plan_of(
    where: str,
    iteration: int,
    group: int,
    sample: int,
    prompt_tokens: int,
    family: str,
    turns: Sequence[Sequence[Any]],
    prompt: str = "",
    contexts: Sequence[int] = (),
) -> TrajectoryPlan:
    """A row of a workload file."""
    return TrajectoryPlan(
        int(iteration),
        int(group),
        int(sample),
        int(prompt_tokens),
        tuple(_turn(where, (iteration, group, sample), i, *turn) for i, turn in enumerate(turns)),
        str(family),
        str(prompt),
        tuple(int(number) for number in contexts),
    )


def _turn(
    where: str,
    place: tuple[int, int, int],
    index: int,
    new_tokens: int,
    tool: str,
    status: str,
    payload_tokens: int,
    tool_s: float,
) -> TurnPlan:
    """A turn as a file has it; ConfigError where its status is no outcome."""
    try:
        return TurnPlan(new_tokens, tool, tool_outcome(status), payload_tokens, tool_s)
    except ValueError as error:
        raise ConfigError(
            f"{where}: turn {index} of trajectory {place}: {error}; save the workload again with this Libra "
            "(libra simulate ... --save-workload FILE)"
        ) from error


def checked(workload: Workload, where: str) -> Workload:
    """``workload`` itself; ConfigError where two trajectories have one place, or a turn cannot be run.

    A turn can be run where its numbers can be, and where a tool comes back from it if and only if another turn follows it; only
    the last one may have a tool as well, whose return nobody reads.
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
    """Read a workload file; ConfigError where it is none."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"workload {path}: {error.strerror or error}") from error
    return Workload.from_json(text, str(path))


class Trace(NamedTuple):
    """A trajectory that was recorded somewhere: what the plans are drawn from."""

    task: str
    prompt_tokens: int
    turns: tuple[TurnPlan, ...]
    family: str = ""


def draw(
    traces: Sequence[Trace],
    *,
    num_groups: int,
    group_size: int,
    seed: int,
    iterations: int = 1,
    kinship: float = 0.0,
    earlier: float | None = None,
    name: str = "sim",
) -> Workload:
    """A workload of ``iterations`` x ``num_groups`` groups drawn from traces.

    Tasks that were recorded at least ``group_size`` times make groups of their own samples. Where there is none, a group is of
    different tasks: its samples tell nothing about each other, which is the worst case for a policy that listens to siblings.
    ``kinship`` (then only) draws them so that the ranks of their lengths have about that intra-class correlation, as samples of
    one prompt have (0.55 measured on tau-bench's airline trials): a stated construction, not a recording.

    ``earlier`` (with ``kinship``) draws what the same prompts came to in a pass before: other samples, and what a prompt's samples
    have in common correlates with what they have in common in the workload that is drawn without it by this much, in [0, 1].
    """
    import numpy as np

    if not traces:
        raise ConfigError("traces: none to draw from; name a directory with agent_turns/*.csv")
    if earlier is not None and not (kinship and 0.0 <= earlier <= 1.0):
        raise ConfigError(
            f"earlier: got {earlier} with kinship {kinship}; it is a correlation from 0 to 1 between what kin have in common"
        )
    rng = np.random.default_rng([seed, 0x5EED])
    by_task: dict[str, list[Trace]] = {}
    for trace in traces:
        by_task.setdefault(trace.task, []).append(trace)
    repeated = [samples for _, samples in sorted(by_task.items()) if len(samples) >= group_size]
    plans = []
    order: list[int] = []
    ranked = sorted(traces, key=lambda trace: sum(turn.new_tokens for turn in trace.turns))
    for index in range(iterations * num_groups):
        iteration, group = divmod(index, num_groups)
        if repeated and group_size > 1:
            if not order:
                order = [int(i) for i in rng.permutation(len(repeated))]
            samples = repeated[order.pop()]
            chosen = [samples[int(i)] for i in rng.permutation(len(samples))[:group_size]]
        elif kinship:
            shared, own = rng.standard_normal(), rng.standard_normal(group_size)
            if earlier is not None:
                before = np.random.default_rng([seed, 0xEA71, index])
                shared = earlier * shared + sqrt(1.0 - earlier * earlier) * before.standard_normal()
                own = before.standard_normal(group_size)
            ranks = [NormalDist().cdf(x) for x in sqrt(kinship) * shared + sqrt(1.0 - kinship) * own]
            chosen = [ranked[int(rank * len(ranked))] for rank in ranks]
        else:
            chosen = []
            while len(chosen) < group_size:
                if not order:
                    order = [int(i) for i in rng.permutation(len(traces))]
                chosen.append(traces[order.pop()])
        plans += [
            TrajectoryPlan(iteration, group, sample, trace.prompt_tokens, trace.turns, trace.family)
            for sample, trace in enumerate(chosen)
        ]
    return Workload(name, tuple(plans))


def synthetic(
    num: int, *, turns: int, seed: int, iterations: int = 1, group_size: int = 8, name: str = "sim"
) -> Workload:
    """A workload made up from distributions: lognormal turn lengths, geometric numbers of turns, bimodal tool times.

    Parameters
    ----------
    num : int
        Trajectories in each iteration.
    turns : int
        Mean number of turns of one.
    """
    import numpy as np

    rng = np.random.default_rng([seed, 0xA11])
    plans = []
    for index in range(num * iterations):
        iteration, place = divmod(index, num)
        count = int(min(20 * turns, max(1, rng.geometric(1.0 / turns))))
        lengths = np.maximum(1, rng.lognormal(4.8, 1.1, count)).astype(int)
        payloads = rng.lognormal(5.0, 1.2, count).astype(int)
        seconds = np.where(rng.random(count) < 0.75, 0.04, rng.gamma(2.0, 5.0, count))
        rows = [
            TurnPlan(int(lengths[i]), "tool", ToolStatus.OK, int(payloads[i]), float(seconds[i]))
            for i in range(count - 1)
        ]
        rows.append(TurnPlan(int(lengths[-1]), "", NO_TOOL, 0, float(seconds[-1])))
        plans.append(TrajectoryPlan(iteration, place // group_size, place % group_size, 1500, tuple(rows), "synthetic"))
    return Workload(name, tuple(plans))


def prompts_of(workload: Workload, plans: Sequence[TrajectoryPlan]) -> GroupsNamed:
    """Which prompts the groups of ``plans`` are of, where these come again."""
    return GroupsNamed(tuple({workload.group_key(plan): plan.prompt for plan in plans if plan.prompt}.items()))


def by_key(workload: Workload) -> Mapping[str, TrajectoryPlan]:
    """Plans by key, in the order of the workload."""
    return {workload.key(plan): plan for plan in workload.trajectories}
