"""Libra: agentic-RL post-training of language models, run as Dask graphs."""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "Environment",
    "Late",
    "RunSummary",
    "Session",
    "__version__",
    "ask",
    "ask_async",
    "deliver",
    "errors",
    "observation",
    "service",
    "session",
    "tool",
    "train",
]

if TYPE_CHECKING:
    from libra import errors
    from libra.api import train
    from libra.driver.late_delivery import deliver
    from libra.driver.run_console import RunSummary
    from libra.driver.run_session import Session
    from libra.envs.asked_services import ask, ask_async, service
    from libra.envs.environment import Environment
    from libra.envs.tool import session, tool
    from libra.store.observations import observation
    from libra.types import Late


_HOMES = {
    "Environment": "libra.envs.environment",
    "Late": "libra.types",
    "RunSummary": "libra.driver.run_console",
    "Session": "libra.driver.run_session",
    "ask": "libra.envs.asked_services",
    "ask_async": "libra.envs.asked_services",
    "deliver": "libra.driver.late_delivery",
    "errors": "libra.errors",
    "observation": "libra.store.observations",
    "service": "libra.envs.asked_services",
    "session": "libra.envs.tool",
    "tool": "libra.envs.tool",
}
"""Modules of the public names, `train` excepted."""


class _Libra(types.ModuleType):
    """This package; public names are imported at first use, so `import libra` loads no torch or
    Dask. `train` is a property because importing the subpackage of this name would replace the
    function."""

    @property
    def train(self) -> Any:
        """The function `libra.api.train`."""
        from libra.api import train

        return train

    @train.setter
    def train(self, subpackage: types.ModuleType) -> None:
        """Ignore the subpackage that the import system announces; imports from it do not need
        this."""

    def __getattr__(self, name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'libra' has no attribute {name!r}")
        module = importlib.import_module(_HOMES[name])
        return module if name == "errors" else getattr(module, name)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by name, as any module, since functions of a user's script are sent by value."""
        return importlib.import_module, (__name__,)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Libra
