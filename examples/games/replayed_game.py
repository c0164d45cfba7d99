"""Games whose objects stay in one process, as environments with a state.

The state of a trajectory is the seed of its game and the replies so far. The worker of the next
step continues its live game, or starts the game again with the seed and repeats the replies. So a
game must depend on its seed and replies alone; otherwise it is a failure of the environment.

Invariants
----------
1. One step at a time uses a live game, which is kept under exactly its seed and replies.
2. A failed step leaves no game that has seen its reply.
"""

from __future__ import annotations

import hashlib
import random
import threading
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

from libra.envs.environment import Environment, question_class
from libra.errors import ConfigError, EnvironmentFault
from libra.types import Episode, Prompt

MOST_LIVE = 512
"""Most live games of a process between steps; the oldest end first."""


class Observed(NamedTuple):
    """A game's answer to a reply: text for the model, reward of the step, and whether the game is
    over."""

    text: str
    reward: float
    done: bool


class ReplayedGame(Environment):
    """Subclasses define how a game starts, acts and ends, and the ``system`` message.

    The reward of a trajectory is the sum over its steps. Facts: ``seed``. ``size`` is the number of
    training games, which then repeat.
    """

    system: str = ""
    max_state_bytes = 2**20

    def __init__(self, *, size: int | None, seed: int) -> None:
        if size is not None and size < 1:
            raise ConfigError(f"environment.args.size: got {size!r}; at least 1 game, or null for no limit")
        self.seed, self.size = seed, size
        self._live: OrderedDict[tuple[int, str], list[Any]] = OrderedDict()
        self._lock = threading.Lock()

    @abstractmethod
    def begin(self, seed: int) -> tuple[Any, str]:
        """A new game, and its first text for the model."""

    @abstractmethod
    def act(self, game: Any, reply: str) -> Observed:
        """The game's answer to a reply."""

    def end(self, game: Any) -> None:
        """Free a game."""

    def prompt(self, split: str, index: int) -> Prompt:
        self.check_split(split)
        if split == "train" and self.size is not None:
            index %= self.size
        seed = self._seed_of(split, index)
        game, first = self.begin(seed)
        self._keep(seed, (), game)
        messages = ({"role": "system", "content": self.system},) if self.system else ()
        facts = {"seed": seed, "first": _digest(first)}
        return Prompt(f"{split}-{index}", (*messages, {"role": "user", "content": first}), facts)

    def prompt_id(self, split: str, index: int) -> str:
        return f"train-{index % self.size}" if split == "train" and self.size is not None else ""

    def reset(self, prompt: Prompt) -> dict[str, Any]:
        """Seed, digest of the first observation, replies, their reward, and whether the game is
        over."""
        return {**{key: prompt.facts[key] for key in ("seed", "first")}, "replies": [], "reward": 0.0, "done": False}

    def step(self, text: str, state: dict[str, Any]) -> str | None:
        game = self._game_at(state)
        observed = self.act(game, text)
        state["replies"].append(text)
        state["reward"] += observed.reward
        state["done"] = observed.done
        if observed.done:
            self.end(game)
            return None
        self._keep(state["seed"], state["replies"], game)
        return observed.text

    def grade(self, episode: Episode) -> float:
        return float(episode.state["reward"])

    async def close(self) -> None:
        with self._lock:
            games = [game for games in self._live.values() for game in games]
            self._live.clear()
        for game in games:
            self.end(game)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_live": OrderedDict(), "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def _seed_of(self, split: str, index: int) -> int:
        draw = random.Random(f"{self.name}/{self.seed}/{split}/{index}")
        while True:
            seed = draw.getrandbits(31)
            if (question_class(str(seed)) == 0) == (split == "eval"):
                return seed

    def _keep(self, seed: int, replies: Any, game: Any) -> None:
        """Keep a live game for the step after these replies."""
        with self._lock:
            self._live.setdefault(_key(seed, replies), []).append(game)
            oldest = self._live.popitem(last=False)[1] if len(self._live) > MOST_LIVE else []
        for each in oldest:
            self.end(each)

    def _game_at(self, state: Mapping[str, Any]) -> Any:
        """The live or repeated game after the replies of a state."""
        key = _key(state["seed"], state["replies"])
        with self._lock:
            games = self._live.get(key, [])
            game = games.pop() if games else None
            if not games:
                self._live.pop(key, None)
        if game is not None:
            return game
        game, first = self.begin(state["seed"])
        reward, done = 0.0, False
        for reply in state["replies"]:
            answer = self.act(game, reply)
            reward, done = reward + answer.reward, answer.done
        if _digest(first) != state["first"] or done or reward != state["reward"]:
            raise EnvironmentFault(
                f"{self.name}: the game of seed {state['seed']} went otherwise when {len(state['replies'])} replies were repeated; "
                "it depends on more than its seed and the replies, so its steps cannot move between workers"
            )
        return game


def _key(seed: int, replies: Any) -> tuple[int, str]:
    return seed, _digest("\0".join(replies))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
