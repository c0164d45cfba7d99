"""What an environment declares of its sessions: the functions that make, reset and close one, and its limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from libra.errors import ConfigError

TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class SessionKind:
    """How sessions are made, made ready for another trajectory, and closed. Each function may be ``async``; others have a thread.

    Attributes
    ----------
    factory : callable
        ``factory()`` makes one.
    reset : callable, optional
        ``reset(session)`` after each trajectory. None: a session serves one trajectory and is closed.
    close : callable, optional
        ``close(session)``.
    alive : callable, optional
        ``alive(session)`` is false of one that has died; called before each action. None: all are alive.
    most : int or None
        Sessions of a worker at once; further trajectories wait up to ``timeout_s`` for one. None: as many as trajectories need.
    idle : int
        Sessions kept between trajectories; further ones are closed.
    timeout_s : float
        Wall seconds of each call, and of the wait for one.
    lease_s : float
        Seconds without an action after which a lease ends, where ``most`` are leased and another trajectory wants one.
    """

    factory: Callable[[], Any]
    reset: Callable[[Any], Any] | None = None
    close: Callable[[Any], Any] | None = None
    alive: Callable[[Any], Any] | None = None
    most: int | None = None
    idle: int = 8
    timeout_s: float = TIMEOUT_S
    lease_s: float = 900.0

    def __post_init__(self) -> None:
        for name in ("factory", "reset", "close", "alive"):
            value = getattr(self, name)
            if not callable(value) and (name == "factory" or value is not None):
                raise ConfigError(
                    f"session: {name} is {value!r:.80}; it is a function{'' if name == 'factory' else ' or None'}"
                )
        if self.most is not None and self.most < 1:
            raise ConfigError(f"session: most is {self.most!r}; it is a whole number above 0, or None")
        if self.idle < 0 or not self.timeout_s > 0 or not self.lease_s > 0:
            raise ConfigError(
                f"session: idle is {self.idle!r}, timeout_s {self.timeout_s!r} and lease_s {self.lease_s!r}; idle is at least 0, "
                "the others are above 0"
            )


def session(factory: Callable[[], Any], **options: Any) -> SessionKind:
    """The `SessionKind` of a function that makes one; options are its other fields."""
    return SessionKind(factory, **options)
