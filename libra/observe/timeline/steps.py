"""Steps of a run: waves, engines' role switches to training and back, and measures of steps.

A wave that a later start trains again counts once. A step is measured once, and only if its gate,
all its groups and its waves belong to this start.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any, Final

from libra import facts, keys
from libra.facts import Fact, StepMeasured
from libra.observe.timeline.states import RunTime
from libra.policy.tail import ASSUMED_LOADS, price_s
from libra.types import Phase

MAX_STEPS: Final = 60
"""Steps with kept waves."""
MAX_SWITCHES: Final = 400
_OF_ENGINES: Final = frozenset({"generating", "turned", "wave"})


@dataclass(slots=True)
class Wave:
    """A wave of ``groups`` groups, of which ``others`` are from other iterations than the step's.

    ``train_s`` is None until trainers and ``hybrids`` engines have trained it, at ``trained_s``.
    """

    groups: int
    train_s: float | None = None
    hybrids: int = 0
    others: int = 0
    trained_s: float = 0.0


@dataclass(slots=True)
class EngineSwitch:
    """A switch of ``worker``'s engine to training or rollout, requested at ``t_s``.

    ``generation`` identifies its role change (None before the start); ``seconds`` is None before
    the end.
    """

    t_s: float
    worker: str
    to: str
    reason: str
    result: str = "requested"
    generation: int | None = None
    seconds: float | None = None


@dataclass(slots=True)
class StepMode:
    """The mode of steps (``way``), set at ``t_s`` from the step after ``step`` on, and the reason."""

    t_s: float
    step: int
    way: str
    reason: str


def groups_text(groups: int, others: int) -> str:
    """Text: groups of a wave, and how many are from other iterations."""
    return f"{groups:,}" + (f" ({others:,} of other iterations)" if others else "")


class Steps:
    """Waves, role switches and measures of a run.

    ``waves`` are by step and number, for the newest steps; ``switches`` and ``modes`` are the
    newest ones, oldest first. ``train_gpus`` counts permanent training GPUs; 0 disables measures.
    ``since_s`` is the time of the previous publication.
    """

    def __init__(self) -> None:
        self.waves: dict[int, dict[int, Wave]] = {}
        self.switches: deque[EngineSwitch] = deque(maxlen=MAX_SWITCHES)
        self.modes: deque[StepMode] = deque(maxlen=MAX_SWITCHES)
        self._groups, self._taken = 0, -1
        self._open: dict[str, EngineSwitch] = {}  # switches without a result, by worker
        self.train_gpus, self.since_s = 0, 0.0
        self._gates_s: dict[int, float] = {}
        self._complete_s: defaultdict[int, list[float]] = defaultdict(list)
        self._ended_s: dict[int, float] = {}  # steps whose publication the next step does not wait for
        self._alone_s: dict[str, float] = {}  # seconds per token of an engine
        self._path_s: defaultdict[str, float] = defaultdict(float)  # seconds of each open trajectory, had it been alone
        self._longest_s: dict[int, float] = {}
        self._changes: dict[str, list[float]] = {"train": [], "rollout": []}
        self._load_s = 0.0  # load of the newest version by an engine

    def is_switching(self, generation: int) -> bool:
        """Whether this role change is an engine switch in progress."""
        return any(switch.generation == generation for switch in self._open.values())

    def is_taken(self, step: int) -> bool:
        """Whether the weights of a step were updated."""
        return step <= self._taken

    def open_step(self) -> dict[str, Any] | None:
        """The open streamed step, else the last one, JSON-able; None before the first wave.

        ``groups`` is the batch size; ``trained``, ``in_wave`` and ``missing`` count groups;
        ``taken`` is a bool. ``waves``: [{"wave", "groups", "others", "train_s" (None in training),
        "hybrids"}, ...].
        """
        if not self.waves:
            return None
        step = min((step for step in self.waves if not self.is_taken(step)), default=max(self.waves))
        waves = self.waves[step]
        trained = sum(wave.groups for wave in waves.values() if wave.train_s is not None)
        in_wave = sum(wave.groups for wave in waves.values()) - trained
        return {
            "step": step, "groups": self._groups, "taken": self.is_taken(step), "trained": trained, "in_wave": in_wave,
            "missing": max(0, self._groups - trained - in_wave),
            "waves": [
                {"wave": number, "groups": wave.groups, "others": wave.others, "train_s": wave.train_s, "hybrids": wave.hybrids}
                for number, wave in sorted(waves.items())
            ],
        }  # fmt: skip

    def add(self, fact: Fact, now_s: float) -> None:
        """Process a fact at ``now_s``, which counts over all starts of the run."""
        match fact:
            case facts.RunStarted():
                self._groups = fact.groups_per_batch
                self.waves = {step: waves for step, waves in self.waves.items() if self.is_taken(step)}
                self._gates_s.clear()
                self._end(list(self._open), "the run was stopped before its end")
            case facts.WaveParked():
                self.waves.setdefault(fact.batch, {})
                while len(self.waves) > MAX_STEPS:
                    del self.waves[min(self.waves)]
            case facts.OpenWave() if fact.members:
                others = sum(iteration != fact.batch for iteration, _ in fact.members)
                self.waves.setdefault(fact.batch, {})[fact.wave] = Wave(len(fact.members), others=others)
            case facts.WaveTrained() if fact.groups:
                waves = self.waves.setdefault(fact.batch, {})
                others = waves[fact.wave].others if fact.wave in waves else 0
                waves[fact.wave] = Wave(fact.groups, fact.train_s, fact.hybrids, others, now_s)
            case facts.StepFinished():
                self._taken = max(self._taken, fact.step)
            case facts.StepsPlanned() | facts.TakeSteps():
                self.modes.append(StepMode(now_s, self._taken, fact.way, fact.reason))
            case _:
                self._switch(fact, now_s)

    def _switch(self, fact: Fact, now_s: float) -> None:
        match fact:
            case facts.Turn():
                self.switches.append(EngineSwitch(now_s, fact.worker, fact.to, fact.reason))
                self._open[fact.worker] = self.switches[-1]
            case facts.TurnRefused():
                self._end([fact.worker], f"refused: {fact.detail}")
            case facts.RoleChangeStarted() if fact.undoes is None:
                for worker in fact.assignments:
                    if (switch := self._open.get(worker)) is not None and switch.generation is None:
                        switch.generation, switch.result = fact.generation, "under way"
            case facts.RoleChanged():
                done = self._open.get(fact.worker)
                if done is not None and done.generation == fact.generation:
                    done.seconds = fact.seconds
                    self._end([fact.worker], "done")
            case facts.RoleChangeFailed():
                self._end(self._of(fact.generation), f"undone: {fact.detail}")
            case facts.RoleChangeCancelled():
                self._end(self._of(fact.generation), "cancelled on request")

    def _of(self, generation: int) -> list[str]:
        return [worker for worker, switch in self._open.items() if switch.generation == generation]

    def _end(self, workers: list[str], result: str) -> None:
        for worker in workers:
            if (switch := self._open.pop(worker, None)) is not None:
                switch.result = result

    # ---------------------------------------------------------------- measures

    def measure(self, fact: Fact, now_s: float) -> None:
        """Process a fact for the measures of steps, if enabled."""
        if not self.train_gpus:
            return
        match fact:
            case facts.QuantumFinished():
                token_s = min(self._alone_s.values(), default=0.0)
                self._path_s[fact.key] += fact.latency_s if fact.phase == Phase.TOOL else fact.tokens * token_s
            case facts.TrajectoryEnded():
                path_s, parsed = self._path_s.pop(fact.key, 0.0), keys.parse(fact.key)
                if parsed is not None and parsed.split == "train":
                    self._longest_s[parsed.indices[0]] = max(path_s, self._longest_s.get(parsed.indices[0], 0.0))
            case facts.OpenGate():
                self._gates_s[fact.iteration] = now_s
            case facts.GroupCommitted(split="train"):
                self._complete_s[fact.iteration].append(now_s)
            case facts.StepFinished(beside=True):
                self._ended_s[fact.step] = now_s
            case facts.WorkerCapacity() if fact.rollout_slots and fact.alone_s_per_token:
                self._alone_s[fact.worker] = fact.alone_s_per_token
            case facts.WorkerWithdrawn():
                self._alone_s.pop(fact.worker, None)
            case facts.VersionServed() if fact.load_s > 0.0:
                self._load_s = fact.load_s
            case facts.RoleChanged() if fact.to_role in self._changes:
                self._changes[fact.to_role].append(price_s(fact.stage_s))

    def measured(self, step: int, now_s: float, time: RunTime) -> StepMeasured | None:
        """A step published at ``now_s`` after the period ``time``; None if partly unseen."""
        self.since_s = time.until_s
        gate_s, complete_s = self._gates_s.get(step), sorted(self._complete_s.get(step, ()))
        trained = [wave for _, wave in sorted(self.waves.get(step, {}).items()) if wave.train_s is not None]
        trained_s = max((wave.trained_s for wave in trained), default=now_s)
        longest_s, ended_s = self._longest_s.get(step, 0.0), self._ended_s.get(step, now_s)
        by_step: tuple[dict[int, Any], ...] = (self._gates_s, self._complete_s, self._longest_s, self._ended_s)
        for known in by_step:
            for done in [k for k in known if k <= step]:
                del known[done]
        whole = len(complete_s) == self._groups == sum(wave.groups for wave in trained)
        elapsed_s = time.until_s - time.since_s
        if gate_s is None or not whole or not elapsed_s > 0:
            return None
        engines = [each for each in time.workers if each.kind == "engine" or _OF_ENGINES & each.seconds.keys()]
        assumed_s = ASSUMED_LOADS * self._load_s
        changes = [sum(took) / len(took) if took else assumed_s for took in self._changes.values()]
        gpus = [self.train_gpus + wave.hybrids for wave in trained]
        waves = [(w.groups, (w.train_s or 0.0) * n / self.train_gpus) for w, n in zip(trained, gpus, strict=True)]
        return StepMeasured(
            step=step,
            complete_s=tuple(round(max(0.0, t_s - gate_s), 6) for t_s in complete_s),
            waves=tuple((groups, round(seconds, 6)) for groups, seconds in waves),
            update_s=round(max(0.0, now_s - trained_s), 6),
            longest_s=round(longest_s, 6),
            rollout_gpus=round(sum(sum(each.gpu_s.values()) for each in engines) / elapsed_s, 6),
            rollout_gpu_s=round(sum(each.gpu_s.get("generating", 0.0) for each in engines), 6),
            change_s=round(sum(changes), 6) if all(changes) else 0.0,
            beside_s=round(max(0.0, now_s - max(ended_s, trained_s)), 6),
        )
