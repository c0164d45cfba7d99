"""Agents of tests, which need the standard library only."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from libra.testing import FixedTurns
from libra.types import Episode, Prompt


class Marked(FixedTurns):
    """Questions with the path of a file, by which an agent knows that it was here before."""

    def __init__(self, *, mark: str = "", seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.mark = mark

    def prompt(self, split: str, index: int) -> Prompt:
        given = super().prompt(split, index)
        return Prompt(given.prompt_id, given.messages, {"mark": self.mark})

    def grade(self, episode: Episode) -> float:
        if episode.own_reward is not None:
            return episode.own_reward
        Path(self.mark).joinpath(f"{episode.trajectory_id}.json").write_text(json.dumps(episode.result))
        return super().grade(episode)


def ask(base_url: str, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The choice of one request, added to ``messages``."""
    body = json.dumps({"model": "policy", "messages": messages, "return_token_ids": True, **more}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        choice = json.load(answer)["choices"][0]
    messages.append(choice["message"])
    return choice


def branching(messages: list[dict[str, Any]], base_url: str) -> list[list[int]]:
    """Three turns, the second once more, and a conversation of its own; the token ids of all, in order."""
    root = list(messages)
    made = [ask(base_url, root)["token_ids"]]
    root.append({"role": "user", "content": "more"})
    again = list(root)
    made.append(ask(base_url, root)["token_ids"])
    made.append(ask(base_url, again)["token_ids"])
    made.append(
        ask(base_url, [{"role": "system", "content": "another"}, {"role": "user", "content": "go"}])["token_ids"]
    )
    root.append({"role": "user", "content": "end"})
    made.append(ask(base_url, root, max_tokens=2)["token_ids"])
    return made


def killer(messages: list[dict[str, Any]], base_url: str, mark: str) -> list[list[int]]:
    """Two turns; the first agent of all kills its worker after its first turn."""
    said = list(messages)
    made = [ask(base_url, said)["token_ids"]]
    flag = Path(mark) / "killed"
    if not flag.exists():
        flag.touch()
        os.kill(int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
    said.append({"role": "user", "content": "more"})
    made.append(ask(base_url, said)["token_ids"])
    return made


def rewarding(messages: list[dict[str, Any]], base_url: str) -> dict[str, float]:
    """One turn, and a reward of its own; a prompt that does not fit is refused."""
    ask(base_url, list(messages))
    try:
        ask(base_url, [{"role": "user", "content": "x" * 10_000}])
    except urllib.error.HTTPError as error:
        told = json.load(error)["error"]["code"]
    return {"reward": 0.25 if told == "context_length_exceeded" else 0.0}


def failing(base_url: str) -> None:
    """An agent with an error of its own."""
    raise ValueError(f"no agent at {base_url}")
