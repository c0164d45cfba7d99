"""Checks of the section `agent` against others."""

from __future__ import annotations

from collections.abc import Iterator

from libra.config.models import RunSections

GATEWAY_VARIABLES = frozenset({
    "OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "LIBRA_GATEWAY_URL",
})  # fmt: skip
"""Variables that each agent is given for itself (`libra.agents.gateway`)."""


def agent_contradictions(config: RunSections) -> Iterator[str]:
    """A message for each contradiction."""
    agent, rollout = config.agent, config.rollout
    if agent.function is not None and agent.command is not None:
        yield "agent.command: there is an agent.function, and a trajectory has one agent; leave either out"
    if not agent.given:
        return
    if set_here := sorted(set(agent.env) & GATEWAY_VARIABLES):
        yield f"agent.env: {set_here[0]} is what agents find the model by, and set for each of them; leave it out"
    if rollout.ignore_eos:
        yield (
            "rollout.ignore_eos: an agent reads turns that end by themselves; type rollout.ignore_eos=false, or leave "
            "agent.function and agent.command out"
        )
    if agent.idle_s > agent.timeout_s:
        limit = f"agent.timeout_s={agent.timeout_s:g}"
        yield f"agent.idle_s: {agent.idle_s:g} is never reached with {limit}; type agent.idle_s={agent.timeout_s:g}"
    if config.cluster.tool_workers_most is not None:
        yield (
            "cluster.tool_workers_most: an agent lives on its tool worker while it waits for the model, so that none can be ended; "
            "type cluster.tool_workers_most=null, and as many cluster.tool_workers as you want"
        )
    if config.distil.teacher is not None:
        yield (
            "distil.teacher: it scores trajectories of one conversation, and an agent may have several; leave agent.function and "
            "agent.command out"
        )
    if config.trainer.routes != "recompute":
        yield (
            "trainer.routes: replay needs trajectories of one conversation, and an agent may have several; type "
            "trainer.routes=recompute"
        )
