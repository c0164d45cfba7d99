"""Forecasts of a trajectory's remaining tokens, learned online from ended and running trajectories.

One ridge regression on progress and every signal, mixed with the totals of siblings
(`libra.policy.posterior.regression`). Trajectories that end early are short (right censoring), so
running trajectories count with expected totals (Buckley and James 1979), updated at each `learn`.

Promises
--------
1. Forecasts depend only on the sequence of events and `learn` calls, for any hash seed.
2. ``restore(snapshot())`` changes no later forecast.
3. Without a measured gain over progress (`Forecast.skill` is 0) the forecast uses progress only.
4. Memory is bounded by the number of running trajectories plus constants.
"""

from __future__ import annotations

import math
from collections import deque
from sys import intern
from typing import Any, NamedTuple

import numpy as np

from libra.facts import (
    Fact,
    PromptsNamed,
    QuantumFinished,
    QuantumStarted,
    TrajectoryEnded,
    TrajectoryParked,
    VersionPublished,
)
from libra.policy.posterior.cohorts import Cohort, Cohorts, History, lognormal_remaining
from libra.policy.posterior.regression import (
    FORGET,
    MAX_BYTES,
    NUM_FEW,
    NUM_ROW,
    TOOL_SLOTS,
    WIDTH,
    Live,
    Regression,
    counted,
)
from libra.policy.saved import Saved
from libra.types import Phase, ToolStatus


class Forecast(NamedTuple):
    """Forecast of one trajectory's remaining tokens, each >= 0."""

    mean_tokens: float  # expectation, for sums of loads
    order_tokens: float  # for ranking, e.g. exp of the expected logarithm
    skill: float  # gain over the progress-only forecast, <= 1; at 0 its order is not used


KEPT = 256  # outcomes
LOGGED = 512  # running trajectories whose forecasts are logged


class ForecastOutcome(NamedTuple):
    """An ended trajectory: forecast of its total at the start and half way, and the true total."""

    first_tokens: float
    half_tokens: float
    tokens: int


class CalibrationLog:
    """Forecasts of ended trajectories, made before their end; no decision reads them."""

    def __init__(self) -> None:
        self.outcomes: deque[ForecastOutcome] = deque(maxlen=KEPT)
        self._forecasts: dict[str, dict[int, float]] = {}  # totals by tokens at the time

    def forecast(self, key: str, generated_tokens: int, total_tokens: float) -> None:
        if key in self._forecasts or (len(self._forecasts) < LOGGED and not generated_tokens):
            self._forecasts.setdefault(key, {})[generated_tokens] = total_tokens

    def ended(self, key: str, tokens: int, *, completed: bool) -> None:
        """``key`` has ended after ``tokens`` tokens; failures do not count."""
        forecasts = self._forecasts.pop(key, None)
        if forecasts and completed and tokens:
            half = [total for generated, total in forecasts.items() if 2 * generated <= tokens]
            self.outcomes.append(ForecastOutcome(half[0], half[-1], tokens))


VERSION_FORGET = 0.9  # weight of everything learned after each new version of the weights
SIBLING_PRIOR, FAMILY_PRIOR = 1.0, 5.0  # weight, in members, of being like all others
SAMPLE = 64  # running trajectories that a `learn` uses
FOLLOWED = 2_048  # running trajectories to learn from: each new one while there is room
WAITING = 1_024  # ended trajectories that wait for `learn`; beyond, the oldest are dropped
NAMED = 65_536  # groups whose prompts are known before their first trajectory
UNFINISHED = "(unfinished turn)"  # the return of a turn that parks before its end
_LARGEST_LOG = 16.0


class Posterior(Saved):
    """The forecaster of one run; it receives every event of the policy, in order."""

    _live: dict[str, Live]
    _tools: dict[str, int]
    _groups: Cohorts
    _families: Cohorts
    _history: History
    _named: dict[str, str]  # prompts of groups that have not started
    _followed: int  # running trajectories with rows
    _waiting: list[tuple[bytes, int, str]]  # ended ones: rows, tokens, group
    _regression: Regression
    _all: Cohort  # all trajectories
    _squares: float  # sum of squares of log totals of ended ones
    _spread: tuple[float, float]  # variance of log totals within and between groups
    _within: list[float]  # ended ones with ended siblings: number, sum of squares

    def __init__(self) -> None:
        super().__init__()
        self._groups, self._families = Cohorts(SIBLING_PRIOR), Cohorts(FAMILY_PRIOR)
        self._history, self._regression, self._all = History(), Regression(), Cohort()
        self._spread, self._within = (0.5, 0.5), [0.0, 0.0]
        self._x, self._row = np.zeros(WIDTH), np.zeros(NUM_ROW, dtype=np.float32)
        self._moment = 0  # changes whenever a forecast may
        self._twin: tuple[int, str, str, Live] | None = None  # last forecast before a start

    def handle(self, event: Fact) -> None:
        self._moment += 1
        if type(event) is QuantumFinished:
            live = self._live.get(event.key)
            if live is not None:
                live.tokens += event.tokens
                live.pending += event.tokens
                if event.status:
                    self._returned(live, event.tool, event.status, event.payload_tokens)
        elif type(event) is TrajectoryParked:
            live = self._live.get(event.key)
            if live is None:
                self._started(event.key, event.group, event.family)
            elif live.pending and event.phase is Phase.ROLLOUT:
                self._returned(live, UNFINISHED, ToolStatus.OK, 0)
        elif type(event) is TrajectoryEnded:
            live = self._live.pop(event.key, None)
            if live is not None:
                self._ended(event.key, live, event.completed)
        elif isinstance(event, QuantumStarted):
            self._begins(event.key)
        elif type(event) is PromptsNamed:
            self._named.update(event.groups)
            for group in list(self._named)[: max(0, len(self._named) - NAMED)]:
                del self._named[group]
        elif type(event) is VersionPublished:
            for part in (self._regression, self._all, self._groups, self._families):
                part.scale(VERSION_FORGET)
            self._squares *= VERSION_FORGET
            self._history.published()

    def _begins(self, key: str) -> None:
        live = self._live.get(key)
        if live is not None and not live.tokens and not live.returns:
            if live.rows is not None:
                live.rows = b""
            self._forecast(live)

    def _started(self, key: str, group: str, family: str) -> None:
        group, family = intern(group), intern(family)
        self._all.live += 1
        if group:
            cohort = self._groups.join(group, key)
            if prompt := self._named.pop(group, ""):
                self._recall(cohort, prompt)
        if family:
            self._families.join(family, key)
        followed = self._followed < FOLLOWED
        self._followed += followed
        live = self._live[key] = Live(group, family, b"" if followed else None)
        self._forecast(live)

    def _recall(self, cohort: Cohort, prompt: str) -> None:
        cohort.prompt = prompt
        prior, persistence = self._groups.prior, self._history.persistence
        shift = self._history.recall(prompt, prior)
        if shift is not None and persistence > 0.0:
            cohort.past, cohort.past_shift = prior * persistence / (1.0 - persistence), shift
            cohort.probe = ""

    def _returned(self, live: Live, tool: str, status: str, payload_tokens: int) -> None:
        if tool not in self._tools and len(self._tools) < TOOL_SLOTS - 1:
            self._tools[tool] = len(self._tools)
        slot = self._tools.get(tool, TOOL_SLOTS - 1)
        live.counts = counted(live.counts, slot, status, payload_tokens)
        live.returns += 1
        self._forecast(live)

    def _ended(self, key: str, live: Live, completed: bool) -> None:
        total = math.log(max(live.tokens, 1)) if completed else None
        weight, value = live.information, live.imputed
        if live.group:
            if total is not None:
                self._compare(self._groups.by_name[live.group], total)
            cohort = self._groups.leave(live.group, key, weight, value, total)
            if cohort.prompt and not cohort.live and cohort.weight > 0.0:
                recalled = cohort.past_shift if cohort.past else None
                self._history.ended(cohort.prompt, cohort.total / cohort.weight, float(cohort.finished), recalled)
        if live.family:
            self._families.leave(live.family, key, weight, value, total)
        if total is not None:
            self._all.scale(FORGET)
            self._squares = FORGET * self._squares + total * total
        self._all.leave(weight, value, total)
        if live.rows is not None:
            self._followed -= 1
            if total is not None:
                self._waiting.append((live.rows, live.tokens, live.group))
                del self._waiting[:-WAITING]

    def _compare(self, siblings: Cohort, total: float) -> None:
        if siblings.weight >= 0.5:
            deviation = total - siblings.total / siblings.weight
            share = siblings.weight / (siblings.weight + 1.0)
            self._within[0] = FORGET * self._within[0] + 1.0
            self._within[1] = FORGET * self._within[1] + share * deviation * deviation

    def _forecast(self, live: Live, *, kept: bool = True) -> None:
        tokens, weight, value = live.tokens, live.information, live.imputed
        log_done = math.log(tokens) if tokens > 1 else 0.0
        everyone, regression = self._all, self._regression
        known = everyone.weight + everyone.running - weight
        centre = (everyone.total + everyone.running_total - weight * value) / known if known > 1e-6 else value
        shift = sure = family = 0.0
        if live.family:
            family, _ = self._families.shift(live.family, centre, weight, value)
            centre += family
        if live.group:
            shift, sure = self._groups.shift(live.group, centre, weight, value)
        within, between = self._spread
        rest = lognormal_remaining(centre + shift, math.sqrt(within + between * (1.0 - sure)), log_done)
        rest_tokens = math.exp(rest)
        x, log1p = self._x, math.log1p
        progress = (1.0, log1p(tokens), log1p(live.returns), log1p(live.pending))
        x[:NUM_FEW] = (*progress, shift, sure, sure * rest, sure * rest_tokens, family)
        np.log1p(np.frombuffer(live.counts, dtype=np.float32), out=x[NUM_FEW:])
        base_log, base_mean, log, mean = (x @ regression.weights).tolist()
        stage = regression.stage(live.returns)
        order_blend, mean_blend = stage.order, stage.mean
        (joint_share, totals_share), (joint_mean, totals_mean) = order_blend.shares, mean_blend.shares
        log = base_log + joint_share * (log - base_log) + totals_share * sure * (rest - stage.excess - base_log)
        mean = base_mean + joint_mean * (mean - base_mean) + totals_mean * sure * (rest_tokens - base_mean)
        base_log = min(max(base_log, 0.0), _LARGEST_LOG)
        log = min(max(log, 0.0), _LARGEST_LOG)
        base_mean, mean = max(base_mean, 1.0), max(mean, 1.0)
        if kept and live.rows is not None and len(live.rows) < MAX_BYTES:
            row = self._row
            row[:WIDTH] = x
            row[WIDTH:] = (tokens, base_log, base_mean, log, mean)
            live.rows += row.tobytes()
        # Eight digits: the last bits of matrix products depend on the alignment of memory.
        live.order = float(f"{math.exp(base_log + order_blend.factor * (log - base_log)):.8g}")
        live.mean = float(f"{base_mean + mean_blend.factor * (mean - base_mean):.8g}")
        live.pending = 0
        # Its weight is the square of the share of all others that it has outlasted: 0 at the start,
        # nearly 1 far in the tail. A larger weight of short members would drown the ended ones. A
        # forecast with skill is worth that share of an ended member from its first return on.
        beyond = (log_done - centre) / math.sqrt(2.0 * (within + between)) if tokens else -9.0
        outlasted = (1.0 - 0.5 * math.erfc(beyond)) ** 2
        known_share = order_blend.skill if live.returns else 0.0
        live.information = information = outlasted + (1.0 - outlasted) * known_share
        live.imputed = imputed = math.log(tokens + live.order)
        more, more_total = information - weight, information * imputed - weight * value
        for cohort in (everyone, self._groups.by_name.get(live.group), self._families.by_name.get(live.family)):
            if cohort is not None:
                cohort.running += more
                cohort.running_total += more_total

    def remaining(self, key: str) -> Forecast:
        live = self._live[key]
        mean, order, pending = live.mean, live.order, live.pending
        if pending:
            mean, order = mean * mean / (mean + pending), order * order / (order + pending)
        return Forecast(mean, order, self._regression.stage(live.returns).order.skill)

    def reconsidered(self, key: str) -> Forecast:
        """`remaining` of a waiting trajectory, updated by its siblings."""
        live = self._live[key]
        if live.tokens or live.returns:
            return self.remaining(key)
        # Siblings that have not begun are equal: at one moment they share a forecast.
        twin, known = self._twin, self._all.weight + self._all.running
        if twin is not None and twin[:3] == (self._moment, live.group, live.family) and live.group and known > 1e-6:
            live.order, live.mean, live.imputed = twin[3].order, twin[3].mean, twin[3].imputed
        else:
            self._forecast(live, kept=False)  # one row of the start is enough to learn from
            self._twin = (self._moment, live.group, live.family, live)
        return Forecast(live.mean, live.order, self._regression.stage(0).order.skill)

    def is_probe(self, key: str) -> bool:
        live = self._live[key]
        return bool(live.group) and self._groups.by_name[live.group].probe == key

    def learn(self) -> None:
        if not self._waiting:
            return
        self._moment += 1
        waiting, self._waiting = self._waiting, []
        for rows, total, group in waiting:
            self._regression.add_ended(rows, total, group)
        running = [one for one in self._live.values() if one.returns and one.rows]
        chosen = min(SAMPLE, len(running))
        taken = [running[i * len(running) // chosen] for i in range(chosen)]
        self._regression.solve(
            [(one.rows or b"", one.tokens, one.order, one.mean) for one in taken], len(running) / max(1, chosen)
        )
        self._spread = within, between = self._spreads()
        self._groups.prior = min(max(within / between, 0.25), 8.0)

    def _spreads(self) -> tuple[float, float]:
        weight, total = self._all.weight, self._all.total
        variance = max(self._squares / weight - (total / weight) ** 2, 0.05) if weight > 2.0 else 1.0
        count, deviations = self._within
        within = (deviations + 5.0 * 0.5 * variance) / (count + 5.0)
        return within, max(variance - within, 0.1 * within)

    def restore(self, snapshot: Any) -> None:
        super().restore(snapshot)
        self._twin = None

    @property
    def skill(self) -> float:
        """Share of progress-only squared error (of log tokens) that forecasts saved."""
        return self._regression.later.order.skill

    @property
    def weights(self) -> dict[str, float]:
        """Weights of regression, siblings' totals and a prompt's history, in the forecast order."""
        order = self._regression.later.order
        joint, totals = (order.factor * share for share in order.shares)
        return {"regression": joint, "totals": totals, "history": self._history.measured}
