"""Games of textarena for one player."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from examples.games.replayed_game import Observed, ReplayedGame
from libra.errors import ConfigError, pip_install
from libra.untrusted import error_text

EXTRA = pip_install("games")
_random = threading.Lock()


class TextArenaGame(ReplayedGame):
    """Needs the package textarena. In a configuration:
    ``examples.games.textarena_game:TextArenaGame``.

    The model reads the game's messages and replies in the game's form, mostly with an action in
    brackets: ``[5]``. The reward is the game's at its end: 1 for a win, often with parts for
    progress. A game that is not over when the trajectory ends has 0.

    Parameters
    ----------
    id : str
        A game for one player, e.g. "GuessTheNumber-v0", "TowerOfHanoi-v0", "Minesweeper-v0",
        "Sudoku-v0", "FrozenLake-v0".
    args : mapping
        Keyword arguments of `textarena.make`.
    size : int, optional
        Number of training games, which then repeat; unlimited by default.

    Raises
    ------
    ConfigError
        The package is not installed, the game is unknown, or it needs more players.
    """

    def __init__(
        self, *, id: str, args: Mapping[str, Any] | None = None, size: int | None = None, seed: int = 0
    ) -> None:
        super().__init__(size=size, seed=seed)
        self.id, self.args = f"{id.removesuffix('-raw')}-raw", dict(args or {})
        try:
            import textarena  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                f"environment.name: the package textarena is not installed ({error}); type {EXTRA}"
            ) from error
        try:
            self.begin(0)
        except Exception as error:  # boundary to textarena and its games
            raise ConfigError(
                f"environment.args.id: textarena plays no {id!r} with one player and {self.args} ({error_text(error)}); type e.g. "
                "GuessTheNumber-v0"
            ) from error

    def begin(self, seed: int) -> tuple[Any, str]:
        import textarena

        game = _Game(textarena.make(self.id, **self.args), random.Random(seed).getstate())
        with game.own_random():
            game.env.reset(num_players=1, seed=seed)
            return game, _messages(game.env)

    def act(self, game: Any, reply: str) -> Observed:
        with game.own_random():
            done, _ = game.env.step(action=reply)
            if not done:
                return Observed(_messages(game.env), 0.0, False)
            rewards, _ = game.env.close()
            return Observed("", float((rewards or {}).get(0, 0.0)), True)


class _Game:
    """A game with its own state of Python's global generator, which textarena draws from."""

    def __init__(self, env: Any, generator: Any) -> None:
        self.env, self._generator = env, generator

    @contextmanager
    def own_random(self) -> Iterator[None]:
        with _random:
            outside = random.getstate()
            random.setstate(self._generator)
            try:
                yield
            finally:
                self._generator = random.getstate()
                random.setstate(outside)


def _messages(env: Any) -> str:
    """The game's messages since the last reply, without the reply itself."""
    _, said = env.get_observation()
    return "\n".join(str(text) for sender, text, *_ in said if sender == -1).strip()
