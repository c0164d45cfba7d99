"""Environments of gymnasium that can be read and played as text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from examples.games.replayed_game import Observed, ReplayedGame
from libra.errors import ConfigError, pip_install
from libra.untrusted import error_text

EXTRA = pip_install("games")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class GymnasiumText(ReplayedGame):
    """Needs the package gymnasium, or another one that registers games with it.

    The model reads the rendering in mode "ansi", else the observation, and its reply names an
    action: the last of ``actions`` in it, or the last number. With a `gymnasium.spaces.Text` the
    reply is the action. After a reply without an action the model reads so, and the game does not
    move. The reward is the sum of the game's. Colours of the terminal are left out, except that
    brackets mark what they highlight.

    Parameters
    ----------
    id : str
        E.g. "FrozenLake-v1", or "package:Game-v0", which imports the package first.
    args : mapping
        Keyword arguments of `gymnasium.make`, e.g. ``{is_slippery: false}``.
    actions : list of str, optional
        Words for the actions 0, 1, ...; for FrozenLake ``[left, down, right, up]``. Without them
        actions are numbers.
    system : str, optional
        System message; by default the list of actions.
    size : int, optional
        Number of training games, which then repeat; unlimited by default.

    Raises
    ------
    ConfigError
        The package is not installed, the environment is unknown, or its actions are neither text
        nor a few numbers.
    """

    def __init__(
        self,
        *,
        id: str,
        args: Mapping[str, Any] | None = None,
        actions: Sequence[str] | None = None,
        system: str | None = None,
        size: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(size=size, seed=seed)
        self.id, self.args = id, dict(args or {})
        try:
            import gymnasium
        except ImportError as error:
            raise ConfigError(
                f"environment.name: the package gymnasium is not installed ({error}); type {EXTRA}"
            ) from error
        try:
            game = gymnasium.make(id)
            self.args = {"render_mode": "ansi", **self.args} if "ansi" in game.metadata["render_modes"] else self.args
            game = gymnasium.make(id, **self.args)
        except Exception as error:  # boundary to gymnasium and the constructor of its environment
            raise ConfigError(
                f"environment.args.id: gymnasium makes no {id!r} with {self.args} ({error_text(error)}); type e.g. FrozenLake-v1"
            ) from error
        space: Any = game.action_space
        self.takes_text = isinstance(space, gymnasium.spaces.Text)
        if not self.takes_text and not isinstance(space, gymnasium.spaces.Discrete):
            raise ConfigError(
                f"environment.args.id: the actions of {id} are {space}; those of a text game are Discrete or Text"
            )
        count = 0 if self.takes_text else int(space.n)
        if actions is not None and len(actions) != count:
            raise ConfigError(
                f"environment.args.actions: got {len(actions)} words; {id} has {count or 'text instead of'} actions"
            )
        self.words = [str(word).lower() for word in (actions if actions is not None else range(count))]
        self.first = 0 if self.takes_text else int(space.start)
        told = "" if self.takes_text else f"Play the game. Reply with one action: {', '.join(self.words)}."
        self.system = told if system is None else system

    def begin(self, seed: int) -> tuple[Any, str]:
        import gymnasium

        game = gymnasium.make(self.id, **self.args)
        observation, _ = game.reset(seed=seed)
        return game, _text(game, observation)

    def act(self, game: Any, reply: str) -> Observed:
        action: Any = reply if self.takes_text else self._action(reply)
        if action is None:
            return Observed(f"No action. Reply with one of {', '.join(self.words)}.", 0.0, False)
        observation, reward, terminated, truncated, _ = game.step(action)
        return Observed(_text(game, observation), float(reward), bool(terminated or truncated))

    def end(self, game: Any) -> None:
        game.close()

    def _action(self, reply: str) -> int | None:
        """The last action that a reply names."""
        named = [word for word in re.findall(r"\w+", reply.lower()) if word in self.words]
        return self.first + self.words.index(named[-1]) if named else None


def _text(game: Any, observation: Any) -> str:
    shown = game.render() if game.render_mode == "ansi" else observation
    marked = re.sub(r"\x1b\[41m(.)\x1b\[0m", r"[\1]", str(shown))  # the player in the toy games
    return _ANSI.sub("", marked).strip()
