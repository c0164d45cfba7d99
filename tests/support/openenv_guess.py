"""A server of the real package openenv-core, in an environment of its own: guess a number that the seed decides."""

from __future__ import annotations

import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int


class Hint(Observation):
    hint: str = ""


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state, self._secret = State(), 0

    def reset(self, seed=None, episode_id=None, **options):
        self._state = State(episode_id=episode_id or "e", step_count=0)
        self._secret = (seed or 0) % 10
        return Hint(hint="0 to 9", done=False, reward=None)

    def step(self, action, timeout_s=None, **options):
        self._state.step_count += 1
        right = action.number == self._secret
        hint = "right" if right else "higher" if action.number < self._secret else "lower"
        return Hint(hint=hint, done=right, reward=1.0 if right else -0.125)

    @property
    def state(self):
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
