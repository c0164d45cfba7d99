"""How old what a step uses may be: one pure judgement for trajectories, rewards, and whatever else was made by a version.

What version ``v`` made, used at the *frontier* ``f``, has *lag* ``f - v``. For a trajectory ``v`` is the version of its oldest
token, for a group that of its oldest trajectory, and the frontier of step ``j`` is ``j``, the version that it trains.

`judge` is asked wherever something is consumed: by `libra.policy.admission`, live and simulated, and by the nodes that commit a
batch. How many groups may begin is AReaL's rule (arXiv:2505.24298): at version ``v`` the gates have let ``(eta + v + 1) * B``.

Invariants
----------
1. A lag of eta or less is accepted, whatever the policy.
2. A greater lag gets the policy's verdict, which is one that the caller allows, or an error that names both.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from enum import StrEnum

from libra.config.models import RunSections


class Verdict(StrEnum):
    """What happens to something at the frontier at which it is to be used."""

    ACCEPT = "accept"
    """It is used as it is."""
    WAIT = "wait"
    """It must not be used, and the frontier must not pass it by: the step before waits until it can be used in time."""
    DROP = "drop"
    """It is left out, of denominators too; a group as a whole."""
    MASK = "mask"
    """What is too old in it is left out, of denominators too; its reward counts in the baseline of its group."""
    CORRECT = "correct"
    """It is used, and the caller weighs it by the ratio of the policies."""
    REBASE = "rebase"
    """It is made again from what the frontier is now (FlashEvolve, arXiv:2605.08520, reflective)."""
    DISTIL = "distil"
    """It is kept apart, to be condensed with others into something new (FlashEvolve, meta)."""


OF_GROUPS = frozenset({Verdict.WAIT, Verdict.DROP, Verdict.MASK, Verdict.CORRECT})
"""Verdicts on what is older than the bound that a step carries out; a caller with artefacts of its own may allow others."""


@dataclass(frozen=True, slots=True)
class StalenessPolicy:
    """Section ``staleness`` of a configuration, as `libra.policy` reads it.

    Attributes
    ----------
    eta : int
        Largest lag that is accepted, in versions.
    over_age : Verdict
        Verdict on a greater lag.
    window : int or None
        Versions alive at once: the newest, and every one since the oldest that a group being generated has tokens of; at least 2,
        because groups begin while a step trains. None: as many as the other rules leave, under `Verdict.WAIT` eta + 1.
    in_flight : int or None
        Batches that may be generated at once: iterations that have begun and whose number is not below that of the batches taken.
        None: eta + 1, which is all that the gates let begin.

    Raises
    ------
    ValueError
        If ``eta`` is below 0, ``window`` below 2, ``in_flight`` below 1, or ``over_age`` accepts.
    """

    eta: int
    over_age: Verdict = Verdict.WAIT
    window: int | None = None
    in_flight: int | None = None

    def __post_init__(self) -> None:
        narrow = (self.window is not None and self.window < 2) or (self.in_flight is not None and self.in_flight < 1)
        if self.eta < 0 or narrow or self.over_age is Verdict.ACCEPT:
            raise ValueError(
                f"staleness: got eta={self.eta}, window={self.window}, in_flight={self.in_flight}, over_age={self.over_age}; "
                "eta is at least 0, window at least 2, in_flight at least 1, over_age no acceptance"
            )

    def last_use(self, version: int) -> int:
        """The last frontier at which something of ``version`` is accepted."""
        return version + self.eta

    def lives(self, version: int, newest: int) -> bool:
        """Whether ``version`` may be in use once ``newest`` is published."""
        return self.window is None or newest - version < self.window


def judge(version: int, frontier: int, policy: StalenessPolicy, allowed: Set[Verdict] = OF_GROUPS) -> Verdict:
    """What happens at ``frontier`` to something made by ``version``.

    Parameters
    ----------
    allowed : set of Verdict
        What the caller can do with something that is over age.

    Raises
    ------
    ValueError
        If it is over age, and ``policy.over_age`` is not allowed.
    """
    if frontier <= policy.last_use(version):
        return Verdict.ACCEPT
    if policy.over_age not in allowed:
        raise ValueError(
            f"staleness.over_age: {policy.over_age}, for version {version} at {frontier} with eta={policy.eta}; allowed here: "
            f"{', '.join(sorted(allowed))}"
        )
    return policy.over_age


def keeps_version(config: RunSections) -> bool:
    """Whether each trajectory keeps the weights that it began with; those of a synchronous run do so anyway."""
    return config.run.eta > 0 and config.staleness.versions == "one"


def staleness_of(config: RunSections) -> StalenessPolicy:
    """The policy of a configuration; a synchronous run has the bound alone."""
    eta, section = config.run.eta, config.staleness
    return (
        StalenessPolicy(eta, Verdict(section.over_age), section.window, section.in_flight)
        if eta
        else StalenessPolicy(0)
    )
