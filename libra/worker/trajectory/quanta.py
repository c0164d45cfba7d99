"""Runs the quanta of trajectories on a worker: generates or acts, records, and reports.

Invariants
----------
1. An engine loads the newest published version before each generation, and never generates for
   iteration ``k`` with weights older than version ``k - eta``.
2. A record is journaled before it is reported, so the loss of a worker costs at most the quantum in
   flight: one generation with its inline actions. If a quantum fails after its in-memory state got
   ahead of the journal, that state is dropped.
3. A worker runs at most one quantum of a trajectory at a time, and only with all earlier records.
4. Bad model or tool output can fail only its own trajectory. The output is made storable before it
   is recorded; output that still cannot be stored becomes a failure record, which a resume finds.
5. No worker runs a quantum of a trajectory whose group is recorded; the trajectory's journal is
   removed once the store has the group.
6. With ``staleness.versions=one`` all tokens of a trajectory have the same version; a trajectory
   that would mix versions starts again from its prompt.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from libra.config.service_devices import extra_draws
from libra.envs import StateCopy, begin_state, run_step
from libra.envs.action_process import ActionProcesses
from libra.envs.environment import Scripted
from libra.errors import ActionRevoked, EngineAsleep, EngineError, EnvironmentFault, FencedOff, ToolFault, Unstorable
from libra.facts import FailureClassified, GivenBack, QuantumFinished, TrajectoryFoundEnded
from libra.named_parts import raised_at
from libra.policy import keeps_version
from libra.store.quantum_records import (
    ActionRecord,
    FailureRecord,
    GenerationRecord,
    QuantumRecord,
    RequestRecord,
    RestartRecord,
)
from libra.store.run_records import group_path, read_group
from libra.types import (
    FailureClass,
    Phase,
    Prompt,
    StopReason,
    ToolReturn,
    ToolStatus,
    TrajectoryId,
    TurnRequest,
)
from libra.untrusted import MAX_ERROR_CHARS, error_text, storable, storable_calls
from libra.worker.context import WorkerContext
from libra.worker.dask_worker import priority_here, still_wanted
from libra.worker.engine.worker_engine import WorkerEngine
from libra.worker.trajectory.graded_members import FAULTS, failure_of
from libra.worker.trajectory.session_leases import SessionLeases
from libra.worker.trajectory.trajectory_state import (
    Attempt,
    TrajectoryRules,
    TrajectoryState,
    end_record,
    failure_record,
    generation_record,
    returned,
)
from libra.worker.trajectory.turn_calls import StoppableActions, TurnCalls, agent_calls, cut_at_stop, recorded

if TYPE_CHECKING:
    from libra.rollout import ChatFormat
    from libra.types import ToolCall
    from libra.worker.trajectory.agent_quanta import Agents

STEP = "step"
"""Name of the environment's own answer among the returns of tools."""
KEPT_PROMPTS = 1024
"""Tokenised prompts kept in memory per worker."""
KEPT_STATES = 4096
"""States kept per worker; a missing one is read from the journal."""
KEPT_BYTES, RECORD_BYTES, TOKEN_BYTES = 64 << 20, 2048, 20
"""Memory for the records of ended trajectories, whose group may be built here; about so much per record and token."""
KILLED = "killed: it took more than"
"""In the detail of a failure: the action took more than its memory."""


class QuantumRunner:
    """Runs quanta of one run on one worker; ``engine`` is None if the worker does not generate.

    ``leaving``: no further generation may start. ``processes``: for tool calls with own resources.
    """

    def __init__(
        self,
        context: WorkerContext,
        engine: WorkerEngine | None,
        leaving: Callable[[], bool] = lambda: False,
        processes: ActionProcesses | None = None,
    ) -> None:
        self.context, self.engine, self._leaving = context, engine, leaving
        self.states: OrderedDict[TrajectoryId, TrajectoryState] = OrderedDict()
        self._ended: OrderedDict[TrajectoryId, int] = OrderedDict()  # bytes of ended trajectories in `states`
        self._ended_bytes = 0
        self.closing = False
        self.sessions = None if context.environment.session is None else SessionLeases(context)
        self.agents: Agents | None = None
        """Only on a worker that runs them."""
        self.calls = TurnCalls(context, self.sessions, processes)
        self.stoppable = StoppableActions()
        self._rules = TrajectoryRules.of(context.spec.config, context.environment)
        self._keeps_version = keeps_version(context.spec.config)
        self._prompts: OrderedDict[str, NDArray[np.int32]] = OrderedDict()

    @cached_property
    def chat(self) -> ChatFormat:
        from libra.rollout import load_chat_format

        environment, loader = self.context.environment, self.context.spec.config.model.loader
        return load_chat_format(
            self.context.model_dir, environment.tool_schemas, tool_format=environment.tool_format, loader=loader
        )

    def close(self) -> None:
        self.closing = True

    # ---------------------------------------------------------------- states

    def state(self, tid: TrajectoryId, prompt: Prompt, quantum: int = 0) -> TrajectoryState:
        """The trajectory's state after its first ``quantum`` records (all records if 0)."""
        state = self.states.get(tid)
        if state is None:
            state = self.states[tid] = TrajectoryState(tid, prompt, self._rules)
            while len(self.states) > KEPT_STATES:
                self.states.popitem(last=False)
        if not quantum or state.quanta < quantum:
            for record in self.context.journal.read(str(tid), start=state.quanta, until=quantum):
                state.apply(record)
        return state

    def drop(self, tid: TrajectoryId) -> None:
        """Forget a trajectory's in-memory state; the journal keeps its records."""
        self.states.pop(tid, None)
        self._ended_bytes -= self._ended.pop(tid, 0)

    def _release(self, state: TrajectoryState) -> None:
        self.drop(state.tid)
        self.states[state.tid] = state
        num_bytes = RECORD_BYTES * len(state.records) + TOKEN_BYTES * state.attempt.num_context_tokens
        self._ended[state.tid] = num_bytes
        self._ended_bytes += num_bytes
        while self._ended_bytes > KEPT_BYTES:
            self.drop(next(iter(self._ended)))

    def _end_with_group(self, state: TrajectoryState) -> None:
        tid = state.tid
        path = group_path(self.context.spec.groups_dir, tid.iteration, tid.group, tid.split)
        if os.access(path, os.F_OK):
            (member,) = (member for member in read_group(path) if member.trajectory_id == tid)
            state.end, state.failure, state.detail = member.end_reason, member.failure, member.failure_detail
            state.quanta = max(state.quanta, len(member.turns))

    # ---------------------------------------------------------------- one quantum

    async def run(self, key: str, tid: TrajectoryId, prompt: Prompt, quantum: int = 0) -> TrajectoryState:
        """Run, journal and report a trajectory's next quantum; returns the state afterwards.

        ``quantum`` is the number of earlier records if the scheduler knows it; the group then has
        no record yet. If 0, journal and store are searched. Further generations follow directly
        while no better trajectory waits for the slot.
        """
        state = self.state(tid, prompt, quantum)
        if state.phase is not None and not quantum:
            self._end_with_group(state)
        if state.phase is None:
            self._end_leases(state, None)
            self._release(state)
            self.context.report(TrajectoryFoundEnded(key, state.quanta, self.context.name, str(state.end)))
            return state
        stranded = state.phase is Phase.TOOL and state.rules.agent and self.agents is None
        if stranded or self.calls.lacks_lease(key, state) or (state.phase is Phase.ROLLOUT and self.engine is None):
            # A worker died between record and report, or an action of a resumed run has no lease: report the
            # trajectory's state, so that the scheduler sends another task.
            self._report(key, state, state.quanta, time.time(), state.phase, goes_on=False)
            return state
        if self.engine is not None:
            self.engine.began(key)
        goes_on = True
        while goes_on:
            started_s, first = time.time(), state.quanta
            phase, lease = state.phase, state.attempt.lease
            try:
                await self._quantum(key, state, started_s)
            except BaseException:
                self.drop(tid)  # it may be ahead of the journal
                raise
            self._end_leases(state, lease)
            goes_on = (
                phase is Phase.ROLLOUT
                and state.phase is Phase.ROLLOUT
                and not isinstance(state.records[-1], FailureRecord)  # another attempt may succeed on another worker
                and (self.engine is None or self.engine.keeps_slot(key))
                and not self._leaving()
                and still_wanted(self.context.worker, key)
            )
            self._report(key, state, first, started_s, phase, goes_on=goes_on)
        if state.phase is None:
            self._release(state)
        return state

    def _end_leases(self, state: TrajectoryState, lease: tuple[str, str] | None) -> None:
        if self.sessions is not None:
            kept = None if state.phase is None else state.attempt.lease
            for each in {lease, state.attempt.lease} - {None, kept}:
                assert each is not None
                self.sessions.release(each)

    async def _quantum(self, key: str, state: TrajectoryState, started_s: float) -> None:
        try:
            if state.phase is Phase.ROLLOUT:
                await self._generate(key, state)
                if state.held is not None:
                    await self._act(state)
                    if state.end is not None:
                        self._forget(state)
                return
            self.context.epoch.check()  # a refused record would not undo the action's outside effects
            action = self._act(state, self.calls.cores_of(key))
            await (self.stoppable.run(key, state.quanta, action) if self.calls.revocable(state) else action)
        except (EngineAsleep, ActionRevoked) as error:
            self.context.report(GivenBack(key, revoked=isinstance(error, ActionRevoked)))
            raise
        except (*FAULTS, Unstorable) as error:
            failure = FailureClass.TOOL if isinstance(error, Unstorable) else failure_of(error)
            self._commit(state, failure_record(failure, str(error)), started_s)
            self._forget(state)

    async def _generate(self, key: str, state: TrajectoryState) -> None:
        assert self.engine is not None, f"{state.tid}: a generation was sent to a worker without an engine"
        serving, context, now = self.engine.serving, self.context, state.attempt
        rollout, environment = context.spec.config.rollout, context.environment
        await serving.pull()
        started_s = time.time()
        if self._keeps_version and self._ends_version(state, {serving.engine.version}, started_s):
            return
        begun, prompt_ids, context_ids = None, None, now.context_ids
        if not now.context:
            begun = await begin_state(environment, state.prompt, str(state.tid))
            prompt_ids = context_ids = self._prompt_ids(state.prompt)
        temperature = self._temperature(state.tid)
        script = environment.scripted(state.tid, state.prompt, now.turns) if isinstance(environment, Scripted) else None
        done = sum(map(len, now.unfinished))
        wanted = rollout.max_new_tokens if script is None else script.new_tokens
        if now.request is not None and now.request.max_tokens is not None:
            wanted = min(wanted, now.request.max_tokens)
        left = max(1, min(wanted - done, rollout.max_context_tokens - len(context_ids)))
        part = min(left, rollout.chunk_tokens or left)
        output = await self.engine.generate(
            key,
            TurnRequest(
                trajectory_id=str(state.tid),
                turn=now.turns,
                context_ids=context_ids,
                max_new_tokens=part,
                temperature=temperature,
                top_p=rollout.top_p,
                stop_ids=() if rollout.ignore_eos else self.chat.stop_ids,
                seed=context.spec.turn_seed(state.tid, now.turns, now.number),
                priority=priority_here(context.worker, key),
                group=f"{state.tid.split}-{state.tid.iteration}-{state.tid.group}",
                generated=done,
                draws=extra_draws(context.spec.config) if state.tid.split == "train" and temperature > 0 else 0,
            ),
        )
        self.engine.turn_ended()
        if self._keeps_version and self._ends_version(state, set(output.weight_versions.tolist()), started_s):
            return
        stopped = None
        if now.request is not None:
            output, stopped = cut_at_stop(output, now.unfinished, now.request.stop, self.chat.decode)
        if stopped is None and output.stop_reason is StopReason.LENGTH and part < left:
            output = replace(output, stop_reason=StopReason.PARKED)
            record = generation_record(now.turns, prompt_ids, output, "", (), begun)
        else:
            text = storable(self.chat.decode(np.concatenate([*now.unfinished, output.token_ids])))
            calls = self._parse(text) if script is None else script.calls
            record = generation_record(now.turns, prompt_ids, output, text, calls, begun)
            record.stopped = stopped
        self._hold(state, record, started_s)
        state.apply(record)
        if not ((now.calls or now.answered) and self._inline(now)):  # else both are appended together
            self._append(state)
        if state.phase is None:
            self._forget(state)

    def _hold(self, state: TrajectoryState, record: GenerationRecord, started_s: float) -> None:
        try:
            state.held = self._packed(state, record, started_s)
        except Unstorable as error:
            record.text, record.calls, record.unstorable = "", (), storable(str(error)[:MAX_ERROR_CHARS])
            try:
                state.held = self._packed(state, record, started_s)
            except Unstorable as second:
                raise EngineError(f"{state.tid}: the engine's output cannot be stored: {second}") from second

    def _temperature(self, tid: TrajectoryId) -> float:
        config = self.context.spec.config
        if tid.split == "eval" and config.evaluation.temperature is not None:
            return config.evaluation.temperature
        if tid.split == "train" and tid.sample == 0 and config.trainer.advantage == "remax":
            return 0.0  # its group's baseline
        return config.rollout.temperature

    def _ends_version(self, state: TrajectoryState, versions: set[int], started_s: float) -> bool:
        if len(had := state.attempt.versions | versions) < 2:
            return False
        self._commit(state, RestartRecord(began=min(had), serves=max(had)), started_s)
        self._forget(state)
        return True

    def _forget(self, state: TrajectoryState) -> None:
        if self.engine is not None:
            self.engine.serving.forget(str(state.tid))

    def _parse(self, text: str) -> tuple[ToolCall, ...]:
        environment = self.context.environment
        if self._rules.agent:
            return agent_calls(environment, text)
        try:
            return storable_calls(environment.parse(text))
        except Exception as error:  # the boundary to the user's environment
            raise EnvironmentFault(
                f"{environment.name}.parse raised {error_text(error)}{raised_at(error)}, for the text {text[:200]!r}"
            ) from error

    def _prompt_ids(self, prompt: Prompt) -> NDArray[np.int32]:
        ids = self._prompts.get(prompt.prompt_id)
        if ids is None:
            ids = self._prompts[prompt.prompt_id] = self.chat.prompt_ids(list(prompt.messages))
            if len(self._prompts) > KEPT_PROMPTS:
                self._prompts.popitem(last=False)
        return ids

    def _inline(self, now: Attempt) -> bool:
        environment = self.context.environment
        if now.answered:
            return environment.inline_steps
        inline = {tool.name for tool in environment.tools if tool.inline}
        return all(call.error is not None or call.name in inline for call in now.calls)

    async def _act(self, state: TrajectoryState, cores: int | None = None) -> None:
        started_s, now, environment = time.time(), state.attempt, self.context.environment
        turn = now.turns - 1
        if state.rules.agent:
            assert self.agents is not None, f"{state.tid}: an action was sent to a worker without agents"
            self._commit(state, await self.agents.act(state), started_s)
            return
        copy = StateCopy(environment, now.state, str(state.tid))
        last, lease, role = state.records[-1], now.lease, "tool"
        assert isinstance(last, GenerationRecord), f"{state.tid}: an action follows a generation"
        if now.answered:
            reply = await run_step(environment, last.text, copy, str(state.tid))
            if reply is None:
                self._commit(state, end_record(turn, copy.data), started_s)
                return
            returns, role = [ToolReturn(STEP, ToolStatus.OK, reply, time.time() - started_s, len(reply))], "user"
        else:
            returns, lease = await self.calls.returns(state, copy, cores)
        ended = bool(len(last.token_ids)) and self.chat.ends(int(last.token_ids[-1]), role)
        shown, observation = self._fitted(now, [r.content for r in returns], role, ended)
        kept = tuple(recorded(each, content) for each, content in zip(returns, shown, strict=True))
        record = ActionRecord(turn=turn, returns=kept, observation_ids=observation, state=copy.data, lease=lease)
        self._commit(state, record, started_s)

    def _fitted(self, now: Attempt, contents: list[str], role: str, ended: bool) -> tuple[list[str], NDArray[np.int32]]:
        from libra.rollout.chat_format import fitted  # here: it imports torch, as the chat format does

        rollout = self.context.spec.config.rollout
        left = rollout.max_context_tokens - now.num_context_tokens
        try:
            return fitted(self.chat, contents, left, rollout.max_new_tokens, ended=ended, role=role)
        except Exception as error:  # the boundary to the model's own template and tokenizer
            raise ToolFault(f"the chat template cannot show what the tools returned: {error_text(error)}") from error

    # ---------------------------------------------------------------- records and reports

    def _commit(self, state: TrajectoryState, record: QuantumRecord, started_s: float) -> None:
        self._append(state, self._packed(state, record, started_s))
        state.apply(record)

    def _packed(self, state: TrajectoryState, record: QuantumRecord, started_s: float) -> bytes:
        record.worker, record.epoch = self.context.name, self.context.spec.epoch
        record.start_s, record.stop_s = started_s, time.time()
        return self.context.journal.pack(str(state.tid), state.quanta, record)

    def _append(self, state: TrajectoryState, *packed: bytes) -> None:
        self.context.epoch.check()
        if self.closing:  # requests of a closed engine are not failures
            raise FencedOff(f"{state.tid}: worker {self.context.name} leaves the run, and writes no more records")
        held = () if state.held is None else (state.held,)
        self.context.journal.append(str(state.tid), state.quanta - len(held), *held, *packed)
        state.held = None

    def _report(
        self, key: str, state: TrajectoryState, first: int, started_s: float, phase: Phase, *, goes_on: bool
    ) -> None:
        new = state.records[first:]
        generated = [record for record in new if isinstance(record, GenerationRecord)]
        answers = [record for record in new if isinstance(record, ActionRecord | RequestRecord)]
        tool, status = returned(new)
        failed = next((record for record in new if isinstance(record, FailureRecord)), None)
        failure = failed.failure if failed else state.failure if new else FailureClass.NONE
        detail = failed.detail if failed else state.detail
        ran_s = max((each.latency_s for record in answers for each in record.returns), default=0.0)
        stop_s = time.time()
        latency_s = round(stop_s - started_s, 6)
        finished = QuantumFinished(
            key=key,
            phase=phase,
            tokens=sum(len(record.token_ids) for record in generated),
            tool=tool,
            status=str(status),
            latency_s=latency_s,
            payload_tokens=sum(len(record.observation_ids) for record in answers),
            tools_s=round(min(ran_s, latency_s), 6) if phase is Phase.ROLLOUT else 0.0,
            quantum=state.quanta - 1,
            worker=self.context.name,
            version=min((int(r.weight_versions.min()) for r in generated if len(r.token_ids)), default=-1),
            end=str(state.end) if state.end is not None else "",
            unfinished=bool(new and state.attempt.unfinished),
            next=str(state.phase) if state.phase is not None else "",
            goes_on=goes_on,
            context_tokens=state.attempt.num_context_tokens,
            stop_s=stop_s,
            calls=self.calls.with_resources(state),
            ran_s=ran_s,
            killed=failure is FailureClass.TOOL and KILLED in detail,
        )
        self.context.report(finished)
        if failure is not FailureClass.NONE:
            self.context.report(FailureClassified(key, str(failure), detail))
