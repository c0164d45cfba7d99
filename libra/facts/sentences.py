"""Facts in words, for page, report and ``libra replay``: what happened, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from libra.facts import commands, runs, trajectory_facts, worker_facts
from libra.facts.fact import Command, Fact, kinds

__all__ = ["NAMES", "Subject", "concerns", "said", "sentence", "subject_of", "subject_text"]

Subject = tuple[str, str | int]
"""("trajectory", key), ("gate", iteration), ("batch", step), ("worker", name) or ("steps",
"steps")."""
_FIELDS: Final = {"trajectory": "key", "gate": "iteration", "batch": "batch", "worker": "worker"}


class _Many(tuple[Any, ...]):
    """Values of a field; the template format ``n`` prints their number."""

    def __format__(self, spec: str) -> str:
        return str(len(self)) if spec == "n" else ", ".join(map(str, self)) or "none"


def sentence(fact: Fact) -> str:
    what, why = said(fact)
    return f"{what}: {why}" if why else what


def said(fact: Fact) -> tuple[str, str]:
    """The fact and its reason as text; the reason may be empty."""
    match fact:
        case runs.PlanConsidered():
            verdict = "accepted" if fact.accepted else "not accepted"
            plan = f"{fact.train_gpus} training, {_engines(fact.engines)}"
            steps = f"{fact.proposed_step_s:.1f} s per step, now {fact.current_step_s:.1f} s"
            return f"after iteration {fact.iteration}: {plan}: {verdict}, {steps}", fact.reason
        case runs.LayoutPlanned():
            return f"start with {fact.train_gpus} training, {_engines(fact.engines)}", fact.reason
        case runs.PlanAccepted():
            return _filled(fact), f"{fact.train_gpus} training, {_engines(fact.engines)}"
        case runs.PlanRealised():
            cost = "" if fact.cost_s is None else f", cost {fact.cost_s:,.2f} s"
            gains = (
                f"predicted gain {100 * fact.predicted_gain_frac:.1f} %, realised {100 * fact.realised_gain_frac:.1f} %"
            )
            return f"{_filled(fact)}: {gains}", f"change {fact.generation}{cost}"
        case runs.BoundariesSet():
            return f"boundaries {', '.join(f'tp{tp}: {tokens:g}' for tp, tokens in fact.boundaries)}", fact.reason
        case runs.LateRewardsTaken():
            return _late(fact)
        case runs.WaveTrained():
            missing = f", {fact.missing} were left for later ones" if fact.missing else ""
            helped = f" by the trainers and {fact.hybrids} engines that turned" if fact.hybrids else ""
            wave = f"wave {fact.wave} of batch {fact.batch}"
            return f"{wave}: {fact.groups} groups trained in {fact.train_s:.3g} s{helped}{missing}", ""
        case runs.StepMeasured():
            trained_s = sum(seconds for _, seconds in fact.waves)
            first_s, last_s = min(fact.complete_s, default=0.0), max(fact.complete_s, default=0.0)
            complete = f"groups complete after {first_s:.3g} to {last_s:.3g} s"
            waves = f"{len(fact.waves)} waves of {trained_s:.3g} s, {fact.update_s:.3g} s for new weights"
            return f"step {fact.step} was measured: {complete}, {waves}", ""
        case trajectory_facts.QuantumFinished():
            what = f"{fact.tokens} tokens" if fact.tokens else f"tool {fact.tool or '-'}: {fact.status or '-'}"
            end = f"; the trajectory ends: {fact.end}" if fact.end else "; the turn goes on" if fact.unfinished else ""
            return f"quantum {fact.quantum} of {fact.key} is committed by {fact.worker} ({fact.phase}, {what}){end}", ""
        case trajectory_facts.TrajectoryEnded():
            return f"{fact.key} has ended" + ("" if fact.completed else ", incomplete"), ""
        case worker_facts.WorkerLost():
            return f"worker lost: {fact.worker or fact.address}", ""
        case worker_facts.StallDetected():
            return f"no progress for {fact.idle_s:.0f} s: {fact.worker or fact.key}", fact.detail
        case worker_facts.RoleChangeStarted():
            wanted = ", ".join(
                f"{worker}: {has.get('role')} tp={has.get('tp')}" for worker, has in fact.assignments.items()
            )
            return f"change {fact.generation} of roles begins: {wanted}", fact.reason
    return _filled(fact), str(getattr(fact, "reason", getattr(fact, "detail", "")))


def _filled(fact: Fact) -> str:
    values = {name: getattr(fact, name) for name in fact.__struct_fields__}
    many = {name: _Many(value) for name, value in values.items() if isinstance(value, tuple)}
    return fact.words.format(**values | many) or fact.name.replace("_", " ")


def _engines(engines: Sequence[tuple[int, ...]]) -> str:
    return ", ".join(f"{count} x tp{tp}" for tp, count, *_ in engines) or "no engine"


def _late(fact: runs.LateRewardsTaken) -> tuple[str, str]:
    if fact.awaited:
        return f"step {fact.batch} waits", f"{fact.awaited} rewards of its members are late"
    dropped = f", {len(fact.dropped)} are dropped after {fact.versions} versions" if fact.dropped else ""
    ages = [group[-1] for group in fact.arrived if group]
    old = f"{min(ages)} to {max(ages)} versions old; " if ages else ""
    why = f"{old}{fact.on_time} more came before their own step, {fact.waiting} groups wait"
    return f"step {fact.batch} corrects for {len(ages)} late rewards{dropped}", why


NAMES: Final = {kind.__name__: kind.plural for kind in kinds(Command) if issubclass(kind, Command)}


def subject_text(subject: Subject) -> str:
    kind, which = subject
    return {"gate": f"iteration {which}", "batch": f"batch {which}"}.get(kind, str(which))


def subject_of(command: Command) -> Subject:
    return command.subject, getattr(command, _FIELDS.get(command.subject, "about"))


def concerns(fact: Fact, subject: Subject, members: tuple[tuple[int, int], ...]) -> bool:
    """Whether a fact belongs to a subject's history; ``members`` are the groups of a batch."""
    kind, which = subject
    match fact:
        case runs.RunStarted():
            return True
        case worker_facts.VersionPublished():
            return kind in ("gate", "batch") and fact.version <= int(which)
        case commands.Vacate() if kind == "trajectory":
            return which in fact.keys
        case trajectory_facts.GroupCommitted(split="train"):
            return kind == "batch" and (fact.iteration, fact.group) in members
    return fact.subject == kind and (kind == "steps" or getattr(fact, _FIELDS[kind], None) == which)
