"""Decisions as pure functions, live and simulated: events in, commands out; no clock, no I/O."""

from __future__ import annotations

from libra.policy.admission import (
    Admission,
    CommittedGroup,
    StalenessPolicy,
    Verdict,
    judge,
    keeps_version,
    staleness_of,
)
from libra.policy.cmlfq import CMLFQ
from libra.policy.dispatcher import EVERYONE, Dispatcher, leaves_slot
from libra.policy.engine_capacity import Move, joined_of, off_by_frac
from libra.policy.one_version import OneVersion
from libra.policy.ordering import (
    LEARNS_EVERY,
    ORDERINGS,
    Fifo,
    Inspectable,
    Mlfq,
    OnlineLearner,
    Ordering,
    learns_after,
    make_ordering,
)
from libra.policy.phase_queue import Place
from libra.policy.posterior.forecaster import Forecast
from libra.policy.step_ways import WayChoice, WaySettings
from libra.policy.tail import Tail, TailSettings
from libra.policy.waves import Waves

__all__ = [
    "CMLFQ", "EVERYONE", "LEARNS_EVERY", "ORDERINGS", "Admission", "CommittedGroup", "Dispatcher", "Fifo", "Forecast",
    "Inspectable", "Mlfq", "Move", "OneVersion", "OnlineLearner", "Ordering", "Place", "StalenessPolicy",
    "Tail", "TailSettings", "Verdict", "Waves", "WayChoice", "WaySettings", "joined_of", "judge", "keeps_version",
    "learns_after", "leaves_slot", "make_ordering", "off_by_frac", "staleness_of",
]  # fmt: skip
