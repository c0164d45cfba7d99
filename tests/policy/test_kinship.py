"""Groups of long trajectories are told from groups of short ones while both still run; strangers are not told apart."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from libra.policy import CMLFQ, QuantumFinished, QuantumStarted, SetPriority, TrajectoryEnded, TrajectoryParked
from libra.policy.kinship import Kinship, beyond
from libra.types import Phase

ROLLOUT = Phase.ROLLOUT


def begin(kinship: Kinship, key: str, group: str, tokens: int) -> None:
    kinship.join(group)
    kinship.generated(group, key, tokens)


def drawn(kin: float, groups: int = 60, members: int = 6, seed: int = 0) -> tuple[Kinship, dict[str, float]]:
    """All of a group begun, but for one; half of all have ended, the others have generated as much as the longest of those."""
    rng = random.Random(seed)
    kinship, means = Kinship(), {}
    totals = {}
    for group in range(groups):
        means[f"g{group}"] = mean = rng.gauss(0.0, 1.0 if not kin else math.sqrt(kin))
        mean = mean if kin else 0.0
        kinship.join(f"g{group}")
        for member in range(members):
            totals[f"{group}-{member}"] = math.exp(9.0 + 0.6 * (mean + rng.gauss(0.0, math.sqrt(1.0 - kin))))
    far = sorted(totals.values())[len(totals) // 2]
    for key, total in sorted(totals.items(), key=lambda item: item[1]):
        begin(kinship, key, f"g{key.split('-')[0]}", int(min(total, far)))
        if total <= far:
            kinship.end(f"g{key.split('-')[0]}", key, completed=True)
    kinship.refresh()
    for _ in range(8):
        said = {name: kinship.longer(name) for name in means}
    return kinship, {name: said[name] * (1.0 if means[name] > 0.0 else -1.0) for name in means}


@given(st.floats(-3, 12), st.floats(0.2, 2.0), st.floats(-3, 12))
def test_what_is_above_a_bound_has_the_mean_of_a_cut_normal(mean: float, deviation: float, bound: float) -> None:
    z = (bound - mean) / deviation
    if z < 5.0:
        wanted = mean + deviation * norm.pdf(z) / norm.sf(z)
        assert beyond(mean, deviation, bound) == pytest.approx(wanted, abs=2e-3 * deviation)
    else:
        assert beyond(mean, deviation, bound) > bound


def test_groups_of_kin_are_told_apart_and_strangers_are_not() -> None:
    _, kin = drawn(0.6)
    _, strangers = drawn(0.0)
    assert sum(value > 0.0 for value in kin.values()) >= 0.75 * len(kin)
    spread = [sum(value * value for value in said.values()) / len(said) for said in (kin, strangers)]
    assert spread[0] > 3.0 * spread[1]


def test_a_group_whose_members_run_on_is_longer_than_one_whose_members_ended() -> None:
    kinship = Kinship()
    for number in range(20):
        begin(kinship, f"other-{number}", f"o{number}", 400 + 50 * number)
        kinship.end(f"o{number}", f"other-{number}", completed=True)
    for number in range(3):
        begin(kinship, f"long-{number}", "long", 1500)
        begin(kinship, f"short-{number}", "short", 300)
    kinship.join("short")
    begin(kinship, "one", "one", 1500)
    kinship.end("short", "short-0", completed=True)
    kinship.end("short", "short-1", completed=True)
    kinship.refresh()
    for _ in range(8):
        long, short, one = (kinship.longer(name) for name in ("long", "short", "one"))
    assert short < 0.0 < one < long
    assert kinship.longer("nobody") == 0.0


def test_the_bounds_of_running_ones_lift_the_mean_of_all() -> None:
    """Those that ended first are the short ones."""
    kinship, _ = drawn(0.5)
    finished = kinship.snapshot()["recent"]
    assert kinship.snapshot()["all"][0] > sum(finished) / len(finished) + 0.2


def test_a_snapshot_changes_no_answer_and_nothing_is_kept_of_the_dead() -> None:
    kinship, _ = drawn(0.5)
    twin = Kinship()
    twin.restore(json.loads(json.dumps(kinship.snapshot())))
    for _ in range(2):
        assert [twin.longer(f"g{i}") for i in range(60)] == [kinship.longer(f"g{i}") for i in range(60)]
        begin(twin, "3-x", "g3", 50_000)
        begin(kinship, "3-x", "g3", 50_000)
        twin.refresh()
        kinship.refresh()
    for name, (members, *_) in kinship.snapshot()["groups"].items():
        for _ in range(members):
            kinship.end(name, "whoever", completed=False)
    assert not kinship.snapshot()["groups"]


def first_order(ordering: CMLFQ, groups: int, samples: int) -> list[str]:
    priorities = {}
    for group in range(groups):
        for sample in range(samples):
            key = f"{group}-{sample}"
            for command in ordering.handle(TrajectoryParked(key, 0, ROLLOUT, 0, f"g{group}")):
                if isinstance(command, SetPriority):
                    priorities[command.key] = command.priority
    return sorted(priorities, key=lambda key: priorities[key])


def test_one_of_each_group_begins_before_the_second_of_any() -> None:
    order = first_order(CMLFQ(), 3, 3)
    assert order == ["0-0", "1-0", "2-0", "0-1", "1-1", "2-1", "0-2", "1-2", "2-2"]
    assert first_order(CMLFQ(objective="stream"), 2, 2) == ["0-0", "0-1", "1-0", "1-1"]


def test_those_whose_sibling_runs_on_go_before_those_whose_sibling_was_short() -> None:
    ordering = CMLFQ()
    first_order(ordering, 40, 2)
    levels: dict[str, int] = {}
    for group in range(40):
        key = f"{group}-0"
        ordering.handle(QuantumStarted(key, ROLLOUT, "w"))
        ordering.handle(QuantumFinished(key, ROLLOUT, 200 + 20 * group, "", "", 1.0))
        ordering.handle(QuantumFinished(key, Phase.TOOL, 0, "bash", "ok", 1.0, 10))
    for group in range(20):
        for command in ordering.handle(TrajectoryEnded(f"{group}-0")):
            if isinstance(command, SetPriority):
                levels[command.key] = command.priority.level
        ordering.learn()
    for group in range(20, 40):
        key = f"{group}-0"
        for event in (
            QuantumFinished(key, ROLLOUT, 4000, "", "", 1.0),
            QuantumFinished(key, Phase.TOOL, 0, "bash", "ok", 1.0, 10),
            TrajectoryParked(key, 0, ROLLOUT, 2, f"g{group}", "", 5000),
        ):
            for command in ordering.handle(event):
                if isinstance(command, SetPriority):
                    levels[command.key] = command.priority.level
    assert levels["39-1"] < levels["1-1"]
