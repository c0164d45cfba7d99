"""Section `agent`: trajectories that a program of the user runs, which asks the model over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from libra.config.own_parts import OwnPart
from libra.config.section import AtLeastOne, Section, VariableNames


class AgentSection(Section):
    """An agent of your own: for each prompt it is started, asks the model over OpenAI's or Anthropic's API, and ends."""

    function: OwnPart | None = None
    """A Python function that is called for each trajectory, as "module:attribute". It takes by name any of prompt, messages, facts,
    base_url, api_key and the columns of a row, and may be async. None: there is no agent, or it is a `command`."""
    command: Annotated[str, Field(min_length=1)] | None = None
    """A command line that is started for each trajectory, e.g. "python agent.py". It reads the task as JSON from its standard
    input; its result is the last line that it prints. None: there is no agent, or it is a `function`."""
    venv: Annotated[Path, Field(strict=False)] | None = None
    """Virtual environment of the agent, whose packages need not fit Libra's. None: Libra's own."""
    env: VariableNames = ()
    """Names of environment variables that agents are given beside those that they always have (docs/security.md), e.g.
    `[SEARCH_API_KEY]`. Each must be set where workers run."""
    timeout_s: Annotated[float, Field(gt=0)] = 3600.0
    """Seconds after its start at which an agent is killed; its trajectory fails with class `timeout`. Time in which the model
    writes or other trajectories have its slot counts."""
    idle_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that an agent may work without asking the model; then it is killed, as by `timeout_s`."""
    concurrency: AtLeastOne = 256
    """Agents that exist at once on one tool worker. Of these, `cluster.tool_slots` may work at once; those that wait for the model
    take no slot."""

    @property
    def given(self) -> bool:
        """Whether there is an agent."""
        return self.function is not None or self.command is not None
