"""A gateway in a process of its own, for its CPU time: real HTTP, conversations and token ids, and
a model that answers at once.

``python -m benchmarks.live.gateway_server MODEL_DIR SESSIONS`` prints its port and the sessions'
tokens as a line of JSON. Each line of its standard input is answered with its CPU seconds so far
and the number of requests; the end of the input ends it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.live.gateway_agents import CALCULATOR
from libra.agents.agent_session import Ended, Session
from libra.agents.conversation import Conversation
from libra.agents.gateway import Gateway
from libra.agents.messages import Reply, forms, reply
from libra.envs.tool_call_formats import parse_hermes
from libra.rollout.chat_format import load_chat_format
from libra.rollout.conversation_format import ConversationFormat

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"line": "k -> d: + 5", "value": 17}}\n</tool_call>'
CONTEXT = 1 << 16


async def model(session: Session, chat: Any, renderer: ConversationFormat) -> None:
    """Answer every request of a session with a call, in the tokens of the model's own format."""
    conversation = Conversation(renderer)
    ids = np.array([*chat.text_ids(CALL), chat.end_of_turn_id], np.int32)
    zeros, versions = np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32)
    lengths: list[int] = []
    for turn in count():
        pending = await session.next(3600)
        if isinstance(pending, Ended):
            return
        request = pending.request
        asked = conversation.prompt(request.messages, request.tools, request.template_args, request.tools_text)
        before = lengths[asked.parent] if asked.parent >= 0 else 0
        assert conversation.ask(asked.parent, asked.tail, asked.tools) == turn
        name = f"{session.name}-{turn}"
        message = reply(chat.decode(ids), parse_hermes, lambda i, name=name: f"{name}-{i}")  # type: ignore[misc]
        conversation.answer(turn, *forms(message, None), last=int(ids[-1]))
        lengths.append(before + len(asked.ids) + len(ids))
        session.answered(pending, Reply(message, "tool_calls", lengths[-1], ids, zeros, versions, name))


async def main(model_dir: Path, sessions: int) -> None:
    chat = load_chat_format(model_dir, [CALCULATOR])
    gateway = Gateway()
    await gateway.start()
    opened = [gateway.open(f"session-{i}", CONTEXT) for i in range(sessions)]
    renderer = ConversationFormat(chat)
    models = [asyncio.create_task(model(session, chat, renderer)) for _, session in opened]
    print(json.dumps({"port": gateway.port, "tokens": [token for token, _ in opened]}), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps({"cpu_s": time.process_time(), "requests": gateway.counts["requests"]}), flush=True)
        for each in models:
            if each.done():
                each.result()
    await gateway.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
