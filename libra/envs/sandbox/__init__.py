"""Runs programs that a model wrote, confined as well as the machine allows.

`Session` is one sandbox in which programs run one after another. `available` says which `Level` works on this machine and why no
better one does; `level_for` gives the level of a setting.
"""

from libra.envs.sandbox.isolation import available, level_for
from libra.envs.sandbox.levels import MEGABYTE, Level, Limits
from libra.envs.sandbox.session import Finished, SandboxFailed, Session

__all__ = ["MEGABYTE", "Finished", "Level", "Limits", "SandboxFailed", "Session", "available", "level_for"]
