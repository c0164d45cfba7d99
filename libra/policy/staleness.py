"""Staleness counted group by group: a place is reserved when a group is admitted, its lag checked when it is consumed.

`Capacity` is the rule alone, by counting. `StalenessLedger` records which group holds a place.

How this relates to `Admission`: both keep lag <= eta, in different units. `Admission` lets whole iterations begin, so at
version ``v`` it has let ``(eta + v + 1) * B`` groups begin in all, which is the rule below summed over gates; it never
drops a group; a batch waits for the slow ones. The ledger admits single groups, for a producer that has no iterations (a
stream of prompts, oversampling, groups filtered out and replaced): a group that ends without being usable gives its place
back, nothing waits for a slow one, and one that became too old is dropped when it would be consumed. A run uses one of the
two.

Versions count optimizer steps: step ``j`` trains version ``j`` and publishes ``j + 1``. A group whose oldest token is
of version ``v`` has *lag* ``j - v`` in step ``j``.

Invariants
----------
1. No group is admitted beyond the capacity: after it, running <= ``max_running`` and running + accepted <=
   ``(eta + version + 1) * B``.
2. **lag <= eta for every group consumed**, whatever the order and however old the engines' weights were.
3. Every group admitted ends exactly once: rejected, dropped, or a member of one batch.
4. No dead end: while fewer than B groups wait to be consumed and none is running, there is capacity.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Capacity:
    """How many groups may begin now, from four counts and the version; the staleness rule of AReaL, arXiv:2505.24298.

    Agrees with ``StalenessManager`` of areal 1.0.4 after every event, also in what it does not check: a caller may submit
    without capacity, which then is negative. `StalenessLedger` refuses that.

    Attributes
    ----------
    eta : int
        Largest lag in versions.
    groups_per_batch : int
        Groups per optimizer step, B. Here and in ``max_running``, anything below 1 counts as 1 in `available` (AReaL).
    max_running : int
        Groups that may run at once.
    enqueued, running, accepted, rejected : int
        Groups waiting to be submitted, being generated, finished and usable since the first version, finished and not.
    """

    eta: int
    groups_per_batch: int
    max_running: int
    version: int = 0
    enqueued: int = 0
    running: int = 0
    accepted: int = 0
    rejected: int = 0

    @property
    def available(self) -> int:
        """Groups that may begin: the minimum of the rooms that concurrency and staleness leave. May be negative."""
        by_concurrency = max(1, self.max_running) - self.running
        by_staleness = (self.eta + self.version + 1) * self._batch - (self.accepted + self.running)
        return min(by_concurrency, by_staleness)

    @property
    def pending_limit(self) -> int:
        """Groups that may wait to be submitted."""
        return (self.eta + 1) * self.groups_per_batch

    @property
    def _batch(self) -> int:
        return max(1, self.groups_per_batch)

    def version_published(self, version: int) -> None:
        """Version ``version`` is the newest."""
        self.version = version

    def version_recovered(self, version: int) -> None:
        """A run continues at ``version``: the groups that its steps have consumed count as accepted."""
        self.version = version
        self.accepted = version * self._batch

    def group_enqueued(self) -> None:
        """A group waits to be submitted."""
        self.enqueued += 1

    def group_submitted(self) -> None:
        """A group that waited is being generated."""
        self.enqueued -= 1
        self.running += 1

    def group_accepted(self) -> None:
        """A running group is finished and usable."""
        self.running -= 1
        self.accepted += 1

    def group_rejected(self) -> None:
        """A running group is finished and gives its place back."""
        self.running -= 1
        self.rejected += 1


@dataclass(frozen=True, slots=True)
class Consumption:
    """The groups that a step may train on, and those that are too old for it.

    Attributes
    ----------
    members : tuple of group ids
        B groups, oldest first; empty if too few remain, and then nothing was consumed.
    dropped : tuple of group ids
        Groups whose lag would be above eta; each is named in one answer, and its place is free again.
    reason : str
    """

    members: tuple[Hashable, ...]
    dropped: tuple[Hashable, ...]
    reason: str


@dataclass(slots=True)
class StalenessLedger:
    """Places of groups: reserve at admission, commit or reject at the end, check at consumption.

    ``capacity`` is the count that the rule reads; read it only; the ledger changes it.

    Raises
    ------
    ValueError
        If eta is below 0, or a batch or the groups that run at once are below 1.
    """

    capacity: Capacity
    _running: dict[Hashable, int] = field(default_factory=dict)
    _waiting: dict[Hashable, int] = field(default_factory=dict)
    _next_batch: int = 0

    def __post_init__(self) -> None:
        rule = self.capacity
        if rule.eta < 0 or rule.groups_per_batch < 1 or rule.max_running < 1:
            raise ValueError(
                f"staleness ledger: got eta={rule.eta}, groups_per_batch={rule.groups_per_batch}, "
                f"max_running={rule.max_running}; eta must be at least 0, the others at least 1"
            )

    def version_published(self, version: int) -> None:
        """Version ``version`` can be pulled; an older one changes nothing."""
        self.capacity.version_published(max(version, self.capacity.version))

    def version_recovered(self, version: int) -> None:
        """A run continues at ``version``, before any group was admitted."""
        self.capacity.version_recovered(version)
        self._next_batch = version

    def reserve(self, group: Hashable) -> bool:
        """Whether ``group`` may begin; if so it holds a place from now on.

        Raises
        ------
        ValueError
            If the group holds a place already.
        """
        if group in self._running or group in self._waiting:
            raise ValueError(f"group {group!r} holds a place already; commit, reject or consume it first")
        if self.capacity.available <= 0:
            return False
        self.capacity.group_enqueued()
        self.capacity.group_submitted()
        self._running[group] = self.capacity.version
        return True

    def commit(self, group: Hashable, oldest_version: int | None = None) -> None:
        """``group`` is finished and usable. ``oldest_version``: of its tokens; None: the version at its admission."""
        admitted_at = self._ended(group)
        self.capacity.group_accepted()
        self._waiting[group] = admitted_at if oldest_version is None else oldest_version

    def reject(self, group: Hashable) -> None:
        """``group`` is finished and will not be trained on (failed, filtered out); its place is free again."""
        self._ended(group)
        self.capacity.group_rejected()

    def consume(self, batch: int) -> Consumption:
        """The groups of step ``batch``, which trains version ``batch``.

        Raises
        ------
        ValueError
            If version ``batch`` is not published, or the step does not follow the last one that got groups.
        """
        if batch != self._next_batch or batch > self.capacity.version:
            raise ValueError(
                f"step {batch} cannot consume: the next step is {self._next_batch}, and the newest version "
                f"{self.capacity.version}; step j trains version j"
            )
        eta, wanted = self.capacity.eta, self.capacity.groups_per_batch
        dropped = tuple(group for group, oldest in self._waiting.items() if batch - oldest > eta)
        for group in dropped:
            del self._waiting[group]
        self.capacity.accepted -= len(dropped)
        self.capacity.rejected += len(dropped)
        if len(self._waiting) < wanted:
            return Consumption((), dropped, f"{len(self._waiting)} of {wanted} groups wait within lag {eta}")
        members = tuple(sorted(self._waiting, key=self._waiting.__getitem__)[:wanted])
        lag = max((batch - self._waiting[group] for group in members), default=0)
        for group in members:
            del self._waiting[group]
        self._next_batch += 1
        return Consumption(members, dropped, f"{len(members)} groups with lag {lag} or less")

    def _ended(self, group: Hashable) -> int:
        if group not in self._running:
            raise ValueError(f"group {group!r} is not running; reserve a place for it first")
        return self._running.pop(group)
