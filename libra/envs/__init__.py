"""Tasks: the interface `Environment`, its prompts, tools and rewards, and `FunctionEnvironment`."""

from __future__ import annotations

from libra.envs.environment import ENVIRONMENTS, Environment, make_environment
from libra.envs.function_environment import FunctionEnvironment
from libra.envs.grader import run_grader
from libra.envs.rewards import REWARDS, make_reward
from libra.envs.state import StateCopy, begin_state, check_state, decode_state, has_state, has_steps, run_step
from libra.envs.tool import SessionKind, Tool, session, tool
from libra.envs.tool_call_formats import TOOL_FORMATS, parse_hermes, parse_qwen3_coder
from libra.envs.tool_calls import hung_threads, run_action

__all__ = [
    "ENVIRONMENTS", "REWARDS", "TOOL_FORMATS", "Environment", "FunctionEnvironment", "SessionKind", "StateCopy", "Tool",
    "begin_state", "check_state", "decode_state", "has_state", "has_steps", "hung_threads", "make_environment", "make_reward",
    "parse_hermes", "parse_qwen3_coder", "run_action", "run_grader", "run_step", "session", "tool",
]  # fmt: skip
