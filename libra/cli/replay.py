"""``libra replay``: repeat a run's decisions from its event log, and show the history of one."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click

from libra import facts, keys
from libra.errors import ConfigError, RunDirectoryError, StoreError, nearest_name, shell_path
from libra.facts import Fact, Line, OpenBatch, OpenWave, SetPriority, name_of, sentence
from libra.facts.sentences import NAMES, Subject, concerns, subject_of, subject_text
from libra.observe.run_directory import check_run_directory
from libra.observe.timeline.decision_outcomes import DecisionOutcomes, Outcome, forecast_results
from libra.policy.log_replay import Told, replay
from libra.store.event_log import EventReader, from_last_snapshot
from libra.untrusted import shown_line
from libra.user_orderings import ordering_of

MAX_SHOWN = 60
"""Maximum lines of history printed per subject; the oldest are left out first."""
MAX_CHANGES = 20
"""Maximum plans and changes printed per run; the oldest are left out first."""


MAX_EVENT_CHARS = 3000
"""Maximum length of a fact's sentence; failure details have at most 2,000 characters."""


@dataclass(slots=True)
class ReplayResult:
    """Result of a replay; ``asked`` holds events by the line of a requested decision."""

    events: int = 0
    first_line: int = 0
    snapshots: int = 0
    commands: Counter[str] = field(default_factory=Counter)
    differing: int = 0
    first_difference: Told | None = None
    cut: Told | None = None
    torn: bool = False
    asked: dict[int, Told] = field(default_factory=dict)
    decision_lines: list[int] = field(default_factory=list)  # kept only for --decision
    changes: DecisionOutcomes = field(default_factory=DecisionOutcomes)

    def add(self, told: Told, decisions: Sequence[int]) -> None:
        """Count one event with its commands."""
        for line, command, _ in told.logged:
            self.commands[type(command).__name__] += 1
            if decisions:
                self.decision_lines.append(line)
                if line in decisions:
                    self.asked[line] = told
        self.snapshots += isinstance(told.event, facts.PolicySnapshot)
        if told.difference:
            self.differing += 1
            self.first_difference = self.first_difference or told
        if told.cut:
            self.cut = told


def replay_run(
    run_dir: Path, *, from_snapshot: bool, keys: Sequence[str], decisions: Sequence[int], as_json: bool
) -> bool:
    """Print the result of a replay of ``run_dir``; True if every decision was reproduced.

    For ``keys`` alone the log is only read, and nothing is replayed.
    """
    if as_json and (keys or decisions):
        raise click.UsageError("--json prints the whole result; leave it out with --key and --decision")
    path = event_log_path(run_dir)

    def reader() -> EventReader:
        found = from_last_snapshot(path) if from_snapshot else EventReader(path)
        if found is None:
            raise ConfigError(f"--from-snapshot: {path} has no snapshot; leave the option out")
        return found

    if keys and not decisions:
        click.echo("\n\n".join("\n".join(_history_of_key(reader, key)) for key in keys))
        return True
    outcome = _outcome(reader(), decisions)
    if not outcome.events:
        raise StoreError(f"{path}: no event; the run died before its first one, so there is nothing to replay")
    click.echo(json.dumps(_as_json(path, outcome)) if as_json else "\n".join(_summary(path, run_dir, outcome)))
    for line in decisions:
        if line not in outcome.asked:
            raise ConfigError(f"--decision {line}: {path} has no decision in that line; {_near(line, outcome)}")
    stories = [_origin(reader(), line, outcome.asked[line]) for line in decisions]
    for story in (*stories, *(_history_of_key(reader, key) for key in keys)):
        click.echo("\n".join(("", *story)))
    return outcome.first_difference is None


def event_text(fact: Fact) -> str:
    """One fact as a sentence, on one line."""
    return shown_line(sentence(fact), MAX_EVENT_CHARS)


def event_log_path(run_dir: Path, command: str = "replay") -> Path:
    """The event log of a run directory; RunDirectoryError with the words to type for ``libra COMMAND``."""
    path = run_dir / "events.jsonl"
    if path.is_file():
        return path
    doctor = f"type libra doctor {shell_path(run_dir)}"
    if path.exists():
        raise RunDirectoryError(f"{path}: is not a file, so the event log cannot be read; {doctor}")
    if any(run_dir.glob("events/*.jsonl*")):
        raise RunDirectoryError(
            f"{run_dir}: no events.jsonl; it is gone, and only older parts are left in events; {doctor}"
        )
    if (run_dir / "config.resolved.yaml").is_file():
        raise RunDirectoryError(f"{run_dir}: no events.jsonl; its event log was removed")
    return check_run_directory(run_dir, command, "events.jsonl")


def _parsed(reader: EventReader, words: Sequence[bytes] = ()) -> Iterator[tuple[int, Line]]:
    for line, values in reader.with_any(words):
        try:
            yield line, facts.from_dict(values)
        except StoreError as error:
            raise StoreError(f"{reader.path}, line {line}: {error}") from error


def _outcome(reader: EventReader, decisions: Sequence[int]) -> ReplayResult:
    outcome = ReplayResult()

    def counted() -> Iterator[tuple[int, Fact]]:
        for line, logged in _parsed(reader):
            outcome.first_line = outcome.first_line or line
            outcome.events += 1
            outcome.changes.add(logged)
            yield line, logged.fact

    try:
        for told in replay(counted(), ordering_of):
            outcome.add(told, decisions)
    except StoreError as error:
        if str(error).startswith("line "):
            raise StoreError(f"{reader.path}, {error}") from error
        raise
    outcome.torn = reader.torn is not None
    return outcome


def _summary(path: Path, run_dir: Path, outcome: ReplayResult) -> list[str]:
    total = outcome.commands.total()
    since = f" from line {outcome.first_line}, the last snapshot," if outcome.first_line > 1 else ""
    lines = [f"{path}: {outcome.events:,} events{since} with {total:,} decisions."]
    kinds = ", ".join(f"{outcome.commands[name]:,} {words}" for name, words in NAMES.items() if outcome.commands[name])
    if kinds:
        lines.append(f"  {kinds}; {outcome.snapshots} snapshots compared on the way")
    lines += _changes(outcome.changes.outcomes())
    if outcome.torn:
        lines.append("The last line is incomplete (its writer died, or is writing) and was left out.")
    if outcome.cut is not None:
        lines.append(f"The log ends after line {outcome.cut.line}, before all decisions on that event were written.")
    difference = outcome.first_difference
    if difference is None:
        lines.append("Every decision was reproduced.")
        lines.append(f"For the history of one, type libra replay {shell_path(run_dir)} --key KEY, or --decision LINE.")
        return lines
    lines.append(f"{outcome.differing:,} events lead to other decisions now. The first is in line {difference.line}:")
    lines.append(f"  event: {event_text(difference.event)}")
    lines.append(f"  {difference.difference}")
    lines.append("Later ones may differ only because this one does.")
    return lines


def _changes(found: Sequence[Outcome]) -> Iterator[str]:
    if found:
        before = f", the last {MAX_CHANGES}" if len(found) > MAX_CHANGES else ""
        yield f"Plans, roles and limits: {len(found):,} decisions{before}:"
    for each in found[-MAX_CHANGES:]:
        predicted = f"predicted {each.predicted_words}, " if each.predicted_words else ""
        measured = "" if each.realised_s is None and each.realised_frac is None else "realised "
        yield f"  {each.t_s:>10.3f} s  {event_text(each.event)}; {predicted}{measured}{each.realised_words}"


def _as_json(path: Path, outcome: ReplayResult) -> dict[str, Any]:
    first = outcome.first_difference
    return {
        "event_log": str(path),
        "events": outcome.events,
        "first_line": outcome.first_line,
        "decisions": outcome.commands.total(),
        "snapshots": outcome.snapshots,
        "changes": [
            {"event": each.event.name, "t_s": each.t_s}
            | {name: value for name, value in each._asdict().items() if name not in ("event", "t_s")}
            for each in outcome.changes.outcomes()
        ],
        "reproduced": first is None,
        "differing_events": outcome.differing,
        "first_difference": None if first is None else {"line": first.line, "text": first.difference},
        "torn": outcome.torn,
        "cut": outcome.cut is not None,
    }


def _near(line: int, outcome: ReplayResult) -> str:
    place = bisect_left(outcome.decision_lines, line)
    near = outcome.decision_lines[max(0, place - 1) : place + 1]
    return f"the nearest are in {' and '.join(f'line {known}' for known in near)}" if near else "it has no decision"


def _origin(reader: EventReader, line: int, told: Told) -> Iterator[str]:
    (entry,) = (entry for entry in told.logged if entry.line == line)
    command, before = entry.command, entry.before
    subject = subject_of(command)
    yield f"Line {line}: {NAMES[type(command).__name__].removesuffix('s')} of {subject_text(subject)}"
    if isinstance(command, SetPriority):
        yield f"  before: {list(before) if before is not None else 'no priority yet'}"
        yield f"  after:  {list(command.priority)} (iteration, level, order; smaller goes first)"
    if isinstance(command, OpenBatch | OpenWave):
        yield f"  members: {', '.join(f'group {g} of iteration {i}' for i, g in command.members)}"
    yield f"  reason: {facts.said(command)[1]}"
    yield f"  event:  line {told.line}, {event_text(told.event)}"
    same = command in told.now
    yield "  replay: the same decision" if same else f"  replay: another decision; {told.difference}"
    yield "  history:"
    yield from _history(_parsed(reader), subject, members=getattr(command, "members", ()), last=line)


_ABOUT_ALL = (facts.RunStarted, facts.VersionPublished)
_ABOUT_GATES = (
    facts.GateParked, facts.OpenGate, facts.BatchParked, facts.OpenBatch, facts.GroupCommitted, facts.WaveParked,
    facts.OpenWave, facts.WaveTrained, facts.LateRewardsTaken,
)  # fmt: skip
_ABOUT_STEPS = (facts.StepsPlanned, facts.StepMeasured, facts.TakeSteps)


def _words(name: str) -> tuple[bytes, ...]:
    if name == "steps":
        return tuple(f'"name":"{name_of(kind)}"'.encode() for kind in (facts.RunStarted, *_ABOUT_STEPS))
    kinds = [f'"name":"{name_of(kind)}"'.encode() for kind in (*_ABOUT_ALL, *_ABOUT_GATES)]
    return tuple(kinds) if name.startswith(("gate-", "batch-")) else (name.encode(errors="replace"), *kinds[:1])


def _history_of_key(reader: Callable[[], EventReader], name: str) -> Iterator[str]:
    told = list(_parsed(reader(), _words(name)))
    subject, _ = _find(told, name)
    if subject is None:
        _, near = _find(_parsed(reader()), name)
        hint = f"did you mean {near}?" if near else "type e.g. --key train-0-0-0, --key gate-0 or --key batch-0"
        raise ConfigError(f"--key {name}: no such trajectory, gate or batch in the event log; {hint}")
    members: tuple[tuple[int, int], ...] = ()
    if subject[0] == "batch":
        for _, (_, _, fact) in told:
            if isinstance(fact, facts.OpenBatch) and fact.batch == subject[1]:
                members = fact.members or members
    yield f"{subject_text(subject)[0].upper()}{subject_text(subject)[1:]}"
    of_trajectory = [(line, logged.fact) for line, logged in told] if subject[0] == "trajectory" else []
    results = forecast_results(of_trajectory, str(subject[1]))
    yield from _history(told, subject, members=members, results=results)


def _history(
    told: Iterable[tuple[int, Line]],
    subject: Subject,
    *,
    members: tuple[tuple[int, int], ...],
    last: int | None = None,
    results: Mapping[int, str] = MappingProxyType({}),
) -> Iterator[str]:
    found: list[str] = []
    for line, (_, t_s, fact) in told:
        if last is not None and line > last:
            break
        if concerns(fact, subject, members):
            found.append(f"  {line:>8}  {t_s:>10.3f} s  {event_text(fact)}{results.get(line, '')}")
    if len(found) > MAX_SHOWN:
        yield f"  ({len(found) - MAX_SHOWN} earlier lines left out)"
    yield from found[-MAX_SHOWN:]


def _find(told: Iterable[tuple[int, Line]], name: str) -> tuple[Subject | None, str]:
    known: dict[str, Subject] = {}
    for _, (_, _, event) in told:
        key = getattr(event, "key", "")
        if key and key not in known:
            parsed = keys.parse(key)
            if parsed is not None:
                subject: Subject = ("trajectory", key)
                short = "-".join((parsed.split, *map(str, parsed.indices)))
                known[key] = known[short] = known[f"{parsed.node}-{short}"] = subject
        elif isinstance(event, facts.GateParked | facts.OpenGate):
            known[f"gate-{event.iteration}"] = ("gate", event.iteration)
        elif isinstance(event, facts.BatchParked | facts.OpenBatch | facts.WaveParked):
            known[f"batch-{event.batch}"] = ("batch", event.batch)
        elif isinstance(event, facts.Turn | facts.LoadVersion):
            known[event.worker] = ("worker", event.worker)
        elif isinstance(event, facts.StepsPlanned):
            known["steps"] = ("steps", "steps")
    parsed_name = keys.parse(name)
    if name not in known and parsed_name is not None and parsed_name.node in ("gate", "batch"):
        name = f"{parsed_name.node}-{parsed_name.indices[0]}"
    near = nearest_name(name, known, 0.0) if name not in known else None
    return known.get(name), near or ""
