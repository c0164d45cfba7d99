"""Quanta of a trajectory: parts of turns, inline actions, restarts, records that cannot be stored, and ends that stay ends."""

import asyncio
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from factories import kinds_of
from libra.config import config_from_dict
from libra.config.effects import ignored_settings
from libra.envs.retries import BackOff
from libra.envs.tool_arithmetic import ToolArithmetic
from libra.errors import ConfigError, EngineError, FencedOff, StoreError, ToolFault, Unstorable
from libra.facts import QuantumFinished, TrajectoryFoundEnded
from libra.rollout import TransformersEngine
from libra.rollout.chat_format import load_chat_format
from libra.store.quantum_records import GenerationRecord
from libra.store.run_records import write_group
from libra.store.start_records import take_epoch
from libra.store.trajectory_journal import Journal
from libra.testing import FixedTurns
from libra.types import (
    EndReason,
    FailureClass,
    Prompt,
    StopReason,
    ToolCall,
    ToolReturn,
    ToolStatus,
    TrajectoryId,
    TurnOutput,
    TurnRequest,
)  # fmt: skip
from libra.worker.engine.engine_factory import check_engine
from libra.worker.trajectory import quanta, turn_calls
from libra.worker.trajectory.quanta import QuantumRunner

TID = TrajectoryId(0, 0, 0)
QUESTION = ToolArithmetic().prompt("train", 3)
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "1 + 2"}}</tool_call>'


class Scripted:
    """An engine that writes given tokens, from where its request's turn stopped; request n is of ``versions[n]``, or n + 1."""

    def __init__(self, turns, *, versions=(), fails_at=-1):
        self.turns, self.versions, self.fails_at = turns, versions, fails_at
        self.requests = list[TurnRequest]()

    @property
    def engine(self):
        at = self.versions[len(self.requests)]
        return SimpleNamespace(version=at[0] if isinstance(at, list) else at)

    async def pull(self): ...

    async def generate(self, request):
        self.requests.append(request)
        number, done = len(self.requests) - 1, request.generated
        if number == self.fails_at:
            raise EngineError("boom")
        whole = self.turns[request.turn % len(self.turns)]
        assert request.context_ids[len(request.context_ids) - done :].tolist() == whole[:done]
        ids = np.array(whole[done : done + request.max_new_tokens], np.int32)
        made = np.resize(self.versions[number] if self.versions else number + 1, len(ids)).astype(np.int32)
        reason = StopReason.STOP if done + len(ids) == len(whole) else StopReason.LENGTH
        logprobs = -np.arange(done, done + len(ids)).astype(np.float32)
        return TurnOutput(ids, logprobs, made, ids * 0, reason)

    def forget(self, trajectory_id): ...


@pytest.fixture(scope="module")
def chat(random_model):
    return load_chat_format(random_model, ToolArithmetic().tool_schemas)


@pytest.fixture(autouse=True)
def _no_dask(monkeypatch):
    monkeypatch.setattr(quanta, "priority_here", lambda worker, key: (0,))
    monkeypatch.setattr(quanta, "still_wanted", lambda worker, key: True)


def scripted(chat, *texts, **more):
    end = next(iter(chat.stop_ids))
    return Scripted([[*chat.tokenizer.encode(text, add_special_tokens=False), end] for text in texts], **more)


def runner_of(directory, chat, serving, environment, *, config, contended=True):
    """A runner without a cluster; those of one directory share a journal. ``context.report`` appends to ``context.reports``."""
    spec = SimpleNamespace(
        back_off=BackOff(retries=0), config=config, epoch=0, directory=directory, groups_dir=directory,
        turn_seed=lambda tid, turn, draw: 100 * draw + turn,
    )  # fmt: skip
    reports = []
    context = SimpleNamespace(
        environment=environment, spec=spec, journal=Journal(directory / "journal"), epoch=SimpleNamespace(check=lambda: None),
        report=lambda *facts: reports.extend(facts), reports=reports, name="w", worker=None,
    )  # fmt: skip
    engine = SimpleNamespace(
        serving=serving, generate=lambda key, request: serving.generate(request), keeps_slot=lambda key: not contended,
        began=lambda key: None, turn_ended=lambda: None,
    )  # fmt: skip
    runner = QuantumRunner(context, engine)
    runner.chat = chat
    return runner


class Played:
    """One trajectory, run to its end, each quantum in a process that knows only the journal."""

    def __init__(self, chat, serving, *, contended=True, **sections):
        environment, how = ToolArithmetic(), {"config": config_from_dict(sections), "contended": contended}
        self.serving, self.rounds, self.reports = serving, 0, list[Any]()
        with tempfile.TemporaryDirectory() as directory:

            def fresh():
                return runner_of(Path(directory), chat, serving, environment, **how)

            phase = ""
            while phase is not None:
                runner = fresh()
                phase = asyncio.run(runner.run("key", TID, QUESTION)).phase
                self.reports += [fact for fact in runner.context.reports if isinstance(fact, QuantumFinished)]
                self.rounds += 1
            self.state = fresh().state(TID, QUESTION)
        self.trajectory = self.state.trajectory(epoch=0)

    def content(self):
        """Everything of the trajectory that does not depend on when it ran."""
        t, timed = self.trajectory, ("generate_s", "queued_s", "tool_s", "cached_tokens")
        rows = [{k: v for k, v in row.items() if k not in timed} for row in t.turns]
        arrays = [each.tolist() for each in (t.token_ids, t.is_action, t.behaviour_logprob, t.kv_version)]
        turns = [(turn.text, turn.calls, turn.num_tokens, turn.token_ids) for turn in self.state.episode().turns]
        return arrays, rows, turns, t.end_reason, t.failure, t.failure_detail


def played(chat, *texts, fails_at=-1, contended=True, **rollout):
    serving = scripted(chat, *texts, fails_at=fails_at)
    return Played(chat, serving, contended=contended, rollout=rollout, trainer={"resample": 1})


@settings(max_examples=8)  # an example is twenty quanta
@given(
    chunk=st.integers(20, 130),
    max_new=st.sampled_from([84, 85, 120, 200]),
    room=st.sampled_from([100, 120, 300, 1000]),
    first=st.sampled_from(["", "let me see ", "x" * 30]),
    answer=st.text("0123456789 <>/{}", max_size=40),
)
def test_parts_add_up_to_the_turn(chat, chunk, max_new, room, first, answer):
    texts, prompt = (first + CALL, CALL, answer), len(chat.prompt_ids(list(QUESTION.messages)))
    limits = {"max_new_tokens": max_new, "max_context_tokens": prompt + room, "max_turns": 3}
    whole, parts = played(chat, *texts, **limits), played(chat, *texts, chunk_tokens=chunk, **limits)
    assert parts.content() == whole.content()
    for request in parts.serving.requests:
        assert request.max_new_tokens <= chunk
        assert request.seed == next(r.seed for r in whole.serving.requests if r.turn == request.turn)
    lengths = [len(r.token_ids) for r in parts.state.records if isinstance(r, GenerationRecord)]
    assert sum(lengths) == parts.trajectory.num_action_tokens and max(lengths) <= chunk
    parked = [isinstance(r, GenerationRecord) and r.is_unfinished for r in parts.state.records]
    assert [report.unfinished for report in parts.reports] == parked
    event(f"{len(parts.state.records)} records, {whole.state.end}")


def test_a_call_over_three_parts_is_one_call(chat):
    made = played(chat, CALL, "3", chunk_tokens=len(CALL) // 2 - 3, max_new_tokens=200)
    kinds = [
        (kind, r.turn, getattr(r, "stop_reason", None), len(getattr(r, "calls", ())))
        for kind, r in zip(kinds_of(made.state.records), made.state.records, strict=True)
    ]
    assert kinds == [
        ("generation", 0, "parked", 0), ("generation", 0, "parked", 0), ("generation", 0, "stop", 1),
        ("action", 0, None, 0), ("generation", 1, "stop", 0),
    ]  # fmt: skip
    assert made.rounds == 5, "it gave its slot back after each part"
    versions = set(made.trajectory.weight_version.tolist())
    assert versions == {-1, 1, 2, 3, 4}, "each token has the version of its own part"
    kept = played(chat, CALL, "3", chunk_tokens=10, max_new_tokens=200, contended=False)
    assert kept.rounds == 3 and len(kept.reports) > 8, "nobody waited for its slot"
    assert all(report.goes_on for report in kept.reports if report.unfinished)


def test_an_engine_that_fails_in_mid_turn_is_asked_for_the_rest(chat):
    whole = played(chat, CALL, "3", max_new_tokens=200)
    failed = played(chat, CALL, "3", max_new_tokens=200, chunk_tokens=20, fails_at=2)
    assert failed.state.retried == [FailureClass.ENGINE]
    assert failed.content() == whole.content()
    assert [request.generated for request in failed.serving.requests[:4]] == [0, 20, 40, 40]


class Forgetful(TransformersEngine):
    """Does not declare that it continues turns."""

    continues_turns = False

    def __init__(self, *, model_dir, slots, max_context_tokens, version): ...


def test_an_engine_that_would_draw_the_same_noise_again_is_refused():
    config = config_from_dict({"rollout": {"engine": f"{__name__}:Forgetful", "chunk_tokens": 8, "max_new_tokens": 64}})
    with pytest.raises(ConfigError, match="continues_turns"):
        check_engine(config)
    check_engine(config.model_copy(update={"rollout": config.rollout.model_copy(update={"chunk_tokens": None})}))
    assert not ignored_settings(config)
    (ignored,) = ignored_settings(config_from_dict({"rollout": {"chunk_tokens": 64, "max_new_tokens": 64}}))
    assert ignored.message.startswith("rollout.chunk_tokens=64")


@pytest.mark.parametrize(
    ("versions", "one", "kept", "restarts"),
    [
        ((4, 4), True, {4}, 0),
        ((4, 5, 5), True, {5}, 1),  # its engine was lost after the first turn, and another serves 5
        ((4, [4, 5], 5, 5), True, {5}, 1),  # weights changed within a turn
        ((4, 5, 6, 6), True, {6}, 2),
        ((4, 5), False, {4, 5}, 0),
    ],
)
def test_a_trajectory_of_one_version_begins_again_where_its_engine_serves_another(versions, one, kept, restarts, chat):
    sections = {"run": {"eta": 1}, "staleness": {"versions": "one" if one else "many"}}
    made = Played(chat, scripted(chat, CALL, "3", versions=versions), rollout={"max_new_tokens": 200}, **sections)
    t, requests = made.trajectory, made.serving.requests
    assert set(t.weight_version[t.is_action].tolist()) == kept
    assert [turn.text for turn in made.state.episode().turns] == [chat.decode(np.array(x)) for x in made.serving.turns]
    assert len(t.turns) == 2 and t.failure is FailureClass.NONE and not t.retried
    assert kinds_of(made.state.records).count("restart") == restarts == made.state.attempt.number
    seeds = [request.seed for request in requests]
    assert len(set(seeds)) == len(seeds) and seeds[-1] == 100 * restarts + 1


@pytest.fixture
def make_runner(random_model, tmp_path):
    """Runners of a trajectory of three turns; all of one test share a journal."""

    def make(inline=False):
        environment = FixedTurns(inline=inline)
        chat = load_chat_format(random_model, environment.tool_schemas)
        sections = {"rollout": {"ignore_eos": True, "max_turns": 3}, "trainer": {"resample": 1}}
        return runner_of(tmp_path, chat, Scripted([[0, 1, 2]]), environment, config=config_from_dict(sections))

    return make


def run(runner, tid=TID):
    return asyncio.run(runner.run("key", tid, FixedTurns().prompt("train", 0)))


def kinds(runner):
    return kinds_of(runner.context.journal.read(str(TID)))


def test_text_without_a_form_ends_its_trajectory_as_the_models_failure(make_runner, monkeypatch):
    monkeypatch.setattr(quanta, "storable_calls", lambda calls: (ToolCall("echo", {"no": 1j}),))
    for found in (run(make_runner()), run(make_runner())):  # the second is what a resume reads
        assert (found.end, found.failure, found.retried) == (EndReason.FAILURE, FailureClass.POLICY, [])
        assert "complex" in found.detail and found.quanta == 1
        trajectory = found.trajectory(epoch=0)
        assert trajectory.num_action_tokens == 3 and trajectory.failure.trains, "its tokens are kept, and train"
        assert found.episode().answer == ""


def test_returns_without_a_form_are_the_tools_failure_and_another_draw_follows(make_runner, monkeypatch):
    async def odd(*_, **__):
        return ToolReturn("echo", ToolStatus.OK, "x", latency_s=1j)

    monkeypatch.setattr(turn_calls, "run_action", odd)
    for quantum, phase in enumerate(("TOOL", "ROLLOUT", "TOOL", None)):  # generation, failure, a fresh draw, failure
        state = run(make_runner())
        assert (state.quanta, state.phase) == (quantum + 1, phase)
    assert (state.end, state.failure, state.retried) == (EndReason.FAILURE, FailureClass.TOOL, [FailureClass.TOOL])
    assert "complex" in state.detail


def test_a_generation_and_its_inline_action_are_one_record_and_two_quanta(make_runner, tmp_path):
    runner = make_runner(inline=True)
    assert run(runner).quanta == 2
    assert [path.name for path in (tmp_path / "journal").glob("*.rec")] == [f"{TID}.0000.rec"]
    assert kinds(runner) == ["generation", "action"]
    assert run(make_runner()).quanta == 3  # another worker goes on where both left off


def test_an_inline_tool_that_fails_ends_the_attempt_and_one_that_is_cut_off_leaves_no_record(make_runner, monkeypatch):
    runner = make_runner(inline=True)
    for error in (asyncio.CancelledError, ToolFault("broken")):

        async def fail(*_, error=error, **__):
            raise error

        monkeypatch.setattr(turn_calls, "run_action", fail)
        if error is asyncio.CancelledError:
            with pytest.raises(asyncio.CancelledError):
                run(runner)
            assert kinds(runner) == []
    run(runner)
    assert kinds(runner) == ["generation", "failure"]


def test_a_worker_of_an_earlier_start_of_the_run_writes_nothing(make_runner, tmp_path):
    runner = make_runner()
    runner.context.epoch = take_epoch(tmp_path / "epochs")
    take_epoch(tmp_path / "epochs")  # the run was started again
    with pytest.raises(FencedOff):
        run(runner)
    assert runner.context.journal.trajectories() == set() and runner.context.reports == []


def test_a_full_disk_still_ends_the_run(make_runner, monkeypatch):
    def full(*_):
        raise StoreError("disk full")

    runner = make_runner()
    monkeypatch.setattr(runner.context.journal, "append", full)
    with pytest.raises(StoreError, match="disk full") as caught:
        run(runner)
    assert not isinstance(caught.value, Unstorable)


def test_a_trajectory_of_a_committed_group_is_not_run_again_by_a_worker_that_does_not_know_it(make_runner, monkeypatch):
    first, second, third = (make_runner() for _ in range(3))
    assert run(second).phase == "TOOL"  # has seen its first quantum
    while (state := run(first)).phase is not None:
        pass
    whole = first.state(TID, FixedTurns().prompt("train", 0))
    write_group(first.context.spec.groups_dir, 0, 0, [whole.trajectory(epoch=0)])
    first.context.journal.remove(str(TID))  # the store has it
    for runner in (second, third):
        runner.context.reports.clear()
        runner.engine.serving.turns = []  # no generation could be made
        found = run(runner)
        assert (found.end, found.failure, found.detail) == (state.end, state.failure, state.detail)
        assert runner.context.reports == [TrajectoryFoundEnded("key", 3, "w", str(state.end))]
    assert not first.context.journal.trajectories()


def test_an_ended_trajectory_keeps_its_tokens_within_a_bound(make_runner, monkeypatch):
    monkeypatch.setattr(quanta, "KEPT_STATES", 3)
    runner, tids = make_runner(inline=True), [TrajectoryId(0, 0, sample) for sample in range(5)]
    for tid in tids:
        if tid == tids[1]:
            monkeypatch.setattr(quanta, "KEPT_BYTES", 0)  # not for its group either
        while (state := run(runner, tid)).phase is not None:
            pass
        assert (tid in runner.states) == (tid == tids[0]), "its group is graded next"
    whole = runner.state(tids[0], Prompt("p", ()))  # a worker that also grades
    assert len(whole.records) == state.quanta and len(whole.attempt.context_ids) > 9


def test_a_quantum_whose_number_is_known_is_not_looked_for(chat, tmp_path, monkeypatch):
    config = config_from_dict({"rollout": {"chunk_tokens": 2}})
    serving, environment = scripted(chat, "it is " * 8), ToolArithmetic()
    first, second = (runner_of(tmp_path, chat, serving, environment, config=config) for _ in range(2))
    quantum = asyncio.run(first.run("key", TID, QUESTION)).quanta
    looked_for = []
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: looked_for.append(path) or access(path, mode))
    state = asyncio.run(second.run("key", TID, QUESTION, quantum))
    assert state.quanta == quantum + 1, "it has the record of the other worker"
    monkeypatch.setattr(Journal, "read", None)
    assert asyncio.run(second.run("key", TID, QUESTION, state.quanta)).quanta == quantum + 2
    assert not looked_for
