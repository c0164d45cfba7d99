"""The client of OpenEnv servers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

from examples.games.replayed_game import Observed, ReplayedGame
from libra.errors import ConfigError, EnvironmentFault, pip_install
from libra.untrusted import error_text

EXTRA = pip_install("openenv")
TIMEOUT_S = 60.0
"""Seconds for one request to a server."""


class OpenEnvClient(ReplayedGame):
    """For a server that you start; it does not need the package openenv here. In a configuration:
    ``examples.games.openenv:OpenEnvClient``.

    A reply that is a JSON object is the action; any other reply becomes ``{action: REPLY}``. Each
    trajectory has a session of the server, started with a seed; equal seeds must give equal
    sessions.

    Parameters
    ----------
    url : str
        E.g. "http://127.0.0.1:8000". All workers must reach it.
    action : str
        Field of an action for a plain reply, e.g. "message" or "code".
    observation : str, optional
        Field of an observation for the model, which otherwise reads all of it as JSON.
    args : mapping
        Further arguments of ``reset``.
    system : str
        System message.
    size : int, optional
        Number of training seeds, which then repeat; unlimited by default.

    Raises
    ------
    ConfigError
        The package websockets is not installed, or ``url`` is not an address.
    """

    step_timeout_s = 2 * TIMEOUT_S

    def __init__(
        self, *, url: str, action: str, observation: str | None = None, args: Mapping[str, Any] | None = None,
        system: str = "", size: int | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(size=size, seed=seed)
        self.url, self.action, self.observation = _socket_url(url), action, observation
        self.args, self.system = dict(args or {}), system
        try:
            import websockets.sync.client  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                f"environment.name: the package websockets is not installed ({error}); type {EXTRA}"
            ) from error

    def begin(self, seed: int) -> tuple[Any, str]:
        from websockets.sync.client import connect

        try:
            opened = ExitStack()
            game = _Session(opened, opened.enter_context(connect(self.url, open_timeout=TIMEOUT_S, max_size=2**26)))
        except Exception as error:  # boundary to the server
            raise EnvironmentFault(
                f"openenv: {self.url} does not answer ({error_text(error)}); start the server"
            ) from error
        return game, self._text(self._ask(game, "reset", {"seed": seed, **self.args}))

    def act(self, game: Any, reply: str) -> Observed:
        answer = self._ask(game, "step", self._action(reply))
        return Observed(self._text(answer), float(answer.get("reward") or 0.0), bool(answer.get("done")))

    def end(self, game: Any) -> None:
        game.opened.close()

    def _ask(self, game: Any, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            game.socket.send(json.dumps({"type": kind, "data": dict(data)}))
            answer = json.loads(game.socket.recv(timeout=TIMEOUT_S))
            data = answer.get("data") or {}
            data = data if isinstance(data, dict) else {}
        except Exception as error:  # boundary to the server
            self.end(game)
            raise EnvironmentFault(f"openenv: {self.url} broke off a {kind} ({error_text(error)})") from error
        if answer.get("type") != "error":
            return data
        if kind == "step":  # the model reads why the server refuses its action
            return {"observation": f"error: {data.get('message', 'not an action')}"}
        self.end(game)
        raise EnvironmentFault(f"openenv: {self.url} refused a reset: {data.get('message')}")

    def _action(self, reply: str) -> Mapping[str, Any]:
        try:
            value = json.loads(reply)
        except (ValueError, RecursionError):
            value = None
        return value if isinstance(value, dict) else {self.action: reply}

    def _text(self, answer: Mapping[str, Any]) -> str:
        seen = answer.get("observation", {})
        if isinstance(seen, dict) and self.observation is not None and self.observation in seen:
            seen = seen[self.observation]
        return seen if isinstance(seen, str) else json.dumps(seen)


class _Session(NamedTuple):
    """A session of the server: its connection, and the stack that closes it."""

    opened: ExitStack
    socket: Any


def _socket_url(url: str) -> str:
    scheme, _, place = url.partition("://")
    schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
    if scheme not in schemes or not place:
        raise ConfigError(
            f"environment.args.url: got {url!r}; type the address of the server, e.g. http://127.0.0.1:8000"
        )
    return f"{schemes[scheme]}://{place.rstrip('/')}/ws"
