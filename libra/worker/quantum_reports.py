"""What a worker reports of a quantum, from the records that it wrote."""

from __future__ import annotations

import time

from libra.events.reports import QuantumReport
from libra.types import FailureClass
from libra.worker.trajectory_state import TrajectoryState, returned


def quantum_report(
    key: str, state: TrajectoryState, first: int, started_s: float, *, goes_on: bool, calls: tuple[str, ...] = ()
) -> QuantumReport:
    """The report of a quantum that began at ``started_s``; ``first`` is the index of the first record it wrote.

    ``goes_on``: the next quantum of the trajectory begins in the same slot. ``calls``: tools that the
    next action calls, if one of them has resources.
    """
    new = state.records[first:]
    generated = [r for r in new if r["kind"] == "generation"]
    tool, status = returned(new)
    failed = next((r for r in new if r["kind"] == "failure"), None)
    return QuantumReport(
        key=key,
        quantum=state.quanta - 1,
        next=str(state.phase) if state.phase is not None else "",
        goes_on=goes_on,
        end=str(state.end) if state.end is not None else "",
        failure=failed["failure"] if failed else str(state.failure if new else FailureClass.NONE),
        detail=failed["detail"] if failed else state.detail,
        tokens=sum(len(r["token_ids"]) for r in generated),
        version=min((int(r["weight_versions"].min()) for r in generated if len(r["token_ids"])), default=-1),
        tool=tool,
        status=str(status),
        payload_tokens=sum(len(r["observation_ids"]) for r in new if r["kind"] == "action"),
        context_tokens=state.num_context_tokens,
        start_s=started_s,
        stop_s=time.time(),
        unfinished=bool(new and state.unfinished),
        calls=calls,
        ran_s=max((each["latency_s"] for r in new if r["kind"] == "action" for each in r["returns"]), default=0.0),
    )
