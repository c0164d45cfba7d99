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
   1,024), the history has at most 16,384 prompts, the tree at most 40,000 nodes, and at most 1,024 trajectories wait to be
   learned from, the latest.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from libra.policy.forecast import Forecast
from libra.policy.messages import (
    Event,
    GroupsNamed,
    QuantumFinished,
    TrajectoryEnded,
    TrajectoryParked,
    VersionPublished,
)
from libra.policy.posterior import cohorts, packed_columns
from libra.policy.posterior.cohorts import Cohorts, lognormal_remaining
from libra.policy.posterior.columns import ADDS, DECAY, NUM_FEW, TOKEN_SCALE, TOOLS, WIDTH, Pool, progress, state_of
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
from libra.policy.posterior.history import History
from libra.policy.posterior.learner import Learner, RunningMean
from libra.policy.posterior.path_residuals import BACK_OFF, SILENT, child
from libra.policy.posterior.ridge import EXPERTS
from libra.types import ToolStatus

SCHEMA = 3
"""Of snapshots."""
NAMED = 65_536
"""Groups whose prompts are known before they have come; more drop the oldest."""
WAITING = 1024
"""Finished trajectories that wait for `learn`; more drop the oldest."""
_ADDS32 = ADDS.astype(np.float32)
_DECAY32 = np.float32(DECAY)
_LARGEST_LOG = 16.0


def _settled(value: float) -> float:
    """``value`` to eight significant digits."""
    return float(f"{value:.8g}")


class Posterior:
    """The forecaster; see the module. One per run.

    Parameters
    ----------
    dials : PosteriorConfig, optional
    """

    def __init__(self, dials: PosteriorConfig | None = None) -> None:
        self.dials = dials = dials or PosteriorConfig()
        self._live: dict[str, Live] = {}
        self._tools: dict[str, int] = {}
        self._pool = Pool()
        self._groups = Cohorts(dials.sibling_prior, dials.version_forget)
        self._families = Cohorts(dials.family_prior, dials.version_forget)
        self._history = History()
        self._named: dict[str, str] = {}  # prompt of groups that have not come yet
        self._waiting: deque[tuple[Rows, int, str]] = deque(maxlen=WAITING)
        self._learner = Learner(dials)
        self._all = [0.0, 0.0, 0.0, 0.0, 0.0]  # finished: weight, sum, squares of log totals; running: weight, sum
        self._spread = (0.5, 0.5)  # variance of log totals within and between groups
        self._within = [0.0, 0.0]  # finished ones with finished siblings: how many, sum of squares
        self._uses_siblings = "siblings" in dials.signals
        self._uses_families = "family" in dials.signals
        self._x = np.zeros(WIDTH)
        self._moment = 0  # changes whenever a forecast may
        self._twin: tuple[int, str, str, Live] | None = (
            None  # the last one that had not begun, and when it was forecast
        )

    # --- events ---

    def handle(self, event: Event) -> None:
        """Learn from one event; cheap, the scheduler's loop waits for it."""
        self._moment += 1
        match event:
            case QuantumFinished(key=key, tokens=tokens, status=status):
                live = self._live.get(key)
                if live is not None:
                    live.tokens += tokens
                    live.pending += tokens
                    if status:
                        self._returned(live, event.tool, status, event.payload_tokens)
            case TrajectoryParked(key=key):
                if key not in self._live:
                    self._started(key, event.group, event.family)
            case TrajectoryEnded(key=key, completed=completed):
                live = self._live.pop(key, None)
                if live is not None:
                    self._ended(key, live, completed)
            case GroupsNamed(groups=groups):
                self._named.update(groups)
                for group in list(self._named)[: max(0, len(self._named) - NAMED)]:
                    del self._named[group]
            case VersionPublished():
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
        """A group has come whose prompt may have come before: as many members' worth is known as belief makes it."""
        groups, belief = self._groups, self._history.belief
        shift = self._history.recall(prompt, groups.prior)
        known = groups.prior * belief / (1.0 - belief) if shift is not None and self.dials.history else 0.0
        groups.recall(group, prompt, known, shift or 0.0)

    def _returned(self, live: Live, tool: str, status: ToolStatus, payload_tokens: int) -> None:
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
        said = None
        if not live.missed:
            live.node = node = child(live.node, state)
            said = learner.tree.says(node, live.tree, learner.unit)
        if said is None:
            live.missed += 1
            live.node = 0  # where it is beyond what the tree knows, nobody asks
            log, tokens = live.tree
            live.tree = (log * BACK_OFF, tokens * BACK_OFF)
        else:
            live.tree = said
        self._forecast(live, state, learner.states.says(state, learner.unit))

    def _ended(self, key: str, live: Live, completed: bool) -> None:
        total = log_tokens(live.tokens) if completed else None
        if live.group:
            if total is not None:
                self._compare(live.group, total)
            counted = live.information if self.dials.running_siblings else 0.0
            self._groups.leave(live.group, key, counted, live.imputed, total)
            self._remember(live.group)
        if live.family:
            self._families.leave(live.family, key, live.information, live.imputed, total)
        everyone = self._all
        everyone[3] -= live.information
        everyone[4] -= live.information * live.imputed
        if total is not None:
            for i, value in enumerate((1.0, total, total * total)):
                everyone[i] = self.dials.forget * everyone[i] + value
            self._waiting.append((live.rows, live.tokens, live.group))
        self._pool.give(live.slot)

    def _remember(self, group: str) -> None:
        """Where a group is over, what it came to is kept for when its prompt comes again."""
        cohort = self._groups.groups.get(group)
        if cohort is not None and cohort.prompt and not cohort.live and cohort.weight > 0.0:
            said = cohort.past_shift if cohort.past else None
            self._history.ended(cohort.prompt, cohort.total / cohort.weight, float(cohort.finished), said)

    def _compare(self, group: str, total: float) -> None:
        """How far it ended from its finished siblings tells how much groups have in common."""
        siblings = self._groups.groups[group]
        if siblings.weight >= 0.5:
            deviation = total - siblings.total / siblings.weight
            within = self._within
            within[0] = self.dials.forget * within[0] + 1.0
            share = siblings.weight / (siblings.weight + 1.0)
            within[1] = self.dials.forget * within[1] + share * deviation * deviation

    def _published(self) -> None:
        keep = self.dials.version_forget
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
            own = weight if self.dials.running_siblings else 0.0
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
        # Products of matrices come out differently in the last bits, by how memory is aligned; what is decided from them must not.
        live.order = _settled(math.exp(base_log + guard_log.factor * (log - base_log)))
        live.mean = _settled((base_mean + guard_mean.factor * (mean - base_mean)) / TOKEN_SCALE)
        if kept and len(live.rows) < MAX_ROWS * STRIDE:
            live.rows.add(
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
        beyond = (log_tokens(tokens) - centre) / math.sqrt(2.0 * (within + between)) if tokens else -9.0
        self._recount(live, tokens, math.exp(base_log), beyond)

    def _recount(self, live: Live, tokens: int, rest: float, beyond: float) -> None:
        """What the trajectory counts for in its group and family changes with its progress.

        It has outlasted a share of all others (``beyond``: where its tokens are among the totals, in deviations times the
        root of two), and the square of that share is what it counts for: nothing at the start, nearly all far in the tail.
        A member whose tokens are few compared with others' totals has said nothing yet, whatever its progress promises;
        counting it for more drowns what the finished ones say.
        """
        weight, value = live.information, live.imputed
        live.information = information = (1.0 - 0.5 * math.erfc(beyond)) ** 2
        live.imputed = imputed = math.log(tokens + rest)
        everyone = self._all
        everyone[3] += information - weight
        everyone[4] += information * imputed - weight * value
        if live.group and self.dials.running_siblings:
            self._groups.change(live.group, weight, value, information, imputed)
        if live.family:
            self._families.change(live.family, weight, value, information, imputed)

    def snapshot(self) -> dict[str, Any]:
        """Everything it knows, as values that JSON can hold; what is live in packed columns."""
        return {
            "schema": SCHEMA,
            "live": packed_columns.dump_live(self._live, self._pool),
            "tools": list(self._tools),
            "groups": cohorts.dump(self._groups),
            "families": cohorts.dump(self._families),
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
        """Know what ``snapshot`` says and nothing else; KeyError, TypeError or ValueError where it is no snapshot."""
        if snapshot["schema"] != SCHEMA:
            raise ValueError(
                f"snapshot of a posterior: schema {snapshot['schema']!r}, this Libra reads {SCHEMA}; use the Libra that wrote it"
            )
        self._twin = None
        self._pool = Pool()
        self._live = packed_columns.load_live(snapshot["live"], self._pool)
        self._tools = {str(tool): number for number, tool in enumerate(snapshot["tools"])}
        cohorts.load(self._groups, snapshot["groups"])
        cohorts.load(self._families, snapshot["families"])
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

        Tokens generated since its last return shorten it as they come, never below 0.
        """
        live = self._live[key]
        mean, order, pending = live.mean, live.order, live.pending
        if pending:
            mean, order = mean * mean / (mean + pending), order * order / (order + pending)
        return Forecast(mean, order, self._learner.guards[0].skill)

    def anew(self, key: str) -> Forecast:
        """`remaining` of one that has not begun, by what its siblings show by now; KeyError as `remaining`."""
        live = self._live[key]
        if live.tokens or live.returns:
            return self.remaining(key)
        self._forecast_anew(live)
        return Forecast(live.mean, live.order, self._learner.guards[0].skill)

    def _forecast_anew(self, live: Live) -> None:
        """Siblings that have not begun count for nothing yet and differ in nothing: one forecast, at one moment, is that of all."""
        twin, known = self._twin, self._all[0] + self._all[3]
        if twin is not None and twin[:3] == (self._moment, live.group, live.family) and live.group and known > 1e-6:
            live.order, live.mean, live.imputed = twin[3].order, twin[3].mean, twin[3].imputed
            return
        self._forecast(live, START, SILENT, kept=False)  # one row of a beginning is enough to learn from
        self._twin = (self._moment, live.group, live.family, live)

    def is_probe(self, key: str) -> bool:
        """Whether it should run ahead of its siblings, of whose length nothing is known yet; KeyError as `remaining`."""
        live = self._live[key]
        return bool(live.group) and self._groups.groups[live.group].probe == key

    # --- learning ---

    def learn(self) -> None:
        """Take in what has finished since, look at what runs, and solve for all weights; milliseconds."""
        if not self._waiting:
            return
        self._moment += 1
        finished = list(self._waiting)
        self._waiting.clear()
        self._learner.learn(finished, *(self._running() if self.dials.censored else ((), 1.0)))
        self._spread = self._spreads()
        self._groups.prior = min(max(self._spread[0] / self._spread[1], 0.25), 8.0)

    def _spreads(self) -> tuple[float, float]:
        """Variance of log totals within groups and between them; until siblings have finished, half is taken for each."""
        weight, total, squares = self._all[:3]
        variance = max(squares / weight - (total / weight) ** 2, 0.05) if weight > 2.0 else 1.0
        count, deviations = self._within
        within = (deviations + 5.0 * 0.5 * variance) / (count + 5.0)
        return within, max(variance - within, 0.1 * within)

    def _running(self) -> tuple[list[RunningMean], float]:
        """Running trajectories that said something, at most ``sample`` of them, and how many each stands for."""
        running = [live for live in self._live.values() if live.returns]
        chosen = min(self.dials.sample, len(running))
        taken = [running[i * len(running) // chosen] for i in range(chosen)]
        return [RunningMean(one.rows, one.tokens, one.order, one.mean) for one in taken], len(running) / max(1, chosen)

    @property
    def skill(self) -> float:
        """Share of the progress-only forecast's squared error (of logarithms) that this one saved, measured as it was served."""
        return self._learner.guards[0].skill

    @property
    def weights(self) -> dict[str, float]:
        """How far each expert is followed in the order, guard included, 0 to 1.

        "joint" rests on all signals at once, "totals" on what siblings say of the total, where there are any. "history" is how
        much of a prompt's length was found to survive until it comes again, within what siblings say; 0 before any has.
        """
        factor = self._learner.guards[0].factor
        earned = self._learner.mixtures[0].weights.tolist()
        weights = {expert: factor * weight for expert, weight in zip((*EXPERTS[1:], "totals"), earned, strict=True)}
        return weights | {"history": self._history.measured}
