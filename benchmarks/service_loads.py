"""Ten services on few devices, and on one each, in virtual time: teachers that score trajectories of recorded agents when they end.

`libra.policy.services.ServiceSchedule` decides, as on a live worker. What a device takes is assumed: a model of 7 billion
parameters in bfloat16 that reads `TOKENS_PER_S`, and is copied from host memory at `COPY_BYTES_PER_S` if it is not on the device.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.action_loads import REQUIRED, read_steps
from libra.planner.agent_turns import read_agent_turns
from libra.policy.services import Fire, ServiceFacts, ServiceSchedule

SERVICES, FEW_DEVICES = 10, 3
WEIGHT_BYTES = 15 << 30
DEVICE_BYTES = 72 << 30
"""Of 80 GiB, what is left for weights."""
TOKENS_PER_S = 28_000.0
"""Prefill of a model of 7 billion parameters at 400 TFLOP/s: two operations for each parameter and token."""
COPY_BYTES_PER_S = 25e9
"""Of a PCIe 4 x16 link from pinned memory."""
MAX_BATCH, MAX_WAIT_S = 8, 0.1


class Asked(NamedTuple):
    """A trajectory has ended, and a service is asked about it: when, which one, and seconds that it takes alone."""

    at_s: float
    service: int
    run_s: float


def drawn_requests(path: Path, count: int, llm_factor: float, seed: int) -> list[Asked]:
    """The ends of ``count`` trajectories of a file that begin together, each with the service of its task."""
    source = read_steps(path)
    assert source is not None, path
    recorded = read_agent_turns(path, REQUIRED)
    rng = np.random.default_rng([seed, 0x5E1])
    rounds = -(-count // len(recorded))
    order = np.concatenate([rng.permutation(len(recorded)) for _ in range(rounds)])[:count]
    domain = {task: int(rng.integers(SERVICES)) for task in sorted({one.task for one in recorded})}
    found = []
    for index in order:
        one, steps = recorded[index], source.trajectories[index]
        tokens = max((turn.prompt_tokens or 0) + turn.completion_tokens for turn in one.turns)
        end_s = sum(step.llm_s * llm_factor + step.work_s for step in steps)
        found.append(Asked(end_s, domain[one.task], tokens / TOKENS_PER_S))
    return sorted(found)


@dataclass
class ServiceOutcome:
    """Completion time of every request, and how often weights were restored."""

    act_s: list[float] = field(default_factory=list)
    restored: int = 0

    @property
    def mean_act_s(self) -> float:
        """Mean completion time."""
        return float(np.mean(self.act_s))


def asked_all(requests: Sequence[Asked], devices: int, *, weight_bytes: int = WEIGHT_BYTES) -> ServiceOutcome:
    """The requests on so many devices; with one for each service they have one each, with their weights on them."""
    own = devices >= SERVICES
    restore_s = weight_bytes / COPY_BYTES_PER_S
    hosts = [ServiceSchedule({"own": None}) for _ in range(SERVICES)] if own else [_shared(devices)]
    for number in range(SERVICES):
        host = hosts[number] if own else hosts[0]
        host.declare(ServiceFacts(str(number), MAX_BATCH, MAX_WAIT_S, weight_bytes, restore_s))
    agenda: list[tuple[float, int, ServiceSchedule, Fire | None, int]] = []
    serial = 0
    for index, asked in enumerate(requests):
        agenda.append((asked.at_s, serial, hosts[asked.service] if own else hosts[0], None, index))
        serial += 1
    heapq.heapify(agenda)
    outcome, restored_s = ServiceOutcome(), dict[int, float]()
    while agenda:
        at_s, number, host, ended, index = heapq.heappop(agenda)
        if ended is not None:
            host.ended(ended, at_s, restore_s=restored_s.pop(number))
            outcome.act_s += [at_s - requests[each].at_s for each in ended.requests]
        elif index >= 0:
            host.asked(str(requests[index].service), index, at_s)
        for fire in host.fire(at_s):
            restored_s[serial] = restore_s if fire.restores and not own else 0.0
            outcome.restored += bool(restored_s[serial])
            took_s = restored_s[serial] + sum(requests[each].run_s for each in fire.requests)
            heapq.heappush(agenda, (at_s + took_s, serial, host, fire, -1))
            serial += 1
        if (next_s := host.next_s(at_s)) is not None:
            heapq.heappush(agenda, (next_s, serial, host, None, -1))
            serial += 1
    assert len(outcome.act_s) == len(requests)
    return outcome


def _shared(devices: int) -> ServiceSchedule:
    return ServiceSchedule({f"device-{number}": DEVICE_BYTES for number in range(devices)})
