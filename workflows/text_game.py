"""A text game: the state of each trajectory travels with its records. Run it with ``python workflows/text_game.py``."""

from __future__ import annotations

import random
import sys

import libra
from libra.config import typed_settings
from libra.types import Prompt


class GuessDigit(libra.Environment):
    """Five guesses of a digit, each answered with higher or lower; the earlier it is right, the more it gives."""

    inline_steps = True  # it takes microseconds

    def prompt(self, split, index):
        secret = random.Random(f"{split}/{index}").randrange(10)
        return Prompt(f"{split}-{index}", ({"role": "user", "content": "guess a digit"},), {"secret": secret})

    def reset(self, prompt):
        return {"secret": prompt.facts["secret"], "guesses": []}

    def step(self, text, state):
        digits = [int(letter) for letter in text if letter in "0123456789"]
        state["guesses"].append(digits[-1] if digits else -1)
        if state["guesses"][-1] == state["secret"] or len(state["guesses"]) == 5:
            return None
        return "higher" if state["guesses"][-1] < state["secret"] else "lower"

    def grade(self, episode):
        guesses = episode.state["guesses"]
        return (6 - len(guesses)) / 5 if guesses and guesses[-1] == episode.state["secret"] else 0.0


if __name__ == "__main__":
    settings = {"run__iterations": 5} | typed_settings(sys.argv[1:])
    print(libra.train(environment=GuessDigit(), **settings))
