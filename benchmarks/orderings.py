"""Orderings to compare with; a run takes one by ``policy.name=benchmarks.orderings:Paper``, or
another name of this file.

`Oracle` needs the lengths of a workload, and is for simulations only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from math import exp, log, sqrt
from typing import ClassVar

import numpy as np

from libra.facts import (
    Fact,
    HomeForgotten,
    Prefer,
    QuantumFinished,
    QuantumStarted,
    SetPriority,
    TrajectoryEnded,
    TrajectoryParked,
    WorkerCapacity,
    WorkerWithdrawn,
)  # fmt: skip
from libra.policy import CMLFQ, Fifo, Mlfq
from libra.policy.cmlfq import Objective
from libra.policy.posterior.forecaster import Forecast
from libra.policy.saved import Saved
from libra.policy.trajectory_table import PATIENCE, TrajectoryStats
from libra.types import Phase, ToolStatus


class CompletedCalls(Mlfq):
    """Most completed tool calls first, then by arrival (DynaRL, OSDI '26, from its README)."""

    name: ClassVar[str] = "completed_calls"

    def _level(self, stats: TrajectoryStats) -> tuple[int, str]:
        return 1 + max(0, MOST_CALLS - stats.calls), f"completed_calls: {stats.calls} tool calls came back"


MOST_CALLS = 10_000
"""`CompletedCalls` does not count calls beyond these."""


# The paper's causal prefix tree of tool returns: a node is a prompt and the path of returns so far. Its released code
# (NetX-lab/Libra @c51bf84) has payload classes at 500 and 5,000 characters and the 90th percentile of the last 200 visits. Here
# payloads are in tokens, so the classes are at 125 and 1,250, and a tool failed by its status, not by "error" in its text.

PAYLOAD_EDGES = (125, 1250)
WINDOW = 200
FAILED = frozenset({ToolStatus.ERROR, ToolStatus.TIMEOUT, ToolStatus.MALFORMED})
"""Failures in a tree with two outcomes. A truncated return counts as a success."""


def state_name(tool: str, status: str, payload_tokens: int) -> str:
    size = sum(payload_tokens > edge for edge in PAYLOAD_EDGES)
    return f"{tool}:{size}:{'failure' if status in FAILED else 'success'}"


Tree = dict[str, tuple[int, float, list[int]]]
"""Remaining lengths seen at each prefix of tool returns (joined by "/"): count, mean, and the last ``WINDOW`` for P90."""


def visit(tree: Tree, states: Sequence[str], remaining: Iterable[int]) -> None:
    """Add a trajectory that passed these states and generated ``remaining`` tokens after each."""
    for path, left in zip(accumulate(states, "{}/{}".format), remaining, strict=True):
        count, mean, last = tree.get(path, (0, 0.0, []))
        tree[path] = (count + 1, mean + (left - mean) / (count + 1), [*last, left][-WINDOW:])


THRESHOLDS = {2: (5_000,), 3: (4_000, 12_000), 4: (4_000, 12_000, 30_000)}
"""Longest remaining output of each bucket but the last, by number of buckets."""


class Paper(Saved):
    """The published rule: a prefix tree of tool returns, and a move if mean and P90 fall into one
    bucket.

    First come, first served; every trajectory begins in the slowest bucket. Source: Libra,
    arXiv:2606.03077 v2, C-MLFQ, with additions of its released code (NetX-lab/Libra @c51bf84): one
    root per prompt and a global one; an unknown state falls back to the deepest known ancestor.
    Deviations, beside the tree's above: placement goes through `libra.policy.dispatcher`,
    which is work conserving, instead of a router that queues at one server; prompts are forgotten
    with their last trajectory.
    """

    name: ClassVar[str] = "paper"

    _fifo: Fifo
    _engines: dict[str, tuple[str, float]]  # bucket and seconds per token, by worker
    _home: dict[str, str]  # worker, by trajectory
    _root: Tree
    _prompts: dict[str, Tree]
    _alive: dict[str, int]
    _paths: dict[str, tuple[str, list[str], list[int]]]  # group, states, tokens generated before each

    def __init__(self) -> None:
        super().__init__()
        self._fifo = Fifo()

    def handle(self, event: Fact) -> tuple[SetPriority | Prefer, ...]:
        answers = self._fifo.handle(event)
        match event:
            case TrajectoryParked(key=key, phase=phase, group=group):
                if key not in self._paths:
                    self._paths[key] = (group, [], [0])
                    self._alive[group] = self._alive.get(group, 0) + 1
                if phase is Phase.ROLLOUT:
                    return (*answers, *self._prefer(key))
            case QuantumFinished(key=key) if key in self._paths:
                self._returned(event)
            case TrajectoryEnded(key=key) if key in self._paths:
                self._ended(key, event.completed)
            case QuantumStarted(key=key, phase=Phase.ROLLOUT, worker=worker):
                self._home[key] = worker
            case HomeForgotten(key=key):
                self._home.pop(key, None)
            case WorkerCapacity(worker=worker, rollout_slots=slots) if slots:
                self._engines[worker] = event.bucket, event.alone_s_per_token
            case WorkerWithdrawn(worker=worker):
                self._engines.pop(worker, None)
        return answers

    def _returned(self, event: QuantumFinished) -> None:
        _, states, generated = self._paths[event.key]
        generated[-1] += event.tokens
        if event.status:
            states.append(state_name(event.tool, event.status, event.payload_tokens))
            generated.append(generated[-1])

    def _ended(self, key: str, completed: bool) -> None:
        group, states, generated = self._paths.pop(key)
        self._home.pop(key, None)
        if completed and states:
            for tree in [self._root, *([self._prompts.setdefault(group, {})] if group else [])]:
                visit(tree, states, [generated[-1] - before for before in generated[: len(states)]])
        self._alive[group] -= 1
        if not self._alive[group]:
            del self._alive[group]
            self._prompts.pop(group, None)

    def _prefer(self, key: str) -> tuple[Prefer, ...]:
        buckets = self._slowest_first()
        if len(buckets) < 2:
            return ()
        group, states, _ = self._paths[key]
        home, _ = self._engines.get(self._home.get(key, ""), ("", 0.0))
        if not home:
            return (Prefer(key, (buckets[0],), "paper: everybody begins in the slowest bucket"),)
        tree, known = self._prompts.get(group, self._root), [*accumulate(states, "{}/{}".format)]
        deepest = next((tree[path] for path in reversed(known) if path in tree), None)
        if deepest is None:
            return ()
        _, mean, last = deepest
        edges = THRESHOLDS.get(len(buckets), THRESHOLDS[4])
        by_mean, by_p90 = bisect_left(edges, mean), bisect_left(edges, float(np.percentile(last, 90)))
        if by_mean != by_p90 or buckets[by_mean] == home:
            return ()
        return (Prefer(key, (buckets[by_mean],), f"paper: mean {int(mean)} and P90 are in one bucket"),)

    def _slowest_first(self) -> list[str]:
        seconds = dict(reversed(self._engines.values()))  # of the first engine of each bucket
        return sorted(seconds, key=lambda bucket: (-seconds[bucket], bucket))


OUTRUN_FRAC = 0.1
"""Forecast for a trajectory longer than its given length: this share of what it has generated."""


class Forecaster(Saved):
    """Stands in for the `Posterior` of `CMLFQ`."""

    def handle(self, event: Fact) -> None:
        """Learn from one event, cheaply: the scheduler's loop waits."""

    def learn(self) -> None:
        """Run the expensive update, off the critical path."""

    def remaining(self, key: str) -> Forecast:
        """Forecast for a live trajectory; KeyError for one never parked or already ended."""
        raise NotImplementedError

    def reconsidered(self, key: str) -> Forecast:
        """`remaining` of a waiting one, updated by its siblings."""
        return self.remaining(key)

    def is_probe(self, key: str) -> bool:
        """Whether it should run ahead of its unknown siblings."""
        return False

    @property
    def skill(self) -> float | None:
        """Measured gain over progress, if it measures any."""
        return None

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each signal, 0 to 1."""
        return {}


class KnownLengths(Forecaster):
    """Forecasts from given total tokens by key, of a given accuracy; unknown keys: skill 0."""

    _totals: dict[str, float]
    _generated: dict[str, int]

    def __init__(self, totals: Mapping[str, int] | None = None, *, accuracy: float = 1.0, seed: int = 0) -> None:
        super().__init__()
        if not 0.0 < accuracy <= 1.0:
            raise ValueError(f"accuracy: got {accuracy}; it is a correlation above 0 and at most 1, e.g. 0.6")
        self._totals = guessed_lengths(dict(sorted((totals or {}).items())), accuracy, seed)

    def handle(self, event: Fact) -> None:
        match event:
            case TrajectoryParked(key=key):
                self._generated.setdefault(key, 0)
            case QuantumFinished(key=key, tokens=tokens):
                if key in self._generated:
                    self._generated[key] += tokens
            case TrajectoryEnded(key=key):
                self._generated.pop(key, None)

    def remaining(self, key: str) -> Forecast:
        """The remainder of the given length; KeyError for a trajectory that does not run."""
        generated = self._generated[key]
        total = self._totals.get(key)
        if total is None:
            return Forecast(0.0, 0.0, 0.0)
        left = max(total - generated, OUTRUN_FRAC * generated if total < generated else 0.0)
        return Forecast(left, left, 1.0)


def guessed_lengths(totals: Mapping[str, int], accuracy: float, seed: int) -> dict[str, float]:
    """Best predictions whose logarithms correlate with the true ones by ``accuracy``."""
    if accuracy == 1.0 or not totals:
        return {key: float(total) for key, total in totals.items()}
    logs = np.array([log(1.0 + total) for total in totals.values()])
    mean, spread = float(logs.mean()), float(logs.std())
    noise = np.random.default_rng(seed).standard_normal(len(logs))
    guesses = mean + accuracy * (accuracy * (logs - mean) + sqrt(1.0 - accuracy * accuracy) * spread * noise)
    return {key: exp(float(value)) - 1.0 for key, value in zip(totals, guesses, strict=True)}


class Oracle(CMLFQ):
    """C-MLFQ's rule with the true lengths: an upper bound of this rule's gain."""

    name: ClassVar[str] = "oracle"
    exact_lengths = True

    def __init__(
        self, totals: Mapping[str, int] | None = None, *, objective: Objective = "makespan", patience: int = PATIENCE
    ) -> None:
        super().__init__(KnownLengths(totals), objective=objective, patience=patience)
