"""Tasks: prompts, tools and rewards. `Environment` is the seam; `FunctionEnvironment` makes one from plain
functions.
"""

from __future__ import annotations

from libra.envs.actions import hung_threads, run_action
from libra.envs.environment import Environment, parse_hermes
from libra.envs.functional import FunctionEnvironment
from libra.envs.grading import run_grader
from libra.envs.registry import ENVIRONMENTS, make_environment
from libra.envs.tool import Tool, tool

__all__ = [
    "ENVIRONMENTS",
    "Environment",
    "FunctionEnvironment",
    "Tool",
    "hung_threads",
    "make_environment",
    "parse_hermes",
    "run_action",
    "run_grader",
    "tool",
]
