"""Overhead of Libra in a rollout: tokens/s through Dask over tokens/s of the same turns sent
directly to the engine.

64 concurrent trajectories (8 groups of 8) of 4 turns, every turn of exactly ``--tokens`` tokens, an
observation between turns. Both sides use the same engine object in the same worker process, with
the same prompts, seeds and observations:

* *Libra*: the trajectories of an iteration graph on real worker processes; every generation and
  action is in the journal, every quantum is in the event log. The tool costs nothing and is inline,
  and each trajectory keeps its slot between turns. Seconds are from the first dispatch to the last
  quantum's report.
* *bare*: in the rollout worker, one coroutine per trajectory calls ``engine.generate`` for turn
  after turn. With ``--engine vllm`` it calls vLLM's own ``AsyncLLM.generate`` in AsyncLLM's event
  loop, without any code of Libra.

Figures: ``throughput_ratio`` (64 tokens per turn), ``throughput_ratio_16``,
``throughput_ratio_tool_slot`` (64 tokens, each action on a slot of a tool worker), and
``scheduler_us_per_quantum``: CPU of the scheduler's thread, less its idle CPU, over quanta at 16
tokens. It is not given for longer turns: at 64 tokens an idle share that is wrong by 1 % of a core
changes it by some 250 us.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.live.only_rollouts import ITERATIONS, OnlyRollouts
from benchmarks.peers import even_words as task
from benchmarks.report import Figure, alternate, command_parser, emit
from libra.cluster.connection import present_workers
from libra.config import config_from_dict
from libra.keys import host_name

GOAL = 0.95
SPECIAL = {64: "throughput_ratio", 16: "throughput_ratio_16"}
GROUP_SIZE, SCHEDULER_TOKENS, IDLE_S = 8, 16, 1.5


def context_tokens(tokens: int, turns: int) -> int:
    """Room for a prompt, and ``turns`` turns of so many tokens with their observations."""
    return 64 + turns * (tokens + 64)


class Side(OnlyRollouts):
    """A run with turns of ``tokens`` tokens; `libra_s` and `bare_s` take the same trajectories."""

    def __init__(self, place: Path, tokens: int, options: argparse.Namespace, *, inline: bool) -> None:
        self.tokens, self.options = tokens, options
        self.scheduler_us: list[float] = []  # of each iteration, per quantum
        name = f"overhead_{options.engine}_{tokens}_{'inline' if inline else 'slots'}"
        rollout = {
            "engine": options.engine, "slots": options.concurrent, "max_new_tokens": tokens, "max_turns": options.turns,
            "max_context_tokens": context_tokens(tokens, options.turns), "ignore_eos": True,
        }  # fmt: skip
        super().__init__(config_from_dict({
            "run": {"name": name, "dir": str(place / "runs"), "iterations": 1, "eta": ITERATIONS},
            "model": {"path": str(place / "model")}, "rollout": rollout,
            "environment": {"name": "libra.testing:FixedTurns", "args": {"inline": inline}},
            "trainer": {"prompts": options.concurrent // GROUP_SIZE, "group_size": GROUP_SIZE},
            "cluster": {"threads": options.threads, "dashboard_port": 0},
            "observe": {"progress": False, "trackers": []},
        }))  # fmt: skip

    def libra_s(self) -> float:
        client = self.session.client
        idle = [self._idle_share()]
        began_wall_s, began_s = time.perf_counter(), client.run_on_scheduler(thread_seconds)
        self.groups()
        spent_s = client.run_on_scheduler(thread_seconds) - began_s
        wall_s = time.perf_counter() - began_wall_s
        idle.append(self._idle_share())
        finished, took_s = self.last()
        assert sum(e["tokens"] for e in finished) == self.options.concurrent * self.options.turns * self.tokens
        if self.tokens == SCHEDULER_TOKENS:
            self.scheduler_us.append(1e6 * (spent_s - statistics.mean(idle) * wall_s) / len(finished))
        return took_s

    def _idle_share(self) -> float:
        return float(self.session.client.run_on_scheduler(idle_share)) if self.tokens == SCHEDULER_TOKENS else 0.0

    def bare_s(self) -> float:
        session, options = self.session, self.options
        workers = present_workers(session.client).items()
        engines = [address for address, worker in workers if worker["name"] == "rollout-0"]
        found = session.client.run(feed, session.spec.run, options.concurrent, options.turns, self.k, workers=engines)
        (seconds,) = found.values()
        return float(seconds)


def thread_seconds(dask_scheduler: Any) -> float:
    return time.thread_time()


async def idle_share(dask_scheduler: Any) -> float:
    """Share of a core that this thread takes when idle: heartbeats, monitors, samplers."""
    began_s, began_wall_s = time.thread_time(), time.perf_counter()
    await asyncio.sleep(IDLE_S)
    return (time.thread_time() - began_s) / (time.perf_counter() - began_wall_s)


async def feed(run: str, concurrent: int, turns: int, k: int, dask_worker: Any) -> float:
    from libra.types import TrajectoryId, TurnRequest

    host = dask_worker.plugins[host_name(run)]
    engine, chat, environment = host.engine.serving.engine, host.quanta.chat, host.context.environment
    rollout = host.spec.config.rollout
    groups = concurrent // GROUP_SIZE
    asked = [chat.prompt_ids(list(environment.prompt("train", k * groups + g).messages)) for g in range(groups)]
    observation = chat.observation_ids(["y" * environment.payload_chars], ended=False)
    llm = getattr(getattr(engine, "_core", None), "llm", None)  # the AsyncLLM within a VLLMEngine

    async def one(g: int) -> None:
        context, name = asked[g // GROUP_SIZE], f"bare-{k}-{g}"
        for turn in range(turns):
            seed = host.spec.turn_seed(TrajectoryId(k, g // GROUP_SIZE, g % GROUP_SIZE), turn)
            if llm is None:
                how = {"temperature": rollout.temperature, "seed": seed}
                token_ids = (
                    await engine.generate(TurnRequest(name, turn, context, rollout.max_new_tokens, **how))
                ).token_ids
            else:
                token_ids = await bare_answer(llm, f"{name}-{turn}", context, seed, rollout)
            context = np.concatenate([context, token_ids, observation])
        engine.forget(name)

    async def every_trajectory() -> float:
        began_s = time.perf_counter()
        await asyncio.gather(*(one(g) for g in range(concurrent)))
        return time.perf_counter() - began_s

    if llm is None:
        return await every_trajectory()
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(every_trajectory(), engine._loop))


async def bare_answer(llm: Any, name: str, context: Any, seed: int, rollout: Any) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    sampling = SamplingParams(
        max_tokens=rollout.max_new_tokens, temperature=rollout.temperature, seed=seed, logprobs=0, ignore_eos=True,
        detokenize=False, flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip
    final = None
    async for output in llm.generate({"prompt_token_ids": context.tolist()}, sampling, name):
        final = output
    assert final is not None
    return np.asarray(final.outputs[0].token_ids, np.int32)


def measure(place: Path, tokens: int, options: argparse.Namespace, *, inline: bool) -> tuple[float, float | None]:
    """Throughput ratio at one turn length, and scheduler CPU microseconds per quantum (median)."""
    with Side(place, tokens, options, inline=inline) as side:
        side.bare_s(), side.libra_s()
        side.scheduler_us.clear()
        measured = alternate(side.bare_s, side.libra_s, pairs=options.pairs)
        scheduler_us = statistics.median(side.scheduler_us) if side.scheduler_us else None
    print(f"{tokens} tokens per turn, inline {inline}: bare over Libra {measured.ratio:.3f}", flush=True)
    return measured.ratio, scheduler_us


def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("rollout_overhead", __doc__, pairs=7)
    parser.add_argument("--tokens", type=int, nargs="+", default=sorted(SPECIAL), help="tokens per turn to measure")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--concurrent", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch threads of the engine")
    options = parser.parse_args(arguments)
    figures: dict[str, Figure] = {}
    with tempfile.TemporaryDirectory(prefix="rollout_overhead-") as name:
        place = Path(name)
        task.save_model(place / "model", positions=context_tokens(max(options.tokens), options.turns))
        for tokens in options.tokens:
            ratio, scheduler_us = measure(place, tokens, options, inline=True)
            if tokens in SPECIAL:
                figures[SPECIAL[tokens]] = Figure(ratio, "ratio", "higher", GOAL)
            if scheduler_us is not None:
                figures["scheduler_us_per_quantum"] = Figure(scheduler_us, "us", "lower", 150)
        if 64 in options.tokens:
            ratio, _ = measure(place, 64, options, inline=False)
            figures["throughput_ratio_tool_slot"] = Figure(ratio, "ratio", "higher", GOAL)
    emit("rollout_overhead", figures, arguments=arguments, as_json=options.json)
