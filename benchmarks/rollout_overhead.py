"""Overhead of Libra in a rollout: tokens/s through Dask over tokens/s of the same turns sent directly to the engine.

64 concurrent trajectories (8 groups of 8) of 4 turns, every turn of exactly ``--tokens`` tokens (end-of-turn ignored), an
observation between turns. Both sides use the same engine object in the same worker process, with the same prompts, seeds and
observations:

* *Libra*: the trajectories of an iteration graph on real worker processes, parked and dispatched by the scheduler's plugin;
  every generation and action is in the journal, every quantum is reported and in the event log. The tool costs nothing and is
  inline (the bare side has none), and no trajectory waits for a slot, so each keeps its slot between turns. With
  ``--tool-slot`` each action goes to a slot of a tool worker and each turn is dispatched: the cost of a tool on another worker.
  Seconds are from the first dispatch to the last quantum's report, from the event log; grading and storing come after.
* *bare*: in the rollout worker, one coroutine per trajectory calls ``engine.generate`` for turn after turn, and appends the
  same observation tokens at once. With ``--engine vllm`` it calls vLLM's own ``AsyncLLM.generate`` in AsyncLLM's event loop,
  without any code of Libra.

Figures: ``throughput_ratio`` (64 tokens per turn), ``throughput_ratio_16``, ``throughput_ratio_256``,
``throughput_ratio_tool_slot`` (64 tokens per turn, actions on TOOL slots; not with ``--tool-slot``),
``break_even_tokens`` (turn length at which the ratio falls below 0.90, interpolated between measured lengths), and
``scheduler_us_per_quantum`` (CPU of the thread that runs scheduler, client and nannies, event log on, less its idle CPU, over
generation and action quanta at 16 tokens; building and submitting the graph is included). Idle CPU is measured before and after
each iteration. It is proportional to the iteration's seconds, so the figure is not given for longer turns: at 64 tokens on two
cores, an idle share that is wrong by 1 % of a core changes it by some 250 us.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Self

from benchmarks import even_words as task
from benchmarks.report import Figure, alternate, command_parser, emit
from libra.cluster.connection import present_workers
from libra.config import config_from_dict
from libra.driver.session import Session
from libra.graph.iteration import iteration_graph
from libra.store.event_log import read_events
from libra.worker.host import host_name

LENGTHS = (16, 64, 256)
GOALS, KEPT = {"transformers": 0.95, "vllm": 0.95}, 0.90
SPECIAL = {64: "throughput_ratio", 16: "throughput_ratio_16", 256: "throughput_ratio_256"}
RUNS_PER_SESSION = 1000
GROUP_SIZE = 8
SCHEDULER_TOKENS = 16
IDLE_S = 1.5


def context_tokens(tokens: int, turns: int) -> int:
    """Room for a prompt, and ``turns`` turns of so many tokens with their observations."""
    return 64 + turns * (tokens + 64)


class Side:
    """A started run that only generates; a context manager."""

    def __init__(
        self, model_dir: Path, runs_dir: Path, tokens: int, options: argparse.Namespace, *, inline: bool
    ) -> None:
        self.tokens, self.options = tokens, options
        self.k = 0
        name = f"overhead_{options.engine}_{tokens}_{'inline' if inline else 'slots'}"
        config = config_from_dict(
            {
                "run": {
                    "name": name,
                    "dir": str(runs_dir),
                    "iterations": 1,
                    "eta": RUNS_PER_SESSION,
                },
                "model": {"path": str(model_dir)},
                "environment": {"name": "libra.testing:FixedTurns", "args": {"inline": inline}},
                "rollout": {
                    "engine": options.engine,
                    "slots": options.concurrent,
                    "max_new_tokens": tokens,
                    "max_turns": options.turns,
                    "max_context_tokens": context_tokens(tokens, options.turns),
                    "ignore_eos": True,
                },
                "trainer": {"prompts": options.concurrent // GROUP_SIZE, "group_size": GROUP_SIZE},
                "cluster": {"threads": options.threads, "dashboard_port": 0},
                "observe": {"progress": False, "tensorboard": False},
            }
        )
        self.session = Session(config)
        self.scheduler_us: list[float] = []
        """Of each iteration, per quantum."""

    def __enter__(self) -> Self:
        self.session.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.session.__exit__(*error)

    def libra_s(self) -> float:
        """One iteration's trajectories through Libra."""
        session, k = self.session, self.k
        assert session.client is not None
        idle = [self._idle_share()]
        began_wall_s, began_s = time.perf_counter(), session.client.run_on_scheduler(thread_seconds)
        graph = iteration_graph(session.spec, k)
        futures = session.client.compute(graph.groups, optimize_graph=False)
        session.client.gather(futures)
        spent_s = session.client.run_on_scheduler(thread_seconds) - began_s
        wall_s = time.perf_counter() - began_wall_s
        del futures
        idle.append(self._idle_share())
        self.k += 1
        session.client.run_on_scheduler(flush_events)
        mine = [
            e
            for e in read_events(session.directory / "events.jsonl").events
            if str(e.get("key", "")).startswith(f"trajectory-train-{k}-")
        ]
        finished = [e for e in mine if e["name"] == "quantum_finished"]
        assert sum(e["tokens"] for e in finished) == self.options.concurrent * self.options.turns * self.tokens
        if self.tokens == SCHEDULER_TOKENS:
            self.scheduler_us.append(1e6 * (spent_s - statistics.mean(idle) * wall_s) / len(finished))
        return float(max(e["t_s"] for e in finished) - min(e["t_s"] for e in mine if e["name"] == "quantum_dispatched"))

    def _idle_share(self) -> float:
        """As `idle_share`; 0 where the figure is not asked for."""
        client = self.session.client
        assert client is not None
        return float(client.run_on_scheduler(idle_share)) if self.tokens == SCHEDULER_TOKENS else 0.0

    def bare_s(self) -> float:
        """The same trajectories directly on the engine, in its process."""
        session = self.session
        assert session.client is not None
        workers = present_workers(session.client)
        engines = [address for address, worker in workers.items() if worker["name"] == "rollout-0"]
        (seconds,) = session.client.run(
            feed, session.spec.run, self.options.concurrent, GROUP_SIZE, self.options.turns, self.k, workers=engines
        ).values()
        return float(seconds)


def thread_seconds(dask_scheduler: Any) -> float:
    """CPU seconds of the thread that runs the scheduler."""
    return time.thread_time()


async def idle_share(dask_scheduler: Any) -> float:
    """Share of a core that this thread takes when idle: heartbeats, Dask's system monitor, samplers."""
    import asyncio

    began_s, began_wall_s = time.thread_time(), time.perf_counter()
    await asyncio.sleep(IDLE_S)
    return (time.thread_time() - began_s) / (time.perf_counter() - began_wall_s)


def flush_events(dask_scheduler: Any) -> None:
    """Flush the event log."""
    for state in dask_scheduler.plugins["libra"].runs.values():
        state.log.flush()


async def feed(run: str, concurrent: int, group_size: int, turns: int, k: int, dask_worker: Any) -> float:
    """Generate ``concurrent`` trajectories, turn after turn; wall seconds."""
    import asyncio

    import numpy as np

    from libra.types import TrajectoryId, TurnRequest

    host = dask_worker.plugins[host_name(run)]
    engine, chat, environment = host.engine.serving.engine, host.quanta.chat, host.context.environment
    rollout = host.spec.config.rollout
    groups = concurrent // group_size
    asked = [chat.prompt_ids(list(environment.prompt("train", k * groups + g).messages)) for g in range(groups)]
    first = [asked[i // group_size] for i in range(concurrent)]
    observation = chat.observation_ids(["y" * environment.payload_chars], ended=False)

    llm = getattr(getattr(engine, "_core", None), "llm", None)  # the AsyncLLM within a VLLMEngine

    async def answer(name: str, turn: int, context: Any, seed: int) -> Any:
        if llm is None:
            request = TurnRequest(
                name, turn, context, rollout.max_new_tokens, temperature=rollout.temperature, seed=seed
            )
            return (await engine.generate(request)).token_ids
        return await bare_answer(llm, f"{name}-{turn}", context, seed, rollout)

    async def one(g: int) -> None:
        context = first[g]
        for turn in range(turns):
            seed = host.spec.turn_seed(TrajectoryId(k, g // group_size, g % group_size), turn)
            token_ids = await answer(f"bare-{k}-{g}", turn, context, seed)
            context = np.concatenate([context, token_ids, observation])
        engine.forget(f"bare-{k}-{g}")

    async def every_trajectory() -> float:
        began_s = time.perf_counter()
        await asyncio.gather(*(one(g) for g in range(concurrent)))
        return time.perf_counter() - began_s

    if llm is None:
        return await every_trajectory()
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(every_trajectory(), engine._loop))


async def bare_answer(llm: Any, name: str, context: Any, seed: int, rollout: Any) -> Any:
    """Tokens of one turn from vLLM's own API, with ids and log-probabilities."""
    import numpy as np
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    sampling = SamplingParams(
        max_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        seed=seed,
        logprobs=0,
        ignore_eos=True,
        detokenize=False,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    final = None
    async for output in llm.generate({"prompt_token_ids": context.tolist()}, sampling, name):
        final = output
    assert final is not None
    return np.asarray(final.outputs[0].token_ids, np.int32)


def break_even(ratios: dict[int, float], kept: float = KEPT) -> float:
    """Turn length below which the ratio is under ``kept``, linear in log length between the two measured around it.

    The shortest measured length if every ratio is at least ``kept``. If none is, extrapolated from the longest one, assuming the
    same overhead per turn at any length.
    """
    lengths = sorted(ratios)
    below = [n for n in lengths if ratios[n] < kept]
    if not below:
        return float(lengths[0])
    low = max(below)
    above = [n for n in lengths if n > low]
    if not above:
        return low * (1 / ratios[low] - 1) / (1 / kept - 1)
    high = min(above)
    share = (kept - ratios[low]) / (ratios[high] - ratios[low])
    return math.exp(math.log(low) + share * (math.log(high) - math.log(low)))


def measure(
    model_dir: Path, runs_dir: Path, tokens: int, options: argparse.Namespace, *, inline: bool
) -> tuple[float, float | None]:
    """Throughput ratio at one turn length, and scheduler CPU microseconds per quantum (median over iterations)."""
    with Side(model_dir, runs_dir, tokens, options, inline=inline) as side:
        side.bare_s(), side.libra_s()
        side.scheduler_us.clear()
        measured = alternate(side.libra_s, side.bare_s, pairs=options.pairs)
        scheduler_us = statistics.median(side.scheduler_us) if side.scheduler_us else None
    libra_s, bare_s = measured.medians
    total = options.concurrent * options.turns * tokens
    # The ratio of each pair is Libra's seconds over bare ones; throughput is its inverse.
    ratio = statistics.median(bare / libra for libra, bare in zip(measured.first, measured.second, strict=True))
    print(
        f"{tokens:4d} tokens per turn, {'inline tool' if inline else 'tool slots'}: Libra {total / libra_s:7,.0f} tok/s, "
        f"bare {total / bare_s:7,.0f} tok/s, ratio {ratio:.3f}"
        + ("" if scheduler_us is None else f"; scheduler {scheduler_us:.0f} us per quantum"),
        flush=True,
    )
    return ratio, scheduler_us


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = command_parser("rollout_overhead", __doc__, pairs=7)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(LENGTHS), help="tokens per turn to measure")
    parser.add_argument("--engine", choices=sorted(GOALS), default="transformers", help="engine of the rollout worker")
    parser.add_argument("--concurrent", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="torch threads of the engine (default: cores)"
    )
    parser.add_argument("--tool-slot", action="store_true", help="run every action on a TOOL slot, not within its turn")
    options = parser.parse_args(arguments)
    goal = GOALS[options.engine]
    ratios: dict[int, float] = {}
    figures: dict[str, Figure] = {}
    with tempfile.TemporaryDirectory(prefix="rollout_overhead-") as name:
        longest = context_tokens(max(options.tokens), options.turns)
        task.save_model(Path(name) / "model", positions=longest)
        model_dir, runs_dir = Path(name) / "model", Path(name) / "runs"
        for tokens in options.tokens:
            ratios[tokens], scheduler_us = measure(model_dir, runs_dir, tokens, options, inline=not options.tool_slot)
            if tokens in SPECIAL:
                figures[SPECIAL[tokens]] = Figure(ratios[tokens], "ratio", "higher", goal)
            if scheduler_us is not None:
                figures["scheduler_us_per_quantum"] = Figure(scheduler_us, "us", "lower", 150)
        if 64 in options.tokens and not options.tool_slot:
            ratio, _ = measure(model_dir, runs_dir, 64, options, inline=False)
            figures["throughput_ratio_tool_slot"] = Figure(ratio, "ratio", "higher", goal)
    figures["break_even_tokens"] = Figure(break_even(ratios), "tokens", "lower", 64)
    emit("rollout_overhead", figures, arguments=arguments, as_json=options.json)


if __name__ == "__main__":
    main()
