"""The lines of the events that come many times a second, written as they are, without a dict in between.

A quarter of the time of `libra.events.to_json`. ``tests/events`` compares each with the line that it gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from json.encoder import encode_basestring_ascii as text
from math import isfinite

from libra.errors import StoreError
from libra.types import ToolOutcome


class Lines:
    """Lines of one run's events; ``schema`` is `libra.events.SCHEMA`. Arguments are the fields of the event, in their order.

    StoreError where a number is not finite, as of `libra.events.to_json`.
    """

    __slots__ = ("_dispatched", "_finished", "_parked", "_preferred", "_set")

    def __init__(self, run: str, schema: int) -> None:
        def head(name: str) -> str:
            return f'{{"schema":{schema},"name":"{name}","run":{text(run)},"t_s":'

        self._parked, self._set = head("trajectory_parked"), head("priority_set")
        self._dispatched, self._finished = head("quantum_dispatched"), head("quantum_finished")
        self._preferred = head("buckets_preferred")

    def trajectory_parked(
        self, t_s: float, key: str, phase: str, quanta: int, context_tokens: int, priority: Sequence[int], reason: str
    ) -> str:
        """`libra.events.TrajectoryParked`."""
        return (
            f'{self._parked}{t_s!r},"key":{text(key)},"phase":{text(phase)},"quanta":{quanta},'
            f'"context_tokens":{context_tokens},"priority":{_numbers(priority)},"reason":{text(reason)}}}'
        )

    def priority_set(self, t_s: float, key: str, priority: Sequence[int], reason: str) -> str:
        """`libra.events.PrioritySet`."""
        return f'{self._set}{t_s!r},"key":{text(key)},"priority":{_numbers(priority)},"reason":{text(reason)}}}'

    def buckets_preferred(
        self,
        t_s: float,
        key: str,
        buckets: Sequence[str],
        reason: str,
        left_tokens: int,
        final_tokens: int,
        begins_tp: int,
    ) -> str:
        """`libra.events.BucketsPreferred`."""
        names = ",".join(map(text, buckets))
        return (
            f'{self._preferred}{t_s!r},"key":{text(key)},"buckets":[{names}],"reason":{text(reason)},'
            f'"left_tokens":{left_tokens},"final_tokens":{final_tokens},"begins_tp":{begins_tp}}}'
        )

    def quantum_dispatched(
        self,
        t_s: float,
        key: str,
        phase: str,
        quantum: int,
        worker: str,
        priority: Sequence[int],
        reason: str,
        alone: bool,
    ) -> str:
        """`libra.events.QuantumDispatched`."""
        return (
            f'{self._dispatched}{t_s!r},"key":{text(key)},"phase":{text(phase)},"quantum":{quantum},"worker":{text(worker)},'
            f'"priority":{_numbers(priority)},"reason":{text(reason)},"alone":{"true" if alone else "false"}}}'
        )

    def quantum_finished(
        self,
        t_s: float,
        key: str,
        phase: str,
        quantum: int,
        tokens: int,
        tool: str,
        status: ToolOutcome,
        payload_tokens: int,
        latency_s: float,
        worker: str,
        version: int,
        end: str,
    ) -> str:
        """`libra.events.QuantumFinished`."""
        if not isfinite(latency_s):
            raise StoreError(f"event 'quantum_finished' of {key}: latency_s is {latency_s}; allowed are finite numbers")
        return (
            f'{self._finished}{t_s!r},"key":{text(key)},"phase":{text(phase)},"quantum":{quantum},"tokens":{tokens},'
            f'"tool":{text(tool)},"status":{text(status)},"payload_tokens":{payload_tokens},"latency_s":{latency_s!r},'
            f'"worker":{text(worker)},"version":{version},"end":{text(end)}}}'
        )


def _numbers(numbers: Sequence[int]) -> str:
    return f"[{','.join(map(str, numbers))}]"
