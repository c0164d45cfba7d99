"""Section of the report about streamed steps: how they were taken, their waves, and the engines that turned to train in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from libra.observe.html import duration, missing, number, table
from libra.observe.report.reported_run import ReportedRun
from libra.observe.report.section import Part, Section, for_each
from libra.observe.timeline.steps import EngineTurn, Wave, groups_text
from libra.untrusted import shown_line

MAX_STEPS: Final = 20
MAX_TURNS: Final = 60


def streamed(runs: Sequence[ReportedRun]) -> Section:
    """Waves of the newest steps, and each turn of an engine with its reason."""
    what = (
        "Waves in which steps were trained while their trajectories were generated, and engines that turned to training and back, "
        "with the reason of each turn."
    )
    return Section("waves", "Waves and turned engines", what, for_each(runs, _streamed_of))


def _streamed_of(run: ReportedRun) -> list[Part]:
    facts = run.timeline.steps
    found = [(step, waves) for step, waves in sorted(facts.waves.items()) if waves]
    if not found:
        return [missing(f"{run.name}: {run.log_error or 'no step was trained in waves (trainer.streaming)'}.")]
    ways: list[Part] = []
    if facts.ways:
        chosen = [(duration(way.t_s), way.step + 1, way.way, shown_line(way.reason, 300)) for way in facts.ways]
        ways.append(table(("at", "from step", "steps are taken by", "why"), chosen[-MAX_TURNS:], (0, 1)))
    rows = [_step_row(step, waves, taken=facts.is_taken(step)) for step, waves in found[-MAX_STEPS:]]
    head = ("step", "groups trained", "waves of groups", "gradients took", "with turned engines", "state")
    parts: list[Part] = [*ways, table(head, rows, (0, 1, 3))]
    if facts.turns:
        turns = [_turn_row(turn) for turn in list(facts.turns)[-MAX_TURNS:]]
        parts.append(table(("at", "engine", "turns to", "result", "took", "why"), turns, (0, 4)))
    else:
        parts.append(missing("No engine turned (trainer.turning)."))
    return [parts]


def _step_row(step: int, waves: dict[int, Wave], *, taken: bool) -> tuple[object, ...]:
    numbered = sorted(waves.items())
    trained = [(place, wave) for place, wave in numbered if wave.train_s is not None]
    helped = ", ".join(f"wave {place}: {wave.hybrids}" for place, wave in trained if wave.hybrids)
    return (
        step, sum(wave.groups for _, wave in trained), " + ".join(groups_text(wave.groups, wave.others) for _, wave in numbered),
        number(sum(wave.train_s or 0.0 for _, wave in trained), ",.2f", " s"), helped or "–", "taken" if taken else "open",
    )  # fmt: skip


def _turn_row(turn: EngineTurn) -> tuple[object, ...]:
    took = number(turn.seconds, ",.2f", " s")
    words = turn.worker, turn.to, turn.result
    return duration(turn.t_s), *(shown_line(word, 120) for word in words), took, shown_line(turn.reason, 300)
