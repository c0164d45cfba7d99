"""Measures the steps of a run that chooses how to take them, from the events of its log.

Invariants
----------
1. A step is measured once, and only if the log of this start has its gate, all its groups and its waves: one that another start of
   the run began is left out.
2. Nothing is kept of iterations that are long done.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from libra import facts, keys
from libra.facts import Line, StepMeasured
from libra.observe.worker_time import WorkerTimes
from libra.policy.tail import price_s
from libra.types import Phase

_OF_ENGINES = frozenset({"generating", "turned", "wave"})


class StepClock:
    """Follows a run's events; ``groups`` of a batch, ``train_gpus`` that always train."""

    def __init__(self, groups: int, train_gpus: int) -> None:
        self._groups, self._train_gpus = groups, train_gpus
        self._gates_s: dict[int, float] = {}
        self._complete_s: defaultdict[int, list[float]] = defaultdict(list)
        self._waves: defaultdict[int, dict[int, tuple[int, float]]] = defaultdict(dict)
        self._trained_s: dict[int, float] = {}
        self._ended_s: dict[int, float] = {}  # of steps whose publication the next one does not wait for
        self._alone_s: dict[str, float] = {}  # seconds of an engine's token
        self._path_s: dict[str, float] = {}  # by open trajectory, its seconds had it been alone
        self._longest_s: dict[int, float] = {}
        self._changes: dict[str, list[float]] = {"train": [], "rollout": []}
        self._since_s = 0.0

    def add(self, line: Line) -> None:
        """Take the next line of the log."""
        _, t_s, event = line
        match event:
            case facts.QuantumFinished(key=key, phase=phase):
                took_s = (
                    event.latency_s if phase == Phase.TOOL else event.tokens * min(self._alone_s.values(), default=0.0)
                )
                self._path_s[key] = self._path_s.get(key, 0.0) + took_s
            case facts.TrajectoryEnded(key=key):
                path_s, parsed = self._path_s.pop(key, 0.0), keys.parse(key)
                if parsed is not None and parsed.split == "train":
                    iteration = parsed.indices[0]
                    self._longest_s[iteration] = max(path_s, self._longest_s.get(iteration, 0.0))
            case facts.OpenGate(iteration=iteration):
                self._gates_s[iteration] = t_s
            case facts.GroupCommitted(split="train", iteration=iteration):
                self._complete_s[iteration].append(t_s)
            case facts.WaveTrained(batch=batch, wave=wave) if event.groups:
                seconds = event.train_s * (self._train_gpus + event.hybrids) / self._train_gpus
                self._waves[batch][wave] = event.groups, seconds
                self._trained_s[batch] = t_s
            case facts.StepFinished(step=step, beside=True):
                self._ended_s[step] = t_s
            case facts.WorkerCapacity(worker=worker, alone_s_per_token=alone_s) if event.rollout_slots and alone_s:
                self._alone_s[worker] = alone_s
            case facts.WorkerWithdrawn(worker=worker):
                self._alone_s.pop(worker, None)
            case facts.RoleChanged(to_role=role) if role in self._changes:
                self._changes[role].append(price_s(event.stage_s))

    def published(self, version: int, now_s: float, times: WorkerTimes) -> StepMeasured | None:
        """The step whose weights, ``version``, are published at ``now_s``; None if not all of it was seen."""
        step, since_s = version - 1, self._since_s
        self._since_s = times.now_s
        gate_s, complete_s = self._gates_s.get(step), sorted(self._complete_s.get(step, ()))
        waves, trained_s = self._waves.get(step, {}), self._trained_s.get(step, now_s)
        longest_s, ended_s = self._longest_s.get(step, 0.0), self._ended_s.get(step, now_s)
        followed: tuple[dict[int, Any], ...] = (
            self._gates_s, self._complete_s, self._waves, self._trained_s, self._longest_s, self._ended_s,
        )  # fmt: skip
        for known in followed:
            for done in [k for k in known if k <= step]:
                del known[done]
        whole = len(complete_s) == self._groups == sum(groups for groups, _ in waves.values())
        if gate_s is None or not whole or not times.now_s > since_s:
            return None
        gpus, gpu_s = _rollout(times, since_s)
        changes = [sum(took) / len(took) for took in self._changes.values() if took]
        return StepMeasured(
            step=step,
            complete_s=tuple(round(max(0.0, t_s - gate_s), 6) for t_s in complete_s),
            waves=tuple((groups, round(seconds, 6)) for _, (groups, seconds) in sorted(waves.items())),
            update_s=round(max(0.0, now_s - trained_s), 6),
            longest_s=round(longest_s, 6),
            rollout_gpus=round(gpus, 6),
            rollout_gpu_s=round(gpu_s, 6),
            change_s=round(sum(changes), 6) if len(changes) == len(self._changes) else 0.0,
            beside_s=round(max(0.0, now_s - max(ended_s, trained_s)), 6),
        )


def _rollout(times: WorkerTimes, since_s: float) -> tuple[float, float]:
    """GPUs of engines since then, on average, and their GPU-seconds with requests."""
    workers = times.times(since_s=since_s).workers
    engines = [each for each in workers if each.kind == "engine" or _OF_ENGINES & each.seconds.keys()]
    there = sum(sum(worker.gpu_s.values()) for worker in engines)
    return there / (times.now_s - since_s), sum(worker.gpu_s.get("generating", 0.0) for worker in engines)
