"""Of a trajectory that has ended a worker keeps that it has, and no tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from libra.events.reports import FoundEndedReport
from libra.testing import FixedTurns
from libra.types import Prompt, TrajectoryId
from libra.worker import quanta
from libra.worker.quanta import QuantumRunner

CONFIG = SimpleNamespace(
    agent=SimpleNamespace(given=False),
    rollout=SimpleNamespace(max_turns=1, max_context_tokens=64, ignore_eos=True),
    trainer=SimpleNamespace(resample=0),
)
PROMPT = Prompt("p", ({"role": "user", "content": "x" * 1000},))
RECORD = {
    "kind": "generation", "turn": 0, "prompt_ids": np.arange(8, dtype=np.int32), "token_ids": np.arange(4, dtype=np.int32),
    "stop_reason": "length", "text": "y", "calls": [],
}  # fmt: skip


def test_an_ended_trajectory_leaves_no_tokens_and_is_still_known_without_its_journal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(quanta, "KEPT_STATES", 3)
    monkeypatch.setattr(quanta, "KEPT_BYTES", 0)  # records of ended ones are not kept for their groups either
    journal: dict[str, list[dict[str, Any]]] = {}
    reports: list[FoundEndedReport] = []
    read = lambda tid, start: journal.get(tid, [])[start:]  # noqa: E731
    context: Any = SimpleNamespace(
        environment=FixedTurns(),
        spec=SimpleNamespace(config=CONFIG, groups_dir=tmp_path),
        journal=SimpleNamespace(read=read),
        report=reports.append,
    )
    runner = QuantumRunner(context, engine=None)
    tids = [TrajectoryId(0, 0, sample) for sample in range(5)]
    for tid in tids:
        journal[str(tid)] = [RECORD]
        state = asyncio.run(runner.run(str(tid), tid, PROMPT))
        assert state.phase is None and len(state.context_ids) == 12
    assert not runner.states
    del journal[str(tids[-1])]
    state = asyncio.run(runner.run("again", tids[-1], PROMPT))
    assert reports[-1] == FoundEndedReport("again", 1, str(state.end)) and state.phase is None
    assert not state.records and not len(state.context_ids)
    assert list(runner._ended) == tids[2:]
    whole = runner.state(tids[0], PROMPT)  # a worker that also grades
    assert len(whole.context_ids) == 12 and whole.prompt == PROMPT
