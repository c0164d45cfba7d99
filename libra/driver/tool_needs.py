"""What the tools of an environment declare, as the scheduler takes it, and its check before anything runs."""

from __future__ import annotations

from collections.abc import Mapping

from libra.cluster.hardware_inventory import tool_supply
from libra.config import RunConfig
from libra.envs import Environment, Tool
from libra.errors import ConfigError
from libra.facts import ToolNeeds
from libra.policy.leases import Resources
from libra.policy.leases.actions import check_declared


def needs_of(environment: Environment) -> dict[str, ToolNeeds]:
    """What calls of each tool with resources take."""
    return {tool.name: _needs(tool) for tool in environment.tools if tool.declares}


def check_tools(config: RunConfig, environment: Environment, *, started_here: bool) -> None:
    """ConfigError where a declaration makes no sense, or the workers that the run starts can never run a call of it."""
    needs = needs_of(environment)
    if environment.session is not None and config.cluster.tool_workers_most is not None:
        raise ConfigError(
            f"cluster.tool_workers_most: {config.cluster.tool_workers_most}, and trajectories of {environment.name} have sessions, "
            "which live on their tool worker, so that none can be ended; type cluster.tool_workers_most=null"
        )
    largest = None
    if started_here and needs:
        supply = tool_supply(config)
        largest = "tool-0", Resources(0, len(supply.core_ids), supply.mib << 20, supply.gpus)
    quotas = {name: str(quota) for name, quota in config.environment.quotas.items()}
    check_declared(needs, quotas, largest)


def _needs(tool: Tool) -> ToolNeeds:
    elastic = tool.elastic
    if isinstance(elastic, Mapping):
        elastic = {int(cores): float(speed) for cores, speed in elastic.items()}
    elif elastic is not None and not isinstance(elastic, str):
        elastic = tuple(float(speed) for speed in elastic)
    least, most = tool.cores
    return ToolNeeds(least, most, round(tool.memory_gib * 2**30), tool.gpu, elastic, tool.quota, tool.revocable)
