"""Connections and requests that are too many, too long, or in pieces."""

import asyncio
import json
import threading
from functools import partial

import pytest

pytest.importorskip("httptools", reason="the extra `agents` is not installed")
pytest.importorskip("httpx2", reason="httpx2 is not installed")

from gateway_place import CHAT, made, placed, taken

from libra.agents.agent_session import LONG, by_size
from libra.agents.messages import Message


async def connected(here, said=b""):
    reader, writer = await asyncio.open_connection(here.gateway.host, here.gateway.port)
    writer.write(said)
    await writer.drain()
    return reader, writer


async def end_of(line):
    try:
        return await asyncio.wait_for(line[0].read(), 30)
    except ConnectionResetError:
        return b""


@placed(max_connections=2)
async def test_an_idle_connection_gives_way_and_busy_ones_do_not(here):
    idle = await connected(here)
    busy = [await connected(here, b"POST /t/") for _ in range(2)]
    assert await end_of(idle) == b""
    assert b" 503 " in await end_of(await connected(here))
    for line in busy:
        line[1].transport.abort()
    while here.gateway.connections:  # noqa: ASYNC110  a connection announces its end to nobody
        await asyncio.sleep(0)
    assert (await here.post("/v1/chat/completions", CHAT)).status_code == 200


@pytest.mark.parametrize("before", [b"", b"GET /nowhere HTTP/1.1\r\nhost: x\r\n\r\n"])
@placed()
async def test_a_head_that_does_not_end_ends_its_connection(here, before):
    line = await connected(here, before)
    if before:
        await line[0].readuntil(b"}}")
    line[1].write(b"POST /v1/models HTTP/1.1\r\nhost: x\r\n" + b"x: y\r\n" * 20_000)
    assert b"200 OK" not in await end_of(line)


def request_of(here, path, body=b"", *, method="POST", version="1.1", **headers):
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in {"host": "x", **headers}.items()]
    lines += [f"content-length: {len(body)}"] if body else []
    head = "\r\n".join([f"{method} /t/{here.token}{path} HTTP/{version}", *lines, "", ""])
    return head.encode() + body


@placed(script=False)
async def test_a_request_before_the_last_answer_is_dropped_and_its_connection_ends(here):
    reader, writer = await connected(here)
    chat = json.dumps(CHAT).encode()
    models = request_of(here, "/v1/models", method="GET")
    writer.write(2 * models + request_of(here, "/v1/chat/completions", chat) + 300 * models)
    pending = await taken(here)
    here.session.answered(pending, made(Message("assistant", "the first")))
    answer = await asyncio.wait_for(reader.read(), 30)
    assert answer.count(b"max_model_len") == 2 and answer.rindex(b"max_model_len") < answer.index(b"the first")
    assert answer.count(b"HTTP/1.1 200 OK") == 3 and b"connection: close" in answer
    writer.close()


@placed(script=False, heartbeat_s=0.02)
async def test_old_clients_and_ones_that_ask_before_they_send_are_answered(here):
    chat = json.dumps(CHAT).encode()
    line = await connected(here, request_of(here, "/v1/chat/completions", chat, version="1.0"))
    pending = await taken(here)
    await line[0].readuntil(b"\r\n\r\n\n")  # a sign of life
    here.session.answered(pending, made(Message("assistant", "late")))
    assert json.loads(await end_of(line))["choices"][0]["message"]["content"] == "late"
    whole = request_of(here, "/reward", b'{"reward": 1}', expect="100-continue", connection="close")
    head, _, body = whole.partition(b"\r\n\r\n")
    line = await connected(here, head + b"\r\n\r\n")
    assert await line[0].readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    line[1].write(body)
    assert b"200 OK" in await end_of(line) and here.session.reward == 1
    upgrade = request_of(here, "/reward", b'{"reward": 2}', connection="Upgrade, HTTP2-Settings", upgrade="h2c")
    assert b'"param":"upgrade"' in await end_of(await connected(here, upgrade)) and here.session.reward == 1
    hello, length = b"\x16\x03\x01\x02\x00\x01\x00", b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n"
    for noise in (hello, b"GET / HTTP/9.9\r\n\r\n", length):
        assert b"200 OK" not in await end_of(await connected(here, noise))


async def test_short_work_takes_no_thread_and_long_work_one_of_two():
    assert await by_size(LONG - 1, threading.get_ident) == threading.get_ident()
    meeting = threading.Barrier(2)  # both threads
    found = await asyncio.gather(*(by_size(LONG, partial(_met, meeting)) for _ in range(8)))
    assert len(set(found)) == 2 and threading.get_ident() not in found


def _met(meeting):
    meeting.wait(60)
    return threading.get_ident()
