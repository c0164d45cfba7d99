"""A run in one process and in emulated time, for the learning curves of
`benchmarks.learning.async_learning`.

The parts of a run are real: the quick start's model in two engines (`libra.rollout.slot_batch`),
chat format and tool calls, weight versions (`libra.weights`), when iterations and batches open
(`libra.policy.Admission`), which engine takes new weights (`libra.policy.OneVersion`), the verdicts
and advantages of a batch (`libra.graph.member_rows`), and the step (`libra.train.Replica`). There
is no Dask, no journal and no worker process, and time is emulated: one tick is one pass of both
engines at once, and an optimizer step takes `LoopSettings.step_ticks` of them beside the engines.
So how old a token is follows from the settings alone, and the same seed gives the same run.

Trajectories start in the order of their iterations, each on the engine with the fewest; tools take
no time.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from libra.config import RunConfig, resolve_model
from libra.envs import Environment, run_action
from libra.facts import OpenBatch, OpenGate, QuantumStarted, TrajectoryEnded, VersionPublished, WorkerCapacity
from libra.graph.member_rows import member_rows
from libra.policy import Admission, CommittedGroup, OneVersion, keeps_version, staleness_of
from libra.rollout import attention, load_chat_format
from libra.rollout.chat_format import fitted
from libra.rollout.slot_batch import SlotBatch
from libra.rollout.slot_table import Job
from libra.rollout.weight_loading import load_causal_lm
from libra.store.quantum_records import ActionRecord
from libra.train import Replica, TrainSettings
from libra.types import Phase, Prompt, Trajectory, TrajectoryId, TurnOutput, TurnRequest
from libra.weights import WeightStore
from libra.worker.training.batch_rows import without_stale
from libra.worker.trajectory.trajectory_state import TrajectoryRules, TrajectoryState, generation_record

ENGINES = ("engine-0", "engine-1")


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """Settings of the loop that a run does not have."""

    steps: int
    slots: int = 32
    step_ticks: int = 60


@dataclass(slots=True)
class LoopResult:
    """The outcome of a run."""

    ended: list[tuple[int, TrajectoryId]] = field(default_factory=list)
    published: list[int] = field(default_factory=list)
    trained_ids: list[list[TrajectoryId]] = field(default_factory=list)
    over_age: int = 0


class Loop:
    """One run of ``config`` with weights in ``directory``."""

    def __init__(self, config: RunConfig, environment: Environment, directory: Path, settings: LoopSettings) -> None:
        self.config, self.environment, self.settings = config, environment, settings
        model_dir = Path(str(resolve_model(config.model.path)))
        self.chat = load_chat_format(model_dir, environment.tool_schemas, tool_format=environment.tool_format)
        attention.register()
        self.engines = {
            name: SlotBatch(
                load_causal_lm(model_dir, config.model.dtype, attention.SLOT_ATTENTION), slots=settings.slots,
                max_context_tokens=config.rollout.max_context_tokens, version=0,
            )
            for name in ENGINES
        }  # fmt: skip
        self.replica = Replica(
            model_dir, TrainSettings.of_run(config), threads=1, seed=config.run.seed, base_dir=model_dir
        )
        self.store = WeightStore(directory)
        self.replica.published = self.store.read
        self.staleness = staleness_of(config)
        self.admission = Admission(self.staleness, config.trainer.prompts)
        self.one_version = OneVersion() if keeps_version(config) else None
        self.tick, self.result = 0, LoopResult()
        self._tickets = itertools.count()
        self._waiting: deque[TrajectoryState] = deque()
        self._running: dict[str, tuple[TrajectoryState, str]] = {}
        self._on = Counter[str]()
        self._groups: dict[tuple[int, int], list[Trajectory]] = {}
        self._publishes: tuple[int, int] | None = None  # at this tick, this version
        self._open: deque[OpenBatch] = deque()

    async def run(self) -> LoopResult:
        if self.one_version is not None:
            for name in ENGINES:
                self.one_version.handle(WorkerCapacity(name, rollout_slots=self.settings.slots))
        self._publish(0)
        for number in range(self.settings.steps):
            self._opened(self.admission.gate_parked(number))
            self._opened(self.admission.batch_parked(number))
        while len(self.result.published) < self.settings.steps:
            await self._one_tick()
        return self.result

    async def evaluate(self, questions: int) -> float:
        for engine in self.engines.values():
            for job in engine.drop_all():
                engine.forget(job.name)
        self._running.clear()
        self._waiting.clear()
        self._on.clear()
        self._load(ENGINES, self.settings.steps)
        self.one_version = None
        self._waiting.extend(self._state(TrajectoryId(0, q, 0, "eval")) for q in range(questions))
        self._evaluated: list[float] = []
        while self._waiting or self._running:
            await self._one_tick()
        return float(np.mean(self._evaluated))

    # ---------------------------------------------------------------- time

    async def _one_tick(self) -> None:
        self.tick += 1
        if self._publishes is not None and self._publishes[0] <= self.tick:
            version, self._publishes = self._publishes[1], None
            self.result.published.append(self.tick)
            self._publish(version)
        if self._publishes is None and self._open:
            self._step(self._open.popleft())
        self._start()
        for name, engine in self.engines.items():
            if engine.has_work:
                for job, output in engine.step():
                    await self._generated(job.name, output, name)

    def _publish(self, version: int) -> None:
        if version == 0:
            self.store.publish(0, self.replica.all_weights())
        if self.one_version is None:
            self._load(ENGINES, version)
        else:
            self._command(self.one_version.handle(VersionPublished(version)))
        self._opened(self.admission.version_published(version))

    def _command(self, commands: Sequence[Any]) -> None:
        for command in commands:
            self._load((command.worker,), command.version)

    def _load(self, names: Sequence[str], version: int) -> None:
        for name in names:
            if self.engines[name].version != version:
                self.engines[name].load(version, self.store.get(version).directory)

    # ---------------------------------------------------------------- rollout

    def _opened(self, commands: Sequence[Any]) -> None:
        for command in commands:
            if isinstance(command, OpenGate):
                trainer, k = self.config.trainer, command.iteration
                for group, sample in itertools.product(range(trainer.prompts), range(trainer.group_size)):
                    self._waiting.append(self._state(TrajectoryId(k, group, sample)))
            elif isinstance(command, OpenBatch):
                self._open.append(command)

    def _state(self, tid: TrajectoryId) -> TrajectoryState:
        rollout, count = self.config.rollout, self.config.trainer.prompts
        index = tid.iteration * count + tid.group if tid.split == "train" else tid.group
        prompt = self.environment.prompt(tid.split, index)
        return TrajectoryState(tid, prompt, TrajectoryRules(rollout.max_turns, rollout.max_context_tokens))

    def _start(self) -> None:
        while self._waiting:
            key = str(self._waiting[0].tid)
            may = [n for n in ENGINES if self.one_version is None or self.one_version.may(key, n)]
            free = [name for name in may if self._on[name] < self.settings.slots]
            if not free:
                return
            state, name = self._waiting.popleft(), min(free, key=lambda each: self._on[each])
            self._on[name] += 1
            if self.one_version is not None:
                self._command(self.one_version.handle(QuantumStarted(key, Phase.ROLLOUT, name)))
            if state.tid.split == "train":
                self.admission.generation_started(state.tid.iteration, state.tid.group, self.engines[name].version)
            self._running[key] = (state, name)
            self._submit(state, name)

    def _submit(self, state: TrajectoryState, name: str) -> None:
        rollout, tid = self.config.rollout, state.tid
        context = state.attempt.context_ids if state.attempt.context else self._prompt_ids(state.prompt)
        text = f"{self.config.run.seed}/{tid}/{state.attempt.turns}"
        request = TurnRequest(
            trajectory_id=str(tid), turn=state.attempt.turns, context_ids=context,
            max_new_tokens=max(1, min(rollout.max_new_tokens, rollout.max_context_tokens - len(context))),
            temperature=rollout.temperature, top_p=rollout.top_p, stop_ids=self.chat.stop_ids,
            seed=int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1,
        )  # fmt: skip
        self.engines[name].submit(Job(next(self._tickets), request, 0.0))

    def _prompt_ids(self, prompt: Prompt) -> Any:
        return self.chat.prompt_ids(list(prompt.messages))

    async def _generated(self, key: str, output: TurnOutput, name: str) -> None:
        state, _ = self._running[key]
        text = self.chat.decode(output.token_ids)
        calls = self.environment.parse(text)
        prompt_ids = None if state.attempt.context else self._prompt_ids(state.prompt)
        record = generation_record(state.attempt.turns, prompt_ids, output, text, calls)
        record.worker = name
        state.apply(record)
        if state.attempt.calls:
            turn = state.attempt.turns - 1
            ended = self.chat.ends(int(output.token_ids[-1]), "tool")
            returns = [
                await run_action(self.environment, state.prompt, call, action_id=f"{key}/{turn}/{index}")
                for index, call in enumerate(state.attempt.calls)
            ]
            rollout = self.config.rollout
            left = rollout.max_context_tokens - state.attempt.num_context_tokens
            shown = [each.content for each in returns]
            _, observation = fitted(self.chat, shown, left, rollout.max_new_tokens, ended=ended)
            state.apply(ActionRecord(turn=turn, returns=tuple(returns), observation_ids=observation, worker=name))
        if state.phase is not None:
            self._submit(state, name)
            return
        del self._running[key]
        self._on[name] -= 1
        self.engines[name].forget(key)
        self._ended(state)
        if self.one_version is not None:
            self._command(self.one_version.handle(TrajectoryEnded(key)))

    def _ended(self, state: TrajectoryState) -> None:
        made = state.trajectory(0)
        made.reward = float(self.environment.grade(state.episode()))
        if state.tid.split == "eval":
            self._evaluated.append(made.reward)
            return
        self.result.ended.append((made.num_action_tokens, state.tid))
        place = (state.tid.iteration, state.tid.group)
        members = self._groups.setdefault(place, [])
        members.append(made)
        if len(members) == self.config.trainer.group_size:
            members.sort(key=lambda each: each.trajectory_id.sample)
            oldest = min(each.oldest_version for each in members if each.num_action_tokens)
            self._opened(self.admission.group_committed(CommittedGroup(*place, oldest)))

    # ---------------------------------------------------------------- training

    def _step(self, opened: OpenBatch) -> None:
        step = opened.batch
        groups = [self._groups.pop(member) for member in opened.members]
        rows = member_rows(self.config.trainer, groups, [Path()] * len(groups), step, self.staleness)
        trained = []
        for group, row in zip(groups, rows, strict=True):
            for member, advantage, trains in zip(group, row["advantages"], row["trains"], strict=True):
                member.advantage = advantage
                if trains:
                    trained.append(without_stale(member, row))
        report = self.replica.step(trained, step)
        found = self.result
        found.trained_ids.append([each.trajectory_id for each in trained])
        found.over_age += sum("over_age" in row for row in rows)
        self.store.publish(step + 1, self.replica.all_weights(), content=report.digest)
        self.store.drop(keep_last=self.staleness.eta + 3, pinned={e.version for e in self.engines.values()})
        self._publishes = (self.tick + self.settings.step_ticks, step + 1)
