"""The paper's causal prefix tree of tool returns, for its rule and for its forecasts (Libra, arXiv:2606.03077 v2, C-MLFQ).

Includes additions of its released code (NetX-lab/Libra @c51bf84): payload classes at 500 and 5,000 characters, and the 90th
percentile of the last 200 visits. Deviations: payloads are measured in tokens as everywhere here, so the classes are at 125 and
1,250 (four characters each); a tool failed by its status (`FAILED`), not by "error" in its text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from libra.types import ToolStatus

PAYLOAD_EDGES = (125, 1250)
WINDOW = 200
FAILED = frozenset({ToolStatus.ERROR, ToolStatus.TIMEOUT, ToolStatus.MALFORMED})
"""Failures in a tree with two outcomes. A truncated return counts as a success."""


def state_name(tool: str, status: str, payload_tokens: int) -> str:
    """A tool's return as a state of the tree: tool, payload class, outcome."""
    size = sum(payload_tokens > edge for edge in PAYLOAD_EDGES)
    return f"{tool}:{size}:{'failure' if status in FAILED else 'success'}"


class Node:
    """Remaining lengths seen at one prefix of tool returns: all-time mean, and the last ``WINDOW`` of them for P90."""

    __slots__ = ("children", "count", "last", "mean")

    def __init__(self) -> None:
        self.children: dict[str, Node] = {}
        self.count = 0
        self.mean = 0.0
        self.last: list[int] = []

    def visit(self, remaining: int) -> None:
        """Add a trajectory that passed this node, and generated ``remaining`` tokens afterwards."""
        self.count += 1
        self.mean += (remaining - self.mean) / self.count
        self.last.append(remaining)
        del self.last[:-WINDOW]

    def enter(self, states: Iterable[str], remaining: Iterable[int]) -> None:
        """A trajectory's path from here: tokens left after each return."""
        node = self
        for state, left in zip(states, remaining, strict=True):
            below = node.children.get(state)
            if below is None:
                below = node.children[state] = Node()
            node = below
            node.visit(left)

    def p90(self) -> float:
        """90th percentile of the last visits, between the two nearest."""
        ordered = sorted(self.last)
        at = 0.9 * (len(ordered) - 1)
        low = int(at)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (at - low) * (ordered[high] - ordered[low])

    def deepest(self, path: Iterable[str]) -> Node:
        """The last known node on the path from here."""
        node = self
        for state in path:
            child = node.children.get(state)
            if child is None:
                break
            node = child
        return node


def dump(root: Node) -> list[Any]:
    """Nodes in depth-first order, each with the number of its parent; flat, because paths exceed the recursion limit."""
    out: list[Any] = []
    open_nodes: list[tuple[int, str, Node]] = [(-1, "", root)]
    while open_nodes:
        parent, name, node = open_nodes.pop()
        number = len(out)
        out.append([parent, name, node.count, node.mean, list(node.last)])
        open_nodes += [(number, below, child) for below, child in node.children.items()]
    return out


def load(dumped: Any) -> Node:
    """Inverse of `dump`."""
    nodes: list[Node] = []
    for parent, name, count, mean, last in dumped:
        node = Node()
        node.count, node.mean, node.last = int(count), float(mean), [int(left) for left in last]
        nodes.append(node)
        if parent >= 0:
            nodes[parent].children[str(name)] = node
    return nodes[0]
