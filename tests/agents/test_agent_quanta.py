"""Agents as real processes on a worker: their environment, time limits, number, crashes and restarts, and what then is trained."""

import asyncio
import contextlib
import itertools
import os
import select
import sys
import venv
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from libra.envs.grader import own_reward
from libra.errors import EngineAsleep, EngineError, EnvironmentFault
from libra.types import EndReason, FailureClass, TrajectoryId

pytest.importorskip("httptools", reason="the extra `agents` is not installed")

from agent_worker import TID, Scripted, agent_worker, check_one_sequence, check_tokens, reasons, turns_of
from marked import Marked

pytestmark = pytest.mark.live

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture
def start(conversation_format, odd_ids, tmp_path):
    """``start(agent, **sections)``: a worker whose agent is that function of `http_agents`, or has those settings. The model
    numbers its answers."""
    chat = conversation_format.chat

    @asynccontextmanager
    async def begin(agent, **sections):
        given = {"function": f"http_agents:{agent}"} if isinstance(agent, str) else agent
        engine = sections.pop("engine", None) or Scripted(chat, odd_ids, lambda text, request: f"turn {request.turn}")
        marked = Marked(mark=str(tmp_path))
        async with agent_worker(tmp_path, chat, engine, given, environment=marked, **sections) as worker:
            yield worker

    return begin


@pytest.fixture(scope="session")
def bare_venv(tmp_path_factory):
    """A virtual environment without a single package."""
    place = tmp_path_factory.mktemp("venv") / "bare"
    venv.create(place, symlinks=True, with_pip=False)
    return place


async def ended(pid):
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            await asyncio.to_thread(select.select, [descriptor], [], [])
        finally:
            os.close(descriptor)


@pytest.mark.parametrize("kind", ["command", "function"])
async def test_an_agent_has_a_virtual_environment_of_its_own(start, bare_venv, kind):
    agent = {kind: {"command": f"python {SUPPORT / 'stdlib_agent.py'}", "function": "stdlib_agent:run"}[kind]}
    assert sys.prefix != str(bare_venv)
    async with start(agent | {"venv": str(bare_venv)}) as worker:
        state = await worker.play()
    episode = state.episode()
    assert episode.result == {"text": "turn 0", "prefix": str(bare_venv), "venv": str(bare_venv), "reward": 0.5}
    assert episode.own_reward == 0.5 and state.failure is FailureClass.NONE
    check_one_sequence(state, worker.engine)


@pytest.mark.parametrize(("agent", "setting"), [
    ({"venv": "gone", "function": "stdlib_agent:run"}, r"agent\.venv"),
    ({"function": "stdlib_agent:walk"}, r"agent\.function"),
])  # fmt: skip
async def test_an_agent_that_cannot_be_loaded_stops_the_worker_with_its_setting(start, agent, setting):
    with pytest.raises(EnvironmentFault, match=setting):
        async with start(agent):
            pass


@pytest.mark.parametrize(
    ("limits", "passed"),
    [({"timeout_s": 1.5, "idle_s": 1.5}, "timeout_s"), ({"timeout_s": 60.0, "idle_s": 1.0}, "idle_s")],
)
async def test_an_agent_that_hangs_is_killed_and_its_trajectory_is_a_timeout(start, tmp_path, limits, passed):
    async with start({"function": "http_agents:hanging"} | limits) as worker:
        state = await worker.play()
        await ended(int((tmp_path / "pid").read_text()))
        assert state.failure is FailureClass.TIMEOUT and not state.failure.trains
        assert passed in state.detail


async def test_no_more_agents_exist_than_concurrency_allows_and_all_have_their_turn(start, tmp_path):
    async with start({"function": "http_agents:counting", "concurrency": 2}) as worker:
        states = await asyncio.gather(*(worker.play(TrajectoryId(0, 0, i)) for i in range(6)))
        for state in states:
            assert state.failure is FailureClass.NONE
            check_one_sequence(state, worker.engine)
        assert worker.given_back, "some found no place"
    there = list(itertools.accumulate(1 if sign == "+" else -1 for sign in (tmp_path / "agents").read_text()))
    assert len(there) == 12 and max(there) == 2 and there[-1] == 0


async def test_an_agent_that_is_killed_fails_as_a_tool_and_is_tried_again_from_the_prompt(start):
    async with start("dying", trainer={"resample": 1}) as worker:
        state = await worker.play()
    assert state.retried == [FailureClass.TOOL] and state.failure is FailureClass.NONE
    assert len(turns_of(state)) == 1 and len(worker.engine.requests) == 2


async def test_agents_go_on_from_the_journal_when_the_program_that_runs_them_is_killed(start, tmp_path):
    async with start("named") as worker:
        prompt = worker.environment.prompt("train", 0)
        for _ in range(2):
            assert await worker.quantum(TID, prompt)
        pid = int((tmp_path / "pid").read_text())
        psutil.Process(pid).parent().kill()
        await ended(pid)  # agents end with it
        state = await worker.play()
    assert state.failure is FailureClass.NONE and state.attempt.number == 0
    check_one_sequence(state, worker.engine)
    assert [request.turn for request in worker.engine.requests] == [0, 1], "no turn was generated twice"


async def test_an_agent_that_asks_something_else_after_a_restart_begins_a_fresh_draw(start, tmp_path, monkeypatch):
    monkeypatch.setattr("libra.worker.trajectory.agent_quanta.REPLAY_S", 0.2)

    async with start("other") as worker:
        prompt, engine = worker.environment.prompt("train", 0), worker.engine
        for _ in range(2):
            assert await worker.quantum(TID, prompt)
    (tmp_path / "again").touch()
    async with start("other", engine=engine) as worker:
        state = await worker.play()
    assert state.attempt.number == 1 and state.failure is FailureClass.NONE
    assert len(turns_of(state)) == 2 and reasons(state) == ["first", "continued"]
    assert [request.turn for request in engine.requests] == [0, 0, 1]


@pytest.mark.parametrize("fault", [EngineAsleep("it sleeps"), EngineError("it was killed")])
async def test_an_agent_waits_while_engines_sleep_or_die(start, fault, tmp_path):
    async with start("counting", trainer={"resample": 3}) as worker:
        worker.engine.faults = [fault, fault]
        state = await worker.play()
    assert state.failure is FailureClass.NONE and state.attempt.number == 0
    assert len(state.retried) == (0 if isinstance(fault, EngineAsleep) else 2)
    check_one_sequence(state, worker.engine)
    assert (tmp_path / "agents").read_text() == "+-", "it was started once"


async def test_new_weights_in_the_middle_of_a_turn_are_in_its_tokens(start, conversation_format, odd_ids):
    engine = Scripted(conversation_format.chat, odd_ids, lambda text, request: f"a long turn {request.turn}")
    async with start("asking", engine=engine, rollout={"chunk_tokens": 3}) as worker:
        state = await worker.play()
    check_tokens(state, engine)
    versions = [of_turn for _, _, of_turn in turns_of(state)]
    assert all(len(set(each)) > 1 and each == sorted(each) for each in versions), "each part has its version"
    assert state.trajectory(0).starts == ()


async def test_parallel_sub_agents_are_sequences_of_one_trajectory(start):
    async with start("parallel") as worker:
        state = await worker.play()
    assert state.failure is FailureClass.NONE
    assert sorted(reasons(state)) == sorted(["first", "continued"] + ["new", "continued"] * 3)
    assert len(state.trajectory(0).starts) == 3
    check_tokens(state, worker.engine)
    assert sorted(state.episode().result) == sorted(ids for ids, _, _ in turns_of(state))


async def test_an_agent_that_fails_at_an_answer_that_was_cut_is_no_failure_of_a_tool(start):
    async with start("wants_the_end") as worker:
        state = await worker.play()
    assert (state.failure, state.end) == (FailureClass.POLICY, EndReason.LENGTH)
    assert "ValueError: length" in state.detail
    assert own_reward(state.episode()) == 0.0, "it could give itself none"
