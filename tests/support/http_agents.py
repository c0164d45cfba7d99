"""Agents of tests, which need the standard library only."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MEETING = 256


def ask(base_url: str, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The choice of one request, added to ``messages``."""
    body = json.dumps({"model": "policy", "messages": messages, "return_token_ids": True, **more}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        choice = json.load(answer)["choices"][0]
    messages.append(choice["message"])
    return choice


def without_and_with_tools(messages: list[dict[str, Any]], base_url: str) -> list[dict[str, Any]]:
    """The answers to one question in a request without tools, and in one with them."""
    tools = [{"type": "function", "function": {"name": "calc", "parameters": {"type": "object", "properties": {}}}}]
    return [ask(base_url, list(messages), **more)["message"] for more in ({}, {"tools": tools})]


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


def wants_the_end(messages: list[dict[str, Any]], base_url: str) -> None:
    """It fails at an answer that was cut, as openai-agents does."""
    raise ValueError(ask(base_url, list(messages), max_tokens=2)["finish_reason"])


def killer(messages: list[dict[str, Any]], base_url: str, mark: str) -> list[list[int]]:
    """Two turns; the first agent of all kills its worker after its first turn."""
    said = list(messages)
    made = [ask(base_url, said)["token_ids"]]
    flag = Path(mark) / "killed"
    if not flag.exists():
        flag.touch()
        os.kill(_parent(_parent(os.getppid())), signal.SIGKILL)  # above its keeper, and the program that starts agents
    said.append({"role": "user", "content": "more"})
    made.append(ask(base_url, said)["token_ids"])
    return made


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


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


def asking(messages: list[dict[str, Any]], base_url: str, turns: int = 2) -> list[list[int]]:
    """So many turns; the token ids of each."""
    said, made = list(messages), []
    for turn in range(turns):
        made.append(ask(base_url, said)["token_ids"])
        said.append({"role": "user", "content": f"more {turn}"})
    return made


def lengthy(base_url: str) -> list[Any]:
    """A request of 4 MiB, which does not fit, one that is long and does, and a short one; the status of each."""
    statuses = []
    for text in ("xyz " * (1 << 20), "the " * 12_000, "short"):
        try:
            ask(base_url, [{"role": "user", "content": text}])
            statuses.append(200)
        except urllib.error.HTTPError as error:
            statuses.append(json.load(error)["error"]["code"])
    return statuses


def hanging(messages: list[dict[str, Any]], base_url: str, mark: str) -> None:
    """One turn, and then nothing more; its process is named in the file ``pid``."""
    Path(mark, "pid").write_text(str(os.getpid()))
    ask(base_url, list(messages))
    signal.pause()


def named(messages: list[dict[str, Any]], base_url: str, mark: str) -> list[list[int]]:
    """As `asking`; its process is named in the file ``pid``."""
    Path(mark, "pid").write_text(str(os.getpid()))
    return asking(messages, base_url)


def dying(messages: list[dict[str, Any]], base_url: str, mark: str) -> list[list[int]]:
    """Its process is killed after its first turn, once; then it ends well."""
    said = list(messages)
    made = [ask(base_url, said)["token_ids"]]
    with contextlib.suppress(FileExistsError):
        Path(mark, "died").touch(exist_ok=False)
        os.kill(os.getpid(), signal.SIGKILL)
    return made


def counting(messages: list[dict[str, Any]], base_url: str, mark: str) -> list[list[int]]:
    """Two turns; a line of the file ``agents`` says when it is there and when it is not any more."""
    with Path(mark, "agents").open("a") as log:
        log.write("+")
        log.flush()
        made = asking(messages, base_url)
        log.write("-")
    return made


def parallel(messages: list[dict[str, Any]], base_url: str) -> list[list[int]]:
    """A root of two turns, and between them three sub-agents of two turns each, at once; token ids of the root, then of each."""
    root, made = list(messages), []
    made.append(ask(base_url, root)["token_ids"])
    with ThreadPoolExecutor(3) as pool:
        subs = [[{"role": "system", "content": f"sub-agent {i}"}, {"role": "user", "content": "go"}] for i in range(3)]
        answers = list(pool.map(lambda said: asking(said, base_url), subs))
    root.append({"role": "user", "content": "finish"})
    made.append(ask(base_url, root)["token_ids"])
    return [*made, *(ids for each in answers for ids in each)]


def behind(messages: list[dict[str, Any]], base_url: str, mark: str) -> list[list[int]]:
    """Two conversations of one turn each; started again, it asks for the second one first, at once with the first one."""
    first, second = [*messages], [{"role": "user", "content": "the other one"}]
    if Path(mark, "again").exists():
        with ThreadPoolExecutor(2) as pool:
            later = pool.submit(ask, base_url, second)
            while not Path(mark, "early").exists():  # the test has seen the second one
                select.select([], [], [], 0.01)
            return [ask(base_url, first)["token_ids"], later.result()["token_ids"]]
    return [ask(base_url, first)["token_ids"], ask(base_url, second)["token_ids"]]


def other(messages: list[dict[str, Any]], base_url: str, mark: str) -> list[list[int]]:
    """Two turns; started again, it asks something else."""
    text = "something else" if Path(mark, "again").exists() else "something"
    return asking([*messages, {"role": "user", "content": text}], base_url)


def meeting(messages: list[dict[str, Any]], base_url: str, mark: str) -> list[list[int]]:
    """Waits until `MEETING` agents are there, then asks."""
    Path(mark, f"here-{os.getpid()}").touch()
    while sum(1 for _ in Path(mark).glob("here-*")) < MEETING:
        select.select([], [], [], 0.05)
    return asking(messages, base_url)


def refused(base_url: str, messages: list[dict[str, Any]]) -> list[str]:
    """What is said of requests that cannot be answered, and then a turn that can."""
    told = []
    for body in (
        {"messages": [], "model": "policy"},
        {"messages": messages, "n": 3},
        {
            "messages": messages,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": True}},
        },
        {"messages": [*messages, {"role": "assistant", "content": "x"}]},
    ):
        told.append(status(f"{base_url}/chat/completions", body))
    told.append(status(f"{base_url}/inference/v1/generate", {"token_ids": [1 << 30]}))
    told.append(status(f"{base_url}/embeddings", {"input": "x"}))
    ask(base_url, list(messages))
    return told


def status(url: str, body: dict[str, Any]) -> str:
    """Status and field of a request that is refused."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(answer.status)
    except urllib.error.HTTPError as error:
        return f"{error.code} {json.load(error)['error']['param'] or ''}".strip()
