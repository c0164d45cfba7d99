"""The vector of resources that a worker supplies and a lease holds, and what a holder requests."""

from __future__ import annotations

import msgspec

from libra.errors import ConfigError

KINDS = ("slots", "cores", "memory", "gpus")
"""Kinds that belong to a worker, in the order of `Resources.local`; a quota is a kind of its own, ``quota NAME``."""


class Resources(msgspec.Struct, frozen=True, gc=False):
    """Amounts of each kind.

    Attributes
    ----------
    slots : int
        TOOL slots; every action takes one.
    cores, gpus : int
        Whole ones, for the holder alone. A holder of 0 cores shares those that no lease has.
    memory_bytes : int
    quotas : tuple of (str, int)
        Units of limits that belong to no worker, by name: rates of external APIs (`libra.policy.leases.quotas`).
    """

    slots: int = 0
    cores: int = 0
    memory_bytes: int = 0
    gpus: int = 0
    quotas: tuple[tuple[str, int], ...] = ()

    @property
    def local(self) -> tuple[int, int, int, int]:
        """Amounts of `KINDS`."""
        return self.slots, self.cores, self.memory_bytes, self.gpus

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of which there is more than nothing."""
        own = (kind for kind, amount in zip(KINDS, self.local, strict=True) if amount)
        return frozenset((*own, *(quota_kind(name) for name, _ in self.quotas)))

    def with_cores(self, cores: int) -> Resources:
        """The same, with so many cores."""
        return msgspec.structs.replace(self, cores=cores)

    def check(self, where: str) -> None:
        """ConfigError for a negative amount, or a quota without units."""
        for kind, amount in zip(KINDS, self.local, strict=True):
            if amount < 0:
                raise ConfigError(f"{where}: {kind} is {amount}; type 0 or more")
        for name, units in self.quotas:
            if units < 1:
                raise ConfigError(f"{where}: {units} units of quota {name!r}; type 1 or more")


def quota_kind(name: str) -> str:
    """The kind of a quota."""
    return f"quota {name}"


def described(resources: Resources) -> str:
    """In words, e.g. ``2 cores, 4 GiB``."""
    words = []
    if resources.cores:
        words.append(f"{resources.cores} core{'s' if resources.cores > 1 else ''}")
    if resources.memory_bytes:
        words.append(f"{resources.memory_bytes / 2**30:g} GiB")
    if resources.gpus:
        words.append(f"{resources.gpus} GPU{'s' if resources.gpus > 1 else ''}")
    words += [f"{units} of quota {name}" for name, units in resources.quotas]
    if not words and resources.slots:
        words.append("a slot")
    return ", ".join(words) or "nothing"


class LeaseRequest(msgspec.Struct, frozen=True, gc=False):
    """What a holder asks for.

    Attributes
    ----------
    holder : str
        Who will hold the lease; one lease or request each.
    least : Resources
        The minimum, below which it does not run.
    tool : str
        Name under which its speed-up curve and its seconds are known (`LeaseTable.declare`); empty: neither.
    home : str
        Worker that it takes if it fits there.
    only : str
        Worker that it must have; empty: any.
    revocable : bool
        Whether the table may take it back for a request that does not fit.
    """

    holder: str
    least: Resources
    tool: str = ""
    home: str = ""
    only: str = ""
    revocable: bool = False


class Lease(msgspec.Struct, frozen=True, gc=False):
    """What a holder has, until it is released or its worker leaves.

    Attributes
    ----------
    holder, worker : str
    resources : Resources
        What it holds; ``cores`` may be above the request's.
    least_cores : int
        Those of the request.
    tool : str
    granted_s : float
    revocable : bool
    reason : str
        Why it was granted so.
    """

    holder: str
    worker: str
    resources: Resources
    least_cores: int
    tool: str
    granted_s: float
    revocable: bool = False
    reason: str = ""


class Revoke(msgspec.Struct, frozen=True, gc=False):
    """Have ``holder`` stop its action on ``worker``, ``ran_s`` after its lease was granted, and release the lease for whom
    ``reason`` names. It is held until then; ``holder`` requests another one."""

    holder: str
    worker: str
    ran_s: float
    reason: str
