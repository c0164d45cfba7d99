"""The benchmark of distillation, small: its figures are measured, and bad options are one line."""

from __future__ import annotations

import json

import pytest

from benchmarks.distil import main


def test_it_measures_variance_and_staleness(capsys: pytest.CaptureFixture[str]) -> None:
    small = "--runs 12 --places 2 --steps 2 --seeds 1 --sequences 4 --tokens 6 --samples 8 --lag 1"
    main([*small.split(), "--json"])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    assert set(figures) == {"variance_ratio_m64", "bias_standard_errors", "kl_lag1_over_lag0"}
    assert 0.5 / 64 < figures["variance_ratio_m64"]["value"] < 2 / 64
    assert 0.3 < figures["bias_standard_errors"]["value"] < 3
    assert 0.1 < figures["kl_lag1_over_lag0"]["value"] < 10


def test_a_bad_option_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--top-k", "0"])
    assert "--top-k: got 0; type --top-k 1 or more" in capsys.readouterr().err
