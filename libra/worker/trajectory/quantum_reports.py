"""What a worker reports of a quantum, from the records that it wrote."""

from __future__ import annotations

import time

from libra.facts import FailureClassified, QuantumFinished
from libra.types import FailureClass, Phase
from libra.worker.trajectory.trajectory_state import TrajectoryState, returned

KILLED = "killed: it took more than"
"""In the detail of a failure: the action took more than its memory."""


def quantum_facts(
    key: str,
    state: TrajectoryState,
    first: int,
    started_s: float,
    *,
    phase: Phase,
    worker: str,
    goes_on: bool,
    calls: tuple[str, ...] = (),
) -> tuple[QuantumFinished | FailureClassified, ...]:
    """What ``worker`` reports of a quantum that began at ``started_s``; ``first`` is the index of the first record it wrote.

    ``goes_on``: the next quantum of the trajectory begins in the same slot. ``calls``: tools that the
    next action calls, if one of them has resources.
    """
    new = state.records[first:]
    generated = [r for r in new if r["kind"] == "generation"]
    tool, status = returned(new)
    failed = next((r for r in new if r["kind"] == "failure"), None)
    failure = failed["failure"] if failed else str(state.failure if new else FailureClass.NONE)
    detail = failed["detail"] if failed else state.detail
    ran_s = max((each["latency_s"] for r in new if r["kind"] == "action" for each in r["returns"]), default=0.0)
    stop_s = time.time()
    latency_s = round(stop_s - started_s, 6)
    finished = QuantumFinished(
        key=key,
        phase=phase,
        tokens=sum(len(r["token_ids"]) for r in generated),
        tool=tool,
        status=str(status),
        latency_s=latency_s,
        payload_tokens=sum(len(r["observation_ids"]) for r in new if r["kind"] == "action"),
        tools_s=round(min(ran_s, latency_s), 6) if phase is Phase.ROLLOUT else 0.0,
        quantum=state.quanta - 1,
        worker=worker,
        version=min((int(r["weight_versions"].min()) for r in generated if len(r["token_ids"])), default=-1),
        end=str(state.end) if state.end is not None else "",
        unfinished=bool(new and state.unfinished),
        next=str(state.phase) if state.phase is not None else "",
        goes_on=goes_on,
        context_tokens=state.num_context_tokens,
        stop_s=stop_s,
        calls=calls,
        ran_s=ran_s,
        killed=failure == FailureClass.TOOL and KILLED in detail,
    )
    if failure == FailureClass.NONE:
        return (finished,)
    return finished, FailureClassified(key, failure, detail)
