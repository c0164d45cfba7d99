"""An MCP server for tests: it adds, fails, and dies."""

import asyncio
import json
import os
import signal
import subprocess

from mcp.server.mcpserver import Context, MCPServer

WIRE = os.dup(1)  # the server gives its standard output to `mcp` alone
server = MCPServer("calculator")


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def fail() -> str:
    """Fails."""
    raise ValueError("it always does")


@server.tool()
def pid() -> int:
    """The number of its process."""
    return os.getpid()


@server.tool()
def variable(key: str) -> str:
    """A variable of its environment."""
    return os.environ.get(key, "none")


@server.tool()
def freeze() -> str:
    """Stops the server's process."""
    os.kill(os.getpid(), signal.SIGSTOP)
    return "thawed"


@server.tool()
async def nonsense(context: Context) -> str:
    """Answers with what is no result."""
    answer = {"jsonrpc": "2.0", "id": context.request_id, "result": {"content": "nonsense"}}
    os.write(WIRE, json.dumps(answer).encode() + b"\n")
    await asyncio.Event().wait()
    return "over"


@server.tool()
def leave() -> int:
    """Leaves a process in a session of its own; the number of that."""
    none = subprocess.DEVNULL
    return subprocess.Popen(["sleep", "600"], start_new_session=True, stdin=none, stdout=none, stderr=none).pid


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


if __name__ == "__main__":
    server.run()
