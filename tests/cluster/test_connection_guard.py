"""Dask's servers against connections that prove nothing: they end soon and are few, and who has the key is served meanwhile."""

import asyncio

from distributed import Scheduler
from distributed.core import rpc
from tornado.httpclient import AsyncHTTPClient

from libra.cluster import connection_guard
from libra.cluster.connection import new_security
from libra.cluster.settings import GUARD

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def with_scheduler(scenario):
    """Run a scenario with a guarded scheduler, and what checks that it serves a client with its key."""

    async def run():
        security = new_security()
        options = {"host": "127.0.0.1", "port": 0, "dashboard_address": "127.0.0.1:0", "preload": [GUARD]}
        async with Scheduler(protocol="tls://", security=security, **options) as scheduler:

            async def served():
                arguments = security.get_connection_args("client")
                async with rpc(scheduler.address, connection_args=arguments) as remote:
                    assert (await remote.identity())["type"] == "Scheduler"

            await scenario(scheduler, served)

    asyncio.run(run())


async def said(port, what):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(what)
    await writer.drain()
    return reader, writer


async def ended(connection):
    try:
        while await connection[0].read(4096):
            pass
    except ConnectionResetError:
        pass
    connection[1].close()


def test_a_handshake_in_single_bytes_has_one_deadline(monkeypatch, caplog):
    monkeypatch.setattr(connection_guard, "HANDSHAKE_S", 0.05)

    async def scenario(scheduler, served):
        for start in (b"", b"\x16", b"\x16\x03\x01\x02\x00\x01"):
            await ended(await said(scheduler.port, start))
        monkeypatch.setattr(connection_guard, "HANDSHAKE_S", 60.0)
        await served()

    with_scheduler(scenario)
    assert caplog.text.count("without its key was closed: no proof within 0.05 s") == 1, "one warning, not three"


def test_a_connection_that_its_own_peer_closes_is_no_warning(caplog):
    async def scenario(scheduler, served):
        for start in (b"", b"", b"\x16\x03\x01\x02\x00\x01"):
            reader, writer = await said(scheduler.port, start)
            writer.write_eof()
            await ended((reader, writer))
        await ended(await said(scheduler.port, b"GET / HTTP/1.1\r\n\r\n"))
        await served()

    with_scheduler(scenario)
    (warned,) = (record for record in caplog.records if record.name == connection_guard.__name__)
    assert "without its key was closed: [SSL: HTTP_REQUEST]" in warned.getMessage()  # the first that was refused


def test_silent_connections_keep_nobody_out(monkeypatch):
    monkeypatch.setattr(connection_guard, "MAX_UNPROVEN", 3)

    async def scenario(scheduler, served):
        silent = [await said(scheduler.port, b"") for _ in range(8)]
        await served()
        for each in silent[:5]:  # the oldest were closed
            await ended(each)
        await served()

    with_scheduler(scenario)


def test_pages_are_served_while_others_ask_for_nothing(monkeypatch):
    monkeypatch.setattr(connection_guard, "MAX_PAGES", 3)

    async def scenario(scheduler, served):
        port = scheduler.http_server.port
        silent = [await said(port, b"GET /health HTTP/1.1\r\nX: ") for _ in range(8)]
        for each in silent[:5]:  # the oldest were closed
            await ended(each)
        answer = await AsyncHTTPClient().fetch(f"http://127.0.0.1:{port}/health")
        assert answer.body == b"ok"
        evil = {"headers": {"Origin": "http://evil.example"}, "raise_error": False}
        refused = await AsyncHTTPClient().fetch(f"http://127.0.0.1:{port}/health", **evil)
        assert refused.code == 403
        assert b"cluster.dashboard_names=[NAME]" in refused.body

    with_scheduler(scenario)


def test_a_request_has_one_deadline(monkeypatch):
    monkeypatch.setattr(connection_guard, "REQUEST_S", 0.05)

    async def scenario(scheduler, served):
        body = b"POST /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n1"
        for start in (b"", b"GET /health HTTP/1.1\r\nX: ", body):
            await ended(await said(scheduler.http_server.port, start))

    with_scheduler(scenario)
