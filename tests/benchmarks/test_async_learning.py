"""The loop in emulated time: the same seed gives the same run, versions per trajectory are as configured; figures by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.async_learning import Curve, Shown, curve_figures, curves_of, gap_se, loop_of, main, seconds_to

SMALL = ("trainer.prompts=2", "trainer.group_size=2", "rollout.max_turns=4", "run.eta=1", "trainer.lr=1e-4")


def run(overrides: Sequence[str], directory: Path) -> Any:
    loop = loop_of([*SMALL, *overrides], 0, 4, 3, str(directory))
    groups: list[Any] = []
    take = loop._step

    def watched(opened: Any) -> None:
        groups.extend(loop._groups[member] for member in opened.members)
        take(opened)

    loop._step = watched
    return loop, asyncio.run(loop.run()), [member for group in groups for member in group]


def test_a_loop_keeps_the_bound_and_repeats_itself(tmp_path: Path) -> None:
    loop, found, members = run(["staleness.versions=many"], tmp_path / "a")
    _, again, _ = run(["staleness.versions=many"], tmp_path / "b")
    assert found == again and len(found.published) == 4 and found.over_age == 0
    assert [len(ids) for ids in found.trained_ids] == [4] * 4
    assert len({str(member.trajectory_id) for member in members}) == 16
    assert max(found.lags) > 0 and loop.replica.steps_done == 4
    assert any(len(set(member.weight_version[member.is_action].tolist())) > 1 for member in members)


def test_trajectories_of_one_version_have_one(tmp_path: Path) -> None:
    _, found, members = run(["staleness.versions=one"], tmp_path)
    assert all(len(set(member.weight_version[member.is_action].tolist())) == 1 for member in members)
    assert {version for member in members for version in member.weight_version[member.is_action].tolist()} > {0}
    assert len(found.published) == 4


def shown(reward: float, ticks: int | None) -> Shown:
    return Shown(reward, ticks, 500, 1.0, 1.5, 0, 1.0, 0.99)


def test_gaps_are_in_standard_errors_and_the_largest_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert gap_se([0.9, 1.0], [0.8, 0.9]) == pytest.approx(0.1 / (2 * 0.005 / 2) ** 0.5)
    curves = {Curve(0, "", "", seed, 9, 9): shown(0.9 + 0.1 * seed, 400) for seed in range(2)}
    for eta, reward in ((1, 0.9), (4, 0.8), (8, 0.1)):
        for seed in range(2):
            curves[Curve(eta, "correct", "many", seed, 9, 9)] = shown(reward + 0.1 * seed, None if eta == 4 else 200)
    figures = curve_figures(curves)
    assert figures["final_reward_gap_se"].value == pytest.approx(2**0.5)  # of eta 4; eta 8 is not held to it
    assert figures["time_to_reward_ratio_eta1"].value == 0.5
    assert figures["time_to_reward_ratio_eta4"].value == 1.25
    assert "eta 4, correct, many, 2 seeds" in (out := capsys.readouterr().out) and "(2 never)" in out


def test_kinds_of_curves_may_be_left_out() -> None:
    def names(*how: str) -> list[str]:
        options = SimpleNamespace(how=how, etas=[0, 4], seeds=1, other_seeds=1, steps=9, step_ticks=9)
        return [curve.name for curve in curves_of(options)]

    assert names("none", "drop") == [
        "eta 0",
        *(f"eta 4, {how}, {v}" for how in ("drop", "none") for v in ("many", "one")),
    ]
    assert names("correct") == ["eta 0", "eta 4, correct, many", "eta 4, correct, one"]


def test_one_lucky_batch_does_not_reach_the_reward_of_a_live_run() -> None:
    rows = [{"iteration_s": 2.0, "trajectories": 128, "reward": reward} for reward in (0.5, 0.9, 0.6, 0.79, 0.82, 0.9)]
    assert seconds_to(rows, 0.8, 256) == 10.0
    assert seconds_to(rows, 0.8, 128) == 4.0
    assert seconds_to(rows[:4], 0.8, 256) is None


def test_a_wrong_option_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--etas", "-1"])
    assert capsys.readouterr().err.splitlines()[-1].endswith("--etas: got -1; at least 0")
