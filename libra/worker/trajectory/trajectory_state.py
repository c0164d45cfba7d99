"""A trajectory's state as a pure function of its records: its turns so far, its next phase, whether it
has ended.

Invariants
----------
1. ``TrajectoryState`` after ``apply(records 0..n)`` is the same on every worker: it has no other
   input.
2. Token ids are those that the engine sampled or the chat format appended, concatenated; never
   re-tokenised.
3. Exactly one of these holds: it needs a generation, it needs an action, it has ended.
4. A failure ends it only after ``resample`` others. Until then, a failure that the tokens cannot
   cause is followed by the same turn with the same random numbers, so that the sample does not
   depend on the failure. Any other failure begins a fresh attempt from the prompt, in the same
   journal.
5. A restart also begins a fresh attempt; it is not a failure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
from libra.worker.trajectory.agent_sequences import AgentTurns

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
    """Record of a generation; ``prompt_ids`` and the first ``state`` go into the first one of an attempt
    only."""
    return GenerationRecord(
        turn=turn,
        prompt_ids=prompt_ids,
        token_ids=output.token_ids,
        logprobs=output.logprobs,
        weight_versions=output.weight_versions,
        kv_versions=output.kv_versions,
        stop_reason=output.stop_reason,
        cached_tokens=output.cached_tokens,
        queued_s=output.queued_s,
        busy_s=output.busy_s,
        text=text,
        calls=tuple(calls),
        drawn=None if output.drawn is None else list(output.drawn),
        state=state,
        routes=output.routes,
        routes_from=output.routes_from,
    )


def end_record(turn: int, state: bytes | None) -> ActionRecord:
    """Record of an action in which the environment's ``step`` ended the trajectory."""
    return ActionRecord(turn=turn, observation_ids=np.zeros(0, np.int32), state=state, ends=True)


def agent_end_record(
    turn: int, end: EndReason, failure: FailureClass, detail: str, result: Any = None, reward: float | None = None
) -> AgentEndRecord:
    """Record of an agent's end, with what it returned and the reward that it gave itself."""
    kept = storable(json.dumps(result)) if result is not None else ""
    cut = storable(detail[:MAX_ERROR_CHARS])
    return AgentEndRecord(turn=turn, end=end, failure=failure, detail=cut, result=kept, reward=reward)


def failure_record(failure: FailureClass, detail: str) -> FailureRecord:
    """Record that ends an attempt without an answer."""
    return FailureRecord(failure=failure, detail=storable(detail[:MAX_ERROR_CHARS]))


def returned(records: Iterable[QuantumRecord]) -> tuple[str, ToolOutcome]:
    """First tool, and the outcome, of the calls that returned in these records of one turn; ("",
    `NO_TOOL`) if none did."""
    found = [r for record in records if isinstance(record, ActionRecord | RequestRecord) for r in record.returns]
    return (found[0].tool if found else ""), turn_outcome(r.status for r in found)


@dataclass(frozen=True, slots=True)
class TrajectoryRules:
    """The rules of a run for its trajectories.

    Attributes
    ----------
    max_turns, max_context_tokens : int
        A trajectory ends when it reaches them.
    ignore_eos : bool
        A turn cut at its token limit does not end the trajectory (benchmarks with turns of a fixed
        length).
    resample : int
        Number of failures not caused by the policy that a trajectory survives.
    steps : bool
        The environment answers a turn without calls, and may end the trajectory.
    agent : bool
        An agent asks for every generation, and ends the trajectory.
    """

    max_turns: int
    max_context_tokens: int
    ignore_eos: bool = False
    resample: int = 0
    steps: bool = False
    agent: bool = False

    @classmethod
    def of(cls, config: RunConfig, environment: Environment) -> TrajectoryRules:
        """The rules of a run."""
        rollout, resample = config.rollout, config.trainer.resample
        steps, agent = has_steps(environment), config.agent.given
        return cls(rollout.max_turns, rollout.max_context_tokens, rollout.ignore_eos, resample, steps, agent)


@dataclass(slots=True)
class TrajectoryState:
    """The state after the records so far.

    Attributes
    ----------
    state : bytes or None
        The environment's state of it after the last record; None if it has none.
    lease : (str, str) or None
        Worker and name of its lease of a session; None if it has none.
    unfinished : list of int32 arrays
        Tokens of the parts of its present turn, if that parked before its end; `turns` does not count
        it yet.
    answered : bool
        Its last turn had no calls, and waits for the environment's answer.
    parents : list of int
        The turns that an agent's requests continue, in order; -1 for none.
    request : RequestRecord or None
        The agent's request that waits for its answer.
    held : bytes or None
        The last record, packed, if it is applied and will be appended together with the next.
    """

    tid: TrajectoryId
    prompt: Prompt
    rules: TrajectoryRules
    quanta: int = 0
    end: EndReason | None = None
    failure: FailureClass = FailureClass.NONE
    detail: str = ""
    records: list[QuantumRecord] = field(default_factory=list)
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
    request: RequestRecord | None = None
    paths: list[list[NDArray[np.int32]]] = field(default_factory=list)

    @property
    def phase(self) -> Phase | None:
        """Its next phase; None if it has ended."""
        if self.end is not None:
            return None
        if self.rules.agent:
            return Phase.TOOL if self.request is None else Phase.ROLLOUT
        return Phase.TOOL if self.calls or self.answered else Phase.ROLLOUT

    @property
    def draw_records(self) -> list[QuantumRecord]:
        """Records of this draw."""
        return self.records[self.first :]

    @property
    def versions(self) -> set[int]:
        """Versions of the tokens of this draw."""
        made = (record.weight_versions for record in self.draw_records if isinstance(record, GenerationRecord))
        return {int(version) for each in made for version in np.unique(each)}

    @property
    def context_ids(self) -> NDArray[np.int32]:
        """All tokens so far (T,)."""
        return np.concatenate(self.context) if self.context else np.zeros(0, np.int32)

    def apply(self, record: QuantumRecord) -> None:
        """Apply the next record."""
        self.records.append(record)
        self.quanta += 1
        if isinstance(record, GenerationRecord):
            self._generated(record)
        elif isinstance(record, ActionRecord):
            self._acted(record)
        elif isinstance(record, RequestRecord):
            before = self.paths[record.parent] if record.parent >= 0 else []
            self.parents.append(record.parent)
            self.context = [*before, record.observation_ids]
            self.num_context_tokens = sum(map(len, self.context))
            self.request = record
        elif isinstance(record, AgentEndRecord):
            self._finish(record.end, record.failure, record.detail)
        elif isinstance(record, RestartRecord):
            self._begin_again()
        elif len(self.retried) >= self.rules.resample:
            self._finish(EndReason.FAILURE, record.failure, record.detail)
        else:
            self.retried.append(record.failure)
            if not record.failure.keeps_records:
                self._begin_again()

    def _generated(self, record: GenerationRecord) -> None:
        if record.state is not None:
            self.state = record.state
        if record.prompt_ids is not None:
            self._extend(record.prompt_ids)
        self._extend(record.token_ids)
        if record.is_unfinished:
            self.unfinished.append(record.token_ids)
            return
        self.unfinished = []
        self.turns += 1
        if record.unstorable is not None:
            self._finish(EndReason.FAILURE, FailureClass.POLICY, record.unstorable)
        elif self.rules.agent:
            self.paths.append(list(self.context))
            self.request = None
        elif record.stop_reason is StopReason.LENGTH and not self.rules.ignore_eos:
            self._finish(EndReason.LENGTH, FailureClass.POLICY, f"turn {self.turns - 1} was cut at its token limit")
        elif not record.calls and self.rules.steps:
            self.answered = True
        elif not record.calls:
            self._finish(EndReason.ANSWERED, FailureClass.NONE, "")
        elif self.turns >= self.rules.max_turns:
            self._finish(EndReason.MAX_TURNS, FailureClass.POLICY, f"{self.turns} turns and still calling tools")
        else:
            self.calls = record.calls

    def _acted(self, record: ActionRecord) -> None:
        if record.state is not None:
            self.state = record.state
        if record.lease is not None:
            self.lease = record.lease
        self._extend(record.observation_ids)
        self.calls, answered, self.answered = (), self.answered, False
        if record.ends:
            self._finish(EndReason.ANSWERED, FailureClass.NONE, "")
        elif answered and self.turns >= self.rules.max_turns:
            self._finish(EndReason.MAX_TURNS, FailureClass.POLICY, f"{self.turns} turns and not at the end")
        elif self.num_context_tokens >= self.rules.max_context_tokens:
            self._finish(EndReason.LENGTH, FailureClass.POLICY, CONTEXT_FULL)

    def _begin_again(self) -> None:
        self.draw += 1
        self.first = len(self.records)
        self.context, self.num_context_tokens, self.turns, self.calls = [], 0, 0, ()
        self.answered, self.state, self.lease, self.unfinished = False, None, None, []
        self.parents, self.request, self.paths = [], None, []

    def _extend(self, token_ids: NDArray[np.int32]) -> None:
        self.context.append(token_ids)
        self.num_context_tokens += len(token_ids)

    def _finish(self, end: EndReason, failure: FailureClass, detail: str) -> None:
        self.end, self.failure, self.detail, self.calls, self.answered = end, failure, detail, (), False

    # ---------------------------------------------------------------- once it has ended

    def episode(self, decode: Callable[[bytes | None], Any] = lambda _: None) -> Episode:
        """The trajectory as the grader sees it; ``decode`` reads the environment's state of it."""
        turns: list[Turn] = []
        for record in self.draw_records:
            if isinstance(record, GenerationRecord):
                ids = tuple(record.token_ids.tolist())
                if record.turn < len(turns):  # a further part of it
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
        end = self.end or EndReason.FAILURE
        return Episode(str(self.tid), self.prompt, tuple(turns), end, decode(self.state), result, reward)

    def trajectory(self, epoch: int) -> Trajectory:
        """All tokens and turns as the store keeps them, not graded yet."""
        parts: list[
            tuple[NDArray[np.int32], GenerationRecord | None]
        ] = []  # tokens, and the record that generated them
        if self.rules.agent:
            parts, _ = AgentTurns.of(self.draw_records).parts()
        for record in () if self.rules.agent else self.draw_records:
            if isinstance(record, GenerationRecord):
                if record.prompt_ids is not None:
                    parts.append((record.prompt_ids, None))
                parts.append((record.token_ids, record))
            elif isinstance(record, ActionRecord):
                parts.append((record.observation_ids, None))

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
        for record in self.draw_records:
            if isinstance(record, GenerationRecord) and (routes := record.routes) is not None:
                if found is None:
                    found = np.full((num_tokens, *routes.shape[1:]), -1, np.int16)
                found[record.routes_from : record.routes_from + len(routes)] = routes
        return found

    def _turn_rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        context = 0
        places = AgentTurns.of(self.draw_records).parts()[1] if self.rules.agent else []
        for record in self.draw_records:
            if isinstance(record, GenerationRecord):
                start, context = places[record.turn] if self.rules.agent else (0, context)
                context += 0 if record.prompt_ids is None else len(record.prompt_ids)
                parts = rows.pop() if record.turn < len(rows) else {}
                rows.append(
                    {
                        "turn": record.turn,
                        "tool": record.calls[0].name if record.calls else "",
                        "status": NO_TOOL,
                        "num_calls": len(record.calls),
                        "prompt_tokens": parts.get("prompt_tokens", context),
                        "generated_tokens": parts.get("generated_tokens", 0) + len(record.token_ids),
                        "observation_tokens": 0,
                        "stop_reason": str(record.stop_reason),
                        "cached_tokens": parts.get("cached_tokens", record.cached_tokens),
                        "generate_s": parts.get("generate_s", 0.0) + record.busy_s,
                        "queued_s": parts.get("queued_s", 0.0) + record.queued_s,
                        "tool_s": 0.0,
                        "worker": record.worker,
                        "text_chars": len(record.text),
                        "payload_chars": 0,
                        "sequence_start": start,
                    }
                )
                context += len(record.token_ids)
            elif isinstance(record, ActionRecord | RequestRecord):
                at = record.parent if isinstance(record, RequestRecord) else len(rows) - 1
                if at < 0:
                    continue
                tool, status = returned([record])
                rows[at] |= {
                    "tool": tool,
                    "status": str(status),
                    "observation_tokens": len(record.observation_ids),
                    "tool_s": max((each.latency_s for each in record.returns), default=0.0),
                    "payload_chars": min(sum(each.payload_chars for each in record.returns), MOST_CHARS),
                }
                context += len(record.observation_ids)
        return rows


def _drawn(generations: Sequence[GenerationRecord]) -> Drawn | None:
    """The further draws of all generations, a row for each generated token; None if one has none."""
    kept = [record.drawn for record in generations if record.drawn is not None]
    if not kept or len(kept) < len(generations):
        return None
    return Drawn(*(np.concatenate(each) for each in zip(*kept, strict=True)))


def _joined(parts: list[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate(parts, dtype=dtype, casting="unsafe") if parts else np.zeros(0, dtype)
