"""Runs programs that a model wrote, confined as well as the machine allows.

`Session` is one sandbox in which programs run one after another; `run_program` runs one and throws the sandbox away. `available`
says which `Level` works here, and why no better one does.
"""

from libra.envs.sandbox.levels import MEGABYTE, Level, Limits, available
from libra.envs.sandbox.session import Finished, SandboxFailed, Session

__all__ = ["MEGABYTE", "Finished", "Level", "Limits", "SandboxFailed", "Session", "available"]
