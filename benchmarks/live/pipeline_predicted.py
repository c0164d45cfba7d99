"""Simulation of the sides of `benchmarks.live.pipeline_live`, from prices and speeds of their runs.

Trajectories, engines and the price of a token's gradient come from a run that is not streamed
(`libra.sim.from_run`); streamed runs give the seconds of a wave besides its gradients and of a step
after its last wave, and runs with role switches the seconds of a switch. Contention of processes on
one machine is predicted only as far as these contain it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.systems.disciplines import DISCIPLINES
from benchmarks.systems.training_gpus import GroupWork, PipelineOptions, WavePrices
from benchmarks.systems.training_run import Pipeline
from libra.config import RunConfig
from libra.config.streaming import enough_groups, most_waves, wave_groups
from libra.facts import Turn
from libra.policy.role_changes import Role, Stage
from libra.policy.tail import OpenStep, TurningEngine, TurningRule, price_s
from libra.policy.waves import GroupId
from libra.sim.configured import configured_ordering
from libra.sim.from_run import RunSetting
from libra.sim.workload import Workload

SYSTEMS = {"off": "split", "streaming": "streaming", "turning": "turning"}
"""The simulator's name of each side."""

Events = Sequence[Mapping[str, Any]]


class WaveSeen(NamedTuple):
    """A wave of a log: seconds from opening to report, groups, and hybrids with a slice of it."""

    batch: int
    seconds: float
    members: tuple[GroupId, ...]
    hybrids: int


class RunSeen(NamedTuple):
    """Steps in the log of a run, in seconds."""

    published_s: tuple[float, ...]
    after_s: Mapping[int, float]
    waves: tuple[WaveSeen, ...]
    changes: tuple[tuple[str, float, float], ...]

    def iterations_s(self) -> list[float]:
        """Seconds between versions, the first step left out, in which everything is loaded."""
        return [after - before for before, after in zip(self.published_s[1:], self.published_s[2:], strict=False)]


def seen(events: Events) -> RunSeen:
    published = {event["version"]: event["t_s"] for event in _named(events, "version_published")}
    opened = {(event["batch"], event["wave"]): event for event in _named(events, "wave_opened") if event["members"]}
    begun = {event["batch"]: event["t_s"] for event in _named(events, "batch_opened")}
    waves = []
    for event in _named(events, "wave_trained"):
        begins = opened[event["batch"], event["wave"]]
        members = tuple((iteration, group) for iteration, group in begins["members"])
        waves.append(WaveSeen(event["batch"], event["t_s"] - begins["t_s"], members, event["hybrids"]))
        begun[event["batch"]] = event["t_s"]
    changes = (
        (event["to_role"], price_s(event["stage_s"]), event["stage_s"].get(Stage.DRAINING, 0.0))
        for event in _named(events, "role_changed")
    )
    return RunSeen(
        tuple(published[version] for version in sorted(published)),
        {batch: published[batch + 1] - t_s for batch, t_s in begun.items() if batch + 1 in published},
        tuple(waves),
        tuple(changes),
    )


def _named(events: Events, name: str) -> Iterable[Mapping[str, Any]]:
    return (event for event in events if event["name"] == name)


class Prices(NamedTuple):
    """Measured seconds."""

    token_s: float
    whole_s: float
    close_s: float
    merge_s: float
    alone_s: float
    shared_s: float
    to_training_s: float
    to_rollout_s: float
    drain_s: float


@dataclass(frozen=True)
class HybridsTurn(TurningRule):
    """The rule where only some engines may turn."""

    hybrids: frozenset[str] = frozenset()

    def turns(self, engines: Sequence[TurningEngine], num_open: int, step: OpenStep | None) -> tuple[Turn, ...]:
        known = [each._replace(may_turn=each.may_turn and each.name in self.hybrids) for each in engines]
        return super().turns(known, num_open, step)


def group_tokens(workload: Workload) -> dict[GroupId, int]:
    found: dict[GroupId, int] = {}
    for plan in workload.trajectories:
        found[plan.iteration, plan.group] = found.get((plan.iteration, plan.group), 0) + plan.final_tokens
    return found


def measured(
    runs: Mapping[str, Sequence[RunSeen]], gradients_s: Sequence[float], tokens: Mapping[GroupId, int], assumed_s: float
) -> Prices:
    batches: dict[int, int] = {}
    for (iteration, _), count in tokens.items():
        batches[iteration] = batches.get(iteration, 0) + count
    trained = [count for iteration, count in batches.items() if iteration]
    token_s = statistics.mean(gradients_s) / statistics.mean(trained)

    whole = [
        seconds - batches[batch] * token_s for run in runs["off"] for batch, seconds in run.after_s.items() if batch
    ]
    close = {
        side: [s for run in runs[side] for batch, s in run.after_s.items() if batch]
        for side in ("streaming", "turning")
    }
    besides: dict[bool, list[float]] = {False: [], True: []}
    for run in (*runs["streaming"], *runs["turning"]):
        for wave in run.waves:
            if wave.batch:
                work_s = sum(tokens[group] for group in wave.members) * token_s / (1 + wave.hybrids)
                besides[wave.hybrids > 0].append(wave.seconds - work_s)
    changes = [change for run in runs["turning"] for change in run.changes]
    prices = {
        role: [seconds for to, seconds, _ in changes if to == role] or [assumed_s / 2]
        for role in (Role.TRAIN, Role.ROLLOUT)
    }
    alone_s = max(0.0, statistics.mean(besides[False]))
    close_s = statistics.mean(close["streaming"])
    return Prices(
        token_s, max(0.0, statistics.mean(whole)), close_s, max(0.0, statistics.mean(close["turning"]) - close_s),
        alone_s, max(0.0, statistics.mean(besides[True])) if besides[True] else alone_s,
        statistics.mean(prices[Role.TRAIN]), statistics.mean(prices[Role.ROLLOUT]),
        statistics.mean([drain_s for to, _, drain_s in changes if to == Role.TRAIN] or [0.0]),
    )  # fmt: skip


def work_of(workload: Workload, token_s: float) -> Mapping[GroupId, GroupWork]:
    longest: dict[GroupId, int] = {}
    for plan in workload.trajectories:
        longest[plan.iteration, plan.group] = max(plan.final_tokens, longest.get((plan.iteration, plan.group), 0))
    return {
        group: GroupWork(count * token_s, longest[group] * token_s) for group, count in group_tokens(workload).items()
    }


def simulated_s(
    setting: RunSetting, prices: Prices, configs: Mapping[str, RunConfig], hybrids: frozenset[str]
) -> dict[str, float]:
    """Seconds of an iteration by side, without the first one."""
    calibration, slots = setting.calibration, min(engine.slots for engine in setting.engines)
    rule = HybridsTurn(
        trajectories_per_gpu=float(slots), min_gain_s=(prices.to_training_s + prices.to_rollout_s) / 2,
        to_training_s=prices.to_training_s, to_rollout_s=prices.to_rollout_s, hybrids=hybrids,
    )  # fmt: skip
    engines = [each._replace(announced=()) for each in setting.engines]
    work, found = work_of(setting.workload, prices.token_s), {}
    for side, system in SYSTEMS.items():
        config, streams = configs[side], side != "off"
        waves = WavePrices(
            most_waves(config), wave_groups(config), enough_groups(config), prices.alone_s, prices.shared_s
        )
        options = PipelineOptions(
            core_gpus=calibration.train_gpus, close_s=prices.close_s if streams else prices.whole_s,
            load_s=calibration.load_s, merge_s=prices.merge_s, drain_s=prices.drain_s, rule=rule,
            update_s=calibration.gate_s + calibration.commit_s, waves=waves if streams else None,
        )  # fmt: skip
        pipeline = Pipeline(
            setting.workload, engines, configured_ordering(setting.record.config), DISCIPLINES[system], work, options
        )
        found[side] = pipeline.train().step_s()
    return found
