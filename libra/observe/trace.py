"""`libra trace`: the event log in Trace Event Format (JSON) for Perfetto and Chrome.

Each worker is a process with lines for its state (`libra.observe.timeline`), its weight syncs, and
each concurrently used slot with its quanta. The process ``run`` has steps, published versions and
counters. Times are microseconds since the run's first start, without pauses between starts. Slices
of one line never overlap.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from libra import facts, keys
from libra.facts import Line
from libra.observe.run_directory import written
from libra.observe.timeline.timeline import Timeline
from libra.types import Phase
from libra.untrusted import shown_line

RUN_PID: Final = 1
STATE_TID, SYNC_TID, SLOT_TID = 1, 2, 10
SAMPLE_S: Final = 0.05
"""Minimum seconds between samples of the counters."""
MAX_LEVELS: Final = 12
"""Levels with their own counter; deeper levels share one."""
_LANES: Final = {Phase.ROLLOUT: 0, Phase.TOOL: 100_000}

TraceLine = dict[str, Any]


class Tracer:
    """Converts facts to trace lines: `add` yields lines of a fact, `finish` the rest."""

    def __init__(self, trainers: Sequence[str] = ()) -> None:
        self.timeline = Timeline(trainers)
        self._pids: dict[str, int] = {}
        self._lanes: dict[tuple[int, Phase], list[float]] = {}
        self._sampled_tokens, self._sampled_s = 0, 0.0
        self._names: dict[tuple[int, int], str] = {}
        self._levels: set[str] = set()

    def add(self, logged: Line) -> Iterator[TraceLine]:
        """Lines of one fact."""
        fact = logged.fact
        before = self.timeline.places.open.get(getattr(fact, "key", ""))
        slot = before.slot if before is not None else None
        self.timeline.add(logged)
        now_s = self.timeline.now_s
        match fact:
            case facts.RunStarted():
                yield _instant(RUN_PID, f"start {fact.epoch}", now_s)
            case facts.QuantumFinished():
                yield self._quantum(fact, now_s - fact.latency_s if slot is None else slot.since_s, now_s)
            case facts.VersionServed():
                name, start_s = f"load version {fact.version}", now_s - fact.load_s
                yield self._slice(self._pid(fact.worker), SYNC_TID, name, start_s, now_s)
            case facts.StepFinished():
                what = {"loss": fact.loss if math.isfinite(fact.loss) else str(fact.loss)}  # JSON has no NaN
                yield self._slice(RUN_PID, STATE_TID, f"step {fact.step}", now_s - fact.train_s, now_s, what)
            case facts.VersionPublished():
                yield _instant(RUN_PID, f"version {fact.version}", now_s)
            case facts.OpenBatch() | facts.OpenGate():
                yield _instant(RUN_PID, f"{fact.name} {fact.about}", now_s)
            case facts.WorkerLost() | facts.FailureClassified() | facts.StallDetected():
                yield _instant(RUN_PID, fact.name, now_s)
        if now_s - self._sampled_s >= SAMPLE_S:
            yield from self._counters(now_s)

    def finish(self) -> Iterator[TraceLine]:
        """States of all workers, and names of all lines."""
        yield from self._counters(self.timeline.now_s)
        for worker, found in self.timeline.workers.segments().items():
            pid = self._pid(worker)
            for start_s, stop_s, state in found:
                yield self._slice(pid, STATE_TID, state, start_s, stop_s)
        yield _meta(RUN_PID, 0, "process_name", "run")
        for worker, pid in self._pids.items():
            yield _meta(pid, 0, "process_name", worker)
        for (pid, tid), name in sorted(self._names.items()):
            yield _meta(pid, tid, "thread_name", name)

    def _quantum(self, event: facts.QuantumFinished, start_s: float, now_s: float) -> TraceLine:
        phase, pid = Phase(event.phase), self._pid(event.worker)
        lanes = self._lanes.setdefault((pid, phase), [])
        lane = next((index for index, free_s in enumerate(lanes) if free_s <= start_s), len(lanes))
        lanes[lane : lane + 1] = [now_s]
        tid = SLOT_TID + _LANES[phase] + lane
        self._names[pid, tid] = f"{phase} {lane}"
        parsed = keys.parse(event.key)
        subject = "-".join(map(str, (parsed.split, *parsed.indices))) if parsed is not None else event.key
        what = {"tokens": event.tokens, "quantum": event.quantum, "version": event.version, "worker_s": event.latency_s}
        texts = {"tool": shown_line(event.tool), "status": str(event.status), "end": event.end}
        if event.unfinished:
            what["unfinished"] = True
        return self._slice(
            pid, tid, subject, start_s, now_s, what | {name: each for name, each in texts.items() if each}
        )

    def _slice(
        self, pid: int, tid: int, name: str, start_s: float, stop_s: float, what: TraceLine | None = None
    ) -> TraceLine:
        if tid in (STATE_TID, SYNC_TID):
            self._names[pid, tid] = "steps" if pid == RUN_PID else "state" if tid == STATE_TID else "weights"
        ts = _us(max(start_s, 0.0))
        line = {"ph": "X", "pid": pid, "tid": tid, "name": shown_line(name), "ts": ts, "dur": _us(stop_s) - ts}
        return line | ({"args": what} if what else {})

    def _pid(self, worker: str) -> int:
        return self._pids.setdefault(worker, RUN_PID + 1 + len(self._pids))

    def _counters(self, now_s: float) -> Iterator[TraceLine]:
        places, tokens = self.timeline.places, self.timeline.tokens
        by_level = Counter(dict.fromkeys(self._levels, 0))  # a level without waiting trajectories is shown as 0
        for levels in places.levels.values():
            for level, count in levels.items():
                by_level[f"level {level:02d}" if level < MAX_LEVELS else f"level {MAX_LEVELS} and deeper"] += count
        self._levels |= by_level.keys()
        elapsed_s = now_s - self._sampled_s
        rate = (tokens - self._sampled_tokens) / elapsed_s if elapsed_s > 0 else 0.0
        self._sampled_s, self._sampled_tokens = now_s, tokens
        yield _counter("open trajectories", now_s, {"open": len(places.open)})
        yield _counter("waiting by phase", now_s, {str(phase): places.levels[phase].total() for phase in Phase})
        yield _counter("waiting by level", now_s, dict(sorted(by_level.items())) or {"level 00": 0})
        yield _counter("generated tokens per second", now_s, {"tokens/s": round(rate, 1)})


def _us(seconds: float) -> int:
    return round(1e6 * seconds)


def _instant(pid: int, name: str, at_s: float) -> TraceLine:
    return {"ph": "i", "pid": pid, "tid": STATE_TID, "name": shown_line(name), "ts": _us(at_s), "s": "p"}


def _counter(name: str, at_s: float, values: TraceLine) -> TraceLine:
    return {"ph": "C", "pid": RUN_PID, "tid": 0, "name": name, "ts": _us(at_s), "args": values}


def _meta(pid: int, tid: int, what: str, name: str) -> TraceLine:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": {"name": shown_line(name)}}


def trace_lines(log: Iterable[Line], trainers: Sequence[str] = ()) -> Iterator[TraceLine]:
    """Trace lines of a whole log."""
    tracer = Tracer(trainers)
    yield from itertools.chain.from_iterable(map(tracer.add, log))
    yield from tracer.finish()


def write_trace(log: Iterable[Line], output: Path, trainers: Sequence[str] = ()) -> int:
    """Write a log's trace, compressed if ``output`` ends with ``.gz``; returns the number of lines.

    StoreError for a damaged log, ConfigError for an unwritable file; then no file is left.
    """
    count, opened = 0, gzip.open if output.suffix == ".gz" else open
    with written(output, "-o") as path, opened(path, "wt", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[')
        for count, line in enumerate(trace_lines(log, trainers), 1):
            file.write(("\n" if count == 1 else ",\n") + json.dumps(line, separators=(",", ":")))
        file.write("\n]}\n")
    return count
