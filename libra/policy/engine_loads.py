"""The best engine for a trajectory: seconds until engines finish, moves that pay, and KV memory.

Each step an engine generates one token for every running trajectory, in a + b x (trajectories
running) + c x (context tokens of all) seconds. So an engine finishes after a x (steps) + b x
(tokens left of all) + c x (sum of tokens left x mean context) seconds: `finish_s`. The number of
steps is the longest trajectory's tokens left, or more if slots are too few. Because forecasts err,
a first placement uses the `NOISY_NORM`-norm of all tokens left as the longest. Without a forecast
or a declared engine there is only a pace in seconds per token. Differs from the paper (Libra,
arXiv:2606.03077 v2, C-MLFQ), which has fixed length boundaries between buckets and free moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from libra.facts import WorkerCapacity
from libra.policy.engine_capacity import Move, TransferPace, priced
from libra.policy.engine_table import EXACT_NORM, EngineState, EngineTable, Refused, Trajectory, peak_tokens
from libra.policy.phase_queue import PhaseQueue

PAYS_FACTOR = 2.0  # a move must save this many times its cost, since forecasts err
SOONER_FACTOR = 0.95  # a move must reduce the seconds until both engines finish to this share
ALIKE_FACTOR = 0.85  # the same between engines of one bucket, where only forecasts differ
QUICKER_FRAC = 0.2  # a move for the trajectory alone must save this share of its seconds per token
GROWTH_STEPS = 16  # growth of contexts is rounded to this part of a token, for the cache
LOOKED_AT = 4  # candidate engines of a move: the first to finish
LISTED_EVERY = 64  # queries between two updates of the candidates
FULL = 0.9  # share of `EngineState.open_tokens` in use from which the order of running ones matters
EARLY_FRAC = 0.8  # loads are uneven if an engine ends before this share of the last one
UNEVEN = 0.1  # without a speed, if their memory use differs by this share


class Loads:
    def __init__(self, table: EngineTable) -> None:
        self._table = table
        self.transfers = TransferPace()
        self._idlest: list[str] = []
        self._queries = 0

    def fits(self, one: Trajectory, worker: str) -> bool:
        """Whether the trajectory's KV fits on ``worker`` until the last of its members ends.

        Growth is forecast (`peak_tokens`) or partly reserved; if KV is exchanged, nothing.
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
        """Context tokens per generated token, with tool output; at first contexts fill slots."""
        table = self._table
        grown = max(table.first_left.mean, table.slot_tokens - table.prompts.mean) + table.grown
        return round(GROWTH_STEPS * grown / max(1.0, table.first_left.mean + table.sampled)) / GROWTH_STEPS

    def finish_s(self, one: Trajectory, worker: str) -> float:
        """Seconds until a declared ``worker`` ends its trajectories and ``one`` (forecast)."""
        engine = self._table.engines[worker]
        if one.home is engine:
            return engine.end_s(engine.norm(engine.peak), engine.left, engine.work)
        longest = engine.norm(engine.peak + engine.power(one.left_tokens)) if engine.members else one.left_tokens
        return engine.end_s(longest, engine.left + one.left_tokens, engine.work + one.work())

    def pace_s_per_token(self, one: Trajectory, worker: str) -> float:
        """Seconds per token of ``one`` on ``worker``, which must have declared its speed."""
        engine = self._table.engines[worker]
        if one.home is engine:
            return engine.s_per_token(engine.room, len(engine.members) - 1)
        return engine.s_per_token(engine.room + self._table.room(one), len(engine.members))

    def over_s(self, engine: EngineState) -> float:
        return engine.end_s(engine.longest_left(), engine.left, engine.work)

    def moved_s(self, one: Trajectory, worker: str) -> tuple[float, float]:
        assert one.home is not None
        here_s, without_s = _ends_here_s(one, one.home)
        return here_s, max(without_s, self.finish_s(one, worker) + self._price_s(one, worker))

    def move(self, one: Trajectory, free: Mapping[str, int]) -> tuple[str, str] | None:
        """A better engine than a home with a free slot, and the reason; or None."""
        found, what = self.better_home(one, free), "both engines are over {} sooner"
        if found is None:
            found, what = self.quicker_home(one, free), "it is over {} sooner, and nobody later"
        return None if found is None else (found[0], f"move: {what.format(_seconds(found[1]))}")

    def better_home(self, one: Trajectory, free: Mapping[str, int]) -> tuple[str, float] | None:
        """An engine with a free slot such that both engines end sooner, and the seconds saved."""
        home = one.home
        if home is None or not one.has_forecast or len(self._table.engines) < 2 or not home.declared:
            return None
        here_s, without_s = _ends_here_s(one, home)
        targets = self._first_over()
        if without_s > SOONER_FACTOR * here_s:
            return None
        for worker, target in self._targets(targets, home, free):
            price_s = self._price_s(one, worker)
            after_s = max(without_s, self.finish_s(one, worker) + price_s)
            factor = ALIKE_FACTOR if target.spec.bucket == home.spec.bucket else SOONER_FACTOR
            pays = after_s <= factor * here_s and here_s - after_s >= PAYS_FACTOR * price_s
            if pays and self.fits(one, worker):
                return worker, here_s - after_s
        return None

    def quicker_home(self, one: Trajectory, free: Mapping[str, int]) -> tuple[str, float] | None:
        """An engine where a trajectory gains more than all there lose, and the seconds gained.

        Neither engine may finish later. The gain is per token, so it holds for any length.
        """
        home = one.home
        if self._table.exponent == EXACT_NORM or home is None or not one.has_forecast or not home.declared:
            return None
        here_s_per_token = self.pace_s_per_token(one, home.spec.worker)
        best = (0.0, "")
        for worker, target in self._targets(self._first_over(), home, free):
            if len(target.members) >= target.spec.rollout_slots:
                continue
            others_s_per_token = len(target.members) * target.spec.beside_s_per_token
            saved = here_s_per_token - self.pace_s_per_token(one, worker) - others_s_per_token
            sooner_s = saved * one.left_tokens
            pays = saved >= QUICKER_FRAC * here_s_per_token and sooner_s >= PAYS_FACTOR * self._price_s(one, worker)
            if not pays or not self.fits(one, worker):
                continue
            here_s, without_s = _ends_here_s(one, home)
            longest = max(target.longest_left(), one.left_tokens)
            there_s = target.end_s(longest, target.left + one.left_tokens, target.work + one.work())
            if max(without_s, there_s) <= max(here_s, self.over_s(target)):
                best = max(best, (sooner_s, worker))
        return (best[1], best[0]) if best[1] else None

    def _targets(
        self, workers: Iterable[str], home: EngineState, free: Mapping[str, int]
    ) -> Iterator[tuple[str, EngineState]]:
        for worker in workers:
            target = self._table.engines.get(worker)
            if target is not None and target is not home and worker in free and target.declared:
                yield worker, target

    def _first_over(self) -> list[str]:
        self._queries += 1
        if self._queries % LISTED_EVERY == 1 or not self._idlest:
            ends = [(self.over_s(each), worker) for worker, each in self._table.engines.items() if each.declared]
            self._idlest = [worker for _, worker in sorted(ends)[:LOOKED_AT]]
        return self._idlest

    def price(self, one: Trajectory, worker: str) -> Move | None:
        """Price of moving a trajectory's KV to ``worker``; None if there is nothing to move."""
        spec: WorkerCapacity | None = one.last_home if one.home is None else one.home.spec
        if spec is None or spec.worker == worker:
            return None
        return priced(one.context_tokens, spec, self._table.engines[worker].spec, self.transfers)

    def _price_s(self, one: Trajectory, worker: str) -> float:
        move = self.price(one, worker)
        return 0.0 if move is None else move.seconds

    def needs_rebalancing(self) -> bool:
        """Whether engines that exchange KV are so full or uneven that all must release their slots.

        Loads are compared in seconds, or by memory if an engine has not declared its speed.
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
    _, left, work = one.share
    here_s = home.end_s(home.longest_left(), home.left, home.work)
    return here_s, home.end_s(home.longest_left(but=one), home.left - left, home.work - work)


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10.0 else f"{value:.2g} s"
