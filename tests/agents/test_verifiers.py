"""The four classes of verifiers, unchanged and in an environment of their own: rollouts are agents, the rubric gives the reward.

`make setup-agents` makes the environment. The model writes a script, in tokens that no encoder would; all between its tokens
and the store's rows is real, and so is verifiers.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra `agents` is not installed")
pytest.importorskip("uvicorn", reason="the extra `agents` is not installed")

from agent_worker import Scripted, agent_worker, check_one_sequence, reasons

from libra.types import FailureClass, Prompt, TrajectoryId
from libra.worker.trajectory_state import TrajectoryState

VENV = Path(os.environ.get("LIBRA_AGENT_VENVS", "~/.cache/libra/agents")).expanduser() / "verifiers"
ROOT = Path(__file__).parents[2]
FOLDERS = [str(ROOT / "workflows"), str(ROOT / "tests" / "support")]


def calls(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


CASES = [
    ("single", ["42"], 1.0, None),
    ("single", ["41"], 0.0, None),
    ("multi", ["41", "42?", "42"], 1.0, "Are you sure?"),
    ("tool", [calls("calc", expression="6*7"), "It is 42."], 1.0, "42"),
    ("stateful", [calls("numbered", expression="6*7"), calls("numbered", expression="1"), "42"], 1.0, "call 2: ?"),
]


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    if not (VENV / ".installed").exists():
        pytest.skip(f"{VENV} is no virtual environment with verifiers; make setup-agents makes it")


def rows(kind: str) -> list[dict[str, Any]]:
    """What the workflow reads in verifiers' environment."""
    command = [str(VENV / "bin" / "python"), f"{FOLDERS[0]}/verifiers_agent.py", "rows", "verifiers_four"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(FOLDERS)}
    done = subprocess.run(
        [*command, json.dumps({"kind": kind}), "2"], check=True, stdout=subprocess.PIPE, text=True, env=env
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(("kind", "texts", "reward", "shown"), CASES)
def test_a_rollout_is_one_sequence_with_the_rubrics_reward(
    kind: str, texts: list[str], reward: float, shown: str | None, conversation_format: Any, odd_ids: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "path", [*FOLDERS, *sys.path])
    example = rows(kind)[0]
    facts = {"environment": "verifiers_four", "args": json.dumps({"kind": kind}), "example": example}
    prompt = Prompt("train-0", tuple(example["prompt"]), facts)
    engine = Scripted(conversation_format.chat, odd_ids, texts)
    agent = {"function": "verifiers_agent:agent", "venv": str(VENV), "idle_s": 120.0}

    async def play() -> TrajectoryState:
        async with agent_worker(tmp_path, conversation_format.chat, engine, agent) as worker:
            return await worker.play(TrajectoryId(0, 0, 0), prompt)

    state = asyncio.run(play())
    assert state.failure is FailureClass.NONE, state.detail
    assert state.episode().own_reward == reward
    assert reasons(state) == ["first", *["continued"] * (len(texts) - 1)]
    check_one_sequence(state, engine)
    if shown is not None:
        assert shown in conversation_format.chat.decode(engine.requests[-1].context_ids)


def test_the_rows_of_a_dataset_are_prompts() -> None:
    read = rows("tool")
    assert [row["answer"] for row in read] == ["42", "42"]
    assert all(isinstance(message["content"], str) for row in read for message in row["prompt"])
