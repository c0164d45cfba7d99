"""Agents of frameworks, unmodified and each in a virtual environment of its own: a conversation is one training sequence.

`make test-agents` makes the environments. The model's text is a script, in tokens that no encoder would write, with reasoning that
the template does not show again; all between its tokens and the store's rows is real.
"""

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("httptools", reason="the extra `agents` is not installed")

from agent_worker import Scripted, agent_worker, check_one_sequence, check_tokens, reasons

from libra.types import FailureClass, Prompt, TrajectoryId

pytestmark = pytest.mark.agents

AGENTS = Path(__file__).parents[1] / "support" / "framework_agents"
VENVS = Path(os.environ.get("LIBRA_AGENT_VENVS", "~/.cache/libra/agents")).expanduser()
THINKS = "<think>\nlet me see\n</think>\n\n"


def calls(name, **arguments):
    inside = ", ".join(f'"{key}": "{value}"' for key, value in arguments.items())
    return f'{THINKS}<tool_call>\n{{"name": "{name}", "arguments": {{{inside}}}}}\n</tool_call>'


CALC = calls("calc", expression="6*7")
DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
CONVERSATIONS = [
    ("openai-agents", "streamed", [CALC, f"{THINKS}42"], "42"),
    ("openai-agents", "responses", [CALC, f"{THINKS}42"], "42"),
    ("langgraph", "streamed", [CALC, f"{THINKS}42"], "42"),
    ("pydantic-ai", "plain", [CALC, f"{THINKS}42"], "42"),
    ("mini-swe-agent", "", [calls("bash", command="echo hi"), calls("bash", command=DONE)], "Submitted"),
    ("strands", "", [CALC, f"{THINKS}42"], "42"),
    ("anthropic", "streamed", [CALC, f"{THINKS}42"], "42"),
]


def environment_of(framework):
    """Where a framework is installed; None: beside Libra. Skips where it is nowhere."""
    if framework == "anthropic":
        if importlib.util.find_spec("anthropic") is None:
            pytest.skip("type pip install anthropic")
        return None
    if not (VENVS / framework / ".installed").exists():
        pytest.skip(f"{VENVS / framework} is not there; type make setup-agents")
    return str(VENVS / framework)


def played(framework, mode, texts, chat, odd_ids, place):
    venv = environment_of(framework)
    python = sys.executable if venv is None else "python"
    command = f"{python} {AGENTS}/with_{framework.replace('-', '_')}.py {mode}"
    engine = Scripted(chat, odd_ids, texts)

    async def play():
        async with agent_worker(place, chat, engine, {"command": command, "venv": venv, "idle_s": 120.0}) as worker:
            return await worker.play()

    return asyncio.run(play()), engine


@pytest.mark.parametrize(("framework", "mode", "texts", "result"), CONVERSATIONS)
def test_a_conversation_is_one_sequence(framework, mode, texts, result, conversation_format, odd_ids, tmp_path):
    state, engine = played(framework, mode, texts, conversation_format.chat, odd_ids, tmp_path)
    assert state.failure is FailureClass.NONE, state.detail
    assert result in str(state.episode().result)
    assert reasons(state) == ["first", "continued"]
    check_one_sequence(state, engine)


def test_an_agent_that_rewrites_the_models_turns_has_a_sequence_for_each(conversation_format, odd_ids, tmp_path):
    texts = [CALC, calls("final_answer", answer="42")]
    state, engine = played("smolagents", "", texts, conversation_format.chat, odd_ids, tmp_path)
    assert state.failure is FailureClass.NONE, state.detail
    assert state.episode().result == "42" and reasons(state) == ["first", "edited"]
    assert len(state.trajectory(0).starts) == 1
    check_tokens(state, engine)


ROOT = Path(__file__).parents[2]
FOLDERS = [str(ROOT / "workflows"), str(ROOT / "tests" / "support")]


KINDS = [
    ("single", ["42"], 1.0, None),
    ("multi", ["41", "42?", "42"], 1.0, "Are you sure?"),
    ("tool", [calls("calc", expression="6*7"), "It is 42."], 1.0, "42"),
    ("stateful", [calls("numbered", expression="6*7"), calls("numbered", expression="1"), "42"], 1.0, "call 2: ?"),
]


def rows(kind):
    """What the workflow reads in verifiers' environment."""
    program = [f"{environment_of('verifiers')}/bin/python", f"{FOLDERS[0]}/verifiers_agent.py"]
    command = [*program, "rows", "verifiers_four", json.dumps({"kind": kind}), "2"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(FOLDERS)}
    return [json.loads(line) for line in subprocess.check_output(command, text=True, env=env).splitlines()]


@pytest.mark.parametrize(("kind", "texts", "reward", "shown"), KINDS)
def test_a_rollout_is_one_sequence_with_the_rubrics_reward(
    kind, texts, reward, shown, conversation_format, odd_ids, tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "path", [*FOLDERS, *sys.path])
    example = rows(kind)[0]
    facts = {"environment": "verifiers_four", "args": json.dumps({"kind": kind}), "example": example}
    prompt = Prompt("train-0", tuple(example["prompt"]), facts)
    engine = Scripted(conversation_format.chat, odd_ids, texts)
    agent = {"function": "verifiers_agent:agent", "venv": environment_of("verifiers"), "idle_s": 120.0}

    async def play():
        async with agent_worker(tmp_path, conversation_format.chat, engine, agent) as worker:
            return await worker.play(TrajectoryId(0, 0, 0), prompt)

    state = asyncio.run(play())
    assert state.failure is FailureClass.NONE, state.detail
    assert state.episode().own_reward == reward
    assert reasons(state) == ["first", *["continued"] * (len(texts) - 1)]
    check_one_sequence(state, engine)
    if shown is not None:
        assert shown in conversation_format.chat.decode(engine.requests[-1].context_ids)
