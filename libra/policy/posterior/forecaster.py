"""Forecasts of a trajectory's remaining tokens, learned online from earlier and concurrent trajectories.

Every signal (`SIGNALS`) is an expert: a linear forecast on the columns of progress and its own. All are solved from one Gram
matrix, and because they are linear, their mixture is one matrix as well: a return costs one small product, whatever the number
of experts.

Trajectories that end early are short (right censoring): with 32 in flight the first to end are far below the mean. So the
posterior also learns from running ones, with their expected totals (Buckley and James 1979), replaced at every `learn`.

Promises
--------
1. Deterministic in the sequence of events and of calls of `learn`, whatever the hash seed.
2. ``restore(snapshot())`` changes no later forecast.
3. Without measured gain over progress (`Forecast.skill` is 0) the forecast is the progress-only one.
4. Memory is bounded by the number of running trajectories, and by constants: a group's state goes with its last member (except
   the last 1,024), the history has at most 16,384 prompts, the tree at most 40,000 nodes, and at most 1,024 ended trajectories,
   the latest, wait for `learn`.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from libra.facts import Fact, PromptsNamed, QuantumFinished, TrajectoryEnded, TrajectoryParked, VersionPublished
from libra.policy.forecast import Forecast
from libra.policy.posterior import packed_columns
from libra.policy.posterior.cohorts import Cohorts, lognormal_remaining
from libra.policy.posterior.compact_rows import (
    MAX_ROWS,
    START,
    STRIDE,
    Live,
    Rows,
    log_tokens,
    stored_log,
    stored_shift,
)
from libra.policy.posterior.config import PosteriorConfig
from libra.policy.posterior.forecast_columns import (
    ADDS,
    DECAY,
    NUM_FEW,
    TOKEN_SCALE,
    TOOLS,
    WIDTH,
    Pool,
    progress,
    state_of,
)
from libra.policy.posterior.learner import Learner, RunningMean
from libra.policy.posterior.path_residuals import BACK_OFF, SILENT, child
from libra.policy.posterior.prompt_history import History
from libra.policy.posterior.ridge import EXPERTS
from libra.types import Phase, ToolStatus

SCHEMA = 3
"""Of snapshots."""
NAMED = 65_536
"""Groups whose prompts are known before their first trajectory; beyond, the oldest are dropped."""
UNFINISHED = "(unfinished turn)"
"""What returns when a turn parks before its end: only that it goes on."""
WAITING = 1024
"""Ended trajectories that wait for `learn`; beyond, the oldest are dropped."""
_ADDS32 = ADDS.astype(np.float32)
_DECAY32 = np.float32(DECAY)
_LARGEST_LOG = 16.0


def _rounded(value: float) -> float:
    """``value`` to eight significant digits."""
    return float(f"{value:.8g}")


class Posterior:
    """The forecaster; see the module. One per run.

    Parameters
    ----------
    config : PosteriorConfig, optional
    """

    def __init__(self, config: PosteriorConfig | None = None) -> None:
        self.config = config = config or PosteriorConfig()
        self._live: dict[str, Live] = {}
        self._tools: dict[str, int] = {}
        self._pool = Pool()
        self._groups = Cohorts(config.sibling_prior, config.version_forget)
        self._families = Cohorts(config.family_prior, config.version_forget)
        self._history = History()
        self._named: dict[str, str] = {}  # prompts of groups that have not started
        self._waiting: deque[tuple[Rows, int, str]] = deque(maxlen=WAITING)
        self._learner = Learner(config)
        self._all = [0.0, 0.0, 0.0, 0.0, 0.0]  # finished: weight, sum, squares of log totals; running: weight, sum
        self._spread = (0.5, 0.5)  # variance of log totals within and between groups
        self._within = [0.0, 0.0]  # ended ones with ended siblings: number, sum of squares
        self._uses_siblings = "siblings" in config.signals
        self._uses_families = "family" in config.signals
        self._x = np.zeros(WIDTH)
        self._moment = 0  # changes whenever a forecast may
        self._twin: tuple[int, str, str, Live] | None = None  # the last trajectory forecast before it began, and when

    # --- events ---

    def handle(self, event: Fact) -> None:
        """Learn from one event; it must be cheap, because the scheduler's loop waits for it."""
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
        elif type(event) is PromptsNamed:
            self._named.update(event.groups)
            for group in list(self._named)[: max(0, len(self._named) - NAMED)]:
                del self._named[group]
        elif type(event) is VersionPublished:
            self._published()

    def _started(self, key: str, group: str, family: str) -> None:
        if group:
            group = self._groups.join(group, key)
            if prompt := self._named.pop(group, ""):
                self._recall(group, prompt)
        if family:
            family = self._families.join(family, key)
        live = self._live[key] = Live(group, family, self._pool.take())
        self._forecast(live, START, SILENT)

    def _recall(self, group: str, prompt: str) -> None:
        """A new group, whose prompt may be known; its history counts as many members as its persistence allows."""
        groups, persistence = self._groups, self._history.persistence
        shift = self._history.recall(prompt, groups.prior)
        known = groups.prior * persistence / (1.0 - persistence) if shift is not None and self.config.history else 0.0
        groups.recall(group, prompt, known, shift or 0.0)

    def _returned(self, live: Live, tool: str, status: str, payload_tokens: int) -> None:
        number = self._tools.get(tool)
        if number is None:
            number = min(len(self._tools), TOOLS - 1)
            if number < TOOLS - 1:
                self._tools[tool] = number
        state = state_of(number, status, payload_tokens)
        learner = self._learner
        counts = self._pool.counts[live.slot]
        counts *= _DECAY32
        counts += _ADDS32[state]
        live.returns += 1
        known_residual = None
        if not live.missed:
            live.node = node = child(live.node, state)
            known_residual = learner.tree.residual(node, live.tree, learner.unit)
        if known_residual is None:
            live.missed += 1
            live.node = 0  # beyond the known paths it is not used
            log, tokens = live.tree
            live.tree = (log * BACK_OFF, tokens * BACK_OFF)
        else:
            live.tree = known_residual
        self._forecast(live, state, learner.states.residual(state, learner.unit))

    def _ended(self, key: str, live: Live, completed: bool) -> None:
        total = log_tokens(live.tokens) if completed else None
        if live.group:
            if total is not None:
                self._compare(live.group, total)
            counted = live.information if self.config.running_siblings else 0.0
            self._groups.leave(live.group, key, counted, live.imputed, total)
            self._remember(live.group)
        if live.family:
            self._families.leave(live.family, key, live.information, live.imputed, total)
        everyone = self._all
        everyone[3] -= live.information
        everyone[4] -= live.information * live.imputed
        if total is not None:
            for i, value in enumerate((1.0, total, total * total)):
                everyone[i] = self.config.forget * everyone[i] + value
            self._waiting.append((live.rows, live.tokens, live.group))
        self._pool.give(live.slot)

    def _remember(self, group: str) -> None:
        """If a group has ended, keep its lengths for the next occurrence of its prompt."""
        cohort = self._groups.groups.get(group)
        if cohort is not None and cohort.prompt and not cohort.live and cohort.weight > 0.0:
            recalled = cohort.past_shift if cohort.past else None
            self._history.ended(cohort.prompt, cohort.total / cohort.weight, float(cohort.finished), recalled)

    def _compare(self, group: str, total: float) -> None:
        """Add its distance to its ended siblings to the variance within groups."""
        siblings = self._groups.groups[group]
        if siblings.weight >= 0.5:
            deviation = total - siblings.total / siblings.weight
            within = self._within
            within[0] = self.config.forget * within[0] + 1.0
            share = siblings.weight / (siblings.weight + 1.0)
            within[1] = self.config.forget * within[1] + share * deviation * deviation

    def _published(self) -> None:
        keep = self.config.version_forget
        self._learner.published()
        for i in range(3):
            self._all[i] *= keep
        self._history.published()
        self._groups.version += 1
        self._families.version += 1

    # --- one forecast ---

    def _forecast(self, live: Live, state: int, last: tuple[float, float], *, kept: bool = True) -> None:
        tokens, weight, value = live.tokens, live.information, live.imputed
        everyone = self._all
        known = everyone[0] + everyone[3] - weight
        centre = (everyone[1] + everyone[4] - weight * value) / known if known > 1e-6 else value
        shift = sure = family = 0.0
        if live.family and self._uses_families:
            family, _ = self._families.shift(live.family, centre, weight, value)
            centre += family
        if live.group and self._uses_siblings:
            own = weight if self.config.running_siblings else 0.0
            shift, sure = self._groups.shift(live.group, centre, own, value)
        within, between = self._spread
        rest = lognormal_remaining(centre + shift, math.sqrt(within + between * (1.0 - sure)), log_tokens(tokens))
        rest_tokens = math.exp(rest) * TOKEN_SCALE
        x = self._x
        x[:NUM_FEW] = array(
            "d",
            (
                *progress(tokens, live.returns, live.pending),
                *last,
                *live.tree,
                shift,
                sure,
                sure * rest,
                sure * rest_tokens,
                family,
            ),
        )
        np.log1p(self._pool.counts[live.slot], out=x[NUM_FEW:])
        learner = self._learner
        base_log, base_mean, log, mean = (x @ learner.final).tolist()
        base_log = min(max(base_log, 0.0), _LARGEST_LOG)
        if sure:
            log += sure * learner.totals[0] * (rest - learner.excess - base_log)
            mean += sure * learner.totals[1] * (rest_tokens - base_mean)
        log = min(max(log, 0.0), _LARGEST_LOG)
        base_mean, mean = max(base_mean, TOKEN_SCALE), max(mean, TOKEN_SCALE)
        guard_log, guard_mean = learner.guards
        # The last bits of matrix products depend on the alignment of memory; decisions must not.
        live.order = _rounded(math.exp(base_log + guard_log.factor * (log - base_log)))
        live.mean = _rounded((base_mean + guard_mean.factor * (mean - base_mean)) / TOKEN_SCALE)
        if kept and len(live.rows) < MAX_ROWS * STRIDE:
            served = (base_log, math.log(base_mean / TOKEN_SCALE), log, math.log(mean / TOKEN_SCALE))
            signals = (stored_shift(shift), stored_log(sure), stored_log(rest), stored_shift(family))
            live.rows.add((state, tokens & 65535, tokens >> 16, *signals, *map(stored_log, served)))
        live.pending = 0
        beyond = (log_tokens(tokens) - centre) / math.sqrt(2.0 * (within + between)) if tokens else -9.0
        self._recount(live, tokens, math.exp(base_log), beyond)

    def _recount(self, live: Live, tokens: int, rest: float, beyond: float) -> None:
        """Update the trajectory's weight in its group and family.

        The weight is the square of the share of all others that it has outlasted (``beyond``: its tokens among the totals, in
        deviations times the root of two): 0 at the start, nearly 1 far in the tail. A member with few tokens compared with
        others' totals carries no information yet; a larger weight would drown that of the ended ones.
        """
        weight, value = live.information, live.imputed
        live.information = information = (1.0 - 0.5 * math.erfc(beyond)) ** 2
        live.imputed = imputed = math.log(tokens + rest)
        everyone = self._all
        everyone[3] += information - weight
        everyone[4] += information * imputed - weight * value
        if live.group and self.config.running_siblings:
            self._groups.change(live.group, weight, value, information, imputed)
        if live.family:
            self._families.change(live.family, weight, value, information, imputed)

    def snapshot(self) -> dict[str, Any]:
        """Its state, as JSON-able values; running trajectories in packed columns."""
        return {
            "schema": SCHEMA,
            "live": packed_columns.dump_live(self._live, self._pool),
            "tools": list(self._tools),
            "groups": self._groups.snapshot(),
            "families": self._families.snapshot(),
            "history": self._history.snapshot(),
            "named": dict(self._named),
            "waiting": packed_columns.dump_rows([rows for rows, _, _ in self._waiting]),
            "totals": [[total, group] for _, total, group in self._waiting],
            "all": list(self._all),
            "spread": list(self._spread),
            "within": list(self._within),
            "learner": self._learner.snapshot(),
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Take the state of ``snapshot``; KeyError, TypeError or ValueError if it is not a snapshot."""
        if snapshot["schema"] != SCHEMA:
            raise ValueError(
                f"snapshot of a posterior: schema {snapshot['schema']!r}, this Libra reads {SCHEMA}; use the Libra that wrote it"
            )
        self._twin = None
        self._pool = Pool()
        self._live = packed_columns.load_live(snapshot["live"], self._pool)
        self._tools = {str(tool): number for number, tool in enumerate(snapshot["tools"])}
        self._groups.restore(snapshot["groups"])
        self._families.restore(snapshot["families"])
        self._history.restore(snapshot["history"])
        self._named = {str(group): str(prompt) for group, prompt in snapshot["named"].items()}
        self._waiting.clear()
        for rows, (total, group) in zip(packed_columns.load_rows(snapshot["waiting"]), snapshot["totals"], strict=True):
            self._waiting.append((rows, int(total), str(group)))
        self._all = [float(value) for value in snapshot["all"]]
        self._spread = (float(snapshot["spread"][0]), float(snapshot["spread"][1]))
        self._within = [float(value) for value in snapshot["within"]]
        self._learner.restore(snapshot["learner"])

    def remaining(self, key: str) -> Forecast:
        """Forecast for a live trajectory; KeyError for one never parked or already ended.

        Tokens generated since its last return shorten it, never below 0.
        """
        live = self._live[key]
        mean, order, pending = live.mean, live.order, live.pending
        if pending:
            mean, order = mean * mean / (mean + pending), order * order / (order + pending)
        return Forecast(mean, order, self._learner.guards[0].skill)

    def reconsidered(self, key: str) -> Forecast:
        """`remaining` of one that has not begun, updated by its siblings; KeyError as `remaining`."""
        live = self._live[key]
        if live.tokens or live.returns:
            return self.remaining(key)
        self._forecast_again(live)
        return Forecast(live.mean, live.order, self._learner.guards[0].skill)

    def _forecast_again(self, live: Live) -> None:
        """Siblings that have not begun are equal: at one moment they share a forecast."""
        twin, known = self._twin, self._all[0] + self._all[3]
        if twin is not None and twin[:3] == (self._moment, live.group, live.family) and live.group and known > 1e-6:
            live.order, live.mean, live.imputed = twin[3].order, twin[3].mean, twin[3].imputed
            return
        self._forecast(live, START, SILENT, kept=False)  # one row of the start is enough to learn from
        self._twin = (self._moment, live.group, live.family, live)

    def is_probe(self, key: str) -> bool:
        """Whether it should run ahead of its siblings because their lengths are unknown; KeyError as `remaining`."""
        live = self._live[key]
        return bool(live.group) and self._groups.groups[live.group].probe == key

    # --- learning ---

    def learn(self) -> None:
        """Add trajectories that ended since the last call, and running ones, and solve for all weights; takes
        milliseconds."""
        if not self._waiting:
            return
        self._moment += 1
        finished = list(self._waiting)
        self._waiting.clear()
        self._learner.learn(finished, *(self._running() if self.config.censored else ((), 1.0)))
        self._spread = self._spreads()
        self._groups.prior = min(max(self._spread[0] / self._spread[1], 0.25), 8.0)

    def _spreads(self) -> tuple[float, float]:
        """Variance of log totals within groups and between them; half for each until siblings have ended."""
        weight, total, squares = self._all[:3]
        variance = max(squares / weight - (total / weight) ** 2, 0.05) if weight > 2.0 else 1.0
        count, deviations = self._within
        within = (deviations + 5.0 * 0.5 * variance) / (count + 5.0)
        return within, max(variance - within, 0.1 * within)

    def _running(self) -> tuple[list[RunningMean], float]:
        """Running trajectories with a return, at most ``sample`` of them, and how many each represents."""
        running = [live for live in self._live.values() if live.returns]
        chosen = min(self.config.sample, len(running))
        taken = [running[i * len(running) // chosen] for i in range(chosen)]
        return [RunningMean(one.rows, one.tokens, one.order, one.mean) for one in taken], len(running) / max(1, chosen)

    @property
    def skill(self) -> float:
        """Share of the progress-only forecast's squared error (of logarithms) that the served forecast saved."""
        return self._learner.guards[0].skill

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each expert in the order, guard included, 0 to 1.

        "joint" uses all signals at once, "totals" the totals of siblings. "history" is the measured persistence of a prompt's
        length, which acts through the siblings; 0 before any prompt has returned.
        """
        factor = self._learner.guards[0].factor
        earned = self._learner.mixtures[0].weights.tolist()
        weights = {expert: factor * weight for expert, weight in zip((*EXPERTS[1:], "totals"), earned, strict=True)}
        return weights | {"history": self._history.measured}
