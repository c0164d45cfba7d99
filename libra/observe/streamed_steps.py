"""Steps that are trained in waves, and the engines that turned to training and back, from the events of the log.

It takes events one by one and reads no clock. Waves that a later start of the run trains again count once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Final

from libra import facts
from libra.facts import Fact

MAX_STEPS: Final = 60
"""Steps whose waves are kept."""
MAX_TURNS: Final = 400


OF_STEPS: Final = frozenset(
    {
        facts.RunStarted, facts.WaveParked, facts.OpenWave, facts.WaveTrained, facts.StepFinished, facts.StepsPlanned,
        facts.TakeSteps, facts.Turn, facts.TurnRefused, facts.RoleChangeStarted, facts.RoleChanged,
        facts.RoleChangeFailed, facts.RoleChangeCancelled,
    }
)  # fmt: skip
"""The kinds of events that `StreamedSteps.add` takes; others change nothing."""


@dataclass(slots=True)
class Wave:
    """A wave of ``groups`` groups; ``train_s`` None: it is not trained yet. ``hybrids`` that can change roles trained in it.

    ``others``: groups that are not of the step's own iteration (``trainer.batches``).
    """

    groups: int
    train_s: float | None = None
    hybrids: int = 0
    others: int = 0


@dataclass(slots=True)
class EngineTurn:
    """A turn of the engine of ``worker`` to training or rollout, asked for at ``t_s``; ``result``: what came of it, in words.

    ``generation`` is that of its change of roles, None: it has not begun. ``seconds`` None: it has not ended in its new role.
    """

    t_s: float
    worker: str
    to: str
    reason: str
    result: str = "asked for"
    generation: int | None = None
    seconds: float | None = None


@dataclass(slots=True)
class StepsWay:
    """How steps are taken from ``t_s`` on (the first after ``step``), and why."""

    t_s: float
    step: int
    way: str
    reason: str


def groups_text(groups: int, others: int) -> str:
    """Groups of a wave, and how many are of other iterations than its step."""
    return f"{groups:,}" + (f" ({others:,} of other iterations)" if others else "")


class StreamedSteps:
    """Waves and turns of a run.

    Attributes
    ----------
    waves : dict of int to dict of int to Wave
        By step and number of the wave, of the newest steps; waves without groups are left out.
    turns : deque of EngineTurn
        The newest, the oldest first.
    ways : deque of StepsWay
        The newest choices of how steps are taken, the oldest first; empty where there was nothing to choose.
    """

    def __init__(self) -> None:
        self.waves: dict[int, dict[int, Wave]] = {}
        self.turns: deque[EngineTurn] = deque(maxlen=MAX_TURNS)
        self.ways: deque[StepsWay] = deque(maxlen=MAX_TURNS)
        self._groups, self._taken = 0, -1
        self._open: dict[str, EngineTurn] = {}  # by worker, turns without a result

    def is_turn(self, generation: int) -> bool:
        """Whether this change of roles is a turn that is under way."""
        return any(turn.generation == generation for turn in self._open.values())

    def is_taken(self, step: int) -> bool:
        """Whether the weights of a step were updated."""
        return step <= self._taken

    def open_step(self) -> dict[str, Any] | None:
        """The step whose waves are being trained, of none the last one, JSON-able; None: no wave was requested yet.

        ``step``, ``groups`` of its batch, ``taken`` (bool), ``trained``, ``in_wave`` and ``missing`` (groups of trained waves, of
        those in training, and of none), ``waves``: [{"wave", "groups", "others" (of them), "train_s" (None: in training),
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
                {
                    "wave": number, "groups": wave.groups, "others": wave.others, "train_s": wave.train_s,
                    "hybrids": wave.hybrids,
                }
                for number, wave in sorted(waves.items())
            ],
        }  # fmt: skip

    def add(self, event: Fact, now_s: float) -> None:
        """Take the next event of the log, at ``now_s`` over all starts of the run."""
        match event:
            case facts.RunStarted():
                self._groups = event.groups_per_batch
                self.waves = {step: waves for step, waves in self.waves.items() if self.is_taken(step)}
                self._end(list(self._open), "the run was stopped before its end")
            case facts.WaveParked():
                self.waves.setdefault(event.batch, {})
                while len(self.waves) > MAX_STEPS:
                    del self.waves[min(self.waves)]
            case facts.OpenWave() if event.members:
                others = sum(iteration != event.batch for iteration, _ in event.members)
                self.waves.setdefault(event.batch, {})[event.wave] = Wave(len(event.members), others=others)
            case facts.WaveTrained() if event.groups:
                waves = self.waves.setdefault(event.batch, {})
                others = waves[event.wave].others if event.wave in waves else 0
                waves[event.wave] = Wave(event.groups, event.train_s, event.hybrids, others)
            case facts.StepFinished():
                self._taken = max(self._taken, event.step)
            case facts.StepsPlanned() | facts.TakeSteps():
                self.ways.append(StepsWay(now_s, self._taken, event.way, event.reason))
            case _:
                self._turn(event, now_s)

    def _turn(self, event: Fact, now_s: float) -> None:
        match event:
            case facts.Turn():
                turn = EngineTurn(now_s, event.worker, event.to, event.reason)
                self.turns.append(turn)
                self._open[event.worker] = turn
            case facts.TurnRefused():
                self._end([event.worker], f"refused: {event.detail}")
            case facts.RoleChangeStarted() if event.undoes is None:
                for worker in event.assignments:
                    if (asked := self._open.get(worker)) is not None and asked.generation is None:
                        asked.generation, asked.result = event.generation, "under way"
            case facts.RoleChanged():
                done = self._open.get(event.worker)
                if done is not None and done.generation == event.generation:
                    done.seconds = event.seconds
                    self._end([event.worker], "done")
            case facts.RoleChangeFailed():
                self._end(self._of(event.generation), f"undone: {event.detail}")
            case facts.RoleChangeCancelled():
                self._end(self._of(event.generation), "cancelled on request")

    def _of(self, generation: int) -> list[str]:
        return [worker for worker, turn in self._open.items() if turn.generation == generation]

    def _end(self, workers: list[str], result: str) -> None:
        for worker in workers:
            if (turn := self._open.pop(worker, None)) is not None:
                turn.result = result
