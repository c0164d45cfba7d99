"""Which engine is best for a trajectory: seconds until engines finish, moves that pay, and KV memory, by the forecasts.

An engine generates one token per step for every running trajectory, and a step takes a + b x (number running) + c x (context of
all) seconds. So the longest ends after a x (steps) + b x (tokens left of all) + c x (sum over all of tokens left x mean context):
`finish_s`. The number of steps is the tokens left of the longest, or more if slots are too few. Forecasts err, and some of
many trajectories with short forecasts become long: for the first placement the longest is replaced by the `UNSURE`-norm of
the tokens left of all, which equals the longest if one stands out, and exceeds it if there are many. A trajectory goes
where the end is soonest. This yields the boundaries between buckets: long trajectories go to fast engines as far as those
have the capacity, and the longest share their engine with few. There are no fixed lengths. A later move must pay off for
the longest itself: by the norm nearly every move would, and most would be mistakes.

Seconds are compared with seconds only. They need a declared engine (`WorkerCapacity.declared`); for other engines no end is
known, and a query is a bug. Without a forecast there is only a pace in seconds per token, which is compared with paces.

Differs from the paper (Libra, arXiv:2606.03077 v2, C-MLFQ): its boundaries are fixed lengths, and its moves are free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from libra.facts import WorkerCapacity
from libra.policy.engine_state import SURE, EngineState, Trajectory
from libra.policy.engine_table import EngineTable
from libra.policy.kv_profile import Refused, peak_tokens
from libra.policy.move_price import TransferPace, priced
from libra.policy.phase_queue import PhaseQueue
from libra.policy.placements import Move

PAYS_FACTOR = 2.0
"""A move must save this many times its cost in seconds: forecasts err, and two moves that cancel out must not pay off."""
SOONER_FACTOR = 0.95
"""A move must reduce the seconds until both engines finish to this share."""
ALIKE_FACTOR = 0.85
"""The same between engines of one bucket: no speed is gained there, only forecasts differ, which err by more."""
QUICKER_FRAC = 0.2
"""A move for the trajectory alone must save this share of its seconds per token."""
GROWTH_STEPS = 16
"""Growth of contexts is rounded to this part of a token: every quantum changes the mean, and hardly any the answer."""
LOOKED_AT = 4
"""Candidate engines of a move: those that finish first."""
LISTED_EVERY = 64
"""Queries between two updates of the candidates."""
FULL = 0.9
"""Share of `EngineState.open_tokens` in use from which the order of trajectories that go on matters."""
EARLY_FRAC = 0.8
"""Loads are uneven if an engine finishes before this share of the seconds until the last one does."""
UNEVEN = 0.1
"""The same for engines without a speed: by how much the shares of memory that contexts fill differ."""


class Loads:
    """Answers about the engines of ``table``."""

    def __init__(self, table: EngineTable) -> None:
        self._table = table
        self.transfers = TransferPace()
        self._idlest: list[str] = []
        self._queries = 0

    # ---------------------------------------------------------------- memory

    def fits(self, one: Trajectory, worker: str) -> bool:
        """Whether its KV fits beside that of all trajectories at home on ``worker``, until the last of them ends.

        What they hold now is sure. What they will hold is forecast (`libra.policy.kv_profile`); without a forecast for it, part of
        the growth of each is reserved. An engine that exchanges KV reserves nothing: what it drops comes back, and contexts need
        no memory while their tools run (`EngineState.open_tokens`).
        """
        table, engine = self._table, self._table.engines[worker]
        if not engine.spec.kv_tokens or not engine.members or one.home is engine:
            return True
        capacity, context = engine.share * engine.spec.kv_tokens, table.context(one)
        if engine.spec.kv_token_bytes or engine.context_tokens + context > capacity:
            return bool(engine.spec.kv_token_bytes) and engine.context_tokens + context <= engine.open_tokens
        if not one.has_forecast:
            return engine.room + table.room(one) <= capacity
        growth, limit = self._growth(), table.max_context_tokens
        own = table.demand(one, growth)
        if engine.context_tokens + growth * engine.left + own.final <= capacity:
            return True
        if engine.refused is not None and engine.refused.covers(own, growth, capacity, limit):
            return False
        if peak_tokens([own, *(table.demand(member, growth) for member in engine.members.values())]) <= capacity:
            return True
        engine.refused = Refused(own, growth, capacity, limit)
        return False

    def _growth(self) -> float:
        """Tokens of context per token generated, payloads of tools included.

        Before anything is generated, contexts are believed to fill their slots: that is how many slots there are.
        """
        table = self._table
        grown = max(table.mean_told, table.slot_tokens - table.mean_prompt) + table.grown
        return round(GROWTH_STEPS * grown / max(1.0, table.mean_told + table.sampled)) / GROWTH_STEPS

    # ---------------------------------------------------------------- seconds

    def finish_s(self, one: Trajectory, worker: str) -> float:
        """Seconds until ``worker`` (declared) finishes with a trajectory (forecast) at home there too."""
        engine = self._table.engines[worker]
        if one.home is engine:
            return engine.end_s(engine.norm(engine.peak), engine.left, engine.work)
        longest = engine.norm(engine.peak + engine.power(one.left_tokens)) if engine.members else one.left_tokens
        return engine.end_s(longest, engine.left + one.left_tokens, engine.work + one.work())

    def pace_s_per_token(self, one: Trajectory, worker: str) -> float:
        """Seconds per token on ``worker`` (declared) with a trajectory at home there too."""
        engine = self._table.engines[worker]
        if one.home is engine:
            return engine.s_per_token(engine.room, len(engine.members) - 1)
        return engine.s_per_token(engine.room + self._table.room(one), len(engine.members))

    def over_s(self, engine: EngineState) -> float:
        """Seconds until an engine (declared) finishes with its members."""
        return engine.end_s(engine.longest_left(), engine.left, engine.work)

    def moved_s(self, one: Trajectory, worker: str) -> tuple[float, float]:
        """Seconds until its home finishes if a trajectory stays; until both engines finish if it moves to ``worker``, cost
        included."""
        assert one.home is not None
        here_s, without_s = _ends_here_s(one, one.home)
        return here_s, max(without_s, self.finish_s(one, worker) + self._price_s(one, worker))

    # ---------------------------------------------------------------- moves

    def move(self, one: Trajectory, free: Mapping[str, int]) -> tuple[str, str] | None:
        """A better engine for a trajectory whose home has a free slot too, and the reason; None: it stays."""
        found, what = self.better_home(one, free), "both engines are over {} sooner"
        if found is None:
            found, what = self.quicker_home(one, free), "it is over {} sooner, and nobody later"
        return None if found is None else (found[0], f"move: {what.format(_seconds(found[1]))}")

    def better_home(self, one: Trajectory, free: Mapping[str, int]) -> tuple[str, float] | None:
        """Another engine with a free slot on which a trajectory makes both engines finish sooner, and by how many seconds.

        None if no gain exceeds the cost of computing its context again.
        """
        home = one.home
        if home is None or not one.has_forecast or len(self._table.engines) < 2 or not home.declared:
            return None
        here_s, without_s = _ends_here_s(one, home)
        targets = self._first_over()
        if without_s > SOONER_FACTOR * here_s:
            return None
        for worker in targets:
            target = self._target(worker, home, free)
            if target is None:
                continue
            price_s = self._price_s(one, worker)
            after_s = max(without_s, self.finish_s(one, worker) + price_s)
            alike = target.spec.bucket == home.spec.bucket
            if (
                after_s > (ALIKE_FACTOR if alike else SOONER_FACTOR) * here_s
                or here_s - after_s < PAYS_FACTOR * price_s
            ):
                continue
            if self.fits(one, worker):
                return worker, here_s - after_s
        return None

    def quicker_home(self, one: Trajectory, free: Mapping[str, int]) -> tuple[str, float] | None:
        """Another engine with a spare slot on which a trajectory gains more time than all trajectories there lose, and by how
        many seconds.

        A spare slot is one that no trajectory at home there needs. Neither engine may finish later. The gain is per token, so that
        it holds for any length: a long trajectory with a short forecast would otherwise be the last, on the slower engine.
        None if there is no such engine, or if lengths are exact.
        """
        home = one.home
        if self._table.exponent == SURE or home is None or not one.has_forecast or not home.declared:
            return None
        here_s_per_token = self.pace_s_per_token(one, home.spec.worker)
        best: tuple[float, str] | None = None
        for worker in self._first_over():
            target = self._target(worker, home, free)
            if target is None or len(target.members) >= target.spec.rollout_slots:
                continue
            others_s_per_token = len(target.members) * target.spec.beside_s_per_token
            saved = here_s_per_token - self.pace_s_per_token(one, worker) - others_s_per_token
            if saved < QUICKER_FRAC * here_s_per_token:
                continue
            sooner_s, price_s = saved * one.left_tokens, self._price_s(one, worker)
            if sooner_s < PAYS_FACTOR * price_s or not self.fits(one, worker):
                continue
            here_s, without_s = _ends_here_s(one, home)
            longest = max(target.longest_left(), one.left_tokens)
            there_s = target.end_s(longest, target.left + one.left_tokens, target.work + one.work())
            if max(without_s, there_s) <= max(here_s, self.over_s(target)):
                best = max(best or (0.0, ""), (sooner_s, worker))
        return None if best is None else (best[1], best[0])

    def _target(self, worker: str, home: EngineState, free: Mapping[str, int]) -> EngineState | None:
        """The engine of ``worker``, if a trajectory may move there from ``home``."""
        target = self._table.engines.get(worker)
        return None if target is None or target is home or worker not in free or not target.declared else target

    def _first_over(self) -> list[str]:
        """The declared engines that finish first, updated every `LISTED_EVERY` calls."""
        self._queries += 1
        if self._queries % LISTED_EVERY == 1 or not self._idlest:
            ends = [(self.over_s(each), worker) for worker, each in self._table.engines.items() if each.declared]
            self._idlest = [worker for _, worker in sorted(ends)[:LOOKED_AT]]
        return self._idlest

    def price(self, one: Trajectory, worker: str) -> Move | None:
        """The price of ``worker`` as the new home of a trajectory, whose KV is at its home or last home; None if that is nowhere
        or here."""
        spec: WorkerCapacity | None = one.last_home if one.home is None else one.home.spec
        if spec is None or spec.worker == worker:
            return None
        return priced(one.context_tokens, spec, self._table.engines[worker].spec, self.transfers)

    def _price_s(self, one: Trajectory, worker: str) -> float:
        move = self.price(one, worker)
        return 0.0 if move is None else move.seconds

    # ---------------------------------------------------------------- all engines

    def strained(self) -> bool:
        """Whether engines that exchange KV are so full or so unevenly loaded that whoever ends a quantum must release its slot.

        A trajectory that keeps its slot saves a decision, and stays where it is. That is right as long as no other order and no
        other place would be better: while every engine has memory left, and all end at about the same time. Loads are compared in
        seconds, since an engine of half the speed has its share with half the tokens; only engines that have not declared their
        speed are compared by memory. A context needs no memory while its tools run, since KV is exchanged: if it counted in full,
        whoever released its slot would wait for room while the engine is idle.
        """
        engines = self._table.exchanging
        shares = [each.context_tokens / each.open_tokens for each in engines]
        if not shares or max(shares) > FULL:
            return bool(shares)
        if len(engines) < 2:
            return False
        if self._table.silent:
            return max(shares) - min(shares) > UNEVEN
        over_s = [self.over_s(each) for each in engines]
        latest_s = max(over_s)
        if min(over_s) >= EARLY_FRAC * latest_s:
            return False
        last = engines[over_s.index(latest_s)]
        quickest_s = min(each.spec.alone_s_per_token for each in engines)
        # One that is alone on the quickest engine gains nothing elsewhere.
        return len(last.members) > 1 or quickest_s < (1.0 - QUICKER_FRAC) * last.spec.alone_s_per_token

    def buckets(self, queue: PhaseQueue) -> list[dict[str, Any]]:
        """A row per bucket, for the dashboard: `bucket`, `engines`, `used` and `slots`, `at_home` and `waiting` trajectories, and
        `left_tokens`, the mean forecast of those at home (0: none).

        If trajectories wait without a home, the last row is theirs, with None for its bucket.
        """
        rows, without_home = list[dict[str, Any]](), len(queue.waiting)
        for bucket, names in sorted(self._table.buckets.items()):
            engines = [self._table.engines[name] for name in names]
            left = [one.left_tokens for each in engines for one in each.members.values()]
            waiting = sum(queue.waiting_at.get(name, 0) for name in names)
            without_home -= waiting
            rows.append({
                "bucket": bucket, "engines": len(names), "used": sum(queue.taken.get(name, 0) for name in names),
                "slots": sum(queue.slots.get(name, 0) for name in names), "at_home": len(left), "waiting": waiting,
                "left_tokens": round(sum(left) / len(left)) if left else 0,
            })  # fmt: skip
        if without_home > 0:
            empty = dict.fromkeys(("engines", "used", "slots", "at_home"), 0)
            rows.append({"bucket": None, **empty, "waiting": without_home, "left_tokens": 0})
        return rows


def _ends_here_s(one: Trajectory, home: EngineState) -> tuple[float, float]:
    """Seconds until the home of a trajectory finishes, with and without it."""
    _, left, work = one.share
    here_s = home.end_s(home.longest_left(), home.left, home.work)
    return here_s, home.end_s(home.longest_left(but=one), home.left - left, home.work - work)


def _seconds(value: float) -> str:
    """Seconds as text, with at least two digits."""
    return f"{value:.0f} s" if value >= 10.0 else f"{value:.2g} s"
