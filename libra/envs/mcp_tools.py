"""Tools of an MCP server beside an environment's own.

Invariants
----------
1. All runs of a process share one server for each command and its variables. The server and its
   processes end with the last environment, or with the process (Linux, `libra.processes.keeper`).
2. A call whose server ended raises `ToolFault`, which the model does not read; the next call starts
   a new server.
3. A call has `TIMEOUT_S`. A server that answers nothing for that time is killed, and the next call
   starts a new server.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import errno
import logging
import os
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from libra.envs.environment import Environment
from libra.envs.tool import Tool
from libra.errors import ConfigError, ToolFault, pip_install
from libra.processes import keeper
from libra.processes.child_environment import child_environment
from libra.untrusted import error_text

logger = logging.getLogger(__name__)

ENV_SETTING = "environment.tools_env"
EXTRA = pip_install("mcp")
START_S = 180.0
TIMEOUT_S = 60.0
"""Wall seconds of a call."""
SLACK_S = 1.0
"""Seconds by which the clock of the caller's event loop may be ahead."""
_servers: dict[tuple[str, tuple[str, ...]], McpServer] = {}
_lock = threading.Lock()


class _Life:
    """One process of a server, as a task, because `mcp` opens and closes a connection in one
    task."""

    def __init__(self, command: str, env: Sequence[str]) -> None:
        self.ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.stop, self.answered_s = asyncio.Event(), 0.0
        self.task = asyncio.ensure_future(self._live(command, env))

    async def _live(self, command: str, env: Sequence[str]) -> None:
        from mcp import Client, StdioServerParameters

        try:
            given = child_environment(env, where=ENV_SETTING)
            words = ["-I", "-S", keeper.__file__, *_found(shlex.split(command), given)]
            async with Client(StdioServerParameters(command=sys.executable, args=words, env=given)) as client:
                self.ready.set_result(client)
                await self.stop.wait()
        except Exception as error:  # boundary to the server's command
            if self.ready.done():
                raise
            self.ready.set_exception(error)

    async def end(self) -> None:
        """End the process; `mcp` kills a process that does not read."""
        self.stop.set()
        if not self.ready.done():
            self.task.cancel()
        with contextlib.suppress(Exception, asyncio.CancelledError):
            await asyncio.wait_for(asyncio.shield(self.task), 15.0)


class McpServer:
    """A server of one command, started at the first request; its own thread talks to the server."""

    def __init__(self, command: str, env: Sequence[str] = ()) -> None:
        self.command, self.env, self.users = command, tuple(env), 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="libra-mcp", daemon=True).start()
        self._life: _Life | None = None
        self._ending: set[asyncio.Task[None]] = set()

    def tools(self) -> list[Any]:
        """The server's tools as `mcp` lists them; ConfigError if the server cannot start."""
        asked = self._submit(self._list())
        try:
            return list(asked.result(START_S))
        except Exception as error:  # boundary to the server's command
            asked.cancel()
            raise ConfigError(
                f"environment.tools.mcp: {self.command!r} offers no tools ({error_text(error)}); type the command of a server that "
                "speaks MCP on its standard input and output"
            ) from error

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A tool's text; RuntimeError with the text if the tool failed, ToolFault if the server
        did."""
        return str(await asyncio.wrap_future(self._submit(self._call(name, arguments, time.monotonic()))))

    def close(self) -> None:
        """End the server."""
        with contextlib.suppress(Exception):  # it may have ended by itself, in any way
            self._submit(self._end_all()).result(20.0)
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _submit(self, work: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _list(self) -> list[Any]:
        client = await asyncio.shield(self._alive().ready)
        found, cursor = [], None
        while True:
            page = await client.list_tools(cursor=cursor)
            found += page.tools
            if (cursor := page.next_cursor) is None:
                return found

    async def _call(self, name: str, arguments: Mapping[str, Any], began_s: float) -> str:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        life = self._alive()

        async def asked() -> Any:
            return await (await asyncio.shield(life.ready)).call_tool(name, dict(arguments))

        calling = asyncio.ensure_future(asked())
        try:
            await asyncio.wait({calling})  # cancelling the call itself would wait for the server
            result = calling.result()
        except MCPError as error:
            if error.error.code != CONNECTION_CLOSED:  # about the request: the model reads it
                life.answered_s = time.monotonic()
                raise RuntimeError(error.error.message) from error
            self._lose(life)
            raise ToolFault(f"the MCP server {self.command!r} ended during a call") from error
        except asyncio.CancelledError:
            if time.monotonic() >= began_s + TIMEOUT_S - SLACK_S and life.answered_s < began_s and self._life is life:
                logger.warning("the MCP server %r answered nothing for %g s, and is killed", self.command, TIMEOUT_S)
                self._lose(life)
            raise
        except Exception as error:  # boundary to the server's command
            raise ToolFault(f"the MCP server {self.command!r} failed: {error_text(error)}") from error
        finally:
            calling.cancel()
        life.answered_s = time.monotonic()
        text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
        if result.is_error:
            raise RuntimeError(text)
        return text

    def _lose(self, life: _Life) -> None:
        if self._life is life:
            self._life = None
            ending = asyncio.ensure_future(life.end())
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    def _alive(self) -> _Life:
        if self._life is not None and (self._life.stop.is_set() or self._life.task.done()):
            self._lose(self._life)
        self._life = self._life or _Life(self.command, self.env)
        return self._life

    async def _end_all(self) -> None:
        if self._life is not None:
            self._lose(self._life)
        await asyncio.gather(*self._ending)


def _found(words: Sequence[str], env: Mapping[str, str]) -> Sequence[str]:
    if not words or shutil.which(words[0], path=env.get("PATH", os.defpath)) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), *words[:1])
    return words


def with_mcp_tools(environment: Environment, command: str, env: Sequence[str] = ()) -> Environment:
    """A copy of ``environment`` with the tools of a server beside its own.

    The server gets the variables named in ``env`` beside `libra.processes.child_environment`.
    ConfigError if the package is not installed, a variable of ``env`` is not set, the server cannot
    start, or two tools have one name.
    """
    try:
        import mcp  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"environment.tools.mcp: the package mcp is not installed ({error}); type {EXTRA}") from error
    child_environment(env, where=ENV_SETTING)
    key = (command, tuple(env))
    with _lock:
        server = _servers.setdefault(key, _servers.get(key) or McpServer(command, env))
        server.users += 1

    def leave() -> None:
        """End the server if this environment was its last."""
        with _lock:
            server.users -= 1
            if last := server.users == 0:
                del _servers[key]
        if last:
            server.close()

    try:
        offered = server.tools()
        twice = {each.name for each in environment.tools} & {each.name for each in offered}
        if twice:
            raise ConfigError(
                f"environment.tools.mcp: {command!r} and {environment.name} have {min(twice)!r}; rename one"
            )
    except BaseException:
        leave()
        raise
    environment, own = copy.copy(environment), environment.close

    async def close() -> None:
        await own()
        await asyncio.to_thread(leave)

    environment.tools = (*environment.tools, *(_tool(server, each) for each in offered))
    environment.close = close  # type: ignore[method-assign]
    return environment


def _tool(server: McpServer, offered: Any) -> Tool:
    async def call(**arguments: Any) -> str:
        return await server.call(offered.name, arguments)

    # JSON schema also allows ``true`` for an argument.
    given = dict(offered.input_schema)
    given["properties"] = {
        name: each if isinstance(each, Mapping) else {} for name, each in given.get("properties", {}).items()
    }
    schema = {"name": offered.name, "description": offered.description or "", "parameters": given}
    return Tool(offered.name, call, {"type": "function", "function": schema}, timeout_s=TIMEOUT_S)
