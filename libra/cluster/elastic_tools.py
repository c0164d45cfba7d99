"""Tool workers that are started where actions wait, and ended where they idle (``cluster.tool_workers_most``).

Local clusters and those of Slurm are a `distributed.SpecCluster` beside their scheduler: a worker is started by adding its
description, and ended by taking it away. Who decides is `libra.scheduler.tool_workers`, in the scheduler.
"""

from __future__ import annotations

import logging
from typing import Any

from libra.config import RunConfig

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks."""


def split_off(specs: dict[str, Any], least: int) -> dict[str, Any]:
    """Take the descriptions of tool workers beyond the first ``least`` out of ``specs``, and return them."""
    names = [name for name in specs if name.startswith("tool-") and int(name.removeprefix("tool-")) >= least]
    return {name: specs.pop(name) for name in names}


class ElasticTools:
    """The tool workers of one cluster beyond the first ``least``; ``reserve`` describes those that are not started."""

    def __init__(self, cluster: Any, reserve: dict[str, Any], least: int) -> None:
        self._cluster, self._reserve = cluster, reserve
        self._least, self._most = least, least + len(reserve)

    async def look(self) -> bool:
        """Follow what the scheduler orders now; whether descriptions of workers have changed."""
        plugin = self._cluster.scheduler.plugins.get("libra")
        if plugin is None:  # no run has come yet
            return False
        order = plugin.trajectories.tool_workers.look(self._least, self._most)
        if order is None:
            return False
        specs: dict[str, Any] = self._cluster.worker_spec
        if order.give_up and order.give_up in specs:
            self._reserve[order.give_up] = specs.pop(order.give_up)  # first: nothing may start it again
            await self._cluster.scheduler.retire_workers(names=[order.give_up], close_workers=True, remove=True)
            return True
        wanted, there = order.ordered, sum(name.startswith("tool-") for name in specs)
        for name in sorted(self._reserve, key=lambda name: int(name.removeprefix("tool-")))[: max(0, wanted - there)]:
            specs[name] = self._reserve.pop(name)
        return True


def most_tools(config: RunConfig) -> int:
    """Tool workers that there may be of a local cluster, or of Slurm."""
    return config.cluster.tool_workers_most or config.cluster.tool_workers
