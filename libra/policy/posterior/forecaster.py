"""How many tokens a trajectory has still to generate, learned online from those that ran before it and beside it.

Every signal (`SIGNALS`) is an expert: a linear forecast on the columns of progress and its own. All are solved from one Gram
matrix, and because they are linear, the mixture that the measured skill calls for is one matrix as well: a return costs one
small product, whatever the number of experts.

Finished trajectories are the short ones (right censoring): with 32 in flight the first to finish are far below the mean. So
running ones are learned from too, with the total that is now expected of them (Buckley and James 1979), replaced at every
`learn`.

Promises
--------
1. Deterministic in the sequence of events and of calls of `learn`, whatever the hash seed.
2. ``restore(snapshot())`` changes no later answer.
3. Without measured gain over progress (`Forecast.skill` is 0) the forecast is the progress-only one.
4. What is kept is bounded by what is live, and by constants: a group's state goes with its last member (but for the last
   16,384 groups, kept in case a prompt comes again), the tree has at most 40,000 nodes, and at most 1,024 trajectories wait
   to be learned from, the latest.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from libra.policy.forecast import Forecast
from libra.policy.messages import Event, QuantumFinished, TrajectoryEnded, TrajectoryParked, VersionPublished
from libra.policy.posterior.cohorts import Cohorts, lognormal_remaining
from libra.policy.posterior.columns import (
    ADDS,
    DECAY,
    NUM_FEW,
    SIGNALS,
    TOKEN_SCALE,
    TOOLS,
    WIDTH,
    Pool,
    matrix,
    progress,
    state_of,
)
from libra.policy.posterior.residuals import BACK_OFF, SILENT, States, Tree, child
from libra.policy.posterior.ridge import EXPERTS, Sums, solve, targets
from libra.policy.posterior.rows import (
    MAX_ROWS,
    START,
    STRIDE,
    Floats,
    Live,
    Table,
    log_tokens,
    stored_log,
    stored_shift,
)
from libra.policy.posterior.stack import Guard, Mixture

WAITING = 1024
"""Finished trajectories that wait for `learn`; more drop the oldest."""
_ADDS32 = ADDS.astype(np.float32)
_DECAY32 = np.float32(DECAY)
_LARGEST_LOG = 16.0


@dataclass(frozen=True, slots=True)
class Dials:
    """What the posterior believes before it has seen anything.

    Attributes
    ----------
    signals : tuple of str
        Those it may use, of `SIGNALS`.
    forget : float
        Weight of a finished trajectory after each later one.
    version_forget : float
        Weight of everything learned after each new version of the weights.
    progress_shrink, signal_shrink, stack_shrink : float
        Trajectories' worth of belief that a column of progress, a column of a signal, an expert says nothing.
    sibling_prior, family_prior : float
        Members' worth of belief that a group, a family is like all others.
    guard_sigmas : float
        Standard errors by which a gain must stand out to be used in full.
    censored : bool
        Learn from running trajectories.
    running_siblings : bool
        Count running siblings; else finished ones only.
    sample : int
        Running trajectories that a `learn` looks at.
    """

    signals: tuple[str, ...] = SIGNALS
    forget: float = 0.998
    version_forget: float = 0.9
    progress_shrink: float = 1.0
    signal_shrink: float = 10.0
    stack_shrink: float = 3.0
    sibling_prior: float = 1.0
    family_prior: float = 5.0
    guard_sigmas: float = 1.0
    censored: bool = True
    running_siblings: bool = True
    sample: int = 64


class Posterior:
    """The forecaster; see the module. One per run.

    Parameters
    ----------
    dials : Dials, optional
    """

    def __init__(self, dials: Dials | None = None) -> None:
        self.dials = dials = dials or Dials()
        self._live: dict[str, Live] = {}
        self._tools: dict[str, int] = {}
        self._pool = Pool()
        self._groups = Cohorts(dials.sibling_prior, dials.version_forget)
        self._families = Cohorts(dials.family_prior, dials.version_forget)
        self._waiting: deque[tuple[array[int], int]] = deque(maxlen=WAITING)
        self._states, self._tree, self._unit = States(), Tree(), 1.0
        self._sums = Sums()
        self._mixtures = (
            Mixture(len(EXPERTS) - 1, dials.stack_shrink),
            Mixture(len(EXPERTS) - 1, dials.stack_shrink),
        )
        self._guards = (Guard(dials.guard_sigmas), Guard(dials.guard_sigmas))
        self._all = [0.0, 0.0, 0.0, 0.0, 0.0]  # finished: weight, sum, squares of log totals; running: weight, sum
        self._weights = np.zeros((WIDTH, 2 * len(EXPERTS)))
        self._weights[1, 0] = 1.0  # knowing nothing: as much is to come as was, the least attained service first
        self._weights[0, 1] = 1.0
        self._weights[:, 2:] = np.tile(self._weights[:, :2], len(EXPERTS) - 1)
        self._few = np.zeros(WIDTH)
        self._mix()

    # --- events ---

    def handle(self, event: Event) -> None:
        """Learn from one event; cheap, the scheduler's loop waits for it."""
        match event:
            case QuantumFinished(key=key, tokens=tokens, tool=tool):
                live = self._live.get(key)
                if live is not None:
                    live.tokens += tokens
                    live.pending += tokens
                    if tool:
                        self._returned(live, tool, event.status, event.payload_tokens)
            case TrajectoryParked(key=key):
                if key not in self._live:
                    self._started(key, event.group, event.family)
            case TrajectoryEnded(key=key, completed=completed):
                live = self._live.pop(key, None)
                if live is not None:
                    self._ended(key, live, completed)
            case VersionPublished():
                self._published()

    def _started(self, key: str, group: str, family: str) -> None:
        live = self._live[key] = Live(group, family, self._pool.take())
        if group:
            self._groups.join(group, key)
        if family:
            self._families.join(family, key)
        self._forecast(live, START, SILENT)

    def _returned(self, live: Live, tool: str, status: str, payload_tokens: int) -> None:
        number = self._tools.get(tool)
        if number is None:
            number = min(len(self._tools), TOOLS - 1)
            if number < TOOLS - 1:
                self._tools[tool] = number
        state = state_of(number, status, payload_tokens)
        counts = self._pool.counts[live.slot]
        counts *= _DECAY32
        counts += _ADDS32[state]
        live.returns += 1
        live.node = node = child(live.node, state)
        said = None if live.missed else self._tree.says(node, live.tree, self._unit)
        if said is None:
            live.missed += 1
            log, tokens = live.tree
            live.tree = (log * BACK_OFF, tokens * BACK_OFF)
        else:
            live.tree = said
        self._forecast(live, state, self._states.says(state, self._unit))

    def _ended(self, key: str, live: Live, completed: bool) -> None:
        total = log_tokens(live.tokens) if completed else None
        if live.group:
            self._groups.leave(live.group, key, live.information, live.imputed, total)
        if live.family:
            self._families.leave(live.family, key, live.information, live.imputed, total)
        everyone = self._all
        everyone[3] -= live.information
        everyone[4] -= live.information * live.imputed
        if total is not None:
            for i, value in enumerate((1.0, total, total * total)):
                everyone[i] = self.dials.forget * everyone[i] + value
            self._waiting.append((live.rows, live.tokens))
        self._pool.give(live.slot)

    def _published(self) -> None:
        keep = self.dials.version_forget
        self._sums.scale(keep)
        for part in (*self._mixtures, *self._guards):
            part.scale(keep)
        for i in range(3):
            self._all[i] *= keep
        self._unit /= keep
        self._groups.version += 1
        self._families.version += 1

    # --- one forecast ---

    def _forecast(self, live: Live, state: int, last: tuple[float, float]) -> None:
        tokens, weight, value = live.tokens, live.information, live.imputed
        everyone = self._all
        known = everyone[0] + everyone[3] - weight
        centre = (everyone[1] + everyone[4] - weight * value) / known if known > 1e-6 else value
        shift = sure = rest = family = 0.0
        own = weight if self.dials.running_siblings else 0.0
        if live.group:
            shift, sure = self._groups.shift(live.group, centre, own, value)
            if sure:
                rest = lognormal_remaining(centre + shift, self._spread, log_tokens(tokens))
        if live.family:
            family, _ = self._families.shift(live.family, centre, weight, value)
        x = self._few
        x[:NUM_FEW] = (
            *progress(tokens, live.returns, live.pending),
            *last,
            *live.tree,
            shift,
            sure,
            rest,
            math.exp(rest) * TOKEN_SCALE if sure else 0.0,
            family,
        )
        np.log1p(self._pool.counts[live.slot], out=x[NUM_FEW:])
        base_log, base_mean, log, mean = (x @ self._final).tolist()
        base_log = min(max(base_log, 0.0), _LARGEST_LOG)
        log = min(max(log, 0.0), _LARGEST_LOG)
        base_mean, mean = max(base_mean, TOKEN_SCALE), max(mean, TOKEN_SCALE)
        guard_log, guard_mean = self._guards
        live.order = math.exp(base_log + guard_log.factor * (log - base_log))
        live.mean = (base_mean + guard_mean.factor * (mean - base_mean)) / TOKEN_SCALE
        if len(live.rows) < MAX_ROWS * STRIDE:
            live.rows.extend(
                (
                    state,
                    tokens & 65535,
                    tokens >> 16,
                    stored_shift(shift),
                    stored_log(sure),
                    stored_log(rest),
                    stored_shift(family),
                    stored_log(base_log),
                    stored_log(math.log(base_mean / TOKEN_SCALE)),
                    stored_log(log),
                    stored_log(math.log(mean / TOKEN_SCALE)),
                )
            )
        live.pending = 0
        self._recount(live, tokens, math.exp(base_log), weight, value)

    def _recount(self, live: Live, tokens: int, rest: float, weight: float, value: float) -> None:
        """What the trajectory counts for in its group and family changes with its progress."""
        total = tokens + rest
        live.information = information = tokens / total
        live.imputed = imputed = math.log(total)
        everyone = self._all
        everyone[3] += information - weight
        everyone[4] += information * imputed - weight * value
        if live.group and self.dials.running_siblings:
            self._groups.change(live.group, weight, value, information, imputed)
        if live.family:
            self._families.change(live.family, weight, value, information, imputed)

    def remaining(self, key: str) -> Forecast:
        """Forecast for a live trajectory; KeyError for one never parked or already ended.

        Tokens generated since its last return shorten it as they come, never below 0.
        """
        live = self._live[key]
        mean, order, pending = live.mean, live.order, live.pending
        if pending:
            mean, order = mean * mean / (mean + pending), order * order / (order + pending)
        return Forecast(mean, order, self._guards[0].skill)

    def is_probe(self, key: str) -> bool:
        """Whether it should run ahead of its siblings, of whose length nothing is known yet; KeyError as `remaining`."""
        live = self._live[key]
        return bool(live.group) and self._groups.groups[live.group].probe == key

    # --- learning ---

    def learn(self) -> None:
        """Take in what has finished since, look at what runs, and solve for all weights; milliseconds."""
        if not self._waiting:
            return
        while self._waiting:
            self._take_in(*self._waiting.popleft())
        if self._unit > 1e6:
            for table in (self._states, self._tree):
                table.scale(1.0 / self._unit)
            self._unit = 1.0
        self._tree.prune()
        sums = self._sums.plus(self._running()) if self.dials.censored else self._sums
        self._weights = solve(sums, (self.dials.progress_shrink, self.dials.signal_shrink), self.dials.signals)
        for mixture, guard in zip(self._mixtures, self._guards, strict=True):
            mixture.solve()
            guard.solve(1.0)
        self._mix()

    def _columns(self, table: Table) -> Floats:
        last = np.array([self._states.says(state, self._unit) for state in table.state.tolist()])
        return matrix(table, last, self._tree.path(table.state.tolist(), self._unit))

    def _take_in(self, rows: array[int], total: int) -> None:
        table = Table(rows)
        left = total - table.tokens
        scored = left >= 1.0  # after the last return nothing is left; that is no length
        if not scored.any():
            return
        x, y = self._columns(table)[scored], targets(left[scored])
        told = x @ self._weights
        forget = self.dials.forget
        served = table.stored[scored]
        for target, (mixture, guard) in enumerate(zip(self._mixtures, self._guards, strict=True)):
            base = told[:, target]
            mixture.scale(forget)
            mixture.add(told[:, 2 + target :: 2] - base[:, None], y[:, target] - base, 1.0)
            then, mixed = served[:, 4 + target], served[:, 6 + target]
            if target:
                then, mixed = np.exp(then) * TOKEN_SCALE, np.exp(mixed) * TOKEN_SCALE
            guard.scale(forget)
            guard.add(mixed - then, y[:, target] - then, 1.0)
        self._unit /= forget
        residuals = (y - told[:, :2]).tolist()
        states = table.state[scored].tolist()
        self._states.learn(states, residuals, self._unit)
        self._tree.learn(states, residuals, self._unit)
        self._sums.scale(forget)
        self._sums.add(x, y, 1.0)

    def _running(self) -> Sums:
        """Running trajectories with the totals now expected of them."""
        sums = Sums()
        chosen: Sequence[Live] = [live for live in self._live.values() if live.returns]
        weight = 1.0
        if len(chosen) > self.dials.sample:
            weight = len(chosen) / self.dials.sample
            chosen = [chosen[int(i * weight)] for i in range(self.dials.sample)]
        for live in chosen:
            table = Table(live.rows)
            done = live.tokens - table.tokens
            y = np.stack([np.log(done + live.order), (done + live.mean) * TOKEN_SCALE], axis=1)
            sums.add(self._columns(table), y, weight)
        return sums

    def _mix(self) -> None:
        """One matrix for the base and the mixture of both targets."""
        self._final = np.empty((WIDTH, 4))
        for target, mixture in enumerate(self._mixtures):
            base = self._weights[:, target]
            away = self._weights[:, 2 + target :: 2] - base[:, None]
            self._final[:, target] = base
            self._final[:, 2 + target] = base + away @ mixture.weights
        weight, total, squares = self._all[:3]
        spread = squares / weight - (total / weight) ** 2 if weight > 2 else 1.0
        self._spread = max(math.sqrt(max(spread, 0.0)), 0.2)

    def weights(self) -> dict[str, float]:
        """How far each expert is followed in the order, guard included, 0 to 1; "joint" rests on all signals at once."""
        factor = self._guards[0].factor
        return {
            expert: factor * float(weight)
            for expert, weight in zip(EXPERTS[1:], self._mixtures[0].weights, strict=True)
        }
