"""Cost of role changes, and replanning under drift, in real runs on this machine.

stages
    ``rollout_to_train_s``, ``train_to_rollout_s``: medians of a change from the request until the
    worker supplies its new role, and of each of its stages; ``state_s`` until a joiner has the
    weights, in the background. ``trainer_blocked_s``: seconds that the core's training thread
    waited for joiners, in all steps.
rebucket (with vLLM where it is installed)
    ``rebucket_s``, ``rebucket_back_s``: from the request until one engine of two ranks serves in
    place of two, and back.
live
    ``live_to_train``, ``live_to_rollout``: changes by the run's own planner while lengths drifted,
    and ``live_realised_gain_frac``, their realised gain as a share of a step.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import QUICKSTART, QUIET, Figure, command_parser, emit
from libra.config import load_config
from libra.config.sections import vllm_is_installed
from libra.driver.run_session import Session
from libra.store.event_log import read_events
from libra.testing import FixedTurns
from libra.types import Prompt

HYBRID = "rollout-0"
PROMPTS, GROUP_SIZE = 16, 4
DRIFT_CHARS = 970
"""Characters of long questions in the drift, which make training much longer than rollout."""
ONE_ENGINE = {"rollout-0": {"role": "rollout", "tp": 2}, "rollout-1": "lent"}
TWO_ENGINES = {name: {"role": "rollout", "tp": 1} for name in ("rollout-0", "rollout-1")}
ROLE_GOALS = {"rollout_to_train": 8.0, "train_to_rollout": 10.8}
"""Seconds that Libra reports (arXiv:2606.03077 v2) for Qwen3-14B on A800: snapshot, restore, vLLM.
"""


class DriftingPrompts(FixedTurns):
    """`FixedTurns` with long questions in every second stretch of ``stretch`` questions: training takes longer there."""

    def __init__(self, *, stretch: int = 64, long_chars: int = 900, **same: Any) -> None:
        super().__init__(**same)
        self.stretch, self.long_chars = stretch, long_chars

    def prompt(self, split: str, index: int) -> Prompt:
        found = super().prompt(split, index)
        if index // self.stretch % 2 == 0:
            return found
        ((message),) = found.messages
        return Prompt(found.prompt_id, ({**message, "content": message["content"].ljust(self.long_chars, "x")},))


def session(directory: str, name: str, iterations: int, stretch: int, *changes: str, long_chars: int = 930) -> Session:
    """A run with one hybrid worker, not started; every second stretch of iterations has long
    questions."""
    args = f"{{stretch: {stretch * PROMPTS}, long_chars: {long_chars}}}"
    asked = (
        f"run.name={name}", f"run.dir={directory}", f"run.iterations={iterations}", "cluster.rollout_workers=2",
        "cluster.hybrid_workers=1", *QUIET, "environment.name=benchmarks.live.elastic:DriftingPrompts",
        f"environment.args={args}", "rollout.ignore_eos=true", "rollout.max_turns=8", "rollout.max_context_tokens=1024",
        "trainer.max_row_tokens=1024", f"trainer.prompts={PROMPTS}",
        f"trainer.group_size={GROUP_SIZE}", "trainer.lr=1e-6",
    )  # fmt: skip
    return Session(load_config(str(QUICKSTART), (*asked, *changes)))


@dataclass(frozen=True, slots=True)
class Ran:
    """A finished run: metrics of its iterations, and its events."""

    rows: Sequence[Mapping[str, Any]]
    directory: Path

    def events(self, *names: str) -> Iterator[Mapping[str, Any]]:
        return (event for event in read_events(self.directory / "events.jsonl").events if event["name"] in names)


def changed_by_hand(directory: str, changes: int) -> Ran:
    """A run with one role change of the hybrid worker per iteration, to training and back."""
    rows = []
    with session(directory, "stages", 2 * changes + 2, 1) as run:
        for values in run.iterations():
            rows.append(values)
            at = len(rows)
            if at <= 2 * changes:
                run.roles.wait(run.roles.change({HYBRID: "train" if at % 2 else "rollout"}))
    return Ran(rows, run.directory)


def drifted(directory: str, iterations: int, stretch: int) -> Ran:
    rows = []
    # With more slots one engine of so small a model would be as fast as two.
    apply = (
        "planner.replan=apply", "planner.change_cost_s=1.0", "rollout.slots=8", "rollout.max_turns=4",
        "rollout.max_new_tokens=48",
    )  # fmt: skip
    with session(directory, "drift", iterations, stretch, *apply, long_chars=DRIFT_CHARS) as run:
        for values in run.iterations():
            rows.append(values)
            role = run.roles.rows()[0]["role"]
            print(
                f"  iteration {values['iteration']:2d}: {values['iteration_s']:5.2f} s, training {values['train_s']:5.2f} s with "
                f"{values['hybrids']} hybrids, {values['generated_tokens']:6d} generated, {values['forwarded_tokens']:6d} "
                f"trained on; {HYBRID} is to {role}",
                flush=True,
            )
    return Ran(rows, run.directory)


def stages(changes: int) -> dict[str, Figure]:
    with tempfile.TemporaryDirectory(prefix="elastic-") as name:
        ran = changed_by_hand(name, changes)
        figures = {}
        for to in ("train", "rollout"):
            kind = "rollout_to_train" if to == "train" else "train_to_rollout"
            found = [event for event in ran.events("role_changed") if event["to_role"] == to]
            seconds = [float(event["seconds"]) for event in found]
            parts = {
                stage: statistics.median(float(event["stage_s"][stage]) for event in found)
                for stage in ("draining", "sleeping", "taking_up")
            }
            said = ", ".join(f"{stage} {value:.3f} s" for stage, value in parts.items())
            print(f"{kind}, {len(found)} changes: median {statistics.median(seconds):.3f} s ({said})", flush=True)
            figures[f"{kind}_s"] = Figure(statistics.median(seconds), "s", "lower", ROLE_GOALS[kind])
            figures |= {f"{kind}_{stage}_s": Figure(value, "s", "lower") for stage, value in parts.items()}
        states = [float(event["seconds"]) for event in ran.events("role_stage") if event["stage"] == "state"]
        if states:
            print(f"weights of a joiner arrive in the background: median {statistics.median(states):.3f} s", flush=True)
            figures["state_s"] = Figure(statistics.median(states), "s", "lower")
        blocked_s = sum(float(row["hybrid_blocked_s"]) for row in ran.rows)
        return figures | {"trainer_blocked_s": Figure(blocked_s, "s", "lower", 0.0)}


def rebuckets(changes: int) -> dict[str, Figure]:
    """Figures of two vLLM engines that become one of two ranks, and back; none without vLLM."""
    if not vllm_is_installed():
        print("rebucket_s: not measured, vllm is not installed here (make setup-vllm)", flush=True)
        return {}
    vllm = (
        "run.eta=1", "rollout.engine=vllm", "rollout.slots=8", "rollout.max_new_tokens=16", "cluster.hybrid_workers=2",
        "trainer.prompts=2",
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="elastic-") as name:
        rows = 0
        with session(name, "rebucket", 2 * changes + 2, 1, *vllm) as run:
            for _ in run.iterations():
                rows += 1
                if rows <= 2 * changes:
                    run.roles.wait(run.roles.change(ONE_ENGINE if rows % 2 else TWO_ENGINES))
            ran = Ran([], run.directory)
        whole: dict[tuple[str, int], float] = {}
        for event in ran.events("role_changed"):
            kind = "one_engine" if event["generation"] % 2 else "two_engines"
            at = kind, event["generation"]
            whole[at] = max(whole.get(at, 0.0), float(event["seconds"]))
        there, back = (
            statistics.median(seconds for (kind, _), seconds in whole.items() if kind == which)
            for which in ("one_engine", "two_engines")
        )
        print(f"rebucket: {there:.3f} s from two engines to one, {back:.3f} s back", flush=True)
        return {"rebucket_s": Figure(there, "s", "lower"), "rebucket_back_s": Figure(back, "s", "lower")}


def drift(iterations: int, stretch: int) -> dict[str, Figure]:
    with tempfile.TemporaryDirectory(prefix="elastic-") as name:
        ran = drifted(name, iterations, stretch)
        for event in ran.events("plan_considered", "plan_realised"):
            if event["name"] == "plan_realised":
                print(
                    f"  {json.dumps({key: event[key] for key in event if key not in ('schema', 'name', 'run', 't_s')})}"
                )
            else:
                now_s, then_s = event["current_step_s"], event["proposed_step_s"]
                print(
                    f"  after {event['iteration']:2d}: {now_s:.2f} s a step, proposed {then_s:.2f} s "
                    f"({100 * (1.0 - then_s / now_s):+.1f} %): {'ACCEPTED, ' if event['accepted'] else ''}{event['reason']}",
                    flush=True,
                )
        moved = [event["to_role"] for event in ran.events("role_changed")]
        realised = [event["realised_gain_frac"] for event in ran.events("plan_realised")]
        figures = {
            "live_to_train": Figure(moved.count("train"), "changes", "higher", 1.0),
            "live_to_rollout": Figure(moved.count("rollout"), "changes", "higher", 1.0),
        }
        if realised:
            figures["live_realised_gain_frac"] = Figure(statistics.fmean(realised), "frac", "higher")
        return figures


PARTS = ("stages", "rebucket", "live")


def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("elastic", __doc__)
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS), help="default: all")
    parser.add_argument("--changes", type=int, default=6, help="role changes each way that are timed (default 6)")
    parser.add_argument("--live-iterations", type=int, default=36, help="of the run under the planner (default 36)")
    parser.add_argument("--stretch", type=int, default=12, help="iterations in a row that are alike (default 12)")
    options = parser.parse_args(arguments)
    figures: dict[str, Figure] = {}
    if "stages" in options.part:
        figures |= stages(options.changes)
    if "rebucket" in options.part:
        figures |= rebuckets(max(options.changes // 3, 1))
    if "live" in options.part:
        figures |= drift(options.live_iterations, options.stretch)
    emit("elastic", figures, arguments=arguments, as_json=options.json)
