"""Cost of one's own agent: rollout through the gateway over the built-in loop, on the
quick start's task.

Both sides are iterations of real runs on one local cluster, in turns. 128 trajectories of some four
turns generate together; nothing is trained. An agent is a process for each trajectory, so on few
cores clients, gateway and engine share them.

* ``tokens_per_s_over_builtin``: generated tokens per second of agents with the openai client over
  the built-in loop's, median of pairs; ``..._64``: 64 trajectories of 4 turns of exactly 64 tokens
  by a model of 2.4 M parameters. Seconds are from the first dispatch to the last report of a
  quantum.
* ``cpu_ms_per_request``: CPU of a process that is nothing but the gateway (no engine, no journal)
  over the requests that 16 conversations of 8 turns send to it at once.
* ``retokenised_tokens``: tokens in the group records of trajectories that differ from what their
  agents, which have no client library, were given.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from distributed import Client

from benchmarks.live.gateway_agents import CALCULATOR, Connection, returned
from benchmarks.live.only_rollouts import ITERATIONS, OnlyRollouts
from benchmarks.peers import even_words
from benchmarks.report import MIN_PAIRS, QUICKSTART, Figure, alternate, command_parser, emit
from libra.cluster.local import local_cluster
from libra.config import RunConfig, config_from_dict, load_config
from libra.config.model_paths import resolve_model
from libra.envs.tool_arithmetic import ToolArithmetic
from libra.store.run_records import read_group
from libra.testing import FixedTurns
from libra.types import Prompt, Trajectory


class Questions(ToolArithmetic):
    """The quick start's task, whose agents write their token ids to files in ``seen``."""

    def __init__(self, *, seen: str = "", **same: Any) -> None:
        super().__init__(**same)
        self.seen = seen

    def prompt(self, split: str, index: int) -> Prompt:
        given = super().prompt(split, index)
        return Prompt(given.prompt_id, given.messages, {**given.facts, "seen": self.seen})


class Turns(FixedTurns):
    """Questions for turns of a fixed length; ``turns`` is for the agent."""

    def __init__(self, *, turns: int = 4, **same: Any) -> None:
        super().__init__(**same)
        self.turns = turns

    def prompt(self, split: str, index: int) -> Prompt:
        given = super().prompt(split, index)
        asked = {"role": "user", "content": even_words.question(index)}  # words that its model's tokenizer has
        return Prompt(given.prompt_id, (asked,), {"turns": self.turns})


GOAL = 0.85
CONVERSATIONS, TURNS_EACH = 16, 8
TEMPERATURE = 1.5
"""At which the model that ships writes tokens that its tokenizer would not."""
QUESTIONS = "benchmarks.live.gateway:Questions"
SYSTEM = [{"role": "system", "content": "Use the calculator."}, {"role": "user", "content": "k = 17\nk -> ans: + 5"}]


class Side(OnlyRollouts):
    """A run on a cluster that others share."""

    def trajectories(self) -> list[Trajectory]:
        found = [member for group in self.groups() for member in read_group(group["path"])]
        wrong = Counter(t.failure_detail for t in found if not t.failure.trains)
        assert not wrong, f"trajectories failed: {wrong.most_common(3)}"
        return found

    def s_per_token(self) -> float:
        tokens = sum(t.num_action_tokens for t in self.trajectories())
        _, took_s = self.last()
        return took_s / tokens


def quickstart(place: Path, name: str, **sections: dict[str, Any]) -> RunConfig:
    values: dict[str, dict[str, Any]] = {
        "run": {"name": name, "dir": str(place), "iterations": 1, "eta": ITERATIONS},
        "environment": {"name": QUESTIONS, "args": {"timeout_rate": 0.0}},
        "cluster": {"dashboard_port": 0},
        "observe": {"progress": False, "trackers": []},
    }
    return load_config(QUICKSTART, values={n: values.get(n, {}) | sections.get(n, {}) for n in (*values, *sections)})


def long_turns(place: Path, name: str, *, built_in: bool, agent: dict[str, Any]) -> RunConfig:
    environment = {"name": "benchmarks.live.gateway:Turns", "args": {"turns": 4}}
    rollout = {"slots": 64, "max_new_tokens": 64, "max_turns": 4, "max_context_tokens": 640, "ignore_eos": built_in}
    return config_from_dict({
        "run": {"name": name, "dir": str(place), "iterations": 1, "eta": ITERATIONS},
        "model": {"path": str(place / "model")}, "environment": environment, "rollout": rollout, "agent": agent,
        "trainer": {"prompts": 8, "group_size": 8}, "cluster": {"threads": 1, "dashboard_port": 0, "tool_slots": 64},
        "observe": {"progress": False, "trackers": []},
    })  # fmt: skip


def compared(builtin: RunConfig, agents: RunConfig, pairs: int) -> float:
    with ExitStack() as exits:
        cluster = exits.enter_context(local_cluster(builtin))
        client = exits.enter_context(Client(cluster))
        sides = [exits.enter_context(Side(config, client)) for config in (builtin, agents)]
        for side in sides:
            side.s_per_token()  # everything is loaded then
        return alternate(*(side.s_per_token for side in sides), pairs=pairs).ratio


# ---------------------------------------------------------------- tokens


def turns_of(trajectory: Trajectory) -> list[list[int]]:
    starts = [turn["sequence_start"] + turn["prompt_tokens"] for turn in trajectory.turns]
    lengths = [turn["generated_tokens"] for turn in trajectory.turns]
    return [trajectory.token_ids[at : at + n].tolist() for at, n in zip(starts, lengths, strict=True)]


def retokenised(place: Path, seen: Path) -> int:
    """Tokens of trajectories that no agent was given."""
    agent = {"function": "benchmarks.live.gateway_agents:plain"}
    environment = {"args": {"timeout_rate": 0.0, "seen": str(seen)}}
    config = quickstart(place, "tokens", agent=agent, environment=environment, rollout={"temperature": TEMPERATURE})
    with local_cluster(config) as cluster, Client(cluster) as client, Side(config, client) as side:
        trajectories = side.trajectories()
    given, found = Counter(path.read_text() for path in seen.glob("*.json")), Counter[str]()
    found.update(json.dumps(turns_of(trajectory)) for trajectory in trajectories)
    return sum(sum(map(len, json.loads(text))) * times for text, times in (found - given).items())


# ---------------------------------------------------------------- CPU


def converse(url: str) -> None:
    connection, said = Connection(url), list(SYSTEM)
    for _ in range(TURNS_EACH):
        choice = connection.ask(said, tools=[CALCULATOR])
        assert choice is not None, "refused"
        said.append(choice["message"])
        for call in choice["message"]["tool_calls"]:
            content = returned(call["function"]["arguments"])
            said.append({"role": "tool", "tool_call_id": call["id"], "content": content})


def cpu_ms_per_request(model: Path, rounds: int) -> float:
    sessions = CONVERSATIONS * (rounds + 1)
    command = [sys.executable, "-m", "benchmarks.live.gateway_server", str(model), str(sessions)]
    found = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None and server.stdout is not None
        told = json.loads(server.stdout.readline())
        urls = [f"http://127.0.0.1:{told['port']}/t/{token}/v1" for token in told["tokens"]]
        for number in range(rounds + 1):
            before = asked(server)
            with ThreadPoolExecutor(CONVERSATIONS) as pool:
                list(pool.map(converse, urls[number * CONVERSATIONS : (number + 1) * CONVERSATIONS]))
            after = asked(server)
            found.append(1000 * (after["cpu_s"] - before["cpu_s"]) / (after["requests"] - before["requests"]))
        server.stdin.close()
        server.wait()
    return statistics.median(found[1:])  # the first one renders and imports what is kept


def asked(server: subprocess.Popen[str]) -> dict[str, float]:
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write("\n")
    server.stdin.flush()
    return json.loads(server.stdout.readline())  # type: ignore[no-any-return]


# ---------------------------------------------------------------- the command


def throughput(place: Path, options: argparse.Namespace) -> dict[str, Figure]:
    openai = {
        name: {"function": f"benchmarks.live.gateway_agents:{name}"} for name in ("openai_client", "fixed_openai")
    }
    even_words.save_model(place / "model", positions=640)
    sides = {
        "": (quickstart(place, "builtin"), quickstart(place, "openai", agent=openai["openai_client"])),
        "_64": (
            long_turns(place, "builtin_64", built_in=True, agent={}),
            long_turns(place, "agent_64", built_in=False, agent=openai["fixed_openai"]),
        ),
    }
    return {
        f"tokens_per_s_over_builtin{name}": Figure(compared(*both, options.pairs), "ratio", "higher", GOAL)
        for name, both in sides.items()
    }


def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("gateway", __doc__, pairs=MIN_PAIRS)
    parts = ("throughput", "cpu", "tokens")
    parser.add_argument("--only", choices=parts, nargs="+", default=parts, help="these parts alone")
    options = parser.parse_args(arguments)
    figures: dict[str, Figure] = {}
    with tempfile.TemporaryDirectory(prefix="gateway-") as name:
        place = Path(name)
        if "cpu" in options.only:
            cpu_ms = cpu_ms_per_request(Path(resolve_model("libra/tiny-arithmetic")), options.pairs)
            figures["cpu_ms_per_request"] = Figure(cpu_ms, "ms", "lower", 1.0)
        if "tokens" in options.only:
            (place / "seen").mkdir()
            figures["retokenised_tokens"] = Figure(retokenised(place, place / "seen"), "tokens", "lower", 0)
        if "throughput" in options.only:
            figures |= throughput(place, options)
    emit("gateway", figures, arguments=arguments, as_json=options.json)
