"""Whether engines that exchange KV are so full or so unevenly loaded that whoever ends a quantum must release its slot.

A trajectory that keeps its slot saves a decision, and stays where it is. That is right as long as no other order and no other place
would be better: while every engine has memory left, and all end at about the same time. Loads are compared in seconds, since an
engine of half the speed has its share with half the tokens; only engines that have not declared their speed are compared by memory.

A context needs no memory while its tools run, since KV is exchanged. If it counted in full, whoever released its slot would wait
for room while the engine is idle: where tools take seconds in the slot, keeping slots was up to 1.7 times as fast.

Measured on fleets of two engines, one up to four times as slow as the other.
"""

from __future__ import annotations

from libra.policy.engine_loads import QUICKER_FRAC, Loads
from libra.policy.fleet import Fleet

FULL = 0.9
"""Contexts under way over what may be (`Host.open_tokens`), from which the order of those who go on matters."""
EARLY_FRAC = 0.8
"""Loads are uneven if an engine ends before this share of the seconds until the last one ends."""
UNEVEN = 0.1
"""The same for engines without a speed: by how much the shares of memory that contexts fill differ."""


def strained(fleet: Fleet, loads: Loads) -> bool:
    """Whether order or places of those who go on matter, although a slot is free for each."""
    engines = fleet.exchanging
    shares = [host.context_tokens / host.open_tokens for host in engines]
    if not shares or max(shares) > FULL:
        return bool(shares)
    if len(engines) < 2:
        return False
    if fleet.silent:
        return max(shares) - min(shares) > UNEVEN
    over_s = [loads.over_s(host.spec.worker) for host in engines]
    latest_s = max(over_s)
    if min(over_s) >= EARLY_FRAC * latest_s:
        return False
    last = engines[over_s.index(latest_s)]
    quickest_s = min(host.spec.alone_s_per_token for host in engines)
    # One that is alone on the quickest engine gains nothing elsewhere.
    return last.residents > 1 or quickest_s < (1.0 - QUICKER_FRAC) * last.spec.alone_s_per_token
