"""A quantum whose record cannot be stored ends its trajectory, and no other; reading the journal again ends it the same way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from libra.config import config_from_dict
from libra.envs.retries import NEVER
from libra.errors import ToolFault, Unstorable
from libra.events.reports import FoundEndedReport
from libra.rollout.chat_format import load_chat_format
from libra.store.group_records import write_group
from libra.store.trajectory_journal import Journal
from libra.testing import FixedTurns
from libra.types import EndReason, FailureClass, StopReason, ToolCall, ToolReturn, ToolStatus, TrajectoryId, TurnOutput
from libra.worker import quanta, turn_calls
from libra.worker.quanta import QuantumRunner
from libra.worker.trajectory_state import TrajectoryState

TID = TrajectoryId(0, 0, 0)


class Serving:
    """An engine that writes the same three tokens every time."""

    def __init__(self) -> None:
        self.cached_tokens = 0

    async def pull(self) -> None: ...

    async def generate(self, request: Any) -> TurnOutput:
        ids = np.arange(3, dtype=np.int32)
        logprobs = np.zeros(3, np.float32)
        return TurnOutput(ids, logprobs, ids * 0, ids * 0, StopReason.STOP, cached_tokens=self.cached_tokens)

    def forget(self, trajectory_id: str) -> None: ...


@pytest.fixture
def make_runner(
    random_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], tuple[QuantumRunner, Serving]]:
    """A runner without a cluster; all of one test share a journal."""
    monkeypatch.setattr(quanta, "priority_here", lambda worker, key: (0,))
    monkeypatch.setattr(quanta, "still_wanted", lambda worker, key: True)
    config = config_from_dict({"rollout": {"ignore_eos": True, "max_turns": 3}, "trainer": {"resample": 1}})
    environment = FixedTurns()

    def make() -> tuple[QuantumRunner, Serving]:
        spec = SimpleNamespace(
            back_off=NEVER,
            config=config,
            epoch=0,
            turn_seed=lambda tid, turn, draw: 0,
            groups_dir=tmp_path,
            directory=tmp_path,
        )
        context: Any = SimpleNamespace(
            environment=environment,
            spec=spec,
            journal=Journal(tmp_path / "journal"),
            epoch=SimpleNamespace(check=lambda: None),
            report=lambda report: None,
            name="w",
            worker=None,
            model_dir=random_model,
        )
        serving = Serving()
        engine: Any = SimpleNamespace(
            serving=serving,
            generate=lambda key, request: serving.generate(request),
            contended=True,
            turn_ended=lambda: None,
        )
        runner = QuantumRunner(context, engine)
        runner.chat = load_chat_format(random_model, environment.tool_schemas)
        return runner, serving

    return make


def run(runner: QuantumRunner) -> TrajectoryState:
    prompt = FixedTurns().prompt("train", 0)
    return asyncio.run(runner.run("key", TID, prompt))


Runner = Callable[[], tuple[QuantumRunner, Serving]]


def test_text_without_a_form_ends_its_trajectory_as_the_models_failure(
    make_runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quanta, "storable_calls", lambda calls: (ToolCall({"no", "text"}, {}),))  # type: ignore[arg-type]
    state = run(make_runner()[0])
    again = run(make_runner()[0])  # what a resume reads
    for found in (state, again):
        assert (found.end, found.failure, found.retried) == (EndReason.FAILURE, FailureClass.POLICY, [])
        assert "cannot store a value of type set" in found.detail and found.quanta == 1
        trajectory = found.trajectory(epoch=0)
        assert trajectory.num_action_tokens == 3 and trajectory.failure.trains, "its tokens are kept, and train"
        assert found.episode().answer == ""


def test_returns_without_a_form_are_the_tools_failure_and_another_draw_follows(
    make_runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def odd(*_: Any, **__: Any) -> ToolReturn:
        return ToolReturn("echo", ToolStatus.OK, "x", latency_s=1j)  # type: ignore[arg-type]

    monkeypatch.setattr(turn_calls, "run_action", odd)
    for quantum, phase in enumerate(("TOOL", "ROLLOUT", "TOOL", None)):  # generation, failure, a fresh draw, failure
        state = run(make_runner()[0])
        assert (state.quanta, state.phase) == (quantum + 1, phase)
    assert (state.end, state.failure, state.retried) == (EndReason.FAILURE, FailureClass.TOOL, [FailureClass.TOOL])
    assert "cannot store a value of type complex" in state.detail


def inline(monkeypatch: pytest.MonkeyPatch, runner: QuantumRunner) -> None:
    """Its tools run within the generation quantum."""
    monkeypatch.setattr(runner, "_inline", lambda state: True)


def test_a_generation_and_its_inline_action_are_one_record_and_two_quanta(
    make_runner: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runner, _ = make_runner()
    inline(monkeypatch, runner)
    assert run(runner).quanta == 2
    assert [path.name for path in (tmp_path / "journal").glob("*.rec")] == [f"{TID}.0000.rec"]
    assert [record["kind"] for record in Journal(tmp_path / "journal").read(str(TID))] == ["generation", "action"]
    assert run(make_runner()[0]).quanta == 3  # another worker goes on where both left off


def test_an_inline_tool_that_fails_ends_the_attempt_after_its_generation(
    make_runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any, **__: Any) -> ToolReturn:
        raise ToolFault("broken")

    runner, _ = make_runner()
    inline(monkeypatch, runner)
    monkeypatch.setattr(turn_calls, "run_action", fail)
    state = run(runner)
    assert [record["kind"] for record in state.records] == ["generation", "failure"]
    assert [record["kind"] for record in runner.context.journal.read(str(TID))] == ["generation", "failure"]


def test_a_worker_that_is_cut_off_in_an_inline_action_begins_the_turn_again(
    make_runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cut(*_: Any, **__: Any) -> ToolReturn:
        raise asyncio.CancelledError

    runner, _ = make_runner()
    inline(monkeypatch, runner)
    with monkeypatch.context() as during:
        during.setattr(turn_calls, "run_action", cut)
        with pytest.raises(asyncio.CancelledError):
            run(runner)
    assert runner.context.journal.read(str(TID)) == []
    assert [record["kind"] for record in run(runner).records] == ["generation", "action"]


def test_the_records_of_an_ended_trajectory_are_kept_for_its_group_within_a_bound(
    make_runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, _ = make_runner()
    inline(monkeypatch, runner)
    while (state := run(runner)).phase is not None:
        pass
    assert runner.states[TID] is state
    monkeypatch.setattr(runner.context.journal, "_load", lambda path: None)  # nothing more can be read
    assert len(runner.state(TID, state.prompt).records) == state.quanta
    monkeypatch.setattr(quanta, "KEPT_BYTES", 0)
    runner._release(state)
    assert not runner.states


def test_a_template_that_cannot_show_a_return_is_a_failure_of_the_tool(
    make_runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(contents: Any, *, ended: bool) -> Any:
        raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")

    runner, _ = make_runner()
    monkeypatch.setattr(runner.chat, "observation_ids", refuse)
    assert run(runner).phase == "TOOL"
    assert run(runner).retried == [FailureClass.TOOL]


def test_numbers_of_the_engine_without_a_form_are_the_engines_failure(make_runner: Runner) -> None:
    runner, serving = make_runner()
    serving.cached_tokens = 2**70
    state = run(runner)
    assert state.retried == [FailureClass.ENGINE] and state.phase == "ROLLOUT"
    serving.cached_tokens = 0
    assert run(runner).turns == 1


def test_a_full_disk_still_ends_the_run(make_runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    from libra.errors import StoreError

    runner, _ = make_runner()

    def full(*_: Any) -> None:
        raise StoreError("disk full")

    monkeypatch.setattr(runner.context.journal, "append", full)
    with pytest.raises(StoreError, match="disk full") as caught:
        run(runner)
    assert not isinstance(caught.value, Unstorable)


def test_a_trajectory_of_a_committed_group_is_not_run_again_by_a_worker_that_does_not_know_it(
    make_runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, _), (second, _), (third, _) = make_runner(), make_runner(), make_runner()
    assert run(second).phase == "TOOL"  # has seen its first quantum
    while (state := run(first)).phase is not None:
        pass
    whole = first.state(TID, FixedTurns().prompt("train", 0))
    write_group(first.context.spec.groups_dir, 0, 0, [whole.trajectory(epoch=0)])
    first.context.journal.remove(str(TID))  # the store has it

    async def refuse(self: Serving, request: Any) -> TurnOutput:
        raise AssertionError("generated again")

    monkeypatch.setattr(Serving, "generate", refuse)
    for runner in (second, third):
        reports: list[Any] = []
        runner.context.report = reports.append
        found = run(runner)
        assert (found.end, found.failure, found.detail) == (state.end, state.failure, state.detail)
        assert reports == [FoundEndedReport("key", 3, str(state.end))]
    assert not first.context.journal.trajectories()
