"""Cost of role changes in real runs on this machine.

stages
    ``rollout_to_train_s``, ``train_to_rollout_s``: medians of a change from the request until the
    worker supplies its new role; its stages are printed. ``trainer_blocked_s``: seconds that the
    core's training thread waited for joiners, in all steps.
rebucket (with vLLM where it is installed)
    ``rebucket_s``: from the request until one engine of two ranks serves in place of two.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import QUICKSTART, QUIET, Figure, command_parser, emit
from libra.config import load_config
from libra.config.sections import vllm_is_installed
from libra.driver.run_session import Session
from libra.store.event_log import read_events

HYBRID = "rollout-0"
PROMPTS, GROUP_SIZE = 16, 4
ONE_ENGINE = {"rollout-0": {"role": "rollout", "tp": 2}, "rollout-1": "lent"}
TWO_ENGINES = {name: {"role": "rollout", "tp": 1} for name in ("rollout-0", "rollout-1")}
ROLE_GOALS = {"rollout_to_train": 8.0, "train_to_rollout": 10.8}
"""Seconds that Libra reports (arXiv:2606.03077 v2) for Qwen3-14B on A800 and vLLM."""


def session(directory: str, name: str, iterations: int, *changes: str) -> Session:
    """A run with one hybrid worker, not started."""
    asked = (
        f"run.name={name}", f"run.dir={directory}", f"run.iterations={iterations}", "cluster.rollout_workers=2",
        "cluster.hybrid_workers=1", *QUIET, "environment.name=libra.testing:FixedTurns", "rollout.ignore_eos=true",
        "rollout.max_turns=8", "rollout.max_context_tokens=1024", "trainer.max_row_tokens=1024",
        f"trainer.prompts={PROMPTS}", f"trainer.group_size={GROUP_SIZE}", "trainer.lr=1e-6",
    )  # fmt: skip
    return Session(load_config(str(QUICKSTART), (*asked, *changes)))


def role_changes(directory: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(directory / "events.jsonl").events if event["name"] == "role_changed"]


def stages(changes: int) -> dict[str, Figure]:
    with tempfile.TemporaryDirectory(prefix="elastic-") as name:
        blocked_s = 0.0
        with session(name, "stages", 2 * changes + 2) as run:
            for count, values in enumerate(run.iterations(), 1):
                blocked_s += float(values["hybrid_blocked_s"])
                if count <= 2 * changes:
                    run.roles.wait(run.roles.change({HYBRID: "train" if count % 2 else "rollout"}))
        figures = {}
        for to in ("train", "rollout"):
            kind = "rollout_to_train" if to == "train" else "train_to_rollout"
            found = [event for event in role_changes(run.directory) if event["to_role"] == to]
            seconds = [float(event["seconds"]) for event in found]
            parts = {
                stage: statistics.median(float(event["stage_s"][stage]) for event in found)
                for stage in ("draining", "sleeping", "taking_up")
            }
            said = ", ".join(f"{stage} {value:.3f} s" for stage, value in parts.items())
            print(f"{kind}, {len(found)} changes: median {statistics.median(seconds):.3f} s ({said})", flush=True)
            figures[f"{kind}_s"] = Figure(statistics.median(seconds), "s", "lower", ROLE_GOALS[kind])
        return figures | {"trainer_blocked_s": Figure(blocked_s, "s", "lower", 0.0)}


def rebuckets(changes: int) -> dict[str, Figure]:
    """Seconds until two vLLM engines are one of two ranks; nothing without vLLM."""
    if not vllm_is_installed():
        print("rebucket_s: not measured, vllm is not installed here (make setup-vllm)", flush=True)
        return {}
    vllm = (
        "run.eta=1", "rollout.engine=vllm", "rollout.slots=8", "rollout.max_new_tokens=16", "cluster.hybrid_workers=2",
        "trainer.prompts=2",
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="elastic-") as name:
        with session(name, "rebucket", 2 * changes + 2, *vllm) as run:
            for count, _ in enumerate(run.iterations(), 1):
                if count <= 2 * changes:
                    run.roles.wait(run.roles.change(ONE_ENGINE if count % 2 else TWO_ENGINES))
        whole: dict[int, float] = {}  # by change, of which every second one is to one engine
        for event in role_changes(run.directory):
            whole[event["generation"]] = max(whole.get(event["generation"], 0.0), float(event["seconds"]))
        to_one = statistics.median(seconds for generation, seconds in whole.items() if generation % 2)
        return {"rebucket_s": Figure(to_one, "s", "lower")}


PARTS = ("stages", "rebucket")


def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("elastic", __doc__)
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS), help="default: all")
    parser.add_argument("--changes", type=int, default=6, help="role changes each way that are timed (default 6)")
    options = parser.parse_args(arguments)
    figures: dict[str, Figure] = {}
    if "stages" in options.part:
        figures |= stages(options.changes)
    if "rebucket" in options.part:
        figures |= rebuckets(max(options.changes // 3, 1))
    emit("elastic", figures, arguments=arguments, as_json=options.json)
