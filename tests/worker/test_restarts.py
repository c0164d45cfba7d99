"""With ``staleness.versions=one`` a trajectory whose engine serves another version begins again, and no token of before is left."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from libra.config import config_from_dict
from libra.envs.retries import NEVER
from libra.envs.tool_arithmetic import ToolArithmetic
from libra.rollout.chat_format import load_chat_format
from libra.store.trajectory_journal import Journal
from libra.types import FailureClass, StopReason, TrajectoryId, TurnOutput, TurnRequest
from libra.worker import quanta
from libra.worker.quanta import QuantumRunner

TID = TrajectoryId(0, 0, 0)
QUESTION = ToolArithmetic().prompt("train", 3)
TEXTS = ('<tool_call>{"name": "calculator", "arguments": {"expression": "1 + 2"}}</tool_call>', "3")


class Changing:
    """An engine that calls a tool and then answers; each generation is by the next of ``versions``, a list: by several."""

    def __init__(self, chat: Any, versions: list[Any]) -> None:
        end = next(iter(chat.stop_ids))
        self.turns = [[*chat.tokenizer.encode(text, add_special_tokens=False), end] for text in TEXTS]
        self.versions, self.seeds = versions, list[int]()

    @property
    def engine(self) -> Any:
        at = self.versions[0]
        return SimpleNamespace(version=at[0] if isinstance(at, list) else at)

    async def pull(self) -> None: ...

    async def generate(self, request: TurnRequest) -> TurnOutput:
        self.seeds.append(request.seed)
        ids, at = np.array(self.turns[request.turn], np.int32), self.versions.pop(0)
        made = np.resize(at, len(ids)).astype(np.int32)
        return TurnOutput(ids, np.zeros(len(ids), np.float32), made, made, StopReason.STOP)

    def forget(self, trajectory_id: str) -> None: ...


@pytest.mark.parametrize(
    ("versions", "one", "kept", "restarts"),
    [
        ([4, 4], True, {4}, 0),
        ([4, 5, 5], True, {5}, 1),  # its engine was lost after the first turn, and another serves 5
        ([4, [4, 5], 5, 5], True, {5}, 1),  # weights changed within a turn
        ([4, 5, 6, 6], True, {6}, 2),
        ([4, 5], False, {4, 5}, 0),
    ],
)
def test_it_ends_with_one_version(
    versions: list[Any], one: bool, kept: set[int], restarts: int, random_model: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(quanta, "priority_here", lambda worker, key: (0,))
    monkeypatch.setattr(quanta, "still_wanted", lambda worker, key: True)
    given = {"run": {"eta": 1}, "staleness": {"versions": "one" if one else "many"}, "rollout": {"max_new_tokens": 200}}
    config = config_from_dict(given)
    spec = SimpleNamespace(
        back_off=NEVER,
        config=config,
        epoch=0,
        directory=tmp_path,
        groups_dir=tmp_path,
        turn_seed=lambda tid, turn, draw: 100 * draw + turn,
    )
    context: Any = SimpleNamespace(
        environment=ToolArithmetic(), spec=spec, journal=Journal(tmp_path / "journal"),
        epoch=SimpleNamespace(check=lambda: None), report=lambda report: None, name="w", worker=None,
    )  # fmt: skip
    chat = load_chat_format(random_model, ToolArithmetic().tool_schemas)
    serving = Changing(chat, [*versions])
    engine: Any = SimpleNamespace(
        serving=serving,
        generate=lambda key, request: serving.generate(request),
        contended=True,
        turn_ended=lambda: None,
    )
    phase: Any = ""
    while phase is not None:  # each quantum in a process that knows only the journal
        runner = QuantumRunner(context, engine)
        runner.chat = chat
        phase = asyncio.run(runner.run("key", TID, QUESTION)).phase
    state = QuantumRunner(context, engine).state(TID, QUESTION)
    trajectory = state.trajectory(epoch=0)
    assert set(trajectory.weight_version[trajectory.is_action].tolist()) == kept
    assert [turn.text for turn in state.episode().turns] == [chat.decode(np.array(ids)) for ids in serving.turns]
    assert len(trajectory.turns) == 2 and trajectory.failure is FailureClass.NONE and not trajectory.retried
    assert sum(record["kind"] == "restart" for record in state.records) == restarts == state.draw
    assert len(set(serving.seeds)) == len(serving.seeds) and serving.seeds[-1] == 100 * restarts + 1
