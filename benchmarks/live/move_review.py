"""Moves of an ended run, scored by the true lengths of its trajectories.

A log is read twice: first for the total tokens and final context of each trajectory, then with
these in place of forecasts (`Loads`). So both ends of every move are known: at the KV owner without
it, and on both engines with it and its cost. Engines have the speeds that they had declared by
then.

1. Every generation that started on another engine than its KV owner is a move, unless the owner was
   lost or dropped.
2. A move with unknown effect (an engine had declared nothing, or the trajectory never ended) is not
   scored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from libra.facts import HomeChanged, Line, QuantumDispatched, QuantumFinished, TrajectoryEnded
from libra.policy.engine_loads import Loads
from libra.policy.engine_table import EXACT_NORM, EngineTable, Trajectory
from libra.types import Phase

NOISE_FRAC = 0.05
"""Delays by less than this share of the end are within noise."""


class Moved(NamedTuple):
    """One move, with the seconds until both engines finish without and with it; NaN if unknown."""

    stayed_s: float = math.nan
    moved_s: float = math.nan

    @property
    def useless(self) -> bool:
        return self.moved_s > (1.0 + NOISE_FRAC) * self.stayed_s

    @property
    def worth(self) -> bool:
        return self.stayed_s > (1.0 + NOISE_FRAC) * self.moved_s


def moves(log: Iterable[Line]) -> tuple[list[Moved], int]:
    lines = list(log)
    generated, final = _lengths(lines)
    table = EngineTable(EXACT_NORM)
    loads = Loads(table)
    found: list[Moved] = []
    done: dict[str, int] = {}
    dispatched = 0
    for _, _, event in lines:
        match event:
            case QuantumDispatched(key=key, worker=worker) if event.phase is Phase.ROLLOUT:
                dispatched += 1
                one = table.of(key)
                if key in generated:
                    table.forecast(one, generated[key] - done.get(key, 0), final[key])
                if one.home is not None and one.home.spec.worker != worker:
                    found.append(_judged(event, one, table, loads, key in generated))
            case QuantumFinished(key=key, tokens=tokens):
                done[key] = done.get(key, 0) + tokens
            case HomeChanged(num_bytes=num_bytes, took_s=took_s) if num_bytes:
                loads.transfers.add(num_bytes, took_s)
        table.handle(event)
    return found, dispatched


def _lengths(lines: list[Line]) -> tuple[dict[str, int], dict[str, int]]:
    table, tokens, final = EngineTable(), dict[str, int](), dict[str, int]()
    for _, _, event in lines:
        if isinstance(event, QuantumDispatched):
            continue
        if isinstance(event, TrajectoryEnded):
            final[event.key] = table.of(event.key).context_tokens
        if isinstance(event, QuantumFinished):
            tokens[event.key] = tokens.get(event.key, 0) + event.tokens
        table.handle(event)
    return {key: tokens[key] for key in final if tokens.get(key)}, final


def _judged(event: QuantumDispatched, one: Trajectory, table: EngineTable, loads: Loads, known: bool) -> Moved:
    home, target = one.home, table.engines.get(event.worker)
    assert home is not None
    if not known or target is None or not (home.declared and target.declared) or not one.has_forecast:
        return Moved()
    home_s, moved_s = loads.moved_s(one, event.worker)
    return Moved(max(home_s, loads.over_s(target)), moved_s)
