"""A trajectory's state as a pure function of its records: what it has done, what it needs next, when it is over.

Invariants
----------
1. ``TrajectoryState`` after ``apply(records 0..n)`` is the same on every worker: nothing else goes into it.
2. Token ids are what the engine sampled or the chat format appended, concatenated; never re-tokenised.
3. Exactly one of these holds: it needs a generation, it needs an action, it has ended.
4. A failure ends it only after ``resample`` others. Until then a failed engine is asked again for the same turn, with the
   same random numbers: what is sampled does not depend on the failure. Any other failure begins a fresh draw from the
   prompt, in the same journal. Neither looks at length or time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.types import (
    NO_TOOL,
    EndReason,
    Episode,
    FailureClass,
    Phase,
    Prompt,
    StopReason,
    ToolCall,
    ToolOutcome,
    ToolReturn,
    ToolStatus,
    Trajectory,
    TrajectoryId,
    Turn,
    TurnOutput,
    turn_outcome,
)


def generation_record(
    turn: int, prompt_ids: NDArray[np.int32] | None, output: TurnOutput, text: str, calls: Sequence[ToolCall]
) -> dict[str, Any]:
    """Record of a generation quantum; ``prompt_ids`` goes into the first of a trajectory only."""
    return {
        "kind": "generation",
        "turn": turn,
        "prompt_ids": prompt_ids,
        "token_ids": output.token_ids,
        "logprobs": output.logprobs,
        "weight_versions": output.weight_versions,
        "kv_versions": output.kv_versions,
        "stop_reason": str(output.stop_reason),
        "cached_tokens": output.cached_tokens,
        "queued_s": output.queued_s,
        "busy_s": output.busy_s,
        "text": text,
        "calls": [{"name": c.name, "arguments": json.dumps(dict(c.arguments)), "error": c.error} for c in calls],
    }


def action_record(turn: int, returns: Sequence[ToolReturn], observation_ids: NDArray[np.int32]) -> dict[str, Any]:
    """Record of an action quantum: what each call of the turn returned, and the tokens appended for the model to read."""
    return {
        "kind": "action",
        "turn": turn,
        "returns": [
            {
                "tool": r.tool,
                "status": str(r.status),
                "content": r.content,
                "latency_s": r.latency_s,
                "payload_chars": r.payload_chars,
            }
            for r in returns
        ],
        "observation_ids": observation_ids,
    }


def returned(records: Iterable[Mapping[str, Any]]) -> tuple[str, ToolOutcome]:
    """First tool and outcome of the calls that came back in these records of one turn; ("", `NO_TOOL`) where none did."""
    found = [r for record in records if record["kind"] == "action" for r in record["returns"]]
    return (found[0]["tool"] if found else ""), turn_outcome(ToolStatus(r["status"]) for r in found)


def failure_record(failure: FailureClass, detail: str) -> dict[str, Any]:
    """Record that ends a trajectory without an answer."""
    return {"kind": "failure", "failure": str(failure), "detail": detail[:2000]}


@dataclass(slots=True)
class TrajectoryState:
    """What the records so far amount to.

    Parameters
    ----------
    max_turns, max_context_tokens : int
        Limits of the run: the trajectory ends when they are reached.
    ignore_eos : bool
        A turn cut at its token limit is then no end (benchmarks with turns of a fixed length).
    resample : int
        How many failures that are not the policy's it survives.
    """

    tid: TrajectoryId
    prompt: Prompt
    max_turns: int
    max_context_tokens: int
    ignore_eos: bool = False
    resample: int = 0
    quanta: int = 0
    end: EndReason | None = None
    failure: FailureClass = FailureClass.NONE
    detail: str = ""
    records: list[dict[str, Any]] = field(default_factory=list)
    retried: list[FailureClass] = field(default_factory=list)
    draw: int = 0
    first: int = 0  # index of the first record of this draw
    context: list[NDArray[np.int32]] = field(default_factory=list)
    num_context_tokens: int = 0
    turns: int = 0
    calls: tuple[ToolCall, ...] = ()

    @property
    def phase(self) -> Phase | None:
        """What it needs next; None: it has ended."""
        if self.end is not None:
            return None
        return Phase.TOOL if self.calls else Phase.ROLLOUT

    @property
    def context_ids(self) -> NDArray[np.int32]:
        """All tokens so far (T,)."""
        return np.concatenate(self.context) if self.context else np.zeros(0, np.int32)

    def apply(self, record: Mapping[str, Any]) -> None:
        """Take one more record, the next in order."""
        self.records.append(dict(record))
        self.quanta += 1
        match record["kind"]:
            case "generation":
                self._generated(record)
            case "action":
                self._extend(record["observation_ids"])
                self.calls = ()
                if self.num_context_tokens >= self.max_context_tokens:
                    self._finish(EndReason.LENGTH, FailureClass.POLICY, "the context is full")
            case "failure":
                self._failed(FailureClass(record["failure"]), record["detail"])

    def _generated(self, record: Mapping[str, Any]) -> None:
        if record["prompt_ids"] is not None:
            self._extend(record["prompt_ids"])
        self._extend(record["token_ids"])
        self.turns += 1
        calls = tuple(ToolCall(c["name"], json.loads(c["arguments"]), c["error"]) for c in record["calls"])
        if record["stop_reason"] == StopReason.LENGTH and not self.ignore_eos:
            self._finish(EndReason.LENGTH, FailureClass.POLICY, f"turn {self.turns - 1} was cut at its token limit")
        elif not calls:
            self._finish(EndReason.ANSWERED, FailureClass.NONE, "")
        elif self.turns >= self.max_turns:
            self._finish(EndReason.MAX_TURNS, FailureClass.POLICY, f"{self.turns} turns and still calling tools")
        else:
            self.calls = calls

    def _failed(self, failure: FailureClass, detail: str) -> None:
        if len(self.retried) >= self.resample:
            self._finish(EndReason.FAILURE, failure, detail)
            return
        self.retried.append(failure)
        if not failure.keeps_records:
            self.draw += 1
            self.first = len(self.records)
            self.context, self.num_context_tokens, self.turns, self.calls = [], 0, 0, ()

    def _extend(self, token_ids: NDArray[np.int32]) -> None:
        self.context.append(token_ids)
        self.num_context_tokens += len(token_ids)

    def _finish(self, end: EndReason, failure: FailureClass, detail: str) -> None:
        self.end, self.failure, self.detail, self.calls = end, failure, detail, ()

    # ---------------------------------------------------------------- once it has ended

    def episode(self) -> Episode:
        """The trajectory as the grader sees it."""
        turns: list[Turn] = []
        for record in self.records[self.first :]:
            if record["kind"] == "generation":
                calls = tuple(ToolCall(c["name"], json.loads(c["arguments"]), c["error"]) for c in record["calls"])
                ids = tuple(int(token) for token in record["token_ids"])
                turns.append(Turn(record["text"], calls, num_tokens=len(ids), token_ids=ids))
            elif record["kind"] == "action":
                returns = tuple(
                    ToolReturn(r["tool"], ToolStatus(r["status"]), r["content"], r["latency_s"], r["payload_chars"])
                    for r in record["returns"]
                )
                turns[-1] = replace(turns[-1], returns=returns)
        return Episode(str(self.tid), self.prompt, tuple(turns), self.end or EndReason.FAILURE)

    def trajectory(self, epoch: int) -> Trajectory:
        """All tokens and turns as the store keeps them, not graded yet."""
        ids: list[NDArray[Any]] = []
        action: list[NDArray[Any]] = []
        logp: list[NDArray[Any]] = []
        weights: list[NDArray[Any]] = []
        kv: list[NDArray[Any]] = []

        def add(token_ids: NDArray[np.int32], record: Mapping[str, Any] | None) -> None:
            n = len(token_ids)
            ids.append(token_ids)
            action.append(np.full(n, record is not None))
            logp.append(np.zeros(n, np.float32) if record is None else record["logprobs"])
            weights.append(np.full(n, -1, np.int32) if record is None else record["weight_versions"])
            kv.append(np.full(n, -1, np.int32) if record is None else record["kv_versions"])

        for record in self.records[self.first :]:
            if record["kind"] == "generation":
                if record["prompt_ids"] is not None:
                    add(record["prompt_ids"], None)
                add(record["token_ids"], record)
            elif record["kind"] == "action":
                add(record["observation_ids"], None)
        return Trajectory(
            trajectory_id=self.tid,
            prompt=self.prompt,
            token_ids=_joined(ids, np.int32),
            is_action=_joined(action, np.bool_),
            behaviour_logprob=_joined(logp, np.float32),
            weight_version=_joined(weights, np.int32),
            kv_version=_joined(kv, np.int32),
            turns=self._turn_rows(),
            end_reason=self.end or EndReason.FAILURE,
            failure=self.failure,
            failure_detail=self.detail,
            epoch=epoch,
            retried=",".join(self.retried),
        )

    def _turn_rows(self) -> list[dict[str, Any]]:
        """One row per turn for the store's per-turn columns."""
        rows: list[dict[str, Any]] = []
        context = 0
        for record in self.records[self.first :]:
            if record["kind"] == "generation":
                context += 0 if record["prompt_ids"] is None else len(record["prompt_ids"])
                rows.append(
                    {
                        "turn": record["turn"],
                        "tool": record["calls"][0]["name"] if record["calls"] else "",
                        "status": NO_TOOL,
                        "num_calls": len(record["calls"]),
                        "prompt_tokens": context,
                        "generated_tokens": len(record["token_ids"]),
                        "observation_tokens": 0,
                        "stop_reason": record["stop_reason"],
                        "cached_tokens": record["cached_tokens"],
                        "generate_s": record.get("busy_s", record["stop_s"] - record["start_s"]),
                        "queued_s": record["queued_s"],
                        "tool_s": 0.0,
                        "worker": record["worker"],
                        "text_chars": len(record["text"]),
                        "payload_chars": 0,
                    }
                )
                context += len(record["token_ids"])
            elif record["kind"] == "action":
                rows[-1] |= {
                    "status": str(returned([record])[1]),
                    "observation_tokens": len(record["observation_ids"]),
                    "tool_s": max((r["latency_s"] for r in record["returns"]), default=0.0),
                    "payload_chars": sum(r["payload_chars"] for r in record["returns"]),
                }
                context += len(record["observation_ids"])
        return rows


def _joined(parts: list[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    """The parts end to end; an empty array where there are none."""
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)
