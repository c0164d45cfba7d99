"""Services of one worker: which batch runs next, on which device, and whose weights are evicted.

A service is a model in host memory or a plain function. Its weights are restored to a device when a
batch is to run there (ARL-Tangram, 3.3). Differs from the paper: weights of several services stay
on a device while they fit. Each call passes the time, which never decreases.

Invariants
----------
1. A device runs one batch at a time. A service without weights has a lane of its own.
2. Each request is in exactly one batch: up to ``max_batch`` of one service, oldest first.
3. A service is ripe with ``max_batch`` requests or after ``max_wait_s``; the first ripe goes first.
4. Weights never exceed a device's memory: the least recently used are evicted, none while in use.
5. A service waits for a busy device with its weights if that should be quicker than restoring.
6. The same calls give the same decisions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import msgspec

from libra.errors import ConfigError, enough_gib

FORGETTING = 0.2  # weight of the newest batch, or restoring, in a service's mean seconds


class ServiceFacts(msgspec.Struct, frozen=True, gc=False):
    name: str
    max_batch: int  # requests
    max_wait_s: float  # of the oldest request
    num_bytes: int = 0  # weights on a device; 0: none
    restore_s: float = 0.0  # until it was measured


class Fire(msgspec.Struct, frozen=True, gc=False):
    """Run a batch: evict from ``device`` (may be empty), and restore weights if ``restores``."""

    service: str
    device: str
    requests: tuple[int, ...]
    evicted: tuple[str, ...]
    restores: bool
    ripe_s: float

    @property
    def lane(self) -> str:
        return self.device or f"without device: {self.service}"


class _Service:
    def __init__(self, facts: ServiceFacts) -> None:
        self.facts = facts
        self.waiting: deque[tuple[float, int]] = deque()
        self.batch_s: float | None = None
        self.restore_s = facts.restore_s

    @property
    def ripe_s(self) -> float:
        if not self.waiting:
            return float("inf")
        oldest_s = self.waiting[0][0] + self.facts.max_wait_s
        most = self.facts.max_batch
        return min(oldest_s, self.waiting[most - 1][0]) if len(self.waiting) >= most else oldest_s


class ServiceSchedule:
    """The services of one worker; ``devices``: bytes for weights by device (None if unbounded)."""

    def __init__(self, devices: Mapping[str, int | None]) -> None:
        self._bytes = dict(devices)
        self._services: dict[str, _Service] = {}
        self._resident: dict[str, dict[str, float]] = {device: {} for device in devices}  # last use
        self._running: dict[str, tuple[Fire, float, _Service]] = {}

    def declare(self, facts: ServiceFacts) -> None:
        """Add a service; ConfigError if no device has room for its weights."""
        most = max((float("inf") if size is None else size for size in self._bytes.values()), default=0)
        if facts.num_bytes > most:
            raise ConfigError(
                f"services.device_gib: service {facts.name!r} has weights of {facts.num_bytes / 2**30:.3g} GiB, and a device has "
                f"{most / 2**30:.3g} GiB for them, so it could never run; type services.device_gib="
                f"{enough_gib(facts.num_bytes)} or more, or name a smaller model"
            )
        self._services.setdefault(facts.name, _Service(facts))

    def bound(self, device: str, num_bytes: int | None) -> None:
        """Limit weights on ``device``, but not below the largest declared service."""
        largest = max((service.facts.num_bytes for service in self._services.values()), default=0)
        self._bytes[device] = None if num_bytes is None else max(num_bytes, largest)

    def withdraw(self, service: str) -> tuple[int, ...]:
        """Remove a service; returns its waiting requests. A running batch keeps its lane."""
        for residents in self._resident.values():
            residents.pop(service, None)
        found = self._services.pop(service, None)
        return tuple(request for _, request in found.waiting) if found is not None else ()

    def resident(self, device: str) -> tuple[str, ...]:
        """Services whose weights are on ``device``, least recently used first."""
        return tuple(sorted(self._resident[device], key=lambda name: (self._resident[device][name], name)))

    def asked(self, service: str, request: int, at_s: float) -> None:
        self._services[service].waiting.append((at_s, request))

    def cancel(self, service: str, request: int) -> None:
        waiting = self._services[service].waiting
        self._services[service].waiting = deque(entry for entry in waiting if entry[1] != request)

    def ended(
        self, fire: Fire, at_s: float, *, restore_s: float = 0.0, device_s: float = 0.0, failed: bool = False
    ) -> None:
        """A batch has ended, which waited ``device_s`` for a device that others used."""
        _, began_s, service = self._running.pop(fire.lane)
        if self._services.get(fire.service) is not service:
            return  # it was withdrawn: nothing of it is here
        service.batch_s = _mean(service.batch_s, max(0.0, at_s - began_s - restore_s - device_s))
        if fire.restores and not failed:
            service.restore_s = _mean(service.restore_s or None, restore_s)
        if fire.device:
            self._resident[fire.device][fire.service] = at_s
            if failed:
                del self._resident[fire.device][fire.service]

    def fire(self, at_s: float) -> tuple[Fire, ...]:
        begun: list[Fire] = []
        passed: set[str] = set()
        while ripe := [(s.ripe_s, name) for name, s in self._services.items() if name not in passed]:
            ripe_s, name = min(ripe)
            if ripe_s > at_s:
                break
            if (device := self._device(name, at_s)) is None:
                passed.add(name)
                continue
            begun.append(self._begin(self._services[name], device, ripe_s, at_s))
            self._running[begun[-1].lane] = begun[-1], at_s, self._services[name]
        return tuple(begun)

    def next_s(self, at_s: float) -> float | None:
        """Earliest time after ``at_s`` at which a service becomes ripe without a new request."""
        times = (service.ripe_s for service in self._services.values())
        return min((each for each in times if at_s < each < float("inf")), default=None)

    def _device(self, name: str, at_s: float) -> str | None:
        """Device on which a ripe service runs now; "" for no device, None if it waits."""
        service = self._services[name]
        need = service.facts.num_bytes
        if not need:
            return "" if f"without device: {name}" not in self._running else None
        fits = [device for device, size in self._bytes.items() if size is None or need <= size]
        free = [device for device in fits if device not in self._running]
        here = [device for device in free if name in self._resident[device]]
        if here:
            return here[0]
        busy = [device for device in fits if device in self._running and name in self._resident[device]]
        if not free or any(self._left_s(device, at_s) <= service.restore_s for device in busy):
            return None
        return min(free, key=lambda device: (self._evicted(device, need)[1], device))

    def _left_s(self, device: str, at_s: float) -> float:
        fire, began_s, service = self._running[device]
        whole_s = (service.batch_s or 0.0) + (service.restore_s if fire.restores else 0.0)
        return max(0.0, began_s + whole_s - at_s)

    def _evicted(self, device: str, need: int) -> tuple[tuple[str, ...], float]:
        size, residents = self._bytes[device], self._resident[device]
        held = sum(self._services[name].facts.num_bytes for name in residents)
        gone: list[str] = []
        for name in () if size is None else self.resident(device):
            if size is not None and size - held >= need:
                break
            held -= self._services[name].facts.num_bytes
            gone.append(name)
        return tuple(gone), residents[gone[-1]] if gone else float("-inf")

    def _begin(self, service: _Service, device: str, ripe_s: float, at_s: float) -> Fire:
        name, waiting = service.facts.name, service.waiting
        requests = tuple(waiting.popleft()[1] for _ in range(min(len(waiting), service.facts.max_batch)))
        if not device:
            return Fire(name, "", requests, (), False, ripe_s)
        residents = self._resident[device]
        restores = name not in residents
        evicted = self._evicted(device, service.facts.num_bytes)[0] if restores else ()
        for each in evicted:
            del residents[each]
        residents[name] = at_s
        return Fire(name, device, requests, evicted, restores, ripe_s)


def _mean(mean: float | None, value: float) -> float:
    return value if mean is None else mean + FORGETTING * (value - mean)
