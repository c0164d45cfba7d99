"""A turn in quanta of `rollout.chunk_tokens` is the turn in one piece, for store and grader: tokens, text, calls, limits."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from libra.config import config_from_dict
from libra.config.effects import ignored_settings
from libra.envs.retries import NEVER
from libra.envs.tool_arithmetic import ToolArithmetic
from libra.errors import ConfigError, EngineError
from libra.events.reports import QuantumReport
from libra.rollout.chat_format import load_chat_format
from libra.rollout.transformers_engine import TransformersEngine
from libra.store.trajectory_journal import Journal
from libra.types import FailureClass, StopReason, TrajectoryId, TurnOutput, TurnRequest
from libra.worker import quanta
from libra.worker.engine_factory import check_engine
from libra.worker.quanta import QuantumRunner
from libra.worker.trajectory_state import TrajectoryState

QUESTION = ToolArithmetic().prompt("train", 3)
TID = TrajectoryId(0, 0, 0)
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "1 + 2"}}</tool_call>'


class Scripted:
    """An engine that writes given tokens, from where the request says that its turn stopped; each request has its own version."""

    def __init__(self, turns: list[list[int]]) -> None:
        self.turns, self.requests = turns, list[TurnRequest]()
        self.fails_at = -1

    async def pull(self) -> None: ...

    async def generate(self, request: TurnRequest) -> TurnOutput:
        self.requests.append(request)
        if len(self.requests) - 1 == self.fails_at:
            raise EngineError("boom")
        whole, done = self.turns[request.turn], request.generated
        assert request.context_ids[len(request.context_ids) - done :].tolist() == whole[:done]
        ids = np.array(whole[done : done + request.max_new_tokens], np.int32)
        places = np.arange(done, done + len(ids))
        reason = StopReason.STOP if int(ids[-1]) in request.stop_ids else StopReason.LENGTH
        return TurnOutput(ids, -places.astype(np.float32), ids * 0 + len(self.requests), ids * 0, reason)

    def forget(self, trajectory_id: str) -> None: ...


@pytest.fixture(scope="module")
def chat(random_model: Path) -> Any:
    return load_chat_format(random_model, ToolArithmetic().tool_schemas)


@pytest.fixture(autouse=True)
def _no_dask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quanta, "priority_here", lambda worker, key: (0,))
    monkeypatch.setattr(quanta, "still_wanted", lambda worker, key: True)


class Played:
    """One trajectory, run to its end, each quantum in a process that knows only the journal."""

    def __init__(
        self, chat: Any, texts: list[str], *, contended: bool = True, fails_at: int = -1, **rollout: Any
    ) -> None:
        end = next(iter(chat.stop_ids))
        config = config_from_dict({"rollout": rollout, "trainer": {"resample": 1}})
        self.reports: list[QuantumReport] = []
        self.serving = Scripted([[*chat.tokenizer.encode(text, add_special_tokens=False), end] for text in texts])
        self.serving.fails_at = fails_at
        environment, seeds = ToolArithmetic(), dict[int, int]()
        with tempfile.TemporaryDirectory() as directory:
            spec = SimpleNamespace(
                back_off=NEVER, config=config, epoch=0, directory=Path(directory), groups_dir=Path(directory),
                turn_seed=lambda tid, turn, draw: seeds.setdefault(turn, len(seeds) + 7),
            )  # fmt: skip
            context: Any = SimpleNamespace(
                environment=environment, spec=spec, journal=Journal(Path(directory) / "journal"),
                epoch=SimpleNamespace(check=lambda: None), report=self.reports.append, name="w", worker=None,
            )  # fmt: skip
            engine: Any = SimpleNamespace(
                serving=self.serving,
                generate=lambda key, request: self.serving.generate(request),
                contended=contended,
                turn_ended=lambda: None,
            )
            self.rounds = 0
            while True:
                runner = QuantumRunner(context, engine)
                runner.chat = chat
                self.rounds += 1
                self.state: TrajectoryState = asyncio.run(runner.run("key", TID, QUESTION))
                if self.state.phase is None:
                    break
            runner = QuantumRunner(context, engine)
            self.state = runner.state(TID, QUESTION)

    def content(self) -> Any:
        """Everything of the trajectory that does not depend on when it ran."""
        t = self.state.trajectory(epoch=0)
        rows = [
            {k: v for k, v in row.items() if k not in ("generate_s", "queued_s", "tool_s", "cached_tokens")}
            for row in t.turns
        ]
        arrays = [each.tolist() for each in (t.token_ids, t.is_action, t.behaviour_logprob, t.kv_version)]
        episode = self.state.episode()
        turns = [(turn.text, turn.calls, turn.num_tokens, turn.token_ids) for turn in episode.turns]
        return arrays, rows, turns, t.end_reason, t.failure, t.failure_detail


@given(
    chunk=st.integers(3, 130),
    max_new=st.sampled_from([84, 85, 120, 200]),
    room=st.sampled_from([100, 120, 300, 1000]),
    first=st.sampled_from(["", "let me see ", "x" * 30]),
    answer=st.text("0123456789 <>/{}", max_size=40),
)
def test_parts_add_up_to_the_turn(chat: Any, chunk: int, max_new: int, room: int, first: str, answer: str) -> None:
    texts, prompt = [first + CALL, CALL, answer], len(chat.prompt_ids(list(QUESTION.messages)))
    limits = {"max_new_tokens": max_new, "max_context_tokens": prompt + room, "max_turns": 3}
    whole = Played(chat, texts, **limits)
    parts = Played(chat, texts, chunk_tokens=chunk, **limits)
    assert parts.content() == whole.content()
    for request in parts.serving.requests:
        assert request.max_new_tokens <= chunk
        assert request.seed == next(r.seed for r in whole.serving.requests if r.turn == request.turn)
    lengths = [len(r["token_ids"]) for r in parts.state.records if r["kind"] == "generation"]
    assert sum(lengths) == parts.state.trajectory(epoch=0).num_action_tokens and max(lengths) <= chunk
    assert [report.unfinished for report in parts.reports] == [
        record.get("stop_reason") == "parked" for record in parts.state.records
    ]
    event(f"{len(parts.state.records)} records, {whole.state.end}")


def test_a_call_over_three_parts_is_one_call(chat: Any) -> None:
    played = Played(chat, [CALL, "3"], chunk_tokens=len(CALL) // 2 - 3, max_new_tokens=200)
    kinds = [(r["kind"], r["turn"], r.get("stop_reason"), len(r.get("calls", ()))) for r in played.state.records]
    assert kinds == [
        ("generation", 0, "parked", 0), ("generation", 0, "parked", 0), ("generation", 0, "stop", 1),
        ("action", 0, None, 0), ("generation", 1, "stop", 0),
    ]  # fmt: skip
    assert played.rounds == 5, "it gave its slot back after each part"
    versions = played.state.trajectory(epoch=0).weight_version
    assert sorted(set(versions.tolist())) == [-1, 1, 2, 3, 4], "each token has the version of its own part"


def test_it_keeps_its_slot_while_nobody_waits_for_one(chat: Any) -> None:
    played = Played(chat, [CALL, "3"], chunk_tokens=10, max_new_tokens=200, contended=False)
    assert played.rounds == 3 and len(played.reports) > 8
    assert all(report.goes_on for report in played.reports if report.unfinished)


def test_an_engine_that_fails_in_mid_turn_is_asked_for_the_rest(chat: Any) -> None:
    whole = Played(chat, [CALL, "3"], max_new_tokens=200)
    failed = Played(chat, [CALL, "3"], max_new_tokens=200, chunk_tokens=20, fails_at=2)
    assert failed.state.retried == [FailureClass.ENGINE]
    assert failed.content() == whole.content()
    assert [request.generated for request in failed.serving.requests[:4]] == [0, 20, 40, 40]


@pytest.mark.parametrize("value", [0, -5, 2.5, "many", True])
def test_values_that_are_no_number_of_tokens_are_named(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.chunk_tokens"):
        config_from_dict({"rollout": {"chunk_tokens": value}})


@pytest.mark.parametrize(("tokens", "effective"), [(63, True), (64, False), (10_000, False)])
def test_a_chunk_that_no_turn_reaches_is_said_to_have_no_effect(tokens: int, effective: bool) -> None:
    config = config_from_dict({"rollout": {"chunk_tokens": tokens, "max_new_tokens": 64}})
    told = [each.message for each in ignored_settings(config)]
    assert told == ([] if effective else [
        f"rollout.chunk_tokens={tokens} has no effect here; needed is a rollout.chunk_tokens below rollout.max_new_tokens"
    ])  # fmt: skip


class Forgetful(TransformersEngine):
    """An engine of one's own that does not say that it continues turns."""

    continues_turns = False

    def __init__(self, *, model_dir: Path, slots: int, max_context_tokens: int, version: int) -> None:
        super().__init__(model_dir, slots=slots, max_context_tokens=max_context_tokens, version=version)


def test_an_engine_that_would_draw_the_same_noise_again_is_refused() -> None:
    config = config_from_dict({"rollout": {"engine": f"{__name__}:Forgetful", "chunk_tokens": 8}})
    with pytest.raises(
        ConfigError, match=r"rollout.chunk_tokens: '.*:Forgetful' does not declare .* continues_turns = True"
    ):
        check_engine(config)
    check_engine(config.model_copy(update={"rollout": config.rollout.model_copy(update={"chunk_tokens": None})}))
