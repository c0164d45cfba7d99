"""A worker that runs agents, without Dask: quanta, journal, gateway and processes are the real ones, the engine is the test's."""

import hashlib
from collections.abc import Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np

from libra.config import config_from_dict
from libra.errors import EngineAsleep
from libra.store.quantum_records import RequestRecord
from libra.store.trajectory_journal import Journal
from libra.testing import FixedTurns
from libra.types import StopReason, TrajectoryId, TurnOutput, TurnRequest
from libra.worker.trajectory.agent_quanta import Agents
from libra.worker.trajectory.quanta import QuantumRunner

TID = TrajectoryId(0, 0, 0)
Script = Callable[[str, TurnRequest], str]
"""The text of a turn, by that of its context."""


class Scripted:
    """An engine that writes what a script says, in tokens as a sampler may split a text and no encoder does.

    Attributes
    ----------
    requests : list of TurnRequest
    written : dict of (trajectory, turn) to lists of token ids
        What it wrote, with the end of turn.
    faults : list of exceptions
        Raised before an answer, one each.
    """

    def __init__(self, chat, split, script):
        self._chat, self._split = chat, split
        texts = script
        self._script: Script = script if callable(script) else lambda text, request: texts[request.turn]
        self.requests = list[TurnRequest]()
        self.written = dict[tuple[str, int], list[int]]()
        self.faults = list[Exception]()
        self.version = 0

    async def pull(self): ...

    def forget(self, trajectory_id): ...

    async def generate(self, request):
        """The next part of a turn. Log-probabilities are those of `logprobs_of`; each part has a version of its own."""
        if self.faults:
            raise self.faults.pop(0)
        self.requests.append(request)
        name = request.trajectory_id, request.turn
        if not request.generated:
            text = self._script(self._chat.decode(request.context_ids), request)
            self.written[name] = [*self._split(text, len(self.requests)), self._chat.end_of_turn_id]
        whole, done = self.written[name], request.generated
        assert request.context_ids[len(request.context_ids) - done :].tolist() == whole[:done]
        ids = np.array(whole[done : done + request.max_new_tokens], np.int32)
        reason = StopReason.STOP if int(ids[-1]) in request.stop_ids else StopReason.LENGTH
        versions = np.full(len(ids), self.version, np.int32)
        self.version += 1
        return TurnOutput(ids, logprobs_of(ids), versions, versions.copy(), reason)


def logprobs_of(ids):
    """A log-probability for each token, by which it is known."""
    return (-(np.asarray(ids) + 1) / 1000).astype(np.float32)


class AgentWorker:
    def __init__(self, runner, agents, engine, environment):
        self.runner, self.agents, self.engine, self.environment = runner, agents, engine, environment
        self.given_back = 0

    async def quantum(self, tid, prompt):
        """One quantum, or none if it is given back; whether the trajectory goes on."""
        try:
            return (await self.runner.run(str(tid), tid, prompt)).phase is not None
        except EngineAsleep:
            self.given_back += 1
            return True

    async def play(self, tid=TID, prompt=None):
        """A trajectory from where its journal ends to its own end."""
        prompt = prompt or self.environment.prompt("train", tid.group)
        while await self.quantum(tid, prompt):
            pass
        return self.runner.state(tid, prompt)


@asynccontextmanager
async def agent_worker(directory, chat, engine, agent, *, environment=None, **sections):
    """A worker with these settings; another one with the same directory continues its trajectories.

    Contexts are long, because frameworks' prompts are.
    """
    rollout = {"max_context_tokens": 1 << 16, "max_new_tokens": 1 << 10, "max_turns": 32, "slots": 8}
    trainer = {"micro_batch_tokens": 1 << 20, "resample": 0}
    given = {"rollout": rollout | sections.get("rollout", {}), "trainer": trainer | sections.get("trainer", {})}
    config = config_from_dict(given | {"agent": agent})
    environment = environment or FixedTurns()
    environment.tools = ()
    reports = list[Any]()
    spec = SimpleNamespace(
        config=config, epoch=0, run="agents", directory=directory, groups_dir=directory / "groups",
        turn_seed=lambda *where: int.from_bytes(hashlib.blake2b(repr(where).encode(), digest_size=4).digest()),
    )  # fmt: skip
    context = SimpleNamespace(
        environment=environment, spec=spec, journal=Journal(directory / "journal"), epoch=SimpleNamespace(check=lambda: None),
        report=lambda *facts: reports.extend(facts), name="tool-0", worker=SimpleNamespace(state=SimpleNamespace(tasks={})),
    )  # fmt: skip
    serving = SimpleNamespace(
        serving=engine, generate=lambda key, request: engine.generate(request), keeps_slot=lambda key: False,
        began=lambda key: None, turn_ended=lambda: None,
    )  # fmt: skip
    runner, agents = QuantumRunner(context, serving), Agents(context, lambda: chat)
    runner.chat, runner.agents = chat, agents
    try:
        await agents.start()
        yield AgentWorker(runner, agents, engine, environment)
    finally:
        await agents.close()


def turns_of(state):
    """Token ids, log-probabilities and versions of each turn, where the store's rows say that they are trained."""
    trajectory, found = state.trajectory(0), []
    for row in trajectory.turns:
        begin = row["sequence_start"] + row["prompt_tokens"]
        span = slice(begin, begin + row["generated_tokens"])
        assert trajectory.is_action[span].all()
        columns = (trajectory.token_ids, trajectory.behaviour_logprob, trajectory.weight_version)
        found.append(tuple(column[span].tolist() for column in columns))
    return found


def check_tokens(state, engine):
    """Every token that the engine wrote is trained once, with its log-probability and version, and no other one is."""
    name = str(state.tid)
    written = [ids for (trajectory, _), ids in engine.written.items() if trajectory == name]
    turns = turns_of(state)
    assert [ids for ids, _, _ in turns] == written
    for ids, logprobs, versions in turns:
        assert np.allclose(logprobs, logprobs_of(ids)) and min(versions) >= 0
    assert state.trajectory(0).num_action_tokens == sum(map(len, written))


def check_one_sequence(state, engine):
    """As `check_tokens`; and the conversation is one sequence, in which each context begins with all tokens before it."""
    check_tokens(state, engine)
    assert state.trajectory(0).starts == (), [record.get("asked", {}).get("reason") for record in state.records]
    requests = [request for request in engine.requests if request.trajectory_id == str(state.tid)]
    for before, after in pairwise(requests):
        known = [*before.context_ids.tolist(), *engine.written[before.trajectory_id, before.turn]]
        assert after.context_ids[: len(known)].tolist() == known, "what was generated is never rendered again"


def reasons(state):
    """Of each request, what it continues or why it does not."""
    return [record.reason for record in state.attempt.records if isinstance(record, RequestRecord)]
