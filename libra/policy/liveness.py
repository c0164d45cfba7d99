"""Liveness: each worker's state in each run, worker restarts, and resources nobody supplies.

::

    setting_up --ready--> ready --version check failed--> quarantined --passed--> ready
        |  failed                                              |  failed again
        v                                                      v
      failed --back-off passed--> restarted                   out

Workers that were present before the run are ``starting`` until they report.

Invariants
----------
1. A worker that joins during runs is withheld from Dask until it is ready for each of these runs or
   the run has ended; then it is supplied once.
2. A worker gets quanta only while it is joining no run, and generates only while no run has its
   engine quarantined or asleep.
3. A worker is restarted only if it has a nanny and has failed for a run that has not ended. Each
   consecutive failure waits for the next delay; after the last delay there is no restart.
4. A name is lost from the moment its last process leaves until a process with that name joins.
5. A missing resource is reported after ``TELL_AFTER_S`` (``START_S`` while its first workers are
   set up), and again after ``REMIND_S`` or when the cause changes. Its return is reported once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

RESTART_AFTER_S = (30.0, 120.0, 600.0)  # delays after setup failures in a row
KEPT_NAMES = 1024  # maximum number of lost names
TELL_AFTER_S = 6.0  # A worker that its nanny restarts without a model to load is back sooner
START_S = 300.0
REMIND_S = 300.0


class Backoff:
    """Consecutive failures by subject, and the delay before the next try."""

    def __init__(self) -> None:
        self._failures: Counter[Hashable] = Counter()

    def failed(self, subject: Hashable, delays_s: Sequence[float], *, forever: bool = False) -> float | None:
        """Delay before the next try; after the last delay None, or with ``forever`` that delay."""
        self._failures[subject] += 1
        tries = self._failures[subject]
        if tries > len(delays_s) and not forever:
            return None
        return delays_s[min(tries, len(delays_s)) - 1]

    def worked(self, *subjects: Hashable) -> None:
        for subject in subjects:
            self._failures.pop(subject, None)

    def subjects(self) -> list[Any]:
        return list(self._failures)


class Stage(StrEnum):
    STARTING = "starting"
    SETTING_UP = "setting_up"
    FAILED = "failed"
    READY = "ready"


JOINING = (Stage.SETTING_UP, Stage.FAILED)


@dataclass(slots=True)
class Standing:
    name: str = ""
    stage: Stage = Stage.STARTING
    joined_s: float = 0.0  # monotonic
    detail: str = ""  # why its setup failed
    restart_s: float | None = None  # monotonic; None if no restart is due
    asleep: bool = False  # its engine sleeps
    quarantined: bool = False  # its engine failed the version check
    out: str = ""  # why its engine stays out of service


class RestartWorker(NamedTuple):
    address: str
    name: str
    reason: str


class Liveness:
    """The workers of all runs on a scheduler; times are in seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._backoff = Backoff()
        self._names: dict[str, str] = {}  # of present workers, by address
        self._lost_s: dict[str, float] = {}  # time of loss, by name
        self._runs: dict[str, dict[str, Standing]] = {}  # by run and address
        self._withheld: set[str] = set()

    def joined(self, address: str, name: str, runs: Iterable[str], t_s: float) -> bool:
        """Register a worker to be set up for ``runs``; returns whether to withhold it from Dask."""
        self._names[address] = name
        self._lost_s.pop(name, None)
        for run in runs:
            self._runs.setdefault(run, {})[address] = Standing(name, Stage.SETTING_UP, t_s)
        if address in self._withheld or not self._is_joining(address):
            return False
        self._withheld.add(address)
        return True

    def ready(self, run: str, address: str) -> list[str]:
        """The worker is set up for a run; returns addresses of workers to supply to Dask."""
        standing = self._standing(run, address)
        standing.stage, standing.detail, standing.restart_s = Stage.READY, "", None
        self._backoff.worked((run, standing.name))
        return self._supplied([address])

    def failed(self, run: str, address: str, detail: str, t_s: float, *, nanny: bool) -> float | None:
        standing = self._standing(run, address)
        delay_s = self._backoff.failed((run, standing.name), RESTART_AFTER_S)
        after_s = delay_s if nanny else None
        standing.stage, standing.detail = Stage.FAILED, detail
        standing.restart_s = None if after_s is None else t_s + after_s
        return after_s

    def left(self, address: str, t_s: float) -> None:
        self._withheld.discard(address)
        for standings in self._runs.values():
            standings.pop(address, None)
        name = self._names.pop(address, address)
        if name not in self._names.values():
            self._lost_s.pop(name, None)
            self._lost_s[name] = t_s
            if len(self._lost_s) > KEPT_NAMES:
                del self._lost_s[next(iter(self._lost_s))]

    def ended(self, run: str) -> list[str]:
        """A run has ended; returns addresses of workers to supply to Dask."""
        self._backoff.worked(*(subject for subject in self._backoff.subjects() if subject[0] == run))
        return self._supplied(self._runs.pop(run, {}))

    def slept(self, run: str, address: str, *, asleep: bool) -> None:
        self._standing(run, address).asleep = asleep

    def checked(self, run: str, address: str, *, passed: bool, out: str = "") -> None:
        """An engine passed or failed the version check; ``out`` is why it stays out of service."""
        standing = self._standing(run, address)
        standing.quarantined, standing.out = not passed, out

    def due(self, run: str, t_s: float) -> tuple[RestartWorker, ...]:
        due = [(a, s) for a, s in self._runs.get(run, {}).items() if s.restart_s is not None and t_s >= s.restart_s]
        for _, standing in due:
            standing.restart_s = None
        return tuple(RestartWorker(address, standing.name, standing.detail) for address, standing in due)

    def of(self, run: str, address: str) -> Standing:
        return self._runs.get(run, {}).get(address) or Standing()

    def joins(self, run: str, address: str) -> bool:
        return self.of(run, address).stage in JOINING

    def joining(self) -> set[str]:
        return {address for address, standing in self._every() if standing.stage in JOINING}

    def silent(self) -> set[str]:
        """Addresses of workers whose engine is asleep or failed the check, in any run."""
        return {address for address, standing in self._every() if standing.quarantined or standing.asleep}

    def out(self, run: str) -> dict[str, str]:
        return {address: standing.out for address, standing in self._runs.get(run, {}).items() if standing.out}

    def lost(self, t_s: float, within_s: float = float("inf")) -> list[str]:
        """Names of workers that left less than ``within_s`` ago and have not returned, sorted."""
        return sorted(name for name, lost_s in self._lost_s.items() if t_s - lost_s < within_s)

    def rows(self, run: str, t_s: float) -> list[dict[str, Any]]:
        """Dashboard rows of workers that joined during a run and are not ready, by name."""
        joining = ((a, s) for a, s in self._runs.get(run, {}).items() if s.stage in JOINING)
        return [
            {
                "worker": s.name, "address": address, "stage": str(s.stage), "for_s": round(t_s - s.joined_s, 3),
                "detail": s.detail, "again_in_s": None if s.restart_s is None else round(max(0.0, s.restart_s - t_s), 3),
            }
            for address, s in sorted(joining, key=lambda item: item[1].name)
        ]  # fmt: skip

    def _every(self) -> Iterable[tuple[str, Standing]]:
        return (item for standings in self._runs.values() for item in standings.items())

    def _standing(self, run: str, address: str) -> Standing:
        name = self._names.get(address, address)
        return self._runs.setdefault(run, {}).setdefault(address, Standing(name))

    def _is_joining(self, address: str) -> bool:
        return any(self.joins(run, address) for run in self._runs)

    def _supplied(self, addresses: Iterable[str]) -> list[str]:
        free = [each for each in addresses if each in self._withheld and not self._is_joining(each)]
        self._withheld.difference_update(free)
        return free


class RoleSupply(NamedTuple):
    """Suppliers of a resource; ``cause`` names lost, out-of-service and unready workers."""

    wanted: int
    names: tuple[str, ...]
    cause: tuple[str, ...] = ()
    coming: bool = False


class RolesMissing(NamedTuple):
    """Too few workers supply these resources; ``had``: last suppliers; ``some``: some remain."""

    resources: tuple[str, ...]
    for_s: float
    had: frozenset[str]
    some: bool


class RolesBack(NamedTuple):
    """Missing resources are supplied; ``again``: not for the first time."""

    resources: tuple[str, ...]
    after_s: float
    names: tuple[str, ...]
    again: bool


@dataclass(slots=True)
class _Role:
    missing_s: float | None = None
    told_s: float | None = None
    had: tuple[str, ...] = ()
    cause: tuple[str, ...] = ()


class MissingRoles:
    def __init__(self, resources: Iterable[str]) -> None:
        self._roles = {resource: _Role() for resource in resources}

    @property
    def told(self) -> list[str]:
        """Resources that were reported missing and have not returned."""
        return [resource for resource, role in self._roles.items() if role.told_s is not None]

    def had(self, resource: str) -> tuple[str, ...]:
        return self._roles[resource].had

    def look(self, t_s: float, supplies: Mapping[str, RoleSupply]) -> tuple[RolesBack | RolesMissing, ...]:
        due, back, since_s, again = list[str](), list[str](), t_s, False
        for resource, role in self._roles.items():
            now = supplies[resource]
            if len(now.names) >= now.wanted:
                if role.told_s is not None and role.missing_s is not None:
                    back.append(resource)
                    since_s, again = min(since_s, role.missing_s), again or bool(role.had)
                role.missing_s, role.told_s, role.had = None, None, now.names
                continue
            role.missing_s = t_s if role.missing_s is None else role.missing_s
            if self._is_due(role, t_s - role.missing_s, now, t_s):
                role.told_s, role.cause = t_s, now.cause
                due.append(resource)
        found = list[RolesBack | RolesMissing]()
        if back:
            names = tuple(dict.fromkeys(name for each in back for name in self._roles[each].had))
            found.append(RolesBack(tuple(back), t_s - since_s, names, again))
        if due:
            for_s = t_s - min(role.missing_s for each in due if (role := self._roles[each]).missing_s is not None)
            had = frozenset(name for each in due for name in self._roles[each].had)
            found.append(RolesMissing(tuple(due), for_s, had, any(supplies[each].names for each in due)))
        return tuple(found)

    @staticmethod
    def _is_due(role: _Role, missing_for_s: float, now: RoleSupply, t_s: float) -> bool:
        if role.told_s is None:
            return missing_for_s >= (START_S if not role.had and now.coming else TELL_AFTER_S)
        told_for_s = t_s - role.told_s
        return told_for_s >= REMIND_S or (told_for_s >= TELL_AFTER_S and now.cause != role.cause)
