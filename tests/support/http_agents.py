"""Agents of tests, which need the standard library only."""

import asyncio
import contextlib
import json
import os
import signal
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def ask(base_url, messages, **more):
    """The choice of one request, added to ``messages``."""
    body = json.dumps({"model": "policy", "messages": messages, "return_token_ids": True, **more}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        choice = json.load(answer)["choices"][0]
    messages.append(choice["message"])
    return choice


def branching(messages, base_url):
    """Three turns, the second once more, and a conversation of its own; the token ids of all, in order."""
    root = list(messages)
    made = [ask(base_url, root)["token_ids"]]
    root.append({"role": "user", "content": "more"})
    again, another = list(root), [{"role": "system", "content": "another"}, {"role": "user", "content": "go"}]
    made += [ask(base_url, said)["token_ids"] for said in (root, again, another)]
    root.append({"role": "user", "content": "end"})
    made.append(ask(base_url, root, max_tokens=2)["token_ids"])
    return made


def wants_the_end(messages, base_url):
    """It fails at an answer that was cut, as openai-agents does."""
    raise ValueError(ask(base_url, list(messages), max_tokens=2)["finish_reason"])


def killer(messages, base_url, mark):
    """Two turns; the first agent of all kills its worker after its first turn."""
    said = list(messages)
    made = [ask(base_url, said)["token_ids"]]
    flag = Path(mark) / "killed"
    if not flag.exists():
        flag.touch()
        os.kill(_parent(os.getppid()), signal.SIGKILL)  # above the program that starts agents
    said.append({"role": "user", "content": "more"})
    made.append(ask(base_url, said)["token_ids"])
    return made


def _parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def rewarding(messages, base_url):
    """One turn, and a reward of its own; a prompt that does not fit is refused."""
    ask(base_url, list(messages))
    try:
        ask(base_url, [{"role": "user", "content": "x" * 10_000}])
    except urllib.error.HTTPError as error:
        told = json.load(error)["error"]["code"]
    return {"reward": 0.25 if told == "context_length_exceeded" else 0.0}


def failing(base_url):
    raise ValueError(f"no agent at {base_url}")


def asking(messages, base_url, turns=2):
    """So many turns; the token ids of each."""
    said, made = list(messages), []
    for turn in range(turns):
        made.append(ask(base_url, said)["token_ids"])
        said.append({"role": "user", "content": f"more {turn}"})
    return made


def hanging(messages, base_url, mark):
    """One turn, and then nothing more; its process is named in the file ``pid``."""
    Path(mark, "pid").write_text(str(os.getpid()))
    ask(base_url, list(messages))
    signal.pause()


def named(messages, base_url, mark):
    """As `asking`; its process is named in the file ``pid``."""
    Path(mark, "pid").write_text(str(os.getpid()))
    return asking(messages, base_url)


def dying(messages, base_url, mark):
    """Its process is killed after its first turn, once; then it ends well."""
    said = list(messages)
    made = [ask(base_url, said)["token_ids"]]
    with contextlib.suppress(FileExistsError):
        Path(mark, "died").touch(exist_ok=False)
        os.kill(os.getpid(), signal.SIGKILL)
    return made


def counting(messages, base_url, mark):
    """Two turns; a line of the file ``agents`` says when it is there and when it is not any more."""
    with Path(mark, "agents").open("a") as log:
        log.write("+")
        log.flush()
        made = asking(messages, base_url)
        log.write("-")
    return made


def parallel(messages, base_url):
    """A root of two turns, and between them three sub-agents of two turns each, at once; token ids of the root, then of each."""
    root, made = list(messages), []
    made.append(ask(base_url, root)["token_ids"])
    with ThreadPoolExecutor(3) as pool:
        subs = [[{"role": "system", "content": f"sub-agent {i}"}, {"role": "user", "content": "go"}] for i in range(3)]
        answers = list(pool.map(lambda said: asking(said, base_url), subs))
    root.append({"role": "user", "content": "finish"})
    made.append(ask(base_url, root)["token_ids"])
    return [*made, *(ids for each in answers for ids in each)]


def other(messages, base_url, mark):
    """Two turns; started again, it asks something else."""
    text = "something else" if Path(mark, "again").exists() else "something"
    return asking([*messages, {"role": "user", "content": text}], base_url)


MEETING = asyncio.Barrier(2)


async def task(what):
    """An agent beside others in one process: two meet, the others fail or never end."""
    if what == "raises":
        raise ValueError("no")
    if what == "exits":
        raise SystemExit(3)
    if what == "hangs":
        await asyncio.Event().wait()
    await MEETING.wait()
    return {"pid": os.getpid(), "url": os.environ["OPENAI_BASE_URL"]}
