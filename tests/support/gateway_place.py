"""A gateway with one session, and a client of it; the model is a script."""

import asyncio
from contextlib import asynccontextmanager

import httpx2
import numpy as np
from coroutine_tests import inside

from libra.agents.agent_session import Ended, Pending, Session
from libra.agents.gateway import Gateway
from libra.agents.messages import ModelRequest, Reply, reply
from libra.envs.tool_call_formats import parse_hermes
from libra.errors import RequestRefused

TOOLS = [{"type": "function", "function": {"name": "calc", "parameters": {"type": "object", "properties": {}}}}]
CALLS = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "calc", "arguments": {"expression": "6*7"}}\n</tool_call>'


def made(message, number=0):
    ids = np.arange(3, dtype=np.int32) + 10
    finish = "tool_calls" if message.calls else "stop"
    return Reply(message, finish, 7, ids, np.full(3, -0.5, np.float32), np.full(3, 4, np.int32), f"t-{number}")


async def scripted(session, seen):
    """Answer with a call, then with the answer."""
    while True:
        pending = await session.next(60)
        if isinstance(pending, Ended):
            return
        number = len(seen)
        seen.append(pending.request)
        if pending.request.messages and pending.request.messages[-1].text == "too long":
            pending.refuse(RequestRefused("the context is full", "messages", code="context_length_exceeded"))
            continue
        used = any(message.role == "tool" for message in pending.request.messages)
        text = "42" if used or not pending.request.tools else CALLS
        session.answered(pending, made(reply(text, parse_hermes, lambda i, n=number: f"call_{n}_{i}"), number))


class Watched(Session):
    """A session that tells of every request that is taken or left."""

    def __init__(self, name, max_model_len):
        super().__init__(name, max_model_len)
        self.news = asyncio.Queue[Pending]()

    def take(self, request, *, retry):
        pending = super().take(request, retry=retry)
        self.news.put_nowait(pending)
        return pending

    def leave(self, pending: Pending) -> None:
        super().leave(pending)
        self.news.put_nowait(pending)


class Place:
    """A gateway with one session, and a client of it."""

    def __init__(self, gateway):
        self.gateway = gateway
        self.token, _ = gateway.open("train-0-0-0", 512)
        self.session = Watched("train-0-0-0", 512)
        gateway._sessions = dict.fromkeys(gateway._sessions, self.session)
        self.url = gateway.environ(self.token)["LIBRA_GATEWAY_URL"]
        self.base = f"http://{gateway.host}:{gateway.port}"
        self.seen: list[ModelRequest] = []
        self.client = httpx2.AsyncClient(timeout=30)

    async def post(self, path, body, **headers):
        return await self.client.post(self.url + path, json=body, headers=headers)


@asynccontextmanager
async def place(*, script=True, **options):
    gateway = Gateway(**options)
    await gateway.start()
    here = Place(gateway)
    task = asyncio.create_task(scripted(here.session, here.seen)) if script else None
    try:
        yield here
    finally:
        await here.client.aclose()
        if task is not None:
            task.cancel()
        await gateway.close()


def placed(**options):
    return inside(lambda: place(**options))


CHAT = {"model": "policy", "messages": [{"role": "user", "content": "6*7?"}], "tools": TOOLS}


async def taken(here):
    pending = await here.session.next(30)
    assert isinstance(pending, Pending)
    return pending
