"""Services and who asks them, where workers can import both."""

import threading
from pathlib import Path

import libra
from libra.envs import tool
from libra.testing import FixedTurns
from libra.types import Episode, ToolCall

ASKED = {"prompt": "What is it?", "completion": "It is so."}


def gated(inputs, *, gate):
    """0.5 for each, once the file ``gate`` is there: a judge that is as slow as a test wants."""
    while not Path(gate).exists():
        threading.Event().wait(0.01)
    return [0.5] * len(inputs)


def gated_model(model, tokenizer, inputs, *, gate):
    """The same, of a model."""
    return gated(inputs, gate=gate)


def short(inputs):
    return []


def lengths(inputs, *, more=0):
    return [float(len(each["completion"]) + more) for each in inputs]


class ThreeAsked(FixedTurns):
    """Every turn's tool asks three services in turn, and writes down what each says."""

    services = ("a", "b", "c")

    def __init__(self, *, path, seed=0):
        super().__init__(seed=seed)
        self.path = path
        self.tools = (tool(self.ask_all, services=("a", "b", "c")),)

    def parse(self, text):
        return (ToolCall("ask_all", {"text": "y"}),)

    def ask_all(self, text: str) -> str:
        """Ask.

        Args:
            text: Anything.
        """
        with Path(self.path).open("a") as file:
            for name in "abc":
                file.write(f"{name} {libra.ask(name, ASKED).hex()}\n")
        return "asked"

    def grade(self, episode: Episode) -> float:
        with Path(self.path).open("a") as file:
            told = libra.ask("b", ASKED)
            file.write(f"b {told.hex()}\n")
        return float(super().grade(episode))
