"""A trajectory's state as a pure function of its records: its turns so far, its next phase, whether it has ended.

Invariants
----------
1. ``TrajectoryState`` after ``apply(records 0..n)`` is the same on every worker: it has no other input.
2. Token ids are what the engine sampled or the chat format appended, concatenated; never re-tokenised.
3. Exactly one of these holds: it needs a generation, it needs an action, it has ended.
4. A failure ends it only after ``resample`` others. Until then, after a failure that the tokens cannot cause, the failed
   turn is generated again with the same random numbers, so that the sample does not depend on the failure. Any other
   failure begins a fresh draw from the prompt, in the same journal. Neither depends on length or time. So does a trajectory that is
   to have one version, where its engine serves another one; that counts as no failure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.types import (
    NO_TOOL,
    Drawn,
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
from libra.untrusted import MAX_ERROR_CHARS, storable
from libra.worker.trajectory.agent_turns import AgentTurns

CONTEXT_FULL = "the context is full"
MOST_CHARS = 2**31 - 1
"""Largest count in a column of the store."""


def generation_record(
    turn: int,
    prompt_ids: NDArray[np.int32] | None,
    output: TurnOutput,
    text: str,
    calls: Sequence[ToolCall],
    state: bytes | None = None,
) -> dict[str, Any]:
    """Record of a generation quantum; ``prompt_ids`` and the first ``state`` go into the first of a trajectory only."""
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
        **({} if output.drawn is None else {"drawn": list(output.drawn)}),
        **_with_state(state),
        **({} if output.routes is None else {"routes": output.routes, "routes_from": output.routes_from}),
    }


def action_record(
    turn: int,
    returns: Sequence[ToolReturn],
    observation_ids: NDArray[np.int32],
    state: bytes | None = None,
    lease: tuple[str, str] | None = None,
) -> dict[str, Any]:
    """Record of an action quantum: what each call of the turn returned, and the tokens appended for the model to read.

    ``state`` is the trajectory's after it, ``lease`` its session's (`libra.worker.trajectory.session_leases`); None: it has none.
    """
    return {
        "kind": "action",
        "turn": turn,
        "returns": [asdict(r) | {"status": str(r.status)} for r in returns],
        "observation_ids": observation_ids,
        **_with_state(state),
        **({} if lease is None else {"lease": list(lease)}),
    }


def request_record(
    turn: int, parent: int, ids: NDArray[np.int32], returns: Sequence[ToolReturn], asked: Mapping[str, Any]
) -> dict[str, Any]:
    """Record of an action quantum in which an agent thought and asked: the answer will be turn ``turn``.

    ``parent`` is the turn that the request continues, -1 for none, ``returns`` what tools returned to that turn. ``asked`` has the
    request as the gateway reads it again after a restart.
    """
    return {**action_record(turn, returns, ids), "parent": parent, "asked": dict(asked)}


def agent_end_record(
    turn: int, end: EndReason, failure: FailureClass, detail: str, result: Any = None, reward: float | None = None
) -> dict[str, Any]:
    """Record of an action quantum in which an agent came to its end, with what it returned and the reward that it gave itself."""
    ended = {"end": str(end), "failure": str(failure), "detail": storable(detail[:MAX_ERROR_CHARS])}
    kept = json.dumps(result) if result is not None else ""
    return {**end_record(turn, None), **ended, "result": storable(kept), "reward": reward}


def end_record(turn: int, state: bytes | None) -> dict[str, Any]:
    """Record of an action quantum in which the environment's ``step`` ended the trajectory."""
    return {**action_record(turn, (), np.zeros(0, np.int32), state), "ends": True}


def _with_state(state: bytes | None) -> dict[str, bytes]:
    return {} if state is None else {"state": state}


def returned(records: Iterable[Mapping[str, Any]]) -> tuple[str, ToolOutcome]:
    """First tool, and the outcome, of the calls that returned in these records of one turn; ("", `NO_TOOL`) if none did."""
    found = [r for record in records if record["kind"] == "action" for r in record["returns"]]
    return (found[0]["tool"] if found else ""), turn_outcome(ToolStatus(r["status"]) for r in found)


def failure_record(failure: FailureClass, detail: str) -> dict[str, Any]:
    """Record that ends an attempt without an answer."""
    return {"kind": "failure", "failure": str(failure), "detail": storable(detail[:MAX_ERROR_CHARS])}


def restart_record(began: int, serves: int) -> dict[str, Any]:
    """Record that begins a trajectory again, which is to have one version: it began with one, and its engine serves another."""
    return {"kind": "restart", "began": began, "serves": serves}


def unlike_record(detail: str) -> dict[str, Any]:
    """Record that begins an agent's trajectory again: started again, it asked something else than before."""
    return {"kind": "restart", "detail": storable(detail[:MAX_ERROR_CHARS])}


def is_unfinished(generation: Mapping[str, Any]) -> bool:
    """Whether a generation record is a part of a turn that goes on; the record of the last part has text and calls of the whole."""
    return bool(generation["stop_reason"] == StopReason.PARKED)


def without_text(generation: Mapping[str, Any], detail: str) -> dict[str, Any]:
    """A generation record that could not be stored, without text and calls: it ends its trajectory as a `policy` failure.

    The tokens are kept, and train: what the model wrote is the model's doing.
    """
    return {**generation, "text": "", "calls": [], "unstorable": storable(detail[:MAX_ERROR_CHARS])}


@dataclass(slots=True)
class TrajectoryState:
    """The state after the records so far.

    Parameters
    ----------
    max_turns, max_context_tokens : int
        Limits of the run: the trajectory ends when they are reached.
    ignore_eos : bool
        A turn cut at its token limit then does not end the trajectory (benchmarks with turns of a fixed length).
    resample : int
        Number of failures not caused by the policy that it survives.
    steps : bool
        The environment answers a turn without calls, and may end the trajectory: such a turn is followed by an action.
    agent : bool
        An agent asks for every generation, and ends the trajectory: each is preceded and followed by an action.

    Attributes
    ----------
    state : bytes or None
        The environment's state of it after the last record; None: it has none.
    lease : (str, str) or None
        Worker and name of its lease of a session; None: it has none.
    unfinished : list of int32 arrays
        Tokens of the parts of its present turn, if that parked before its end; `turns` does not count it yet.
    answered : bool
        Its last turn had no calls, and waits for the environment's answer.
    parents : list of int
        Of an agent's requests, in order, the turns that they continue; -1: none. ``asked``: the last one, which is ``request``,
        waits for its answer.
    held : bytes or None
        The last record, packed, if it is applied and will be appended together with the next.
    """

    tid: TrajectoryId
    prompt: Prompt
    max_turns: int
    max_context_tokens: int
    ignore_eos: bool = False
    resample: int = 0
    steps: bool = False
    agent: bool = False
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
    answered: bool = False
    state: bytes | None = None
    lease: tuple[str, str] | None = None
    unfinished: list[NDArray[np.int32]] = field(default_factory=list)
    held: bytes | None = None
    parents: list[int] = field(default_factory=list)
    asked: bool = False
    request: Mapping[str, Any] = field(default_factory=dict)
    paths: list[list[NDArray[np.int32]]] = field(default_factory=list)

    @property
    def phase(self) -> Phase | None:
        """Its next phase; None: it has ended."""
        if self.end is not None:
            return None
        if self.agent:
            return Phase.ROLLOUT if self.asked else Phase.TOOL
        return Phase.TOOL if self.calls or self.answered else Phase.ROLLOUT

    @property
    def versions(self) -> set[int]:
        """Versions of the tokens of this draw."""
        made = (r["weight_versions"] for r in self.records[self.first :] if r["kind"] == "generation")
        return {int(version) for each in made for version in np.unique(each)}

    @property
    def context_ids(self) -> NDArray[np.int32]:
        """All tokens so far (T,)."""
        return np.concatenate(self.context) if self.context else np.zeros(0, np.int32)

    def apply(self, record: Mapping[str, Any]) -> None:
        """Apply the next record."""
        self.records.append(dict(record))
        self.quanta += 1
        self.state = record.get("state", self.state)
        if "lease" in record:
            self.lease = (record["lease"][0], record["lease"][1])
        match record["kind"]:
            case "generation":
                self._generated(record)
            case "action" if self.agent:
                self._agent_acted(record)
            case "action":
                self._extend(record["observation_ids"])
                self.calls, answered, self.answered = (), self.answered, False
                if "ends" in record:
                    self._finish(EndReason.ANSWERED, FailureClass.NONE, "")
                elif answered and self.turns >= self.max_turns:
                    self._finish(EndReason.MAX_TURNS, FailureClass.POLICY, f"{self.turns} turns and not at the end")
                elif self.num_context_tokens >= self.max_context_tokens:
                    self._finish(EndReason.LENGTH, FailureClass.POLICY, CONTEXT_FULL)
            case "restart":
                self._begin_again()
            case "failure":
                self._failed(FailureClass(record["failure"]), record["detail"])

    def _generated(self, record: Mapping[str, Any]) -> None:
        if record["prompt_ids"] is not None:
            self._extend(record["prompt_ids"])
        self._extend(record["token_ids"])
        if is_unfinished(record):
            self.unfinished.append(record["token_ids"])
            return
        self.unfinished = []
        self.turns += 1
        calls = _calls(record)
        if self.agent and "unstorable" not in record:
            self.paths.append(list(self.context))
            self.asked = False
            return
        if "unstorable" in record:
            self._finish(EndReason.FAILURE, FailureClass.POLICY, record["unstorable"])
        elif record["stop_reason"] == StopReason.LENGTH and not self.ignore_eos:
            self._finish(EndReason.LENGTH, FailureClass.POLICY, f"turn {self.turns - 1} was cut at its token limit")
        elif not calls and self.steps:
            self.answered = True
        elif not calls:
            self._finish(EndReason.ANSWERED, FailureClass.NONE, "")
        elif self.turns >= self.max_turns:
            self._finish(EndReason.MAX_TURNS, FailureClass.POLICY, f"{self.turns} turns and still calling tools")
        else:
            self.calls = calls

    def _agent_acted(self, record: Mapping[str, Any]) -> None:
        if "ends" in record:
            self._finish(EndReason(record["end"]), FailureClass(record["failure"]), record["detail"])
            return
        parent = record["parent"]
        self.parents.append(parent)
        self.context = [*(self.paths[parent] if parent >= 0 else ()), record["observation_ids"]]
        self.num_context_tokens = sum(map(len, self.context))
        self.asked, self.request = True, record["asked"]

    def _failed(self, failure: FailureClass, detail: str) -> None:
        if len(self.retried) >= self.resample:
            self._finish(EndReason.FAILURE, failure, detail)
            return
        self.retried.append(failure)
        if not failure.keeps_records:
            self._begin_again()

    def _begin_again(self) -> None:
        """A fresh draw from the prompt."""
        self.draw += 1
        self.first = len(self.records)
        self.context, self.num_context_tokens, self.turns, self.calls = [], 0, 0, ()
        self.answered, self.state, self.lease, self.unfinished = False, None, None, []
        self.parents, self.asked, self.paths = [], False, []

    def _extend(self, token_ids: NDArray[np.int32]) -> None:
        self.context.append(token_ids)
        self.num_context_tokens += len(token_ids)

    def _finish(self, end: EndReason, failure: FailureClass, detail: str) -> None:
        self.end, self.failure, self.detail, self.calls, self.answered = end, failure, detail, (), False

    # ---------------------------------------------------------------- once it has ended

    def episode(self, decode: Callable[[bytes | None], Any] = lambda _: None) -> Episode:
        """The trajectory as the grader sees it; ``decode`` reads the environment's state of it."""
        turns: list[Turn] = []
        for record in self.records[self.first :]:
            if record["kind"] == "generation":
                ids = tuple(record["token_ids"].tolist())
                if record["turn"] < len(turns):  # a further part of it
                    ids = turns.pop().token_ids + ids
                turns.append(Turn(record["text"], _calls(record), num_tokens=len(ids), token_ids=ids))
            elif record["kind"] == "action":
                returns = tuple(ToolReturn(**r | {"status": ToolStatus(r["status"])}) for r in record["returns"])
                at = record.get("parent", len(turns) - 1)
                if at >= 0 and returns:
                    turns[at] = replace(turns[at], returns=returns)
        end = self.end or EndReason.FAILURE
        last = self.records[-1] if self.records else {}
        result = json.loads(last["result"]) if last.get("result") else None
        return Episode(
            str(self.tid),
            self.prompt,
            tuple(turns),
            end,
            decode(self.state),
            result,
            last.get("reward") if self.agent else None,
        )

    def trajectory(self, epoch: int) -> Trajectory:
        """All tokens and turns as the store keeps them, not graded yet."""
        parts: list[
            tuple[NDArray[np.int32], Mapping[str, Any] | None]
        ] = []  # token ids, and the record that generated them
        if self.agent:
            parts, _ = AgentTurns.of(self.records[self.first :]).parts()
        for record in () if self.agent else self.records[self.first :]:
            if record["kind"] == "generation":
                if record["prompt_ids"] is not None:
                    parts.append((record["prompt_ids"], None))
                parts.append((record["token_ids"], record))
            elif record["kind"] == "action":
                parts.append((record["observation_ids"], None))

        def column(name: str, fill: int, dtype: type[np.generic]) -> NDArray[Any]:
            return _joined([np.full(len(ids), fill) if r is None else r[name] for ids, r in parts], dtype)

        return Trajectory(
            trajectory_id=self.tid,
            prompt=self.prompt,
            token_ids=_joined([ids for ids, _ in parts], np.int32),
            is_action=_joined([np.full(len(ids), record is not None) for ids, record in parts], np.bool_),
            behaviour_logprob=column("logprobs", 0, np.float32),
            weight_version=column("weight_versions", -1, np.int32),
            kv_version=column("kv_versions", -1, np.int32),
            turns=self._turn_rows(),
            end_reason=self.end or EndReason.FAILURE,
            failure=self.failure,
            failure_detail=self.detail,
            epoch=epoch,
            retried=",".join(self.retried),
            routes=self._routes(sum(len(ids) for ids, _ in parts)),
            drawn=_drawn([record for _, record in parts if record is not None]),
        )

    def _routes(self, num_tokens: int) -> NDArray[np.int16] | None:
        """The experts of each token by the newest record that has them (T, layers, experts); None if none has."""
        found: NDArray[np.int16] | None = None
        for record in self.records[self.first :]:
            if (routes := record.get("routes")) is not None:
                if found is None:
                    found = np.full((num_tokens, *routes.shape[1:]), -1, np.int16)
                found[record["routes_from"] : record["routes_from"] + len(routes)] = routes
        return found

    def _turn_rows(self) -> list[dict[str, Any]]:
        """One row per turn for the store's per-turn columns."""
        rows: list[dict[str, Any]] = []
        context = 0
        places = AgentTurns.of(self.records[self.first :]).parts()[1] if self.agent else []
        for record in self.records[self.first :]:
            if record["kind"] == "generation":
                start, context = places[record["turn"]] if self.agent else (0, context)
                context += 0 if record["prompt_ids"] is None else len(record["prompt_ids"])
                parts = rows.pop() if record["turn"] < len(rows) else {}
                rows.append(
                    {
                        "turn": record["turn"],
                        "tool": record["calls"][0]["name"] if record["calls"] else "",
                        "status": NO_TOOL,
                        "num_calls": len(record["calls"]),
                        "prompt_tokens": parts.get("prompt_tokens", context),
                        "generated_tokens": parts.get("generated_tokens", 0) + len(record["token_ids"]),
                        "observation_tokens": 0,
                        "stop_reason": record["stop_reason"],
                        "cached_tokens": parts.get("cached_tokens", record["cached_tokens"]),
                        "generate_s": parts.get("generate_s", 0.0)
                        + record.get("busy_s", record["stop_s"] - record["start_s"]),
                        "queued_s": parts.get("queued_s", 0.0) + record["queued_s"],
                        "tool_s": 0.0,
                        "worker": record["worker"],
                        "text_chars": len(record["text"]),
                        "payload_chars": 0,
                        "sequence_start": start,
                    }
                )
                context += len(record["token_ids"])
            elif record["kind"] == "action":
                tool, status = returned([record])
                at = record.get("parent", len(rows) - 1)
                if at < 0 or ("ends" in record and self.agent):
                    continue
                rows[at] |= {
                    "tool": tool,
                    "status": str(status),
                    "observation_tokens": len(record["observation_ids"]),
                    "tool_s": max((r["latency_s"] for r in record["returns"]), default=0.0),
                    "payload_chars": min(sum(r["payload_chars"] for r in record["returns"]), MOST_CHARS),
                }
                context += len(record["observation_ids"])
        return rows


def _drawn(generations: Sequence[Mapping[str, Any]]) -> Drawn | None:
    """The further draws of all generations, a row for each generated token; None if one has none."""
    kept = [record["drawn"] for record in generations if "drawn" in record]
    if not kept or len(kept) < len(generations):
        return None
    return Drawn(*(np.concatenate(each) for each in zip(*kept, strict=True)))


def _calls(record: Mapping[str, Any]) -> tuple[ToolCall, ...]:
    return tuple(_call(each) for each in record["calls"])


def _call(kept: Mapping[str, Any]) -> ToolCall:
    try:
        return ToolCall(kept["name"], json.loads(kept["arguments"]), kept["error"])
    except (
        ValueError,
        RecursionError,
    ):  # of a Libra that did not limit arguments: to raise here would end every resume
        return ToolCall("", {}, "its arguments cannot be read")


def _joined(parts: list[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    """The parts concatenated; an empty array without parts."""
    return np.concatenate(parts, dtype=dtype, casting="unsafe") if parts else np.zeros(0, dtype)
