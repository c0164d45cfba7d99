"""The quick start with its calculator behind an MCP server: a tool server's tools are the model's.

The server is this file, with the package ``mcp``; a server of yours is any command that speaks MCP on its standard input and
output::

    python workflows/mcp_tools.py                              # two cores, minutes
    libra run configs/mcp_tools.yaml                           # the same
    libra run configs/mcp_tools.yaml configs/qwen3_4b.yaml --scheduler tls://HOST:8786
    python workflows/mcp_tools.py serve                        # the server alone

Other arguments are settings, as for ``libra run``. Needs ``pip install -e '.[mcp]'``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "mcp_tools.yaml"


def serve() -> None:
    """Serve the calculator until the standard input ends."""
    from mcp.server.mcpserver import MCPServer

    from libra.envs.tool_arithmetic import calculate

    server = MCPServer("calculator")

    @server.tool()
    def calculator(line: str, value: int) -> str:
        """Works out one line, such as "k -> d: + 5", with the value of the name that it begins with."""
        return calculate(line, value)

    server.run()


def main(arguments: list[str]) -> int:
    """Train, and print what was learned."""
    from libra.config import load_config
    from libra.driver.run_session import run
    from libra.errors import LibraError

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("override", nargs="*", help="section.key=value")
    overrides = parser.parse_intermixed_args(arguments).override
    command = f"{sys.executable} {Path(__file__).resolve()} serve"
    try:
        print(run(load_config(CONFIG, overrides=[f"environment.tools={{mcp: {command}}}", *overrides])))
    except LibraError as error:
        print(f"mcp_tools: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        sys.exit(main(sys.argv[1:]))
