"""Skill of the posterior's forecasts of the remaining length, on every ``DIR/agent_turns/*.csv``
(``--data DIR``; default: the excerpt), scored at every tool return with tokens left to generate.

Five folds by task: it learns from the trajectories of four folds, one after another, then forecasts
the fifth without learning from it. In a set with groups (several samples per task) all siblings have
finished; ``_alone``: without any; ``_together``: all run at once, and so did the training groups.

``posterior_{r2,spearman}_<set>``, ``..._alone``, ``..._together``: R2 is of the mean forecast on
tokens, Spearman of the order.
"""

from __future__ import annotations

import copy
import heapq
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import Figure, command_parser, emit
from benchmarks.virtual.draws import agent_turn_files
from libra.errors import ConfigError
from libra.facts import QuantumFinished, TrajectoryEnded, TrajectoryParked
from libra.planner.agent_turns import AgentTurn, read_agent_turns
from libra.policy.posterior.forecaster import Posterior
from libra.types import NO_TOOL, Phase, ToolOutcome

KNOWN = ("mini_swe", "agentcgroup", "tau")
"""Sets whose file name is longer, e.g. ``tau_airline_gpt4o.csv``."""
REQUIRED = ("source", "task", "sample", "tool", "status", "payload_chars", "completion_tokens")
TOKEN_S, TOOL_S = 0.02, 0.1
"""Seconds per generated token, and of a tool, if the trace has none."""


class Turn(NamedTuple):
    """One generation of ``tokens`` and its tool's result; `NO_TOOL`: the last turn."""

    tokens: int
    tool: str
    status: ToolOutcome
    payload_tokens: int
    seconds: float

    @classmethod
    def of(cls, turn: AgentTurn) -> Turn:
        llm_s = TOKEN_S * turn.completion_tokens if turn.llm_s is None else turn.llm_s
        seconds = llm_s + (TOOL_S if turn.tool_s is None else turn.tool_s) if turn.gap_s is None else turn.gap_s
        return cls(turn.completion_tokens, turn.tool, turn.status, turn.payload_tokens, max(seconds, 1e-3))


class Trace(NamedTuple):
    """A recorded trajectory: its prompt (``group``), its environment (``family``), its turns."""

    key: str
    task: str
    group: str
    family: str
    turns: tuple[Turn, ...]

    @property
    def tokens(self) -> int:
        return sum(turn.tokens for turn in self.turns)


class ScoredForecast(NamedTuple):
    """One forecast and its truth, in tokens."""

    mean: float
    order: float
    truth: float


def sets_in(data: Path) -> dict[str, Path]:
    return {next((n for n in KNOWN if path.stem.startswith(n)), path.stem): path for path in agent_turn_files(data)}


def read_traces(path: Path) -> list[Trace]:
    """The trajectories of one file, in its order, without those that generated nothing."""
    found = []
    for one in read_agent_turns(path, REQUIRED):
        group = "/".join(filter(None, (one.source, one.model, one.task)))
        key = "/".join(filter(None, (group, one.sample)))
        found.append(Trace(key, one.task, group, one.source, tuple(map(Turn.of, one.turns))))
    return [trace for trace in found if trace.tokens > 0]


def start(forecaster: Posterior, trace: Trace) -> None:
    forecaster.handle(TrajectoryParked(trace.key, 0, Phase.ROLLOUT, 0, trace.group, trace.family))


def replay_turn(forecaster: Posterior, trace: Trace, index: int) -> bool:
    made = trace.turns[index]
    forecaster.handle(QuantumFinished(trace.key, Phase.ROLLOUT, made.tokens, "", NO_TOOL, 0.0))
    if made.status:
        returned = QuantumFinished(
            trace.key, Phase.TOOL, 0, made.tool, made.status, 0.0, payload_tokens=made.payload_tokens
        )
        forecaster.handle(returned)
    return bool(made.status)


def train_on(forecaster: Posterior, traces: Iterable[Trace]) -> None:
    for trace in traces:
        start(forecaster, trace)
        for index in range(len(trace.turns)):
            replay_turn(forecaster, trace, index)
        forecaster.handle(TrajectoryEnded(trace.key))
        forecaster.learn()


def replay(
    forecaster: Posterior, group: Sequence[Trace], *, learn: bool = True, completed: bool = True
) -> list[ScoredForecast]:
    """Replay a group whose members start together.

    ``learn=False`` learns nothing from ended trajectories; ``completed=False`` ignores them.
    """
    scored, done = list[ScoredForecast](), [0] * len(group)
    for trace in group:
        start(forecaster, trace)
    heap = [(trace.turns[0].seconds, number, 0) for number, trace in enumerate(group)]
    heapq.heapify(heap)
    while heap:
        now, number, index = heapq.heappop(heap)
        trace = group[number]
        done[number] += trace.turns[index].tokens
        left = trace.tokens - done[number]
        if replay_turn(forecaster, trace, index) and left > 0:
            forecast = forecaster.remaining(trace.key)
            scored.append(ScoredForecast(forecast.mean_tokens, forecast.order_tokens, left))
        if index + 1 < len(trace.turns):
            heapq.heappush(heap, (now + trace.turns[index + 1].seconds, number, index + 1))
        else:
            forecaster.handle(TrajectoryEnded(trace.key, completed))
            if learn:
                forecaster.learn()
    return scored


def scores(scored: Sequence[ScoredForecast]) -> dict[str, float]:
    mean, order, truth = np.array(scored, float).T
    ranks, true_ranks = (_ranks(each) - _ranks(each).mean() for each in (order, truth))
    size = float(np.sqrt((ranks @ ranks) * (true_ranks @ true_ranks)))
    return {
        "r2": 1.0 - float(((truth - mean) ** 2).sum() / ((truth - truth.mean()) ** 2).sum()),
        "spearman": float(ranks @ true_ranks) / size if size > 0 else 0.0,
    }


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2.0)[inverse]


FOLDS = 5
MODES = ("alone", "three", "together")
GOALS: dict[str, float] = {
    "posterior_spearman_mini_swe": 0.58, "posterior_r2_mini_swe": 0.15, "posterior_spearman_agentcgroup": 0.40,
    "posterior_r2_tau": 0.33, "posterior_r2_tau_together": 0.157,
}  # fmt: skip


def groups_of(traces: Sequence[Trace]) -> list[list[Trace]]:
    groups: dict[str, list[Trace]] = {}
    for trace in traces:
        groups.setdefault(trace.group, []).append(trace)
    return list(groups.values())


def folds_of(traces: Sequence[Trace]) -> list[list[list[Trace]]]:
    """Groups in ``FOLDS`` folds; a task, also in different environments, is in one fold."""
    tasks = sorted({trace.task for trace in traces})
    fold = {tasks[at]: rank % FOLDS for rank, at in enumerate(np.random.default_rng(0).permutation(len(tasks)))}
    folds: list[list[list[Trace]]] = [[] for _ in range(FOLDS)]
    for group in groups_of(traces):
        folds[fold[group[0].task]].append(group)
    return folds


def five_folds(traces: Sequence[Trace], modes: Sequence[str]) -> dict[str, list[ScoredForecast]]:
    """Forecasts of all trajectories of each fold after training on the other four, by mode."""
    folds = folds_of(traces)
    scored: dict[str, list[ScoredForecast]] = {mode: [] for mode in modes}
    for held_out in range(FOLDS):
        groups = [group for at, fold in enumerate(folds) if at != held_out for group in fold]
        train, rng = [trace for group in groups for trace in group], np.random.default_rng(held_out)
        one_by_one, together = Posterior(), Posterior()
        train_on(one_by_one, [train[i] for i in rng.permutation(len(train))])
        if "together" in modes:
            for at in np.random.default_rng(held_out).permutation(len(groups)):
                replay(together, groups[at])
        for mode in modes:
            for group in folds[held_out]:
                scored[mode] += ask(together if mode == "together" else one_by_one, group, mode)
    return scored


def ask(learned: Posterior, group: Sequence[Trace], mode: str) -> list[ScoredForecast]:
    """Forecasts of a copy of ``learned`` for a new group; it learns from siblings only."""
    if mode == "together":
        return replay(copy.deepcopy(learned), group, learn=False)
    scored: list[ScoredForecast] = []
    for trace in group:
        if mode == "alone":  # forgotten at once: no copy needed
            scored += replay(learned, [trace], learn=False, completed=False)
            continue
        forecaster = copy.deepcopy(learned)
        train_on(forecaster, [sibling for sibling in group if sibling is not trace])
        scored += replay(forecaster, [trace], learn=False)
    return scored


def measure(name: str, traces: Sequence[Trace]) -> dict[str, Figure]:
    grouped = len(traces) >= 2 * len(groups_of(traces))
    values: dict[str, float] = {}
    for mode, scored in five_folds(traces, MODES if grouped else MODES[:1]).items():
        suffix = "" if mode == ("three" if grouped else "alone") else f"_{mode}"
        values |= {f"posterior_{score}_{name}{suffix}": value for score, value in scores(scored).items()}
    return {figure: Figure(value, "ratio", "higher", GOALS.get(figure)) for figure, value in values.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("length_skill", __doc__, data=True)
    parser.add_argument("--sets", nargs="+", help="names of sets; default: all that are there")
    options = parser.parse_args(arguments)
    sets = sets_in(options.data)
    if unknown := set(options.sets or ()) - set(sets):
        raise ConfigError(f"--sets: no {', '.join(sorted(unknown))} in {options.data}; there are {', '.join(sets)}")
    figures: dict[str, Figure] = {}
    for name in options.sets or sets:
        traces = read_traces(sets[name])
        print(f"{name}: {len(traces)} trajectories in {len(groups_of(traces))} groups")
        figures |= measure(name, traces)
    emit("length_skill", figures, arguments=arguments, as_json=options.json)
