"""Action quanta of agent trajectories: an agent gets an answer, works, and sends a request or ends.

The agent is a process on this worker, and sends requests to this worker's gateway. A request ends
the action quantum; a generation quantum, on any worker, produces the answer; the next action
quantum delivers the answer to the agent. The journal records all of these.

Invariants
----------
1. An agent that waits for the model holds no slot.
2. An agent that restarts after the loss of a worker receives the recorded answers while its
   requests are the recorded ones; sub-agents may send them in any order. If a request differs or
   the agent ends sooner, a fresh draw starts.
3. A worker runs at most ``agent.concurrency`` agents, and returns quanta beyond that.
4. A prompt that does not fit is refused, never truncated.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from libra.agents.agent_session import Ended, Pending, Session, as_float, by_size
from libra.agents.conversation import TOO_LONG, Asked, Conversation
from libra.agents.gateway import Gateway
from libra.agents.messages import Message, ModelRequest, Reply, digest, forms, offers_tools, reply
from libra.agents.processes import AgentProcesses
from libra.errors import EngineAsleep, RequestRefused, ToolFault, ToolTimeout
from libra.store.quantum_records import AgentEndRecord, GenerationRecord, QuantumRecord, RequestRecord, RestartRecord
from libra.store.run_records import group_path
from libra.types import EndReason, FailureClass, StopReason, ToolCall, ToolReturn, ToolStatus, TrajectoryId
from libra.untrusted import storable
from libra.worker.context import WorkerContext
from libra.worker.trajectory.trajectory_state import AgentTurns, Attempt, TrajectoryState, agent_end_record
from libra.worker.trajectory.turn_calls import agent_calls

if TYPE_CHECKING:
    from libra.rollout.chat_format import ChatFormat
    from libra.rollout.conversation_format import ConversationFormat

logger = logging.getLogger(__name__)
task_logger = logging.getLogger(__name__ + ".tasks")

SWEEP_S = 30.0
"""Seconds between sweeps for agents whose trajectory has ended without them."""
REPLAY_S = 5.0
"""Seconds that a restarted agent with another request has for the recorded ones: sub-agents change their order."""
NO_ROOM_S = 0.5
"""Seconds that a quantum waits for another agent's end before it is returned."""


@dataclass(slots=True, eq=False)
class _Live:
    number: int  # of the attempt
    token: str
    session: Session
    conversation: Conversation
    started_s: float
    process: int = -1
    pending: dict[int, Pending] = field(default_factory=dict)  # requests that were recorded, by turn
    taken: int = 0  # turns whose request the conversation has
    answered: int = 0  # turns whose answer the conversation has
    replay: dict[int, bytes] = field(default_factory=dict)  # turns that a restarted process has not requested yet
    early: deque[Pending] = field(default_factory=deque)  # requests that arrived before `replay` was complete
    replies: list[Reply] = field(default_factory=list)
    given_s: dict[int, float] = field(default_factory=dict)
    refused: tuple[EndReason, str] | None = None

    def refuse(self, end: EndReason, detail: str, param: str = "messages", code: str = TOO_LONG) -> RequestRefused:
        self.refused = end, detail
        return RequestRefused(detail, param, status=400, code=code)

    def give(self, pending: Pending, turn: int) -> None:
        self.session.answered(pending, self.replies[turn])
        self.given_s[turn] = time.monotonic()


class Agents:
    """The agents of one worker; ``chat`` returns the worker's chat format."""

    def __init__(self, context: WorkerContext, chat: Callable[[], ChatFormat]) -> None:
        self._context, self._chat, self._config = context, chat, context.spec.config
        agent = self._config.agent
        self.gateway = Gateway()
        self.processes = AgentProcesses(function=agent.function, command=agent.command, venv=agent.venv, env=agent.env)
        self._live: dict[TrajectoryId, _Live] = {}
        self._left = asyncio.Event()
        self._sweeping: asyncio.Task[None] | None = None
        self._format: ConversationFormat | None = None

    async def start(self) -> None:
        """Start the gateway and the program that runs agents.

        Raises EnvironmentFault if the agent cannot be loaded, ConfigError if a variable of
        ``agent.env`` is not set.
        """
        await self.gateway.start()
        await self.processes.prepare()
        self._sweeping = asyncio.create_task(self._sweep())
        run, gateway = self._context.spec.run, self.gateway
        logger.info("agents of run %s ask at http://%s:%d", run, gateway.host, gateway.port)

    async def close(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
        self._live.clear()
        await self.processes.close()
        await self.gateway.close()

    # ---------------------------------------------------------------- one quantum

    async def act(self, state: TrajectoryState) -> QuantumRecord:
        """Let the agent work until it sends a request or ends; returns the record of that event.

        Raises EngineAsleep if this worker already runs ``agent.concurrency`` agents, ToolTimeout if
        the agent took too long, ToolFault if it failed.
        """
        try:
            return await self._act(state)
        except EngineAsleep:
            raise
        except BaseException:
            self.drop(state.tid, "it failed")
            raise

    def drop(self, tid: TrajectoryId, why: str) -> None:
        """Kill the trajectory's agent, if it runs on this worker."""
        live = self._live.pop(tid, None)
        if live is not None:
            self.processes.stop(live.process)
            self.gateway.drop(live.token, why)
            self._left.set()

    async def _act(self, state: TrajectoryState) -> QuantumRecord:
        now, live = state.attempt, self._live.get(state.tid)
        if live is not None and (live.number != now.number or not live.answered <= now.turns <= live.answered + 1):
            self.drop(state.tid, "it began again")
            live = None
        if live is None:
            live = await self._begin(state)
        self._take_answers(live, state)
        began_again = False
        while True:
            event = await self._next(live, state)
            if event is None:
                return self._unlike(state, "asked something else than before")
            if isinstance(event, Ended) and event.lost and not began_again:
                logger.warning("%s: %s; its agent is started again", state.tid, event.error)
                self.drop(state.tid, "it began again")
                live, began_again = await self._begin(state), True
            elif isinstance(event, Ended):
                return self._ended(live, state, event)
            elif live.replay:
                asked = event.request.fingerprint
                turn = next((turn for turn, recorded in live.replay.items() if recorded == asked), None)
                if turn is not None:
                    del live.replay[turn]
                    live.give(event, turn)
                else:
                    live.early.append(event)
            else:
                try:
                    return await self._asked(live, state, event)
                except RequestRefused as refused:
                    task_logger.info("%s: request refused: %s", state.tid, refused)
                    event.refuse(refused)

    async def _next(self, live: _Live, state: TrajectoryState) -> Pending | Ended | None:
        """Return the agent's next event; None if the agent does not repeat a recorded request."""
        agent = self._config.agent
        while live.early and not live.replay:
            if (pending := live.early.popleft()).waiting > 0:
                return pending
        left_s = live.started_s + agent.timeout_s - time.monotonic()
        wait_s = min(left_s, agent.idle_s)
        replays = bool(live.early) and wait_s > REPLAY_S
        try:
            return await live.session.next(max(0.0, REPLAY_S if replays else wait_s))
        except TimeoutError:
            if replays:
                return None
            name = "idle_s" if agent.idle_s < left_s else "timeout_s"
            passed = f"agent.{name}={getattr(agent, name):g} passed"
            raise ToolTimeout(f"the agent of {state.tid} was killed: {passed}") from None

    async def _begin(self, state: TrajectoryState) -> _Live:
        concurrency, limit = self._config.agent.concurrency, self._config.rollout.max_context_tokens
        if len(self._live) >= concurrency:
            self._left.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._left.wait(), NO_ROOM_S)
            if len(self._live) >= concurrency:
                raise EngineAsleep(f"{state.tid}: agent.concurrency={concurrency} agents are here")
        if self._format is None:
            from libra.rollout.conversation_format import ConversationFormat  # imports torch, as the chat format does

            self._format = ConversationFormat(self._chat(), limit)
        now, prompt = state.attempt, state.prompt
        token, session = self.gateway.open(str(state.tid), limit)
        live = _Live(now.number, token, session, Conversation(self._format), time.monotonic())
        self._live[state.tid] = live
        self._take_answers(live, state)
        live.replay = {turn: asked.fingerprint for turn, asked in enumerate(AgentTurns.of(now.records).requests)}
        task = {
            "trajectory": str(state.tid), "prompt_id": prompt.prompt_id,
            "messages": [dict(message) for message in prompt.messages], "facts": dict(prompt.facts),
        }  # fmt: skip
        live.process = await self.processes.start(self.gateway.environ(token), task, session.end)
        return live

    def _take_answers(self, live: _Live, state: TrajectoryState) -> None:
        if live.answered == state.attempt.turns:
            return
        turns = AgentTurns.of(state.attempt.records)
        for turn in range(live.answered, state.attempt.turns):
            asked = turns.requests[turn]
            made = self._reply(state, turn, asked, turns.generated[turn])
            if live.taken == turn:  # the process is new here
                live.taken += 1
                tail = [Message.from_plain(plain) for plain in asked.messages]
                live.conversation.ask(-1 if asked.by_ids else asked.parent, tail, asked.tools)
            said = () if asked.by_ids else forms(made.message, made.stop)
            live.conversation.answer(turn, *said, last=int(made.token_ids[-1]) if len(made.token_ids) else -1)
            live.replies.append(made)
            live.answered = turn + 1
            if (pending := live.pending.pop(turn, None)) is not None:
                live.give(pending, turn)

    def _reply(self, state: TrajectoryState, turn: int, asked: RequestRecord, parts: list[GenerationRecord]) -> Reply:
        name, last = f"{state.tid}-{state.attempt.number}-{turn}", parts[-1]

        def parse(text: str) -> tuple[ToolCall, ...]:  # without tools, the agent reads text
            return agent_calls(self._context.environment, text) if offers_tools(asked.tools) else ()

        message = reply(last.text, parse, lambda i: f"call_{digest(f'{name}/{i}'.encode()).hex()[:16]}", last.stopped)
        ids, logprobs, versions = (
            np.concatenate([getattr(part, column) for part in parts])
            for column in ("token_ids", "logprobs", "weight_versions")
        )
        context = sum(map(len, state.attempt.paths[turn])) - len(ids)
        cut = last.stop_reason is StopReason.LENGTH
        finish = "tool_calls" if message.calls else "length" if cut else "stop"
        return Reply(message, finish, context, ids, logprobs, versions, name, last.stopped)

    def _unlike(self, state: TrajectoryState, what: str) -> RestartRecord:
        detail = f"its agent, started again, {what}; a fresh draw begins"
        logger.info("%s: %s", state.tid, detail)
        self.drop(state.tid, "it began again")
        return RestartRecord(detail=storable(detail))

    async def _asked(self, live: _Live, state: TrajectoryState, pending: Pending) -> RequestRecord:
        request, now, most = pending.request, state.attempt, self._config.rollout.max_turns
        if now.turns >= most:
            detail = f"rollout.max_turns={most} turns were answered, and no more are"
            raise live.refuse(EndReason.MAX_TURNS, detail, code="max_turns_reached")
        by_ids = request.token_ids is not None
        asked: Asked = await by_size(request.size, partial(self._read, live, now, request))
        self._check_room(live, now, asked)
        tools = f"ids {now.turns}" if by_ids else asked.tools
        turn = live.conversation.ask(-1 if by_ids else asked.parent, asked.tail, tools)
        assert turn == now.turns, f"{state.tid}: request {turn} of a trajectory with {now.turns} turns"
        if asked.reason not in ("first", "continued"):
            task_logger.info("%s: turn %d begins a branch: %s", state.tid, turn, asked.reason)
        live.pending[turn], live.taken = pending, turn + 1
        return RequestRecord(
            turn=turn, parent=asked.parent, returns=self._returns(live, asked), observation_ids=asked.ids,
            messages=[message.to_plain() for message in asked.tail], tools=tools, reason=asked.reason,
            fingerprint=request.fingerprint, stop=list(request.stop), max_tokens=request.max_tokens, by_ids=by_ids,
        )  # fmt: skip

    def _read(self, live: _Live, now: Attempt, request: ModelRequest) -> Asked:
        limit = self._config.rollout.max_context_tokens
        try:
            if request.token_ids is None:
                return live.conversation.prompt(
                    request.messages, request.tools, request.template_args, request.tools_text
                )
        except RequestRefused as refused:
            if refused.code == TOO_LONG:
                live.refused = (EndReason.LENGTH, str(refused))
            raise
        if (has := len(request.token_ids)) >= limit:
            text = f"this model's maximum context length is {limit} tokens, and token_ids has {has}"
            raise live.refuse(EndReason.LENGTH, text, "token_ids")
        return _by_ids(now, request, len(self._chat().tokenizer))

    def _check_room(self, live: _Live, now: Attempt, asked: Asked) -> None:
        rollout, most = self._config.rollout, self._config.trainer.micro_batch_tokens
        before = sum(map(len, now.paths[asked.parent])) if asked.parent >= 0 else 0
        limit, tokens, detail = rollout.max_context_tokens, before + len(asked.ids), ""
        if tokens >= limit:
            detail = f"this model's maximum context length is {limit} tokens, and the messages have {tokens}"
        elif asked.reason not in ("first", "continued"):
            parts, _ = AgentTurns.of(now.records).parts()
            total = sum(len(ids) for ids, _ in parts) + tokens
            if total + rollout.max_new_tokens > most:
                detail = (
                    f"the conversations of this trajectory would have {total} tokens, and trainer.micro_batch_tokens={most} holds "
                    "no more"
                )
        if detail:
            raise live.refuse(EndReason.LENGTH, detail)

    def _returns(self, live: _Live, asked: Asked) -> tuple[ToolReturn, ...]:
        if asked.parent < 0:
            return ()
        calls = {call.id: call.name for call in live.replies[asked.parent].message.calls}
        took_s = time.monotonic() - live.given_s.get(asked.parent, time.monotonic())
        results = [message for message in asked.tail if message.role == "tool"]
        names = chain(calls.values(), repeat(""))
        return tuple(
            ToolReturn(
                storable(calls.get(message.call_id, name))[:256], ToolStatus.OK, storable(message.text), took_s, len(message.text)
            )
            for message, name in zip(results, names, strict=False)
        )  # fmt: skip

    def _ended(self, live: _Live, state: TrajectoryState, ended: Ended) -> AgentEndRecord | RestartRecord:
        if live.replay and ended.error is None:
            return self._unlike(state, "ended sooner than before")
        end, failure, detail = EndReason.ANSWERED, FailureClass.NONE, ""
        if ended.error is not None:
            cut = bool(live.replies) and live.replies[-1].finish == "length"
            if live.refused is None and not cut:
                raise ToolFault(f"the agent of {state.tid} failed: {ended.error}")
            failure = FailureClass.POLICY
            end, detail = live.refused or (EndReason.LENGTH, f"failed after an answer that was cut: {ended.error}")
        elif state.attempt.turns == 0:
            raise ToolFault(
                f"the agent of {state.tid} ended without a request to the model, which it finds at OPENAI_BASE_URL"
            )
        self.drop(state.tid, "it has ended")
        turn, reward = max(0, state.attempt.turns - 1), _reward(live.session.reward, ended.result)
        return agent_end_record(turn, end, failure, detail, ended.result, reward)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            late_s = time.monotonic() - 2 * self._config.agent.timeout_s
            for tid, live in list(self._live.items()):
                path = group_path(self._context.spec.groups_dir, tid.iteration, tid.group, tid.split)
                if live.started_s < late_s or path.exists():
                    logger.info("%s: its agent is killed, because its trajectory has ended", tid)
                    self.drop(tid, "it has ended")


def _by_ids(now: Attempt, request: ModelRequest, vocab_size: int) -> Asked:
    ids = np.array(request.token_ids, np.int32)
    if ids.max() >= vocab_size:
        raise RequestRefused(f"token_ids: got {ids.max()}; the tokenizer's ids are 0 to {vocab_size - 1}", "token_ids")
    best, length = -1, 0
    for turn, path in enumerate(now.paths):
        known = np.concatenate(path)
        if length < len(known) < len(ids) and np.array_equal(ids[: len(known)], known):
            best, length = turn, len(known)
    reason = "continued" if best >= 0 and best not in now.parents else "branched" if best >= 0 else "new"
    return Asked(best, ids[length:], reason if now.paths else "first", (), "")


def _reward(posted: float | None, result: Any) -> float | None:
    """The agent's own reward: posted to /reward, its numeric result, or "reward" in its result."""
    if posted is not None:
        return posted
    value = result.get("reward") if isinstance(result, Mapping) else result
    return as_float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
