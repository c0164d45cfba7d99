"""What an agent of one's own costs: rollout through the gateway over the built-in loop, on the quick start's task.

Both sides are iterations of real runs on one local cluster, in turns: scheduler, plugin, journal, records and the transformers
engine with the model that ships. 128 trajectories (16 questions, 8 samples) of some four turns generate together; nothing is
trained. The built-in loop runs its calculator on TOOL slots; no call hangs on either side. An agent is a process for each
trajectory, so on few cores clients, gateway and engine share them.

Figures
-------
``tokens_per_s_over_builtin``: generated tokens per second of agents with the openai client over those of the built-in loop,
median of pairs. Seconds are from the first dispatch to the last report of a quantum. ``tokens_per_s_over_builtin_plain``: with
agents that need the standard library only, which is what gateway and processes cost without a client library.
``tokens_per_s_over_builtin_64`` and ``..._64_plain``: 64 trajectories of 4 turns of exactly 64 tokens by a model of 2.4 M
parameters, as in `benchmarks.rollout_overhead`. ``tokens_per_s_over_builtin_openai_agents``: agents of openai-agents in the
virtual environment ``--venv``.

``cpu_ms_per_request``: CPU time of a process that is nothing but the gateway (HTTP, the conversation's tree, rendering and
encoding of tails, replies; no engine, no journal) over the requests that 16 conversations of 8 turns send to it at once.

``retokenised_tokens``: of the tokens in the group records of the plain agents' trajectories, those that are not what these
agents were given, turn by turn (``return_token_ids``). Beside it, ``would_differ``: tokens of turns whose text, encoded again
as a client of a text-only server would have it, are other tokens: without any the figure would say nothing.

``--learn SEED ...`` trains the quick start twice for each seed, by the built-in loop and by agents of openai-agents
(``--venv``), some minutes each: ``held_out_below_builtin_se`` is by how many standard errors of the difference the agents'
held-out reward is below the built-in loop's (256 questions for each run), and at most 1 is wanted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from distributed import Client

from benchmarks import even_words
from benchmarks.gateway_agents import CALCULATOR, Connection, returned
from benchmarks.report import MIN_PAIRS, QUICKSTART, Figure, alternate, command_parser, emit
from libra.cluster.local import local_cluster
from libra.config import RunConfig, config_from_dict, load_config
from libra.config.model_paths import resolve_model
from libra.driver.session import Session
from libra.graph.iteration import iteration_graph
from libra.rollout.chat_format import ChatFormat, load_chat_format
from libra.store.event_log import read_events
from libra.store.run_records import read_group
from libra.types import Trajectory

GOAL = 0.85
ITERATIONS = 1000
CONVERSATIONS, TURNS_EACH = 16, 8
TEMPERATURE = 1.5
"""At which the model that ships writes tokens that its tokenizer would not."""
QUESTIONS = "benchmarks.gateway_tasks:Questions"
SYSTEM = [{"role": "system", "content": "Use the calculator."}, {"role": "user", "content": "k = 17\nk -> ans: + 5"}]


class Side:
    """A started run that only generates, on a cluster that others share; a context manager."""

    def __init__(self, config: RunConfig, client: Client) -> None:
        self.session, self.k = Session(config, client=client), 0
        self.tokens_per_s: list[float] = []

    def __enter__(self) -> Self:
        self.session.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.session.__exit__(*error)

    def trajectories(self) -> list[Trajectory]:
        """Those of one more iteration."""
        graph = iteration_graph(self.session.spec, self.k)
        futures = self.session.client.compute(graph.groups, optimize_graph=False)
        groups = self.session.client.gather(futures)
        self.k += 1
        found = [member for group in groups for member in read_group(group["path"])]
        wrong = Counter(t.failure_detail for t in found if not t.failure.trains)
        assert not wrong, f"trajectories failed: {wrong.most_common(3)}"
        return found

    def s_per_token(self) -> float:
        """Seconds of one iteration for each token that it generated."""
        k = self.k
        tokens = sum(t.num_action_tokens for t in self.trajectories())
        self.session.client.run_on_scheduler(flush_events)
        prefix = f"trajectory-train-{k}-"
        log = read_events(self.session.directory / "events.jsonl").events
        mine = [event for event in log if str(event.get("key", "")).startswith(prefix)]
        last_s = max(event["t_s"] for event in mine if event["name"] == "quantum_finished")
        took_s = last_s - min(event["t_s"] for event in mine if event["name"] == "quantum_dispatched")
        self.tokens_per_s.append(tokens / took_s)
        return float(took_s / tokens)


def flush_events(dask_scheduler: Any) -> None:
    """Flush the event log."""
    for state in dask_scheduler.plugins["libra"].runs.values():
        state.log.flush()


def quickstart(place: Path, name: str, **sections: dict[str, Any]) -> RunConfig:
    """The quick start's settings for a run that only generates."""
    values: dict[str, dict[str, Any]] = {
        "run": {"name": name, "dir": str(place), "iterations": 1, "eta": ITERATIONS},
        "environment": {"name": QUESTIONS, "args": {"timeout_rate": 0.0}},
        "cluster": {"dashboard_port": 0},
        "observe": {"progress": False, "tensorboard": False},
    }
    return load_config(QUICKSTART, values={n: values.get(n, {}) | sections.get(n, {}) for n in (*values, *sections)})


def long_turns(place: Path, name: str, model: Path, *, built_in: bool, agent: dict[str, Any]) -> RunConfig:
    """Turns of exactly 64 tokens: the model ends none by itself."""
    environment = {"name": "benchmarks.gateway_tasks:Turns", "args": {"turns": 4}}
    rollout = {"slots": 64, "max_new_tokens": 64, "max_turns": 4, "max_context_tokens": 640, "ignore_eos": built_in}
    return config_from_dict({
        "run": {"name": name, "dir": str(place), "iterations": 1, "eta": ITERATIONS},
        "model": {"path": str(model)}, "environment": environment, "rollout": rollout, "agent": agent,
        "trainer": {"prompts": 8, "group_size": 8}, "cluster": {"threads": 1, "dashboard_port": 0, "tool_slots": 64},
        "observe": {"progress": False, "tensorboard": False},
    })  # fmt: skip


def compared(configs: dict[str, RunConfig], pairs: int) -> dict[str, float]:
    """Tokens per second of each other side over those of the first one."""
    first, *others = configs
    ratios = {}
    with ExitStack() as exits:
        cluster = exits.enter_context(local_cluster(configs[first]))
        client = exits.enter_context(Client(cluster))
        sides = {name: exits.enter_context(Side(config, client)) for name, config in configs.items()}
        for side in sides.values():
            side.s_per_token()  # everything is loaded then
            side.tokens_per_s.clear()
        for name in others:
            measured = alternate(sides[first].s_per_token, sides[name].s_per_token, pairs=pairs)
            ratios[name] = measured.ratio
            rate, own = (statistics.median(sides[each].tokens_per_s[-pairs:]) for each in (first, name))
            print(f"{name}: {own:,.0f} tokens/s, {first} {rate:,.0f}, ratio {measured.ratio:.3f}", flush=True)
    return ratios


# ---------------------------------------------------------------- tokens


def differing(found: Sequence[Sequence[int]], given: Sequence[Sequence[int]]) -> int:
    """Tokens of the turns ``found`` that are not those ``given``."""
    count = sum(len(ids) for ids in found[len(given) :])
    for ids, known in zip(found, given, strict=False):
        count += sum(a != b for a, b in zip(ids, known, strict=False)) + max(0, len(ids) - len(known))
    return count


def turns_of(trajectory: Trajectory) -> list[list[int]]:
    """Generated token ids of each turn, by what its row says of its place."""
    starts = [turn["sequence_start"] + turn["prompt_tokens"] for turn in trajectory.turns]
    lengths = [turn["generated_tokens"] for turn in trajectory.turns]
    return [trajectory.token_ids[at : at + n].tolist() for at, n in zip(starts, lengths, strict=True)]


def retokenised(place: Path, seen: Path) -> tuple[int, int, int]:
    """Tokens that are not what agents were given, tokens whose text would be other tokens, and all of them."""
    agent = {"function": "benchmarks.gateway_agents:plain"}
    environment = {"args": {"timeout_rate": 0.0, "seen": str(seen)}}
    config = quickstart(place, "tokens", agent=agent, environment=environment, rollout={"temperature": TEMPERATURE})
    with local_cluster(config) as cluster, Client(cluster) as client, Side(config, client) as side:
        trajectories = side.trajectories()
    given = Counter(path.read_text() for path in seen.glob("*.json"))
    chat = load_chat_format(resolve_model(config.model.path), ())
    wrong = other = total = 0
    unknown = []
    for trajectory in trajectories:
        turns = turns_of(trajectory)
        total += sum(map(len, turns))
        other += sum(encoded_otherwise(chat, ids) for ids in turns)
        text = json.dumps(turns)
        if given[text]:
            given[text] -= 1
        else:
            unknown.append(turns)
    rest = [json.loads(text) for text, times in given.items() for _ in range(times)]
    for turns in unknown:
        wrong += min((differing(turns, each) for each in rest), default=sum(map(len, turns)))
    return wrong, other, total


def encoded_otherwise(chat: ChatFormat, ids: list[int]) -> int:
    """Tokens of a turn that its text, encoded again, has otherwise."""
    body = [i for i in ids if i not in chat.stop_ids]
    again = chat.text_ids(chat.decode(ids)).tolist()
    return 0 if again == body else differing([body], [again]) or len(body)


# ---------------------------------------------------------------- CPU


def converse(url: str) -> None:
    """One conversation, in which each call is answered."""
    connection, said = Connection(url), list(SYSTEM)
    for _ in range(TURNS_EACH):
        choice = connection.ask(said, tools=[CALCULATOR])
        assert choice is not None, "refused"
        said.append(choice["message"])
        for call in choice["message"]["tool_calls"]:
            content = returned(call["function"]["arguments"])
            said.append({"role": "tool", "tool_call_id": call["id"], "content": content})


def cpu_ms_per_request(model: Path, rounds: int) -> float:
    """Median over rounds, each of fresh conversations."""
    sessions = CONVERSATIONS * (rounds + 1)
    command = [sys.executable, "-m", "benchmarks.gateway_server", str(model), str(sessions)]
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
    """CPU seconds and requests of the server so far."""
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write("\n")
    server.stdin.flush()
    return json.loads(server.stdout.readline())  # type: ignore[no-any-return]


# ---------------------------------------------------------------- learning


def learned(place: Path, venv: Path, seeds: Sequence[int]) -> tuple[float, list[dict[str, Any]]]:
    """By how many standard errors agents of openai-agents end below the built-in loop, and the runs."""
    import libra

    rows = []
    agents = {"agent__function": "benchmarks.openai_agents_agent:agent", "agent__venv": str(venv)}
    for seed in seeds:
        for name, settings in (("builtin", {}), ("openai_agents", agents)):
            began_s = time.perf_counter()
            summary = libra.train(
                config="libra/quickstart", run__name=f"{name}_{seed}", run__dir=place, run__seed=seed,
                cluster__dashboard_port=0, observe__progress=False, observe__tensorboard=False, **settings,
            )  # fmt: skip
            row = {
                "side": name, "seed": seed, "before": summary.reward_before, "after": summary.reward_after,
                "seconds": round(time.perf_counter() - began_s),
            }  # fmt: skip
            rows.append(row)
            print(row, flush=True)
    questions = load_config(QUICKSTART).evaluation.prompts * len(seeds)
    mean = {
        side: statistics.mean(r["after"] for r in rows if r["side"] == side) for side in ("builtin", "openai_agents")
    }
    error = math.sqrt(sum(max(p * (1 - p), 1 / questions) / questions for p in mean.values()))
    return (mean["builtin"] - mean["openai_agents"]) / error, rows


# ---------------------------------------------------------------- the command


def throughput(place: Path, options: argparse.Namespace) -> dict[str, Figure]:
    """All ratios."""
    agents = "benchmarks.gateway_agents:"
    configs = {"builtin": quickstart(place, "builtin")}
    configs[""] = quickstart(place, "openai", agent={"function": f"{agents}openai_client"})
    configs["_plain"] = quickstart(place, "plain", agent={"function": f"{agents}plain"})
    if options.venv is not None:
        own = {"function": "benchmarks.openai_agents_agent:agent", "venv": str(options.venv)}
        configs["_openai_agents"] = quickstart(place, "openai_agents", agent=own)
    ratios = compared(configs, options.pairs)
    even_words.save_model(place / "model", positions=640)
    configs = {"builtin": long_turns(place, "builtin_64", place / "model", built_in=True, agent={})}
    for name, function in (("_64", "fixed_openai"), ("_64_plain", "fixed")):
        agent = {"function": f"{agents}{function}"}
        configs[name] = long_turns(place, f"agent{name}", place / "model", built_in=False, agent=agent)
    ratios |= compared(configs, options.pairs)
    return {
        f"tokens_per_s_over_builtin{name}": Figure(ratio, "ratio", "higher", GOAL) for name, ratio in ratios.items()
    }


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = command_parser("gateway", __doc__, pairs=MIN_PAIRS)
    parser.add_argument("--venv", type=Path, help="virtual environment with openai-agents")
    parser.add_argument("--learn", type=int, nargs="+", default=[], metavar="SEED", help="train with these seeds, too")
    parser.add_argument("--only", choices=("throughput", "cpu", "tokens", "learn"), nargs="+", help="these parts alone")
    options = parser.parse_args(arguments)
    if options.learn and options.venv is None:
        parser.error("--learn needs openai-agents: type --venv DIRECTORY, as `make test-agents` makes one")
    parts = set(options.only or ("throughput", "cpu", "tokens", *(["learn"] if options.learn else [])))
    figures: dict[str, Figure] = {}
    beside: dict[str, object] = {"load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(prefix="gateway-") as name:
        place = Path(name)
        if "cpu" in parts:
            cpu_ms = cpu_ms_per_request(Path(resolve_model("libra/tiny-arithmetic")), options.pairs)
            print(f"{cpu_ms:.2f} ms of CPU per request", flush=True)
            figures["cpu_ms_per_request"] = Figure(cpu_ms, "ms", "lower", 1.0)
        if "tokens" in parts:
            (place / "seen").mkdir()
            wrong, beside["would_differ"], beside["tokens"] = retokenised(place, place / "seen")
            figures["retokenised_tokens"] = Figure(wrong, "tokens", "lower", 0)
        if "throughput" in parts:
            figures |= throughput(place, options)
        if "learn" in parts and options.learn:
            below, beside["runs"] = learned(place, options.venv, options.learn)
            figures["held_out_below_builtin_se"] = Figure(below, "standard errors", "lower", 1.0)
    emit("gateway", figures, arguments=arguments, as_json=options.json, beside=beside)


if __name__ == "__main__":
    main()
