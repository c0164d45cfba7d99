"""The benchmark of the cost model scores what it has not seen."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import cost_model
from benchmarks.cost_halves import half_of_attention, half_of_linear, halves, score_collective, score_linear
from benchmarks.earl_fig3 import earl_figures
from benchmarks.training_form import fit_training
from libra.hardware import load_gpu
from libra.hardware.profiles import AttentionProfile, CollectiveProfile, LinearProfile, read_profiles

EXCERPT = Path(cost_model.EXCERPT)


def linear() -> LinearProfile:
    (profile,) = read_profiles(EXCERPT / "vidur" / "compute_a100_meta-llama_Llama-2-70b-hf_mlp.csv")
    assert isinstance(profile, LinearProfile)
    return profile


def test_halves_share_no_token_count() -> None:
    profile = linear()
    for parity in (0, 1):
        learned, asked = half_of_linear(profile, True, parity), half_of_linear(profile, False, parity)
        seen = {count for curve in learned.curves for count in curve.tokens}
        assert not seen & {count for curve in asked.curves for count in curve.tokens}
        assert len(learned.curves) == len(asked.curves) == len(profile.curves)
    attention = AttentionProfile(
        "a.csv", None, profile.shape, 1, 64, 8, 128, np.ones((6, 3)) * np.arange(6)[:, None], np.ones((0, 3)), 0
    )
    learned_points, asked_points = (half_of_attention(attention, learn, 0).decode for learn in (True, False))
    assert not set(learned_points[:, 1]) & set(asked_points[:, 1])
    first, second = halves(np.array([3.0, 1.0, 3.0, 2.0]))
    assert first.tolist() == [True, True, True, False] and second.tolist() == [False, False, False, True]


def test_scores_rise_when_the_half_that_is_asked_is_disturbed() -> None:
    profile = linear()
    profile = replace(profile, curves=tuple(curve for curve in profile.curves if curve.tp == 8))
    counts = np.unique(profile.curves[0].tokens)
    odd = set(counts[1::2])
    wrong = tuple(
        replace(c, seconds=c.seconds * np.where([t in odd for t in c.tokens], 1.5, 1.0)) for c in profile.curves
    )
    true, disturbed = (
        {score.label: score.mape for score in score_linear(load_gpu("A100-80G"), each)}
        for each in (profile, replace(profile, curves=wrong))
    )
    assert true[""] < 5.0
    assert disturbed[""] > 25.0


def test_all_reduce_is_scored_from_the_other_half() -> None:
    sizes = np.arange(1.0, 41.0) * 1e5
    smooth = CollectiveProfile("n.csv", None, "all_reduce", 4, 4, sizes, 1e-5 + sizes / 1e11)
    assert score_collective(smooth).mape < 1.0
    jagged = replace(smooth, seconds=smooth.seconds * np.where(np.arange(40) % 2, 2.0, 1.0))
    assert score_collective(jagged).mape > 40.0


def test_a_training_form_finds_links_that_differ_by_degree() -> None:
    sizes, tps = (grid.ravel() for grid in np.meshgrid([1.0, 2.0, 4.0, 8.0, 16.0], [1.0, 2.0, 4.0]))
    link = np.select([tps == 2, tps == 4], [0.01, 0.3], 0.0)  # a bridge between two, a slow bus between four
    seconds = 0.02 + sizes * (0.4 / tps + link)
    form = fit_training(np.column_stack([sizes, tps]), seconds)
    assert form.num_constants == 4
    assert form.work_s == pytest.approx(0.4, rel=0.02)
    assert form.link_s[4] == pytest.approx(0.3, rel=0.02)
    assert form.seconds(np.array([3.0, 32.0]), 4) == pytest.approx([0.02 + 3 * 0.4, 0.02 + 32 * 0.4], rel=0.02)


def test_earl_is_scored_on_columns_that_were_not_fitted() -> None:
    figures, notes = earl_figures()
    assert figures["earl_signs"].value >= 12
    assert figures["earl_error_points"].value <= 10.0
    assert figures["earl_oom_right"].reached
    assert any("TP4 at 128 x 32K" in note for note in notes)


def test_it_runs_on_files_of_any_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = EXCERPT / "frontier" / "compute_a800_meta-llama_Llama-2-7b-hf_mlp.csv"
    inside = tmp_path / "compute" / "a100" / "some" / "Model-7b"
    inside.mkdir(parents=True)
    (inside / "mlp.csv").write_text(source.read_text())
    (tmp_path / "unnamed.csv").write_text(source.read_text())
    (tmp_path / "other.csv").write_text("when,what\n1,2\n")
    monkeypatch.setattr(sys, "argv", ["cost_model", "--data", str(tmp_path), "--json"])
    cost_model.main()
    out = capsys.readouterr().out.splitlines()
    figures = json.loads(out[-1])["figures"]
    assert set(figures) >= {"decode_mape", "prefill_mape", "linear_mape", "linear_mape/A100-80G/some_Model-7b"}
    assert "training_mape" not in figures
    assert any("GPU unknown" in line and "unnamed.csv" in line for line in out)
