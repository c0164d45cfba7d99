"""A trajectory's state as a pure function of its records; also the trajectory for store and grader.

An agent's conversations may branch. A `RequestRecord` names the turn that the request continues,
and the next generation answers the request. The token arrays hold one sequence per branch, one
after the other (`libra.agents.conversation`).

Invariants
----------
1. ``TrajectoryState`` after ``apply(records 0..n)`` is the same on every worker: it has no other
   input.
2. Token ids are concatenations of the ids that the engine sampled and the chat format appended;
   text is never tokenised again.
3. A trajectory needs a generation, needs an action, or has ended: exactly one of the three.
4. A trajectory survives ``resample`` failures; the next failure ends it. After a failure that its
   tokens cannot cause, the same turn is sampled with the same random numbers, so the sample does
   not depend on the failure. After any other failure a fresh attempt starts from the prompt, in the
   same journal.
5. A restart also starts a fresh attempt, but is not a failure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.agents.conversation import paths
from libra.config import RunConfig
from libra.envs import Environment, has_steps
from libra.store.quantum_records import (
    ActionRecord,
    AgentEndRecord,
    FailureRecord,
    GenerationRecord,
    QuantumRecord,
    RequestRecord,
    RestartRecord,
)
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
    Trajectory,
    TrajectoryId,
    Turn,
    TurnOutput,
    turn_outcome,
)
from libra.untrusted import MAX_ERROR_CHARS, storable

Part = tuple[NDArray[np.int32], GenerationRecord | None]
"""Token ids, and the record that generated them where they are trained."""

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
) -> GenerationRecord:
    """A generation's record; only the first of an attempt has ``prompt_ids`` and ``state``."""
    drawn = None if output.drawn is None else list(output.drawn)
    made = {name: getattr(output, name) for name in _OF_THE_OUTPUT}
    return GenerationRecord(
        turn=turn, prompt_ids=prompt_ids, text=text, calls=tuple(calls), drawn=drawn, state=state, **made
    )


_OF_THE_OUTPUT = (
    "token_ids", "logprobs", "weight_versions", "kv_versions", "stop_reason", "cached_tokens", "queued_s", "busy_s",
    "routes", "routes_from",
)  # fmt: skip


def end_record(turn: int, state: bytes | None) -> ActionRecord:
    return ActionRecord(turn=turn, observation_ids=np.zeros(0, np.int32), state=state, ends=True)


def agent_end_record(
    turn: int, end: EndReason, failure: FailureClass, detail: str, result: Any = None, reward: float | None = None
) -> AgentEndRecord:
    """Record of an agent's end, with its result and the reward that it reported."""
    kept = storable(json.dumps(result)) if result is not None else ""
    cut = storable(detail[:MAX_ERROR_CHARS])
    return AgentEndRecord(turn=turn, end=end, failure=failure, detail=cut, result=kept, reward=reward)


def failure_record(failure: FailureClass, detail: str) -> FailureRecord:
    return FailureRecord(failure=failure, detail=storable(detail[:MAX_ERROR_CHARS]))


def returned(records: Iterable[QuantumRecord]) -> tuple[str, ToolOutcome]:
    """First tool and joint outcome of one turn's returned calls; ("", `NO_TOOL`) without any."""
    found = [r for record in records if isinstance(record, ActionRecord | RequestRecord) for r in record.returns]
    return (found[0].tool if found else ""), turn_outcome(r.status for r in found)


@dataclass(frozen=True, slots=True)
class TrajectoryRules:
    max_turns: int  # a trajectory ends when it reaches this limit or the next
    max_context_tokens: int
    ignore_eos: bool = False  # a turn cut at its token limit does not end the trajectory (turns of a fixed length)
    resample: int = 0  # number of failures not caused by the policy that a trajectory survives
    steps: bool = False  # the environment answers a turn without calls, and may end the trajectory
    agent: bool = False  # an agent asks for every generation, and ends the trajectory

    @classmethod
    def of(cls, config: RunConfig, environment: Environment) -> TrajectoryRules:
        rollout, resample = config.rollout, config.trainer.resample
        steps, agent = has_steps(environment), config.agent.given
        return cls(rollout.max_turns, rollout.max_context_tokens, rollout.ignore_eos, resample, steps, agent)


@dataclass(slots=True)
class Attempt:
    """State of a trajectory since its prompt; a fresh attempt resets all of it."""

    number: int = 0  # earlier attempts
    records: list[QuantumRecord] = field(default_factory=list)
    context: list[NDArray[np.int32]] = field(default_factory=list)
    num_context_tokens: int = 0
    turns: int = 0
    calls: tuple[ToolCall, ...] = ()
    answered: bool = False  # the last turn had no calls and waits for the environment's step
    state: bytes | None = None  # the environment's state after the last record, if any
    lease: tuple[str, str] | None = None  # worker and name of the leased session
    # Tokens of the current turn if it was parked before its end; `turns` does not count that turn.
    unfinished: list[NDArray[np.int32]] = field(default_factory=list)
    request: RequestRecord | None = None  # the agent's unanswered request
    parents: list[int] = field(default_factory=list)  # per request, the turn that it continues; -1: none
    # Per turn, its tokens since the start of its conversation.
    paths: list[list[NDArray[np.int32]]] = field(default_factory=list)

    @property
    def versions(self) -> set[int]:
        made = (record.weight_versions for record in self.records if isinstance(record, GenerationRecord))
        return {int(version) for each in made for version in np.unique(each)}

    @property
    def context_ids(self) -> NDArray[np.int32]:
        """All token ids so far (T,), int32."""
        return np.concatenate(self.context) if self.context else np.zeros(0, np.int32)

    def extend(self, token_ids: NDArray[np.int32]) -> None:
        self.context.append(token_ids)
        self.num_context_tokens += len(token_ids)


@dataclass(slots=True)
class TrajectoryState:
    """State after all applied records; ``held`` is the last one, packed, until it is journaled."""

    tid: TrajectoryId
    prompt: Prompt
    rules: TrajectoryRules
    attempt: Attempt = field(default_factory=Attempt)
    records: list[QuantumRecord] = field(default_factory=list)
    quanta: int = 0
    retried: list[FailureClass] = field(default_factory=list)
    end: EndReason | None = None
    failure: FailureClass = FailureClass.NONE
    detail: str = ""
    held: bytes | None = None

    @property
    def phase(self) -> Phase | None:
        """The next phase; None if the trajectory has ended."""
        now = self.attempt
        if self.end is not None:
            return None
        acts = now.request is None if self.rules.agent else now.calls or now.answered
        return Phase.TOOL if acts else Phase.ROLLOUT

    def apply(self, record: QuantumRecord) -> None:
        now = self.attempt
        self.records.append(record)
        now.records.append(record)
        self.quanta += 1
        if isinstance(record, GenerationRecord):
            self._generated(record)
        elif isinstance(record, ActionRecord):
            self._acted(record)
        elif isinstance(record, RequestRecord):
            now.parents.append(record.parent)
            now.context = [*(now.paths[record.parent] if record.parent >= 0 else []), record.observation_ids]
            now.num_context_tokens = sum(map(len, now.context))
            now.request = record
        elif isinstance(record, AgentEndRecord):
            self._finish(record.end, record.failure, record.detail)
        elif isinstance(record, RestartRecord):
            self.attempt = Attempt(now.number + 1)
        elif len(self.retried) >= self.rules.resample:
            self._finish(EndReason.FAILURE, record.failure, record.detail)
        else:
            self.retried.append(record.failure)
            if not record.failure.keeps_records:
                self.attempt = Attempt(now.number + 1)

    def _generated(self, record: GenerationRecord) -> None:
        now = self.attempt
        if record.state is not None:
            now.state = record.state
        if record.prompt_ids is not None:
            now.extend(record.prompt_ids)
        now.extend(record.token_ids)
        if record.is_unfinished:
            now.unfinished.append(record.token_ids)
            return
        now.unfinished = []
        now.turns += 1
        if record.unstorable is not None:
            self._finish(EndReason.FAILURE, FailureClass.POLICY, record.unstorable)
        elif self.rules.agent:
            now.paths.append(list(now.context))
            now.request = None
        elif record.stop_reason is StopReason.LENGTH and not self.rules.ignore_eos:
            self._finish(EndReason.LENGTH, FailureClass.POLICY, f"turn {now.turns - 1} was cut at its token limit")
        elif not record.calls and self.rules.steps:
            now.answered = True
        elif not record.calls:
            self._finish(EndReason.ANSWERED, FailureClass.NONE, "")
        elif now.turns >= self.rules.max_turns:
            self._finish(EndReason.MAX_TURNS, FailureClass.POLICY, f"{now.turns} turns and still calling tools")
        else:
            now.calls = record.calls

    def _acted(self, record: ActionRecord) -> None:
        now = self.attempt
        if record.state is not None:
            now.state = record.state
        if record.lease is not None:
            now.lease = record.lease
        now.extend(record.observation_ids)
        now.calls, answered, now.answered = (), now.answered, False
        if record.ends:
            self._finish(EndReason.ANSWERED, FailureClass.NONE, "")
        elif answered and now.turns >= self.rules.max_turns:
            self._finish(EndReason.MAX_TURNS, FailureClass.POLICY, f"{now.turns} turns and not at the end")
        elif now.num_context_tokens >= self.rules.max_context_tokens:
            self._finish(EndReason.LENGTH, FailureClass.POLICY, CONTEXT_FULL)

    def _finish(self, end: EndReason, failure: FailureClass, detail: str) -> None:
        self.end, self.failure, self.detail = end, failure, detail
        self.attempt.calls, self.attempt.answered = (), False

    # ---------------------------------------------------------------- once it has ended

    def episode(self, decode: Callable[[bytes | None], Any] = lambda _: None) -> Episode:
        """The trajectory for the grader; ``decode`` decodes the environment's state."""
        turns: list[Turn] = []
        for record in self.attempt.records:
            if isinstance(record, GenerationRecord):
                ids = tuple(record.token_ids.tolist())
                if record.turn < len(turns):  # a further part of the turn
                    ids = turns.pop().token_ids + ids
                turns.append(Turn(record.text, record.calls, num_tokens=len(ids), token_ids=ids))
            elif isinstance(record, ActionRecord | RequestRecord):
                at = record.parent if isinstance(record, RequestRecord) else len(turns) - 1
                if at >= 0 and record.returns:
                    turns[at] = replace(turns[at], returns=record.returns)
        last = self.records[-1] if self.records else None
        result, reward = None, None
        if isinstance(last, AgentEndRecord):
            result, reward = json.loads(last.result) if last.result else None, last.reward
        state, end = decode(self.attempt.state), self.end or EndReason.FAILURE
        return Episode(str(self.tid), self.prompt, tuple(turns), end, state, result, reward)

    def trajectory(self, epoch: int) -> Trajectory:
        """The ungraded trajectory for the store, with all tokens and turns."""
        parts, places = self._parts()

        def column(name: str, fill: int, dtype: type[np.generic]) -> NDArray[Any]:
            return _joined([np.full(len(ids), fill) if r is None else getattr(r, name) for ids, r in parts], dtype)

        return Trajectory(
            trajectory_id=self.tid,
            prompt=self.prompt,
            token_ids=_joined([ids for ids, _ in parts], np.int32),
            is_action=_joined([np.full(len(ids), record is not None) for ids, record in parts], np.bool_),
            behaviour_logprob=column("logprobs", 0, np.float32),
            weight_version=column("weight_versions", -1, np.int32),
            kv_version=column("kv_versions", -1, np.int32),
            turns=self._turn_rows(places),
            end_reason=self.end or EndReason.FAILURE,
            failure=self.failure,
            failure_detail=self.detail,
            epoch=epoch,
            retried=",".join(self.retried),
            routes=self._routes(sum(len(ids) for ids, _ in parts)),
            drawn=_drawn([record for _, record in parts if record is not None]),
        )

    def _parts(self) -> tuple[list[Part], list[tuple[int, int]]]:
        """Token parts in order; per turn, start of its training sequence and tokens before it."""
        if self.rules.agent:
            return AgentTurns.of(self.attempt.records).parts()
        parts: list[Part] = []
        places: list[tuple[int, int]] = []
        total = 0
        for record in self.attempt.records:
            before = getattr(record, "prompt_ids", getattr(record, "observation_ids", None))
            if before is not None:
                parts.append((before, None))
                total += len(before)
            if isinstance(record, GenerationRecord):
                if record.turn == len(places):
                    places.append((0, total))
                parts.append((record.token_ids, record))
                total += len(record.token_ids)
        return parts, places

    def _routes(self, num_tokens: int) -> NDArray[np.int16] | None:
        """Expert ids per token (T, layers, experts) from the newest record with them, or None."""
        found: NDArray[np.int16] | None = None
        for record in self.attempt.records:
            if isinstance(record, GenerationRecord) and (routes := record.routes) is not None:
                if found is None:
                    found = np.full((num_tokens, *routes.shape[1:]), -1, np.int16)
                found[record.routes_from : record.routes_from + len(routes)] = routes
        return found

    def _turn_rows(self, places: list[tuple[int, int]]) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for record in self.attempt.records:
            if isinstance(record, GenerationRecord):
                if record.turn == len(rows):
                    start, before = places[record.turn]
                    rows.append(
                        {
                            "turn": record.turn, "prompt_tokens": before, "cached_tokens": record.cached_tokens,
                            "sequence_start": start, "status": NO_TOOL, "generated_tokens": 0, "observation_tokens": 0,
                            "generate_s": 0.0, "queued_s": 0.0, "tool_s": 0.0, "payload_chars": 0,
                        }
                    )  # fmt: skip
                row = rows[record.turn]
                row |= {
                    "tool": record.calls[0].name if record.calls else "",
                    "num_calls": len(record.calls),
                    "stop_reason": str(record.stop_reason),
                    "worker": record.worker,
                    "text_chars": len(record.text),
                }
                row["generated_tokens"] += len(record.token_ids)
                row["generate_s"] += record.busy_s
                row["queued_s"] += record.queued_s
            elif isinstance(record, ActionRecord | RequestRecord):
                at = record.parent if isinstance(record, RequestRecord) else len(rows) - 1
                if at >= 0:
                    tool, status = returned([record])
                    rows[at] |= {
                        "tool": tool,
                        "status": str(status),
                        "observation_tokens": len(record.observation_ids),
                        "tool_s": max((each.latency_s for each in record.returns), default=0.0),
                        "payload_chars": min(sum(each.payload_chars for each in record.returns), MOST_CHARS),
                    }
        return rows


@dataclass(slots=True)
class AgentTurns:
    """Answered requests of one attempt, by turn, with the record or records of each answer."""

    requests: list[RequestRecord] = field(default_factory=list)
    generated: list[list[GenerationRecord]] = field(default_factory=list)

    @classmethod
    def of(cls, records: Iterable[QuantumRecord]) -> AgentTurns:
        """The answered turns in the records of one attempt."""
        turns = cls()
        for record in records:
            if isinstance(record, RequestRecord):
                turns.requests.append(record)
                turns.generated.append([])
            elif isinstance(record, GenerationRecord):
                turns.generated[-1].append(record)
        if turns.generated and not turns.generated[-1]:
            turns.requests.pop()
            turns.generated.pop()
        return turns

    def parts(self) -> tuple[list[Part], list[tuple[int, int]]]:
        """As `TrajectoryState._parts`, for all of the attempt's sequences, concatenated."""
        parts: list[Part] = []
        places = [(0, 0)] * len(self.requests)
        total = 0
        for path in paths([request.parent for request in self.requests]):
            start = total
            for step in path:
                asked = self.requests[step.turn].observation_ids
                parts.append((asked, None))
                total += len(asked)
                if step.trained:
                    places[step.turn] = (start, total - start)
                for record in self.generated[step.turn]:
                    parts.append((record.token_ids, record if step.trained else None))
                    total += len(record.token_ids)
        return parts, places


def _drawn(generations: Sequence[GenerationRecord]) -> Drawn | None:
    kept = [record.drawn for record in generations if record.drawn is not None]
    if not kept or len(kept) < len(generations):
        return None
    return Drawn(*(np.concatenate(each) for each in zip(*kept, strict=True)))


def _joined(parts: list[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate(parts, dtype=dtype, casting="unsafe") if parts else np.zeros(0, dtype)
