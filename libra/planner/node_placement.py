"""Engines and ranks of the trainer by node.

With degrees that divide one another and the node, placing the largest first wastes nothing: the free room on a node is a
multiple of every smaller degree, as long as at most one node is partly filled by training ranks. The trainer therefore
takes the smaller last node first, and whole nodes after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from libra.errors import PlanError


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """``num_nodes`` nodes that are alike: GPUs for training, engines by TP degree, GPUs that are free."""

    num_nodes: int
    train_gpus: int
    engines: Mapping[int, int]
    free_gpus: int


def placed(num_gpus: int, gpus_per_node: int, train_gpus: int, engines: Mapping[int, int]) -> tuple[NodeGroup, ...]:
    """Nodes by content, the trainer's first.

    Raises
    ------
    PlanError
        More GPUs are needed than given, or a degree does not divide the node.
    """
    wanted = train_gpus + sum(tp * number for tp, number in engines.items())
    if wanted > num_gpus:
        raise PlanError(
            f"planner.num_gpus: {wanted} GPUs are needed, {num_gpus} are available; type planner.num_gpus={wanted}"
        )
    full, rest = divmod(num_gpus, gpus_per_node)
    free = ([rest] if rest else []) + [gpus_per_node] * full
    trained = [0] * len(free)
    left = train_gpus
    for node in range(len(free)):
        trained[node] = min(left, free[node])
        free[node] -= trained[node]
        left -= trained[node]
    held: list[dict[int, int]] = [{} for _ in free]
    for tp in sorted(engines, reverse=True):
        missing = engines[tp]
        for node in range(len(free)):
            here = min(missing, free[node] // tp)
            if here:
                held[node][tp] = here
                free[node] -= here * tp
                missing -= here
        if missing:
            raise PlanError(
                f"TP{tp}: {missing} engines find no node of {gpus_per_node} GPUs with room; degrees have to nest"
            )
    groups: dict[tuple[int, tuple[tuple[int, int], ...], int], int] = {}
    for node in range(len(free)):
        content = (trained[node], tuple(sorted(held[node].items())), free[node])
        groups[content] = groups.get(content, 0) + 1
    return tuple(NodeGroup(number, train, dict(held), room) for (train, held, room), number in groups.items())
